"""Any teleoperator of lerobot 0.4.4 as a `TeleopDevice`: leader arms, gamepad, keyboard, phone, and those of packages
called lerobot_teleoperator_*.

A leader arm is rarely where the robot is. So it engages when every joint of it is near the robot's, or at once; and
either way what is left between the two fades in a stated time, in which the robot follows the leader's own motion.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hal.drivers.lerobot.make import connect, disconnect, make_lerobot
from hal.drivers.lerobot.serial_ports import port_fault
from hal.drivers.lerobot.spec import motor_units
from hal.interfaces.dynamics import require_dimension
from hal.interfaces.teleop import TeleopCommand
from hal.teleop.pose import check_rest
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError, suggest
from wire.messages.gateway import COMMAND_FRESH_S
from wire.types import CommandType, RobotSpec

_ELEMENT = re.compile(r"(.+)\[(\w+)\]")
_OLD_S = COMMAND_FRESH_S
"""a reading older than this is of a device that stands still or is gone, and no robot follows it: hold"""
_READ_TRIES = 2
"""a packet lost on a serial bus is asked for once more"""


@dataclass(frozen=True, slots=True)
class LeRobotTeleopConfig:
    """A lerobot teleoperator and how it drives a robot. Raises `ConfigError` that names the field."""

    type: str
    """its registered type, as in lerobot's `--teleop.type`: so101_leader, gamepad, phone, ..."""
    fields: dict[str, Any] = field(default_factory=dict)
    """of lerobot's own configuration: port, id, calibration_dir, ..."""
    names: dict[str, str] = field(default_factory=dict)
    """what of its action drives each dimension of the robot: NAME, NAME[2] of an array or NAME[a3] of a mapping; those
    of one name need not be told"""
    scale: dict[str, float] = field(default_factory=dict)
    """robot units per unit of the device, by dimension"""
    changes: tuple[str, ...] = ()
    """deltas and velocities that follow how the device's value changes, as of a phone's position"""
    engage: str = "near"
    """near: when it is where the robot is; always: at once; NAME: while this value of its action is true"""
    near: float = 0.08
    """share of a dimension's range that counts as near"""
    blend_s: float = 1.0
    """so long the robot takes to come to a leader that is near"""
    speed: float = 0.3
    """share of a dimension's range per second: to one that is farther away it takes so much longer"""
    rate_hz: float = 60.0
    """so often it is read"""
    write_calibration: bool = False
    """write the calibration file into motors that hold another one; otherwise that is an error"""
    plugins: tuple[str, ...] = ()
    """modules to import that register types and are not called lerobot_teleoperator_*"""

    def __post_init__(self) -> None:
        for name in ("near", "blend_s", "speed", "rate_hz"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"lerobot teleoperator '{self.type}': {name} must be positive.")


