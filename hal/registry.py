"""Finds robots and their scripted operators by name.

A third party adds a robot by an entry point in the group `vla_fleet.robots` that names a callable taking the robot's
configuration (or None for its default), and an operator by one in `vla_fleet.operators` that takes the robot.
Nothing is imported before it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hal.robot import Robot, Teleoperator
from wire.clock import Clock
from wire.errors import ConfigError, FleetError, RobotError, nearest

ROBOTS = "vla_fleet.robots"
OPERATORS = "vla_fleet.operators"

_BUILT_IN = (
    EntryPoint("fake", "hal.fake:FakeRobot", ROBOTS),
    EntryPoint("metaworld", "hal.drivers.metaworld:MetaWorldRobot", ROBOTS),
    EntryPoint("fake", "hal.fake:FakeExpert", OPERATORS),
    EntryPoint("metaworld", "hal.drivers.metaworld_expert:MetaWorldExpert", OPERATORS),
)

_registered: dict[str, dict[str, Callable[..., Any]]] = {ROBOTS: {}, OPERATORS: {}}


def known_robots() -> tuple[str, ...]:
    """Names that `make_robot` takes, sorted. A name that is listed may still fail to load; `broken_robots` tells."""
    return tuple(sorted({*_found(ROBOTS), *_registered[ROBOTS]}))


def known_operators() -> tuple[str, ...]:
    """Names that `make_operator` takes, sorted."""
    return tuple(sorted({*_found(OPERATORS), *_registered[OPERATORS]}))


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

    `clock`: what it should stamp with, for a simulator whose time is not the machine's; it must take it as `clock`.

    Raises `ConfigError` for an unknown name, with the nearest; `RobotError` naming the entry point when it is broken.
    """
    robot = _call(ROBOTS, kind, config, **({} if clock is None else {"clock": clock}))
    if not isinstance(robot, Robot):
        raise RobotError(
            f"robot '{kind}' gave a {type(robot).__name__}, which lacks methods of "
            "hal.robot.Robot: spec, connect, reset, read, write, close."
        )
    return robot


def make_operator(kind: str, robot: Robot) -> Teleoperator:
    """The scripted operator called `kind` for `robot`. Errors as `make_robot`."""
    return _call(OPERATORS, kind, robot)


def broken_robots() -> dict[str, str]:
    """Why each robot that cannot be loaded cannot, by name. Imports every driver's module: for a doctor."""
    broken = {}
    for name, point in sorted(_found(ROBOTS).items()):
        try:
            _load(point)
        except RobotError as error:
            broken[name] = str(error)
    return broken


def _found(group: str, installed: Iterable[EntryPoint] | None = None) -> dict[str, EntryPoint]:
    # Ours come last: a package may add robots, but not take the place of one that is built in.
    installed = entry_points(group=group) if installed is None else installed
    return {point.name: point for point in (*installed, *_BUILT_IN) if point.group == group}


def _call(group: str, kind: str, argument: Any, **options: Any) -> Any:
    if kind in _registered[group]:
        return _registered[group][kind](argument, **options)
    found = _found(group)
    what = "robot" if group == ROBOTS else "operator"
    if kind not in found:
        raise ConfigError(
            f"no {what} '{kind}'.{nearest(kind, found)} Known: {', '.join(sorted(found))}. "
            f"A package adds one by an entry point in the group '{group}'."
        )
    return _load(found[kind])(argument, **options)


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
