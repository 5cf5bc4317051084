"""What a robot on ROS 2 topics is: the configuration of `Ros2Robot` and `Ros2Camera`, readable from JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

import msgspec

from hal.drivers.ros2.output_config import Field, Output, check_outputs
from hal.drivers.ros2.wrapper import Reliability
from hal.interfaces.dynamics import require_dimension
from wire.errors import ConfigError
from wire.types import CommandType, RobotSpec

WRENCH_AXES = ("force.x", "force.y", "force.z", "torque.x", "torque.y", "torque.z")


class StampSource(StrEnum):
    """When a message was made."""

    header = "header"
    arrival = "arrival"
    """when it came: for a robot that does not stamp, or whose clock is not ours"""


@dataclass(frozen=True, slots=True)
class Topics:
    """Names of topics and services, relative to the namespace."""

    joint_states: str = "joint_states"
    command: str = "joint_trajectory"
    executed: str = "executed"
    reset: str = "reset"
    stop: str = "stop"


@dataclass(frozen=True, slots=True)
class DepthRange:
    """The distances that the 255 grey levels of a depth picture stand for: 1 is near or nearer, 255 far or farther, 0
    that nothing was measured."""

    near_m: float
    far_m: float

    def __post_init__(self) -> None:
        if not 0 <= self.near_m < self.far_m < math.inf:
            raise ConfigError(
                f"DepthRange: near_m {self.near_m} and far_m {self.far_m} are no range; give 0 <= near < far."
            )


@dataclass(frozen=True, slots=True)
class ImageTopic:
    """How the pictures of one camera come."""

    topic: str = ""
    """'': `camera/NAME/image_raw`, with `/compressed` behind it when compressed"""
    compressed: bool = False
    resize: bool = False
    """shrink what comes to the spec's size; otherwise another size is an error"""
    depth: DepthRange | None = None
    """it is a depth picture, 16UC1 or 32FC1"""

    def __post_init__(self) -> None:
        if self.depth is not None and self.compressed:
            raise ConfigError("ImageTopic: depth comes as a raw Image alone; unset compressed.")

    @property
    def kind(self) -> str:
        """The type of its messages."""
        return f"sensor_msgs/msg/{'CompressedImage' if self.compressed else 'Image'}"

    def topic_of(self, camera: str) -> str:
        """Relative to the namespace."""
        return self.topic or f"camera/{camera}/image_raw" + "/compressed" * self.compressed


@dataclass(frozen=True, slots=True)
class WrenchTopic:
    """A force and torque sensor, geometry_msgs/WrenchStamped."""

    topic: str
    axes: dict[str, str]
    """by state dimension: force.x to torque.z, in the sensor's frame"""


@dataclass(frozen=True, slots=True)
class IntegrationTarget:
    """What a delta action moves, when the sum of all is sent."""

    state: str
    """the state dimension that measures it; its limits are the target's"""
    scale: float = 1.0
    """in the state's unit, for an action of 1"""


@dataclass(frozen=True, slots=True)
class QosConfig:
    """How topics are subscribed to. A reliable subscriber hears no best-effort publisher."""

    joint_states: Reliability = "reliable"
    executed: Reliability = "reliable"
    images: Reliability = "reliable"
    wrenches: Reliability = "reliable"
    command: Reliability = "reliable"


