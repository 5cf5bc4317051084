"""Start N simulated robots that speak ROS 2, each in a namespace of its own, and an edge for each.

ros2 launch vla_fleet sim_fleet.launch.py robots:=3 learner:=true demonstrate:=true

Robot I is `/robot_I`: its `sim_robot_node` offers the standard topics, its `edge_node` drives it through them. With
learner:=true gateway, trainer and evaluator start here too; else `gateway` says where they are, and `keys` must hold
the keys of robot_0, robot_1, ...
"""

import json

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "robots": ("3", "how many"),
    "prefix": ("robot_", "namespace of robot I is this and I"),
    "recipe": ("pixels", "which robot and policy: a name from `vla-fleet recipes`"),
    "policy": ("", "another policy than the recipe's, KIND:NAME, such as lerobot:DIRECTORY"),
    "policy_config": ("", "that policy's configuration: a JSON file, or JSON"),
    "gateway": ("tcp://127.0.0.1:5760", "address of the gateway"),
    "data": ("vla-fleet-data", "directory that keeps everything the fleet knows"),
    "keys": ("", "directory of the keys; default: DATA/keys"),
    "log_level": ("info", "debug, info, warn, error or fatal"),
    "learner": ("false", "start gateway, trainer and evaluator here too"),
    "demonstrate": ("false", "with learner: record the recipe's demonstrations, which fresh data need once"),
}


SIMULATED = "sim_robot"
OFFERS = {"simulated": True, "executed": True, "reset": True, "stop": True, "parameters_of": SIMULATED}
"""what a simulated robot has beyond joint states and commands; its spec and tasks are the recipe's"""


def generate_launch_description() -> LaunchDescription:
    """The arguments, then the robots they ask for."""
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, (default, text) in ARGUMENTS.items()
            ),
            OpaqueFunction(function=_fleet),
        ]
    )


def _fleet(context):
    given = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    if not given["robots"].isdigit():
        raise ValueError(f"robots:={given['robots']}: give a whole number.")
    names = [f"{given['prefix']}{number}" for number in range(int(given["robots"]))]
    parts = [part for name in names for part in _robot(name, given)]
    if given["learner"].lower() in ("true", "1", "yes"):
        wanted = {name: given[name] for name in ("recipe", "data", "policy", "policy_config")}
        wanted |= {"names": " ".join(names), "teaches": "script"}
        port = given["gateway"].rpartition(":")[2]
        parts.append(_included("learner", **wanted, port=port, demonstrate=given["demonstrate"]))
    return parts


def _robot(name, given):
    simulated = Node(
        package="vla_fleet",
        executable="sim_robot_node",
        name=SIMULATED,
        namespace=name,
        arguments=["--recipe", given["recipe"], "--ros-args", "--log-level", given["log_level"]],
        output="screen",
        respawn=True,
        respawn_delay=2.0,
    )
    edge = _included(
        "edge",
        namespace=name,
        name=name,
        robot="ros2",
        robot_config=json.dumps(OFFERS),
        gateway=given["gateway"],
        recipe=given["recipe"],
        policy=given["policy"],
        policy_config=given["policy_config"],
        data=given["data"],
        keys=given["keys"],
        log_level=given["log_level"],
    )
    return simulated, edge


def _included(what, **arguments):
    """Another launch file of this package, in a scope of its own: its arguments shall not reach the next robot."""
    path = PathJoinSubstitution([FindPackageShare("vla_fleet"), "launch", f"{what}.launch.py"])
    source = PythonLaunchDescriptionSource(path)
    return GroupAction([IncludeLaunchDescription(source, launch_arguments=arguments.items())], scoped=True)
