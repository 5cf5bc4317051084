"""Is the bench of an arm as its file says? Ports, calibration, servos, leader and cameras, before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fleet.config.recipe import Recipe
from hal.cameras.conformance import check_camera
from hal.conformance.report import CheckOutcome, ConformanceReport, Figure
from hal.drivers.lerobot.servos import examine_servos, record_by_hand
from hal.drivers.with_cameras import CameraRobotConfig
from hal.registry import CAMERAS, TELEOPERATORS, make_camera, make_robot, make_teleoperator, read_config
from hal.safety.limits import SafetyLimits, compile_limits
from hal.safety.measured import limits_from_motion
from hal.safety.required import require_limits
from hal.stop_devices.watch import WatchedDevice, check_devices, watched_devices
from hal.teleop.pose import pose_of
from wire.clock import Clock
from wire.errors import ConfigError, FleetError

_RATE = 0.7
"""least share of the rate that a camera was asked for"""
_DARKEST, _FLATTEST = 8.0, 2.0
"""mean and standard deviation of a picture, of 255, below which a camera sees nothing"""

Found = tuple[list[CheckOutcome], list[Figure]]


def examine_bench(recipe: Recipe, seconds: float, notify: Callable[[str], None]) -> ConformanceReport:
    """All that can be known without torque. `seconds`: how long each camera is watched; `notify` hears what comes next.

    Raises `ConfigError` for a recipe without a bench.
    """
    driver = _driver(recipe)
    checks: list[CheckOutcome] = []
    figures: list[Figure] = []
    for name, look in _examinations(recipe, driver, seconds):
        notify(name)
        try:
            found = look()
        except FleetError as error:
            found = [CheckOutcome(name, False, str(error))], []
        checks += found[0]
        figures += found[1]
    return ConformanceReport(tuple(checks), tuple(figures))


def measure_by_hand(recipe: Recipe, seconds: float, clock: Clock) -> SafetyLimits:
    """Limits from how a person moves the arm meanwhile; its torque is off. Raises `FleetError`."""
    arm = _driver(recipe).robot_config
    return limits_from_motion(*record_by_hand(arm["type"], arm["fields"], arm["plugins"], seconds, clock))


def limits_tables(limits: SafetyLimits) -> str:
    """For a bench's file."""
    tables = ("velocity", limits.velocity), ("acceleration", limits.acceleration)
    lines: list[str] = []
    for name, table in (*tables, ("stop_deceleration", limits.stop_deceleration)):
        lines += [f"[limits.{name}]", *(f"{joint.removesuffix('.pos')} = {v:g}" for joint, v in table.items()), ""]
    return "\n".join(lines)


def _driver(recipe: Recipe) -> CameraRobotConfig:
    driver = recipe.robot_config
    if not isinstance(driver, CameraRobotConfig) or driver.robot != "lerobot":
        raise ConfigError(f"recipe '{recipe.name}' has no bench with an arm of lerobot.")
    return driver


def _examinations(
    recipe: Recipe, driver: CameraRobotConfig, seconds: float
) -> Iterator[tuple[str, Callable[[], Found]]]:
    arm, leader = driver.robot_config, recipe.teleoperator
    yield "robot", lambda: examine_servos("robot", arm["type"], arm["fields"], arm["plugins"])
    yield "limits", lambda: _limits(recipe)
    for device in watched_devices(recipe.stop_devices):
        yield device.who, lambda device=device: _beside(device)  # type: ignore[misc]
    if leader is not None:
        own = leader.config
        yield (
            "leader",
            lambda: examine_servos("teleoperator", own["type"], own["fields"], own.get("plugins", ())),
        )
        yield "leader match", lambda: _leader_match(recipe)
    for choice in driver.cameras:
        yield (
            f"camera {choice.config['name']}",
            lambda kind=choice.kind, config=choice.config: _camera(  # type: ignore[misc]
                kind, config, seconds
            ),
        )


def _beside(device: WatchedDevice) -> Found:
    check_devices([device])
    return [CheckOutcome(device.who, True)], []


def _limits(recipe: Recipe) -> Found:
    robot = make_robot(recipe.robot, recipe.robot_config)
    recipe.spec.require(robot.spec, f"robot '{recipe.robot}' for recipe '{recipe.name}'")
    require_limits(robot, recipe.loop.safety)
    compile_limits(recipe.spec, recipe.loop.safety)
    return [CheckOutcome("limits", True, "of every dimension; `--measure` proposes others")], []


def _leader_match(recipe: Recipe) -> Found:
    """Whether the leader says all that the robot takes, in its units."""
    assert recipe.teleoperator is not None
    kind = recipe.teleoperator.kind
    device = make_teleoperator(kind, read_config(kind, recipe.teleoperator.config, TELEOPERATORS))
    try:
        device.connect(recipe.spec)
        device.read(pose_of(recipe.spec, None), False)
    finally:
        device.close()
    return [CheckOutcome("leader match", True, "it says every dimension of the robot, in its units")], []


def _camera(kind: str, config: dict[str, Any], seconds: float) -> Found:
    name = f"camera {config['name']}"

    def make() -> Any:
        return make_camera(kind, read_config(kind, config, CAMERAS))

    camera = make()
    try:
        # What is not there is said once, rather than by every check.
        camera.connect()
        image = np.asarray(camera.read().image, np.float32)
    finally:
        camera.close()
    report = check_camera(make, seconds)
    bright, contrast = float(image.mean()), float(image.std())
    seen = CheckOutcome(
        f"{name} picture",
        bright > _DARKEST and contrast > _FLATTEST,
        f"mean {bright:.0f} and deviation {contrast:.0f} of 255"
        + ("" if bright > _DARKEST and contrast > _FLATTEST else ": take its cap off, or give it light."),
    )
    rate = next((figure.value for figure in report.figures if figure.name == "rate"), 0.0)
    least = _RATE * camera.spec.rate_hz
    slow = "Give it light, its own USB port, `fps` it can do, or fourcc MJPG in its `config`."
    checks = [replace(check, name=f"{name} {check.name}") for check in report.checks if not check.passed]
    return [*checks, seen], [Figure(f"{name} rate", rate, "Hz", least, at_least=True, advice=slow)]