class LeRobotTeleop:
    """Keeps the `TeleopDevice` protocol. A thread reads lerobot's object, which may wait for its hardware."""

    def __init__(self, config: LeRobotTeleopConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or MonotonicClock()
        self._what = f"lerobot teleoperator '{config.type}'"
        self._device: Any = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._spec: RobotSpec | None = None
        self._clear()

    def _clear(self) -> None:
        self._reading: tuple[int, dict[str, Any]] | None = None
        self._fault = ""
        self._engaged = False
        self._offset: np.ndarray = np.zeros(0)
        self._engaged_ns, self._blend_ns = 0, 1
        self._before: tuple[int, np.ndarray] | None = None
        self._rates: np.ndarray = np.zeros(0)
        self.hint = ""

    def connect(self, spec: RobotSpec) -> None:
        """Open it, and read it until `close`. Raises `ConfigError` for a robot that it cannot drive, naming the
        dimensions, and `RobotError` for a device or package that is not there."""
        self.close()
        check_rest(spec, self._what)
        self._clear()
        device = make_lerobot("teleoperator", self.config.type, self.config.fields, self.config.plugins)
        self._sources = self._bind(spec, device)
        self._check_units(spec, device)
        self._low, self._high = spec.action_low(), spec.action_high()
        self._absolute = np.array([d.meaning is CommandType.absolute for d in spec.action])
        states = {d.name for d in spec.state}
        self._measurable = self._absolute & np.array([d.name in states for d in spec.action])
        self._changes = np.array([d.name in self.config.changes for d in spec.action])
        self._scale = np.array([self.config.scale.get(d.name, 1.0) for d in spec.action])
        self._per = np.array([spec.period_ns / 1e9 if d.meaning is CommandType.delta else 1.0 for d in spec.action])
        connect(device, self._what, self.config.type, self.config.write_calibration)
        self._spec, self._device = spec, device
        self._stop.clear()
        self._thread = threading.Thread(target=self._read_on, name="lerobot-teleop", daemon=True)
        self._thread.start()

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        self._engaged &= driving
        if self._fault:
            raise RobotError(f"{self._what} cannot be read: {self._fault} Check its cable and power.")
        reading, now_ns = self._reading, self._clock.now_ns()
        if reading is None or now_ns - reading[0] > _OLD_S * 1e9:
            lost = reading is not None
            self.hint = f"{self._what} says nothing any more: the robot holds" if lost else "waiting for the device"
            self._engaged = False
            return TeleopCommand(engaged=True)
        if self.config.engage not in ("near", "always") and not bool(reading[1].get(self.config.engage)):
            self.hint, self._engaged, self._before = f"{self.config.engage} to drive", False, None
            return TeleopCommand(engaged=True)
        wanted = self._wanted(*reading)
        if not self._engaged and not self._may_engage(wanted, np.asarray(pose, np.float32)):
            return TeleopCommand(engaged=True)
        return TeleopCommand(engaged=True, action=self._follow(wanted, now_ns), time_ns=reading[0])

    def close(self) -> None:
        """Give it back. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None
        if self._device is not None:
            disconnect(self._device, self._what)
        self._device = self._spec = None

    # --- the clutch ----------------------------------------------------------------------------------------------

    def _may_engage(self, wanted: np.ndarray, pose: np.ndarray) -> bool:
        """Whether the robot may begin to follow; says what is missing."""
        assert self._spec is not None
        off = np.where(self._absolute, wanted - pose, 0.0)
        # What no robot of this kind measures (a gripper's effort) cannot be compared, and does not hold things up.
        measured = np.isfinite(off)
        if not measured[self._measurable].all():
            self.hint = "waiting for the robot's pose"
            return False
        share = np.where(measured, np.abs(off) / (self._high - self._low), 0.0)
        if self.config.engage == "near" and share.max(initial=0.0) > self.config.near:
            dimensions = self._spec.action
            far = [i for i in np.argsort(-share) if share[i] > self.config.near]
            moves = ", ".join(f"{dimensions[i].name} by {-off[i]:+.0f} {dimensions[i].unit}" for i in far)
            self.hint = f"bring {moves} to where the robot is"
            return False
        self._engaged, self._engaged_ns = True, self._clock.now_ns()
        self._offset = np.where(measured, -off, 0.0)
        blend_s = max(self.config.blend_s, float(share.max(initial=0.0)) / self.config.speed)
        self._blend_ns = round(1e9 * blend_s)
        self.hint = f"going over to the device in {blend_s:.1f} s"
        return True

    def _follow(self, wanted: np.ndarray, now_ns: int) -> np.ndarray:
        """float32[da]: `wanted`, and what is left of the difference at which the robot began to follow."""
        left = max(0.0, 1 - (now_ns - self._engaged_ns) / self._blend_ns)
        self.hint = self.hint if left else ""
        return np.clip(wanted + left * self._offset, self._low, self._high).astype(np.float32)

    # --- what it says --------------------------------------------------------------------------------------------

    def _wanted(self, time_ns: int, action: Mapping[str, Any]) -> np.ndarray:
        """float64[da] in the robot's units, within its limits."""
        values = np.array([self._value(action, *source) for source in self._sources]) * self._scale
        if not np.isfinite(values).all():
            raise RobotError(f"{self._what} says {dict(action)}, which is not all numbers.")
        if self._before is None or time_ns > self._before[0]:
            # A robot repeats a command until the next: it gets the rate at which the device moves, not the step.
            then_ns, then = self._before or (0, values)
            self._rates = (values - then) / ((time_ns - then_ns) / 1e9) * self._per
            self._before = (time_ns, values)
        return np.clip(np.where(self._changes, self._rates, values), self._low, self._high)

    def _value(self, action: Mapping[str, Any], name: str, element: str) -> float:
        value = action.get(name)
        try:
            if element:
                value = value[element if isinstance(value, Mapping) else int(element)]  # type: ignore[index]
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, LookupError):
            part = f"{name}[{element}]" if element else name
            raise RobotError(f"{self._what} gives no number as '{part}': {action.get(name)!r}.") from None

    def _read_on(self) -> None:
        failed = 0
        while not self._stop.wait(1 / self.config.rate_hz):
            try:
                action = self._device.get_action()
                if action:  # a phone says nothing until it knows where it is
                    self._reading = (self._clock.now_ns(), dict(action))
                failed = 0
            except Exception as error:  # noqa: BLE001 - a device may fail in any way; `read` says it
                failed += 1
                if failed < _READ_TRIES:
                    continue
                port = getattr(getattr(self._device, "bus", None), "port", "")
                self._fault = (port and port_fault(str(port))) or f"{type(error).__name__}: {error}."
                return

    # --- opening -------------------------------------------------------------------------------------------------

    def _bind(self, spec: RobotSpec, device: Any) -> list[tuple[str, str]]:
        """The source of each action dimension: a name, and what of it or ''."""
        features = device.action_features
        outputs = list(features["names"] if isinstance(features.get("names"), Mapping) else features)
        actions = [d.name for d in spec.action]
        for where, names in (
            ("names", self.config.names),
            ("scale", self.config.scale),
            ("changes", self.config.changes),
        ):
            for name in names:
                require_dimension(f"{self._what} for robot '{spec.embodiment}': `{where}`", name, actions)
        for d in spec.action:
            if d.name in self.config.changes and d.meaning is CommandType.absolute:
                raise ConfigError(f"{self._what}: '{d.name}' is an absolute target and cannot follow changes.")
        engage = self.config.engage
        if engage not in ("near", "always") and engage not in outputs:
            raise ConfigError(
                f"{self._what}: engage='{engage}' is neither near nor always nor something it says."
                f"{suggest(engage, outputs)}"
            )
        sources, lacking = [], []
        for name in actions:
            source = self.config.names.get(name, name)
            element = _ELEMENT.fullmatch(source)
            base, part = (element[1], element[2]) if element else (source, "")
            if base not in outputs:
                lacking.append(f"'{name}'" + (f" (from '{source}')" if source != name else ""))
            sources.append((base, part))
        if lacking:
            raise ConfigError(
                f"{self._what} does not say {', '.join(lacking)} of robot '{spec.embodiment}'. It says "
                f"{', '.join(outputs)}. Name what drives what: names={{'ROBOT_DIMENSION': 'ITS_NAME'}}."
            )
        return sources

    def _check_units(self, spec: RobotSpec, device: Any) -> None:
        """Raise `ConfigError` when a leader counts in another unit than the robot: a jump by a factor."""
        units = motor_units(device)
        for d, (name, _) in zip(spec.action, self._sources, strict=True):
            mine = units.get(name, d.unit)
            if mine != d.unit and d.name not in self.config.scale:
                raise ConfigError(
                    f"{self._what} says '{name}' in {mine}, and robot '{spec.embodiment}' takes '{d.name}' in "
                    f"{d.unit}. Give both the same `use_degrees`, or the factor: scale."
                )
