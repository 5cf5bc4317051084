"""Any robot of lerobot 0.4.4 as a `Robot`: SO-100, SO-101, Koch, ..., and those of packages called lerobot_robot_*.

    LeRobotRobot(LeRobotConfig("so101_follower", {"port": "/dev/ttyACM0", "id": "left"}, {"pick": "pick the cube"}))

lerobot's object is made by the constructor, because its features and its calibration are the spec; it opens nothing
before `connect`. Never calibrates: that asks a person at a terminal (`lerobot-calibrate`).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hal.drivers.lerobot.camera import GrabbedPictures, NewestCamera, detach_cameras
from hal.drivers.lerobot.make import check_calibration, disconnect, make_lerobot
from hal.drivers.lerobot.spec import LeRobotConfig, calibrated_limits, lerobot_spec
from hal.interfaces.robot import Feedback, check_reset
from hal.safety.limiter import limit_action
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError
from wire.types import CommandType, Observation

log = logging.getLogger(__name__)

_READ_TRIES = 2
"""a packet lost on a serial bus is asked for once more"""
_SETTLE_S = 2.0
"""a robot may lag so long behind its rest pose"""


class LeRobotRobot:
    """Keeps the `Robot` protocol. `executed` is what lerobot's `send_action` says it sent."""

    def __init__(self, config: LeRobotConfig | None, clock: Clock | None = None) -> None:
        """Raises `ConfigError` for an unknown type, a wrong field or a dimension without unit or limits."""
        if config is None:
            raise ConfigError("robot 'lerobot' needs a configuration: type, fields and tasks; see docs/robots.md.")
        self.config = config
        self._clock = clock or MonotonicClock()
        self._robot = make_lerobot("robot", config.type, config.fields, config.plugins)
        self.spec = lerobot_spec(config, self._robot)
        self.tasks = tuple(config.tasks)
        self._what = config.what
        self._states = [d.name for d in self.spec.state]
        self._actions = [d.name for d in self.spec.action]
        own = calibrated_limits(self._robot, tuple(self._actions))
        # Arms of one make share a spec, and each has a calibration of its own: the narrower of both holds.
        self._low = np.maximum(self.spec.action_low(), [own.get(n, (-np.inf, 0))[0] for n in self._actions])
        self._high = np.minimum(self.spec.action_high(), [own.get(n, (0, np.inf))[1] for n in self._actions])
        self._cameras: list[NewestCamera] = []
        self._pictures = GrabbedPictures({}, [])
        self._connected = False
        self._task = ""

    def connect(self) -> None:
        """Open the buses and cameras, with torque on. Raises `RobotError` for a port that does not answer, motors that
        hold another calibration than the file, or a camera without a picture; everything is closed again then."""
        if self._connected:
            return
        if not self._cameras:
            self._cameras = detach_cameras(self._robot, self._clock.now_ns)
            self._pictures = GrabbedPictures({c.name: (c.height, c.width) for c in self.spec.cameras}, self._cameras)
        try:
            # Without `calibrate`, or lerobot would ask at a terminal that a robot process does not have.
            self._robot.connect(calibrate=False)
            check_calibration(self._robot, self._what, self.config.write_calibration)
        except Exception as error:
            self._disconnect()
            if isinstance(error, RobotError):
                raise
            raise RobotError(
                f"{self._what} cannot be connected: {type(error).__name__}: {error}. "
                "Check its power, its cable and the port in `fields`; `lerobot-find-port` finds it."
            ) from error
        self._connected = True

    def reset(self, task: str, seed: int) -> None:
        """Move to the rest pose, if there is one, and wait until the robot is there. `seed` means nothing to it.

        Raises `ConfigError` for an unknown task, `RobotError` before `connect` and when the robot does not arrive.
        """
        check_reset(self._what, task, self.tasks, 0, self._connected)
        self._task = ""
        if self.config.rest_pose:
            self._go_to_rest()
        self._observe()
        self._task = task

    def read(self) -> Observation:
        """State float32[ds] and the newest picture of each camera. Raises `RobotError` when a motor does not answer."""
        self._ready("read")
        seen, time_ns = self._observe()
        return Observation(
            time_ns, self._numbers(seen), self._pictures.frames(seen, time_ns), self.config.tasks[self._task]
        )

    def write(self, action: np.ndarray) -> Feedback:
        """Send `action`; raises `InvalidDataError` for one that is none, `RobotError` when the bus does not take it."""
        self._ready("write")
        return Feedback(self._send(limit_action(self.spec, action)))

    def close(self) -> None:
        """Stop what moves by velocity, then give all back; whether torque stays is in lerobot's own configuration
        (`disable_torque_on_disconnect`)."""
        if not self._connected:
            return
        self._connected, self._task = False, ""
        rates = [
            name for name, d in zip(self._actions, self.spec.action, strict=True) if d.meaning != CommandType.absolute
        ]
        try:
            if rates:
                self._robot.send_action(self._stop_action(rates))
        except Exception as error:  # noqa: BLE001 - it is given back whatever it says
            log.error("%s did not take its last stop: %s", self._what, error)
        self._disconnect()

    # --- lerobot's side -------------------------------------------------------------------------------------------

    def _stop_action(self, rates: list[str]) -> dict[str, float]:
        """A whole action that keeps the robot where it is measured."""
        seen, _ = self._observe()
        return {name: 0.0 if name in rates else float(seen.get(name, 0.0)) for name in self._actions}

    def _observe(self) -> tuple[dict[str, Any], int]:
        for attempt in range(1, _READ_TRIES + 1):
            try:
                # Stamped afterwards: no picture in it is newer.
                return self._robot.get_observation(), self._clock.now_ns()
            except ConnectionError as error:
                if attempt == _READ_TRIES:
                    raise RobotError(f"{self._what} does not answer: {error}. Check its cable and power.") from error
                log.warning("%s: asked again after: %s", self._what, error)
            except Exception as error:
                raise RobotError(f"{self._what} cannot be read: {type(error).__name__}: {error}.") from error
        raise AssertionError("the loop returns or raises")

    def _numbers(self, seen: dict[str, Any]) -> np.ndarray:
        missing = [name for name in self._states if name not in seen]
        if missing:
            raise RobotError(f"{self._what} did not measure {', '.join(missing)}; it promised to in its features.")
        return np.array([seen[name] for name in self._states], np.float32)

    def _send(self, action: np.ndarray) -> np.ndarray:
        """float32[da]: what was sent of `action`, within the limits of the spec and of this robot's calibration."""
        wanted = np.clip(action, self._low, self._high)
        goals = {name: float(value) for name, value in zip(self._actions, wanted, strict=True)}
        try:
            sent = self._robot.send_action(dict(goals)) or {}
        except Exception as error:
            raise RobotError(
                f"{self._what} did not take its command: {type(error).__name__}: {error}. Check its cable and power."
            ) from error
        done = np.array([sent.get(name, goal) for name, goal in goals.items()], np.float32)
        # A joint that was pushed past its limit comes back by steps that begin outside; what is recorded stays inside.
        return np.clip(done, self.spec.action_low(), self.spec.action_high()).astype(np.float32)

    def _go_to_rest(self) -> None:
        names, low, high = self._actions, self._low, self._high
        seen, _ = self._observe()
        rest = self.config.rest_pose
        absolute = [d.meaning == CommandType.absolute for d in self.spec.action]
        unknown = [n for n, a in zip(names, absolute, strict=True) if a and n in rest and n not in seen]
        if unknown:
            raise ConfigError(f"{self._what}: rest_pose moves {', '.join(unknown)}, which is not measured.")
        start = np.array([seen.get(n, 0.0) if a else 0.0 for n, a in zip(names, absolute, strict=True)])
        goal = np.clip([rest.get(n, s) for n, s in zip(names, start, strict=True)], low, high)
        span = high - low
        ticks = int(np.ceil(np.max(np.abs(goal - start) / (span * self.config.rest_speed)) * self.spec.control_hz)) + 1
        due_ns = self._clock.now_ns()
        for tick in range(1, ticks + round(_SETTLE_S * self.spec.control_hz) + 1):
            self._send((start + (goal - start) * min(1.0, tick / ticks)).astype(np.float32))
            due_ns += self.spec.period_ns
            self._clock.sleep_until(due_ns)
            if tick < ticks:
                continue
            seen, _ = self._observe()
            off = {n: abs(seen[n] - g) / s for n, g, s in zip(names, goal, span, strict=True) if n in rest}
            if max(off.values()) <= self.config.rest_tolerance:
                return
        worst = max(off, key=lambda name: off[name])
        raise RobotError(
            f"{self._what} does not reach its rest pose: '{worst}' is at {seen[worst]:.1f} instead of "
            f"{goal[names.index(worst)]:.1f}. Is it blocked, or without power?"
        )

    def _disconnect(self) -> None:
        disconnect(self._robot, self._what)
        for camera in self._cameras:
            try:
                camera.disconnect()
            except Exception as error:  # noqa: BLE001
                log.error("%s: camera '%s' did not close: %s", self._what, camera.name, error)

    def _ready(self, what: str) -> None:
        if not self._task:
            raise RobotError(f"{self._what}: {what} without a task; call reset() first.")
