"""Finds robots, their scripted operators, cameras and teleoperation devices by name.

A third party adds a robot by an entry point in the group `vla_fleet.robots` that names a callable taking the robot's
configuration (or None for its default), and an operator by one in `vla_fleet.operators` that takes the robot. Cameras
(`vla_fleet.cameras`) and the devices people teleoperate with (`vla_fleet.teleoperators`) are made like robots.
Nothing is imported before it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, signature
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec.inspect import type_info

from hal.interfaces.camera import Camera
from hal.interfaces.robot import Robot, Teleoperator
from hal.interfaces.teleop import TeleopDevice
from wire.clock import Clock
from wire.errors import ConfigError, FleetError, RobotError, suggest

ROBOTS = "vla_fleet.robots"
OPERATORS = "vla_fleet.operators"
CAMERAS = "vla_fleet.cameras"
TELEOPERATORS = "vla_fleet.teleoperators"
_NOUNS = {ROBOTS: "robot", OPERATORS: "operator", CAMERAS: "camera", TELEOPERATORS: "teleoperator"}

_BUILT_IN = (
    EntryPoint("fake", "hal.drivers.fake:FakeRobot", ROBOTS),
    EntryPoint("gym-aloha", "hal.drivers.gym.presets:aloha_robot", ROBOTS),
    EntryPoint("gym-fetch", "hal.drivers.gym.presets:fetch_robot", ROBOTS),
    EntryPoint("gym-metaworld", "hal.drivers.gym.presets:metaworld_robot", ROBOTS),
    EntryPoint("gym-pusht", "hal.drivers.gym.presets:pusht_robot", ROBOTS),
    EntryPoint("gymnasium", "hal.drivers.gym.robot:GymRobot", ROBOTS),
    EntryPoint("lerobot", "hal.drivers.lerobot.robot:LeRobotRobot", ROBOTS),
    EntryPoint("metaworld", "hal.drivers.metaworld.robot:MetaWorldRobot", ROBOTS),
    EntryPoint("replay", "hal.drivers.replay:ReplayRobot", ROBOTS),
    EntryPoint("ros2", "hal.drivers.ros2.robot:Ros2Robot", ROBOTS),
    EntryPoint("with-cameras", "hal.drivers.with_cameras:CameraRobot", ROBOTS),
    EntryPoint("fake", "hal.drivers.fake:FakeExpert", OPERATORS),
    EntryPoint("gym-fetch", "hal.drivers.gym.fetch_expert:FetchExpert", OPERATORS),
    EntryPoint("metaworld", "hal.drivers.metaworld.expert:MetaWorldExpert", OPERATORS),
    EntryPoint("replay", "hal.drivers.replay:ReplayOperator", OPERATORS),
    EntryPoint("with-cameras", "hal.drivers.with_cameras:inside_operator", OPERATORS),
    EntryPoint("opencv", "hal.cameras.opencv:OpenCvCamera", CAMERAS),
    EntryPoint("pattern", "hal.cameras.simulated:PatternCamera", CAMERAS),
    EntryPoint("ros2", "hal.drivers.ros2.camera:Ros2Camera", CAMERAS),
    EntryPoint("scene", "hal.cameras.simulated:SceneCamera", CAMERAS),
    EntryPoint("video", "hal.cameras.opencv:VideoCamera", CAMERAS),
    EntryPoint("gamepad", "hal.teleop.gamepad:Gamepad", TELEOPERATORS),
    EntryPoint("keyboard", "hal.teleop.keyboard:Keyboard", TELEOPERATORS),
    EntryPoint("lerobot", "hal.drivers.lerobot.teleop:LeRobotTeleop", TELEOPERATORS),
    EntryPoint("script", "hal.teleop.script:ScriptedDevice", TELEOPERATORS),
)

_registered: dict[str, dict[str, Callable[..., Any]]] = {group: {} for group in _NOUNS}


def known(group: str) -> tuple[str, ...]:
    """Names in a group, sorted. A name that is listed may still fail to load; `broken` tells."""
    return tuple(sorted({*_found(group), *_registered[group]}))


def register(kind: str, robot: Callable[..., Robot], operator: Callable[[Any], Teleoperator] | None = None) -> None:
    """Add a robot, and its scripted operator, for this process: for a robot that is not installed as a package.

    Call it where the recipe is defined; every process of the fleet imports that. Raises `ConfigError` for a taken name.
    """
    for group, made in ((ROBOTS, robot), (OPERATORS, operator)):
        if kind in _found(group) and _registered[group].get(kind) is not made:
            raise ConfigError(f"'{kind}' is taken in '{group}'; choose another name.")
        if made is not None:
            _registered[group][kind] = made


def make_robot(kind: str, config: Any = None, clock: Clock | None = None) -> Robot:
    """The robot called `kind`, not connected yet. `config` is what its driver takes; None is its default.

    `clock`: what it should stamp with, for a simulator whose time is not the machine's.

    Raises `ConfigError` for an unknown name, with the nearest, and for a robot that takes no `clock`; `RobotError`
    naming the entry point when it is broken.
    """
    make = _maker(ROBOTS, kind)
    if clock is None:
        robot = _call(ROBOTS, kind, config)
    elif "clock" in signature(make).parameters:
        robot = _call(ROBOTS, kind, config, clock=clock)
    else:
        raise ConfigError(
            f"robot '{kind}' cannot be used faster than real time: what makes it takes no `clock`. Give it "
            "`def __init__(self, config=None, clock=None)` and stamp with `clock.now_ns()` when there is one; without "
            "it there are no demonstrations and no evaluations of this robot."
        )
    if not isinstance(robot, Robot):
        raise RobotError(
            f"robot '{kind}' gave a {type(robot).__name__}, which lacks methods of "
            "hal.interfaces.robot.Robot: spec, connect, reset, read, write, close."
        )
    return robot


def make_camera(kind: str, config: Any = None) -> Camera:
    """The camera called `kind`, not connected yet. Errors as `make_robot`."""
    return _call(CAMERAS, kind, config)


def make_teleoperator(kind: str, config: Any = None) -> TeleopDevice:
    """The device called `kind` that a person teleoperates with, not connected yet. Errors as `make_robot`."""
    return _call(TELEOPERATORS, kind, config)


def read_config(kind: str, given: Mapping[str, Any], group: str = ROBOTS) -> Any:
    """The configuration of the robot, camera or teleoperator called `kind` from plain values, as in a JSON file.

    Its type is that of the first parameter of the driver's constructor. Raises `ConfigError` that names the field.
    """
    what = f"{_NOUNS[group]} '{kind}'"
    wanted = _config_type(_maker(group, kind))
    if wanted is None:
        raise ConfigError(f"{what} does not say what its configuration is; annotate its constructor.")
    fields = [field.name for field in _fields(wanted)]
    for name in given:
        if fields and name not in fields:
            raise ConfigError(f"{what}: its configuration has no '{name}'.{suggest(name, fields)}")
    try:
        return msgspec.convert(dict(given), wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: its configuration is not valid: {error}.") from error


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Types of the parameters that are annotated."""
    hints = get_type_hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    hints.pop("return", None)
    return hints


