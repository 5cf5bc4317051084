"""The ROS 2 executables: `edge_node`, which keeps a robot's edge processes, and `sim_robot_node`, a simulated robot.

`ros2 run vla_fleet edge_node` finds them after a `colcon build`, a shell in the virtual environment without one.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.config.robot_config import SAFETY, read_robot_config
from fleet.launch.robot_builders import edge_processes
from hal.drivers.ros2 import sim_node
from hal.drivers.ros2.config import ImageTopic, Ros2Config, robot_spec
from hal.drivers.ros2.messages import JOINT_STATE, TRAJECTORY, TRIGGER, WRENCH
from hal.registry import OPERATORS, known, make_robot, read_config
from robot_edge.ros2.parameters import EdgeParameters, usage
from robot_edge.ros2.topics import Endpoint
from robot_edge.runtime.log_format import configure_logging, report_end
from wire.errors import ConfigError, FleetError, storage_errors

ROS2 = "ros2"
"""the driver's registered name"""
_ROS_MODULES = ("rclpy", "_msgs", "_srvs", "_interfaces")
"""how the names of ROS 2's Python modules end"""

if TYPE_CHECKING:
    from robot_edge.ros2.node import NodeSetup


def prepare(parameters: EdgeParameters, namespace: str) -> NodeSetup:
    """The edge processes for these parameters, and what the robot must offer. Raises `FleetError`."""
    from robot_edge.ros2.node import NodeSetup

    root = Path(parameters.data) if parameters.data else ros_home() / "vla_fleet" / parameters.recipe.replace(":", ".")
    root = root.absolute()
    given = dataclasses.asdict(parameters)
    overrides = Overrides(**{one.name: given[one.name] for one in dataclasses.fields(Overrides) if one.name in given})
    bench = Path(parameters.config).absolute() if parameters.config else None
    recipe = get_recipe(parameters.recipe, config=bench)
    wanted: tuple[Endpoint, ...] = ()
    if (overrides.robot or recipe.robot) == ROS2:
        config = complete_config(recipe, overrides.robot_config, namespace)
        wanted = required_endpoints(config)
        path = DataDirectory(root).edge(parameters.name) / "robot.json"
        write_config(config, path, read_robot_config(overrides.robot_config).safety if overrides.robot_config else {})
        overrides = dataclasses.replace(overrides, robot=ROS2, robot_config=str(path))
    driven = overrides.applied(recipe)
    make_robot(driven.robot, driven.robot_config)
    if parameters.operator and driven.robot not in known(OPERATORS):
        raise ConfigError(f"robot '{driven.robot}' has no scripted operator; leave parameter 'operator' false.")
    options = EdgeOptions(
        recipe=parameters.recipe,
        config=bench,
        data=root,
        gateway=parameters.gateway,
        keys=Path(parameters.keys).absolute() if parameters.keys else None,
        name=parameters.name,
        operator=parameters.operator,
        think=parameters.think,
        site=parameters.site,
        stop_key=_listed(parameters.stop_keys),
        stop_line=_listed(parameters.stop_lines),
        key=_listed(parameters.command_keys),
        speed_limit=parameters.speed_limit,
        spool_max=parameters.spool_max,
        cpu_control=parameters.cpu_control if parameters.cpu_control >= 0 else None,
        cpu_driver=parameters.cpu_driver if parameters.cpu_driver >= 0 else None,
        metrics_port=parameters.metrics_port,
        metrics_host=parameters.metrics_host,
        overrides=overrides,
    )
    return NodeSetup(edge_processes(options), wanted, DataDirectory(root).edge(parameters.name))


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def complete_config(recipe: Recipe, robot_config: str, namespace: str) -> Ros2Config:
    """What is given in `robot_config` (JSON, or a file of JSON or TOML) and in the recipe, with the rest filled in.

    `namespace`: the node's, which the driver shares unless it has one. Raises `ConfigError` that names the field.
    """
    given: dict[str, Any] = {"spec": msgspec.to_builtins(recipe.spec), "tasks": dict(recipe.instructions)}
    if isinstance(recipe.robot_config, Ros2Config):
        given.update(msgspec.to_builtins(recipe.robot_config))
    if robot_config:
        given.update(read_robot_config(robot_config).driver)
    config = read_config(ROS2, given)
    return config if config.namespace else dataclasses.replace(config, namespace=namespace.rstrip("/"))


