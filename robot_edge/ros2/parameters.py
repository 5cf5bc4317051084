"""The parameters of the ROS 2 edge node: names, defaults, what they mean, and how plain values become a checked set.

Knows nothing of rclpy, so that launch files, documents and tests can be held against it anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from wire.errors import ConfigError
from wire.transport.keys import check_name

DEFAULT_NAME = "robot-0"


@dataclass(frozen=True, slots=True)
class EdgeParameters:
    """What the node is told. The defaults are those of `vla-fleet edge`; '' and 0 leave what the recipe says."""

    name: Annotated[
        str, "name of this robot, under which its key is filed; default: the last part of the namespace, else robot-0"
    ] = ""
    gateway: Annotated[str, "address of the gateway, tcp://HOST:PORT"] = "tcp://127.0.0.1:5760"
    recipe: Annotated[str, "which robot and policy: a name from `vla-fleet recipes`, or module:function"] = "pixels"
    config: Annotated[str, "what a recipe of real robots is made from, FILE.toml, as `vla-fleet edge --config`"] = ""
    keys: Annotated[str, "directory with this robot's key and the gateway's public key; default: DATA/keys"] = ""
    data: Annotated[str, "directory for the spool, the weight cache and logs; default: ~/.ros/vla_fleet/RECIPE"] = ""
    site: Annotated[str, "where the robot stands"] = ""
    stop_keys: Annotated[
        str, "pedals or keys that stop the robot, DEVICE[:KEY], as `vla-fleet edge --stop-key`; several with commas"
    ] = ""
    stop_lines: Annotated[
        str, "GPIO lines that stop it, CHIP:LINE[:active-low], as `vla-fleet edge --stop-line`; several with commas"
    ] = ""
    command_keys: Annotated[
        str, "keys that command it, DEVICE:KEY=COMMAND, as `vla-fleet edge --key`; several with commas"
    ] = ""
    speed_limit: Annotated[
        float, "share of its velocity limits at which it moves at most; may be set, no higher, while the node is active"
    ] = 1.0
    spool_max: Annotated[
        float, "gigabytes that what waits for the gateway may take on the disk; 0: half of what is free, 20 at most"
    ] = 0.0
    cpu_control: Annotated[int, "the only core that control runs on; -1: any but the first"] = -1
    cpu_driver: Annotated[int, "the only core that the robot's driver runs on; -1: any but the first"] = -1
    metrics_port: Annotated[int, "port for Prometheus, which asks for /metrics; 0: none"] = 0
    metrics_host: Annotated[str, "address that port is opened on"] = "127.0.0.1"
    operator: Annotated[bool, "whether the scripted operator corrects, for simulated robots that have one"] = False
    strategy: Annotated[str, "how actions that come late are dealt with, as `vla-fleet edge --strategy`"] = ""
    delay: Annotated[str, "inject latency in control ticks: 4, random:2-8 or burst:2,12,0.05"] = ""
    speed_up: Annotated[int, "execute every q-th action"] = 0
    think: Annotated[
        str, "address of a think server that runs the slow path, tcp://HOST:PORT; default: this computer"
    ] = ""
    robot: Annotated[str, "another driver for the recipe's robot, such as ros2"] = ""
    robot_config: Annotated[
        str, "that driver's configuration, with `safety` its limits: JSON, or a JSON or TOML file"
    ] = ""
    policy: Annotated[str, "another policy than the recipe's, KIND:NAME, as `vla-fleet edge --policy`"] = ""
    policy_config: Annotated[str, "that policy's configuration: a JSON file, or JSON"] = ""
    reset_by: Annotated[str, "who resets the scene: person or robot; default: a person, if the robot is real"] = ""
    judged_by: Annotated[
        str, "who says how episodes ended: person or robot; default: a person, if the robot is real or one resets it"
    ] = ""
    reset_time_s: Annotated[float, "seconds for the scene, then the next episode begins; 0: when it is told to"] = 0.0
    episode_time_s: Annotated[float, "seconds an episode may last, whoever drives"] = 0.0
    wait_for_robot_s: Annotated[float, "how long configure waits for the topics of a ROS 2 robot, in seconds"] = 10.0
    give_up_after: Annotated[
        int, "deaths in a row of one edge process after which the node goes to its error state; 0: never"
    ] = 8
    autostart: Annotated[
        bool, "configure and activate without being asked, and again after an error: for a plain `ros2 run`"
    ] = False


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EdgeParameters)}
DESCRIPTIONS: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(EdgeParameters, include_extras=True).items()
}


def read_parameters(given: Mapping[str, Any], namespace: str = "/") -> EdgeParameters:
    """The checked set from plain values; `namespace` is the node's, which names a robot that has no name.

    A number is taken where text is wanted, because a command line makes numbers of digits. Raises `ConfigError` that
    names the parameter.
    """
    values = {name: _typed(name, value) for name, value in {**DEFAULTS, **given}.items()}
    values["name"] = check_name(values["name"] or namespace.rpartition("/")[2] or DEFAULT_NAME)
    if "://" not in values["gateway"]:
        raise ConfigError(f"parameter 'gateway' is '{values['gateway']}'; give an address as tcp://HOST:PORT.")
    for name in ("speed_up", "wait_for_robot_s", "give_up_after", "metrics_port"):
        if not values[name] >= 0:
            raise ConfigError(f"parameter '{name}' is {values[name]}; give 0 or more.")
    if values["metrics_port"] > 65535:
        raise ConfigError(f"parameter 'metrics_port' is {values['metrics_port']}; give a port up to 65535.")
    return EdgeParameters(**values)


def _typed(name: str, value: Any) -> Any:
    wanted = type(DEFAULTS[name])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is str and number:
        return str(value)
    if wanted is float and number:
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(
            f"parameter '{name}' is {value!r}, of type {type(value).__name__}; it must be a {wanted.__name__}."
        )
    return value


def usage(program: str) -> str:
    """What `--help` prints."""
    width = max(map(len, DESCRIPTIONS)) + 2
    lines = [f"  {name:{width}}{text} [{DEFAULTS[name]!r}]" for name, text in DESCRIPTIONS.items()]
    return "\n".join(
        [
            f"usage: {program} [--ros-args -r __ns:=/NAMESPACE -p PARAMETER:=VALUE --params-file FILE ...]",
            "",
            "A managed (lifecycle) ROS 2 node that keeps the edge processes of one robot.",
            "",
            "parameters [default]:",
            *lines,
            "",
            "services: ~/change_state and the other lifecycle services; std_srvs/Trigger: ~/estop, ~/release_estop,",
            "  ~/start, ~/take_over, ~/hand_back, ~/success, ~/failure, ~/end, ~/discard, ~/rerecord, ~/scene_ready,",
            "  ~/next, ~/recover, ~/correct",
            "topics: /diagnostics (diagnostic_msgs/DiagnosticArray), ~/transition_event",
        ]
    )
