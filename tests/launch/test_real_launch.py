"""Where ROS 2's own `launch` and `launch_ros` are: the launch files and the stand-ins held against them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.launch.description import FILES, STANDINS, describe, standins

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("launch_ros") is None, reason="launch and launch_ros come with a ROS 2 installation only"
)

MODULES = sorted(
    ".".join(path.relative_to(STANDINS).with_suffix("").parts)
    for path in STANDINS.rglob("*.py")
    if path.stem != "__init__"
)


def options(kind: type) -> set[str]:
    """Names that a class's constructor takes, its bases' included, for they are handed down."""
    inits = [base.__init__ for base in kind.__mro__ if "__init__" in vars(base)]
    return {name for init in inits for name in inspect.signature(init).parameters} - {"self", "kwargs", "args", "more"}


def classes(module: str) -> dict[str, type]:
    here = importlib.import_module(module)
    return {name: kind for name, kind in vars(here).items() if inspect.isclass(kind) and not name.startswith("_")}


@pytest.mark.parametrize("module", MODULES)
def test_the_standins_take_only_what_the_real_ones_take(module: str) -> None:
    with standins():
        ours = {name: options(kind) for name, kind in classes(module).items() if kind.__module__ == module}
    assert ours
    real: dict[str, Any] = classes(module)
    for name, taken in ours.items():
        assert taken <= options(real[name]), f"{module}.{name}"


@pytest.mark.parametrize("file", ["edge.launch.py", "learner.launch.py", "sim_fleet.launch.py"])
def test_the_real_launch_reads_the_file(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROS_LOG_DIR", str(tmp_path))
    from launch import LaunchContext
    from launch.launch_description_sources import PythonLaunchDescriptionSource

    description = PythonLaunchDescriptionSource(str(FILES / file)).get_launch_description(LaunchContext())
    assert {argument.name for argument in description.get_launch_arguments()} == set(describe(file).declared)