@dataclass(frozen=True, slots=True)
class Ros2Config:
    """One robot on ROS 2 topics (docs/ros2.md). Raises `ConfigError` that names the field."""

    spec: RobotSpec | str
    """as an object, or the JSON file that holds it"""
    tasks: dict[str, str] = field(default_factory=dict)
    """the instruction of each task it knows; empty: any task, which is its own instruction"""
    namespace: str = ""
    node: str = "vla_fleet_driver"
    domain_id: int | None = None
    """None: ROS_DOMAIN_ID"""
    topics: Topics = field(default_factory=Topics)
    cameras: dict[str, ImageTopic] = field(default_factory=dict)
    """by the spec's camera names; those not named are raw, on their usual topics"""
    qos: QosConfig = field(default_factory=QosConfig)
    joints: dict[str, str] = field(default_factory=dict)
    """the joint of a dimension whose name is another"""
    fields: dict[str, Field] = field(default_factory=dict)
    """which field of its joint a state dimension reads; position when not named"""
    wrenches: tuple[WrenchTopic, ...] = ()
    """sensors that state dimensions come from instead of joints"""
    outputs: tuple[Output, ...] = ()
    """the controllers that its dimensions go to; empty: all in one message on `topics.command`"""
    targets: dict[str, IntegrationTarget] = field(default_factory=dict)
    """by delta dimension: each delta is added onto the last target, and that is sent; empty: deltas go as they are"""
    executed: bool = False
    """the robot publishes what it executed: every command waits for that. Otherwise it is the limited command"""
    stepped: bool = False
    """the robot moves by each command and stands still in between; needs `executed`"""
    reset: bool = False
    """it offers the service; a real robot needs `stop` then, which alone stops a reset that is under way"""
    stop: bool = False
    """it offers the service"""
    simulated: bool = False
    """nobody can be hurt: it may run without limits of velocity and acceleration (`hal.safety.required`)"""
    parameters_of: str = ""
    """the node that takes the parameters task and seed before a reset, relative to the namespace; '': none"""
    stamps: StampSource = StampSource.header
    use_sim_time: bool = False
    connect_timeout_s: float = 10.0
    reset_timeout_s: float = 60.0
    confirm_timeout_s: float = 0.25
    max_age_s: float = 0.25
    """joint states that are older are not acted on"""
    max_skew_s: float = 0.5
    """how much older than the joint states a picture may be"""
    future_s: float = 0.05
    """how far a stamp may be ahead of our clock"""
    jump_s: float = 0.5
    """a clock that moves by more than this at once has jumped"""

    def __post_init__(self) -> None:
        if self.stepped and not self.executed:
            raise self._wrong("stepped", "needs executed: true, or no command would know when its step is over")
        if self.stepped and self.stamps != StampSource.header:
            raise self._wrong("stepped", "needs stamps: header, to know which picture belongs to which step")
        if self.reset and not (self.stop or self.simulated):
            raise self._wrong(
                "reset",
                "moves a real robot for up to reset_timeout_s, in which nothing but its service `stop` stops it; offer "
                "that and set stop: true, or say simulated: true where nobody can be hurt",
            )
        if self.executed and self.outputs:
            raise self._wrong("executed", "is said of commands on topics.command; a controller of `outputs` says none")
        for one in fields(self):
            if one.name.endswith("_s") and not getattr(self, one.name) > 0:
                raise self._wrong(one.name, "must be above 0")
        if self.domain_id is not None and not 0 <= self.domain_id <= 232:
            raise self._wrong("domain_id", f"{self.domain_id} is not within 0 to 232")

    def _wrong(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"Ros2Config: {name} {why}.")


def robot_spec(config: Ros2Config) -> RobotSpec:
    """The spec that `config` gives or names, with everything else in it checked against it.

    Raises `ConfigError` for a file that is not one, and for a name that is not in the spec.
    """
    spec = config.spec if isinstance(config.spec, RobotSpec) else _read(config.spec)
    states, actions = [d.name for d in spec.state], [d.name for d in spec.action]
    cameras = [camera.name for camera in spec.cameras]
    for what, given, known in (
        ("cameras", config.cameras, cameras),
        ("fields", config.fields, states),
        ("joints", config.joints, [*states, *actions]),
        ("targets", config.targets, actions),
        ("targets", [target.state for target in config.targets.values()], states),
    ):
        for name in given:
            require_dimension(f"Ros2Config of '{spec.embodiment}': `{what}`", name, known)
    if config.targets:
        missing = [d.name for d in spec.action if d.meaning is CommandType.delta and d.name not in config.targets]
        if missing:
            raise ConfigError(
                f"Ros2Config: targets: say which state dimension {', '.join(missing)} of '{spec.embodiment}' moves."
            )
    _check_wrenches(config, spec)
    felt: dict[str, Field] = {name: "effort" for sensor in config.wrenches for name in sensor.axes}
    check_outputs(spec, config.outputs, config.targets, {**config.fields, **felt})
    return spec


def _check_wrenches(config: Ros2Config, spec: RobotSpec) -> None:
    taken: set[str] = {*config.joints, *config.fields} & {d.name for d in spec.state}
    for sensor in config.wrenches:
        who = f"Ros2Config of '{spec.embodiment}': wrench '{sensor.topic}'"
        for name, axis in sensor.axes.items():
            require_dimension(who, name, [d.name for d in spec.state])
            require_dimension(f"{who}: '{name}'", axis, WRENCH_AXES)
            if name in taken:
                raise ConfigError(f"{who}: '{name}' comes from elsewhere already.")
            taken.add(name)


def _read(path: str) -> RobotSpec:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=RobotSpec)
    except OSError as error:
        raise ConfigError(f"Ros2Config: spec {path}: {error.strerror}. Give the spec or a JSON file of it.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"Ros2Config: spec {path} is not a robot spec: {error}.") from error