def _config_type(make: Callable[..., Any]) -> Any:
    """The type of the first parameter without its None; None where it is not annotated."""
    first = next(iter(_hints(make).values()), None)
    return next((kind for kind in get_args(first) if kind is not NoneType), first)


def _needs_config(make: Callable[..., Any]) -> bool:
    """Whether the first parameter has no default and does not take None."""
    try:
        first = next(iter(signature(make).parameters.values()), None)
    except ValueError:  # nothing in Python says what it takes
        return False
    if first is None or first.default is not Parameter.empty:
        return False
    hint = _hints(make).get(first.name)
    return hint is not None and NoneType not in get_args(hint)


def _fields(config: Any) -> tuple[Any, ...]:
    """Of a dataclass or struct; none of anything else."""
    return getattr(type_info(config), "fields", ())


def make_operator(kind: str, robot: Robot) -> Teleoperator:
    """The scripted operator called `kind` for `robot`. Errors as `make_robot`."""
    return _call(OPERATORS, kind, robot)


def broken(group: str = ROBOTS) -> dict[str, str]:
    """Why each member of a group that cannot be loaded cannot, by name. Imports every module: for a doctor."""
    wrong = {}
    for name, point in sorted(_found(group).items()):
        try:
            _load(point)
        except RobotError as error:
            wrong[name] = str(error)
    return wrong


def _found(group: str) -> dict[str, EntryPoint]:
    # Ours come last: a package may add robots, but not take the place of one that is built in.
    return {point.name: point for point in (*entry_points(group=group), *_BUILT_IN) if point.group == group}


def _call(group: str, kind: str, argument: Any, **options: Any) -> Any:
    make = _maker(group, kind)
    if argument is None and _needs_config(make):
        needed = ", ".join(field.name for field in _fields(_config_type(make)) if field.required)
        with_what = f" with {needed}" if needed else ""
        raise ConfigError(f"{_NOUNS[group]} '{kind}' needs a configuration{with_what}; see docs/robots.md.")
    return make(argument, **options)


def _maker(group: str, kind: str) -> Callable[..., Any]:
    if kind in _registered[group]:
        return _registered[group][kind]
    found = _found(group)
    if kind not in found:
        raise ConfigError(
            f"no {_NOUNS[group]} '{kind}'.{suggest(kind, found)} Known: {', '.join(sorted(found)) or 'none'}. "
            f"A package adds one by an entry point in the group '{group}'."
        )
    return _load(found[kind])


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        return point.load()
    except FleetError:
        raise
    except Exception as error:  # whatever a third party's module does when it is imported
        owner = point.dist.name if point.dist else "vla-fleet"
        raise RobotError(
            f"entry point '{point.name} = {point.value}' of package '{owner}' (group '{point.group}') cannot be "
            f"loaded: {type(error).__name__}: {error}. Repair or uninstall '{owner}'; the others are not affected."
        ) from error