def write_config(config: Ros2Config, path: Path, safety: Mapping[str, Any] | None = None) -> None:
    """Write it, and the limits beside it, where the edge's processes read them. Raises `StorageError`."""
    both = msgspec.to_builtins(config) | ({SAFETY: safety} if safety else {})
    with storage_errors("noting the driver's configuration", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(both)))


def required_endpoints(config: Ros2Config) -> tuple[Endpoint, ...]:
    """What the robot must have in the graph before it can be driven."""
    topics = config.topics
    wanted = [("publisher", topics.joint_states, JOINT_STATE)]
    wanted += [("publisher", sensor.topic, WRENCH) for sensor in config.wrenches]
    commands = [(output.topic, output.kind.type) for output in config.outputs] or [(topics.command, TRAJECTORY)]
    wanted += [("subscription", topic, type_) for topic, type_ in commands]
    if config.executed:
        wanted.append(("publisher", topics.executed, JOINT_STATE))
    for camera in robot_spec(config).cameras:
        image = config.cameras.get(camera.name, ImageTopic())
        wanted.append(("publisher", image.topic_of(camera.name), image.kind))
    if config.reset:
        wanted.append(("service", topics.reset, TRIGGER))
    if config.stop:
        wanted.append(("service", topics.stop, TRIGGER))
    return tuple(Endpoint(kind, absolute_name(name, config.namespace), type_) for kind, name, type_ in wanted)


def absolute_name(name: str, namespace: str) -> str:
    """A topic's name from the root, as ROS 2 resolves it."""
    return name if name.startswith("/") else f"/{namespace.strip('/')}/{name}".replace("//", "/")


def ros_home() -> Path:
    """Where ROS 2 keeps what it writes: ROS_HOME, else ~/.ros."""
    return Path(os.environ.get("ROS_HOME") or Path.home() / ".ros")


def edge_node_main(arguments: list[str] | None = None) -> None:
    """The `edge_node` executable."""
    arguments = sys.argv if arguments is None else arguments
    if {"-h", "--help"} & set(arguments[1:]):
        print(usage("edge_node"))
        return

    def run() -> int:
        from robot_edge.ros2.node import run_edge_node

        return run_edge_node(prepare, arguments)

    _main("edge_node", run)


def sim_robot_main() -> None:
    """The `sim_robot_node` executable: `--recipe NAME` is the robot of that recipe; the rest is the node's own."""
    _main("sim_robot_node", lambda: sim_node.main(sim_robot_arguments(sys.argv[1:])))


def sim_robot_arguments(arguments: list[str]) -> list[str]:
    """`arguments` with a recipe's robot in the place of `--recipe NAME`. Raises `ConfigError` for an unknown recipe."""
    own = arguments[: arguments.index("--ros-args")] if "--ros-args" in arguments else arguments
    if "--recipe" not in own[:-1]:
        return arguments
    at = own.index("--recipe")
    recipe = get_recipe(arguments[at + 1])
    config = msgspec.json.encode(recipe.robot_config).decode()
    return [*arguments[:at], "--robot", recipe.robot, "--robot-config", config, *arguments[at + 2 :]]


def _main(program: str, work: Callable[[], int]) -> None:
    """Errors that are ours become one line and exit status 1."""
    try:
        configure_logging(program)
        status = work()
    except ModuleNotFoundError as error:
        if not (error.name or "").split(".")[0].endswith(_ROS_MODULES):
            raise
        sys.exit(
            f"{program}: ROS 2's Python module '{error.name}' is not here: install vla-fleet[ros], or source the setup "
            "file of a ROS 2 whose Python is this one."
        )
    except FleetError as error:
        report_end(program, str(error))
        status = 1
    sys.exit(status)
