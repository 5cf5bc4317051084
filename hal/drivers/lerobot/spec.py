"""From what a lerobot robot says of itself, and what its configuration adds, to a `RobotSpec`.

lerobot names its dimensions ("shoulder_pan.pos") but gives neither unit nor limits. For motors on a bus they follow
from the normalisation of each motor (lerobot.motors.MotorNormMode) and its calibration; for everything else they must
be in the configuration, and what is missing is named. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hal.interfaces.dynamics import require_dimension
from wire.errors import ConfigError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

ENCODER_DEG = 360.0
"""no encoder of one turn measures further from the middle of its range"""


@dataclass(frozen=True, slots=True)
class DimensionConfig:
    """What the configuration says of one dimension; what it leaves out comes from the motor."""

    unit: str = ""
    low: float | None = None
    high: float | None = None
    meaning: CommandType = CommandType.absolute


@dataclass(frozen=True, slots=True)
class LeRobotConfig:
    """A lerobot robot and what has to be known of it. Raises `ConfigError` that names the field."""

    type: str
    """its registered type, as in lerobot's `--robot.type`: so101_follower, koch_follower, ..."""
    fields: dict[str, Any] = field(default_factory=dict)
    """of lerobot's own configuration: port, id, calibration_dir, max_relative_target, cameras, ..."""
    tasks: dict[str, str] = field(default_factory=dict)
    """the sentence a person would say, by task name"""
    control_hz: float = 30.0
    dimensions: dict[str, DimensionConfig] = field(default_factory=dict)
    """by lerobot's name; `state.NAME` or `action.NAME` where the two differ"""
    leave_out: tuple[str, ...] = ()
    """names of observations that are not wanted"""
    images: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(height, width) by camera, for pictures smaller than the camera's; people still see the large ones"""
    rest_pose: dict[str, float] = field(default_factory=dict)
    """where `reset` brings the robot; none: it stays where it is"""
    rest_speed: float = 0.25
    """share of a dimension's range per second, on the way to the rest pose"""
    rest_tolerance: float = 0.05
    """share of a dimension's range that it may be off at the end; more means that it is blocked"""
    write_calibration: bool = False
    """write the calibration file into motors that hold another one; otherwise that is an error"""
    embodiment: str = ""
    """'': the type"""
    plugins: tuple[str, ...] = ()
    """modules to import that register types and are not called lerobot_robot_*"""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError(
                f"lerobot robot '{self.type}': no tasks; say what it is for: tasks={{'pick': 'pick the cube'}}."
            )
        for name in ("control_hz", "rest_speed", "rest_tolerance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"lerobot robot '{self.type}': {name} must be positive, not {getattr(self, name)}.")

    @property
    def what(self) -> str:
        """How errors call it."""
        return f"robot '{self.embodiment or self.type}'"


def lerobot_spec(config: LeRobotConfig, robot: Any) -> RobotSpec:
    """The spec of lerobot's `robot`. Raises `ConfigError` naming each dimension without a unit or limits."""
    motors = _motors(robot)
    states, cameras = _split(robot.observation_features, config)
    actions, pictures = _split(robot.action_features, config)
    if pictures:
        raise ConfigError(f"{config.what}: its actions {sorted(pictures)} are arrays; only numbers can be commanded.")
    _check_names(config, states, actions, cameras, robot.observation_features)
    lacking: dict[str, list[str]] = {}
    spec = RobotSpec(
        embodiment=config.embodiment or config.type,
        state=tuple(_dimension(config, "state", name, motors, lacking) for name in states),
        action=tuple(_dimension(config, "action", name, motors, lacking) for name in actions),
        cameras=tuple(_camera(config, robot, name, shape) for name, shape in cameras.items()),
        control_hz=config.control_hz,
    )
    if lacking:
        missing = "; ".join(f"no {what} of {', '.join(dict.fromkeys(names))}" for what, names in lacking.items())
        example = next(iter(lacking.values()))[0]
        raise ConfigError(
            f"{config.what}: {missing}. Give them: "
            f'dimensions={{"{example}": {{"unit": "deg", "low": -90, "high": 90}}}}.'
        )
    return spec


def calibrated_limits(robot: Any) -> dict[str, tuple[float, float]]:
    """What this very robot, or teleoperator, can reach by its calibration, by name of those that have one."""
    return {
        name: (motor.low, motor.high)
        for name, motor in _motors(robot).items()
        if motor.low is not None and motor.high is not None
    }


def motor_units(robot: Any) -> dict[str, str]:
    """In what unit lerobot counts each motor's position, by name."""
    return {name: motor.unit for name, motor in _motors(robot).items()}


def components(robot: Any) -> Iterator[tuple[str, Any]]:
    """`robot`, or teleoperator, and those it is made of (two arms), each with the prefix of its names."""
    yield "", robot
    for attribute, value in vars(robot).items():
        if hasattr(value, "action_features") and (hasattr(value, "send_action") or hasattr(value, "get_action")):
            yield attribute.removesuffix("arm"), value


class _Motor(NamedTuple):
    """A motor's position as lerobot normalises it; no limits where they follow from a calibration that is not there."""

    unit: str
    low: float | None
    high: float | None
    file: str
    """of its calibration"""


def _motors(robot: Any) -> dict[str, _Motor]:
    return {
        f"{prefix}{name}.pos": _motor(bus, name, str(getattr(part, "calibration_fpath", "")))
        for prefix, part in components(robot)
        for bus in vars(part).values()
        if isinstance(getattr(bus, "motors", None), Mapping)
        for name in bus.motors
    }


def _motor(bus: Any, name: str, file: str) -> _Motor:
    motor = bus.motors[name]
    match motor.norm_mode.name:
        case "RANGE_M100_100":
            return _Motor("%", -100.0, 100.0, file)
        case "RANGE_0_100":
            return _Motor("%", 0.0, 100.0, file)
        case "DEGREES":
            known = (getattr(bus, "calibration", None) or {}).get(name)
            steps = getattr(bus, "model_resolution_table", {}).get(motor.model, 0)
            if known is None or not steps:
                return _Motor("deg", None, None, file)
            # lerobot counts degrees from the middle of the calibrated range.
            half = (known.range_max - known.range_min) / 2 * 360 / (steps - 1)
            return _Motor("deg", -half, half, file)
    return _Motor("", None, None, file)


def _dimension(
    config: LeRobotConfig, side: str, name: str, motors: dict[str, _Motor], lacking: dict[str, list[str]]
) -> Dimension:
    given = config.dimensions.get(f"{side}.{name}") or config.dimensions.get(name) or DimensionConfig()
    unit, low, high, file = motors.get(name, _Motor("", None, None, ""))
    why = f" (no calibration at {file})" if unit == "deg" and low is None else ""
    if side == "state" and unit == "deg" and given.low is None and given.high is None:
        # A joint can be pushed out of its calibrated range, and lerobot says so in degrees.
        low, high = -ENCODER_DEG, ENCODER_DEG
    unit = given.unit or unit
    low = low if given.low is None else given.low
    high = high if given.high is None else given.high
    if low is None or high is None or not unit:
        missing = [what for what, value in (("unit", unit or None), ("low", low), ("high", high)) if value is None]
        lacking.setdefault(", ".join(missing) + why, []).append(name)
        # Only to go on and name the others too; the caller raises.
        return Dimension(name, "?", 0.0, 1.0, given.meaning)
    return Dimension(name, unit, float(low), float(high), given.meaning)


def _split(features: Mapping[str, Any], config: LeRobotConfig) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Names of numbers, and (height, width) of pictures by name."""
    numbers: list[str] = []
    pictures: dict[str, tuple[int, int]] = {}
    for name, feature in features.items():
        if name in config.leave_out:
            continue
        if feature in (float, int):
            numbers.append(name)
        elif isinstance(feature, tuple) and len(feature) == 3 and feature[2] == 3:
            pictures[name] = (feature[0], feature[1])
        else:
            raise ConfigError(
                f"{config.what}: '{name}' is neither a number nor a colour picture but {feature}; "
                f"leave it out: leave_out=('{name}',)."
            )
    return numbers, pictures


def _camera(config: LeRobotConfig, robot: Any, name: str, shape: tuple[int, int]) -> CameraSpec:
    height, width = config.images.get(name, shape)
    rate_hz: float | None = None
    for prefix, part in components(robot):
        own = getattr(getattr(part, "config", None), "cameras", None) or {}
        rate_hz = rate_hz or getattr(own.get(name.removeprefix(prefix)), "fps", None)
    # A robot that brings pictures without a camera of lerobot's takes them when it is read.
    return CameraSpec(name, height, width, float(rate_hz or config.control_hz))


def _check_names(
    config: LeRobotConfig, states: list[str], actions: list[str], cameras: Mapping[str, Any], seen: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` for a name in the configuration that the robot does not have."""
    both = {*states, *actions, *config.leave_out}
    sides = {*both, *(f"state.{name}" for name in states), *(f"action.{name}" for name in actions)}
    for where, names, known in (
        ("dimensions", config.dimensions, sides),
        ("rest_pose", config.rest_pose, set(actions)),
        ("images", config.images, set(cameras)),
        ("leave_out", config.leave_out, set(seen)),
    ):
        for name in names:
            require_dimension(f"{config.what}: `{where}`", name, sorted(known))
