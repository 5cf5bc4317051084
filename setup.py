"""For colcon alone: what makes this project a ROS 2 package as well. Everything else is in pyproject.toml."""

from glob import glob

from setuptools import setup

PACKAGE = "vla_fleet"

distribution = setup(
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{PACKAGE}"]),
        (f"share/{PACKAGE}", ["package.xml"]),
        (f"share/{PACKAGE}/launch", sorted(glob("launch/*.launch.py"))),
    ],
)
# colcon asks for these options in a run of its own and reads them back as literals, which a SpecifierSet is not.
for holder in (distribution, distribution.metadata):
    holder.python_requires = str(holder.python_requires)
