"""Any robot of lerobot 0.4.4 as a `Robot`: SO-100, SO-101, Koch, ..., and those of packages called lerobot_robot_*.

    LeRobotRobot(LeRobotConfig("so101_follower", {"port": "/dev/ttyACM0", "id": "left"}, {"pick": "pick the cube"}))

lerobot's object is made by the constructor, because its features and its calibration are the spec; it opens nothing
before `connect`. Never calibrates: that asks a person at a terminal (`lerobot-calibrate`).
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np

from hal.cameras.capture import CameraConfig, ThreadedCamera
from hal.cameras.picture import resize_image, to_rgb
from hal.drivers.lerobot.make import connect, disconnect, make_lerobot
from hal.drivers.lerobot.spec import LeRobotConfig, calibrated_limits, components, lerobot_spec
from hal.interfaces.robot import Feedback, RestPose, check_reset, require_scene
from hal.safety.limiter import limit_action
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, InvalidDataError, RobotError
from wire.types import CameraSpec, CommandType, Frame, Observation

log = logging.getLogger(__name__)

_READ_TRIES = 2
"""a packet lost on a serial bus is asked for once more"""
_BUS_S = 0.05
"""how long a stop waits for the call that has the bus"""
_WAIT_MS = 900.0
"""a camera without a picture for so long is opened again"""


class NewestCamera:
    """Stands in for a lerobot camera: any of its ways to read gives the newest picture, without waiting.

    To the thread that reads on it is the `CaptureDevice`.
    """

    def __init__(self, name: str, camera: Any, clock: Clock) -> None:
        self.given: Frame | None = None
        """what was read last, as captured, RGB"""
        self.is_connected = False
        self._camera = camera
        self._clock = clock
        self._swap = str(getattr(camera, "color_mode", "rgb")).lower().endswith("bgr")
        size = {"height": camera.height, "width": camera.width, "rate_hz": camera.fps or 1000.0}
        # the loop sees how old a picture is
        config = CameraConfig(name=name, stall_timeout_s=math.inf, **size)
        self._thread = ThreadedCamera(config, "lerobot", lambda: self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._camera, name)  # height, width, fps, ...

    def connect(self, *arguments: Any, **options: Any) -> None:
        """Open the camera and wait for its first picture. Raises `RobotError` when none comes."""
        self._thread.connect()
        self.is_connected = True

    def read(self, *arguments: Any, **options: Any) -> np.ndarray:
        """uint8[height, width, 3], RGB."""
        self.given = self._thread.read()
        return self.given.image

    async_read = read_latest = read

    def disconnect(self) -> None:
        self.is_connected = False
        self._thread.close()

    def open(self) -> None:
        self._camera.connect()

    def grab(self) -> tuple[int, np.ndarray]:
        image = self._camera.async_read(timeout_ms=_WAIT_MS)
        return self._clock.now_ns(), image[..., ::-1] if self._swap else image

    def close(self) -> None:
        if self._camera.is_connected:
            self._camera.disconnect()


class LeRobotRobot:
    """Keeps the `Robot` protocol. `executed` is what lerobot's `send_action` says it sent."""

    real = True

    def __init__(self, config: LeRobotConfig, clock: Clock | None = None) -> None:
        """Raises `ConfigError` for an unknown type, a wrong field or a dimension without unit or limits."""
        self.config = config
        self._clock = clock or MonotonicClock()
        self._robot = make_lerobot("robot", config.type, config.fields, config.plugins)
        self.spec = lerobot_spec(config, self._robot)
        self.tasks = tuple(config.tasks)
        self._what = config.what
        self._states = [d.name for d in self.spec.state]
        self._actions = [d.name for d in self.spec.action]
        own = calibrated_limits(self._robot)
        # Arms of one make share a spec, and each has a calibration of its own: the narrower of both holds.
        low = np.maximum(self.spec.action_low(), [own.get(n, (-np.inf, 0))[0] for n in self._actions])
        high = np.minimum(self.spec.action_high(), [own.get(n, (0, np.inf))[1] for n in self._actions])
        self.reach = low.astype(np.float32), high.astype(np.float32)
        """as `hal.interfaces.robot.reach`"""
        self._cameras = self._detach_cameras()
        self._frames: dict[str, tuple[np.ndarray, Frame]] = {}
        """by camera: the newest picture as lerobot gave it, and what was made of it"""
        self._connected = False
        self._task = ""
        self._sent: dict[str, float] = {}
        """what was commanded last, by dimension"""
        self._bus = threading.RLock()
        """two packets at once would be none: who talks to lerobot's robot has it"""

    def connect(self) -> None:
        """Open the buses and cameras, with torque on. Raises `RobotError` for a port that does not answer, motors that
        hold another calibration than the file, or a camera without a picture; everything is closed again then."""
        if self._connected:
            return
        try:
            connect(self._robot, self._what, self.config.type, self.config.write_calibration)
            self._connected = True
        finally:
            if not self._connected:
                self._close_cameras()

    def reset(self, task: str, seed: int) -> RestPose | None:
        """The rest pose, if there is one. `seed` means nothing to it.

        Raises `ConfigError` for an unknown task, `RobotError` before `connect` and when the robot does not answer.
        """
        check_reset(self._what, task, self.tasks, 0, self._connected)
        self._task = ""
        pose = self._rest_pose() if self.config.rest_pose else None
        self._observe()
        self._task = task
        return pose

    def read(self) -> Observation:
        """State float32[ds] and the newest picture of each camera. Raises `RobotError` when a motor does not answer."""
        require_scene(self._what, "read", self._task or None)
        seen, time_ns = self._observe()
        frames = {camera.name: self._frame(camera, seen.get(camera.name), time_ns) for camera in self.spec.cameras}
        return Observation(time_ns, self._state_of(seen), frames, self.config.tasks[self._task])

    def write(self, action: np.ndarray) -> Feedback:
        """Send `action`; raises `InvalidDataError` for one that is none, `RobotError` when the bus does not take it."""
        require_scene(self._what, "write", self._task or None)
        return Feedback(self._send(limit_action(self.spec, action)))

    def close(self) -> None:
        """Stop what moves, then give all back. Whether torque stays is in lerobot's own configuration
        (`disable_torque_on_disconnect`), and the log says what that means."""
        if not self._connected:
            return
        with self._bus:
            self._connected, self._task = False, ""
            try:
                self._stay()
            except Exception as error:  # noqa: BLE001 - it is given back whatever it says
                log.error("%s did not take its last stop: %s", self._what, error)
            self._announce_torque()
            self._sent = {}
            disconnect(self._robot, self._what)
        self._close_cameras()

    def stop_motion(self) -> None:
        """As `StoppableRobot.stop_motion`: each target becomes what is measured now, all else 0. Raises `RobotError`
        when another call has the bus, or it does not answer.
        """
        if not self._bus.acquire(timeout=_BUS_S):
            raise RobotError(f"{self._what}: its bus is taken by another call, which has not ended for {_BUS_S:g} s.")
        try:
            if self._connected:
                self._stay()
        except RobotError:
            raise
        except Exception as error:
            raise RobotError(f"{self._what} did not take its stop: {type(error).__name__}: {error}.") from error
        finally:
            self._bus.release()

    # --- lerobot's side -------------------------------------------------------------------------------------------

    def _stay(self) -> None:
        """Command it to stay where it is: a target that is not measured stays what it was, or is left out.

        So is one that stands outside of its reach: a servo that is told to be there goes to the end of its calibration.
        """
        seen, _ = self._observe()
        known = dict(self._sent)
        for name, low, high in zip(self._actions, *(side.tolist() for side in self.reach), strict=True):
            # What was commanded goes to that end already, or comes from there.
            if name in seen and (name in self._sent or low <= seen[name] <= high):
                known[name] = min(max(float(seen[name]), low), high)
        rates = {d.name: 0.0 for d in self.spec.action if d.meaning != CommandType.absolute}
        if goals := {name: known[name] for name in self._actions if name in known} | rates:
            with self._bus:
                self._robot.send_action(goals)

    def _announce_torque(self) -> None:
        """lerobot's disconnecting may let an arm fall, which nobody should have to find out."""
        settings = {
            getattr(getattr(part, "config", None), "disable_torque_on_disconnect", None)
            for _, part in components(self._robot)
        }
        if True in settings:
            log.warning(
                "%s: its torque goes off now, and what nothing holds up falls: disable_torque_on_disconnect is true. "
                "Give it a rest_pose that lies, or set it to false in `fields`.",
                self._what,
            )
        elif False in settings:
            log.info("%s: its torque stays on (disable_torque_on_disconnect is false).", self._what)

    def _observe(self) -> tuple[dict[str, Any], int]:
        for attempt in range(1, _READ_TRIES + 1):
            try:
                with self._bus:
                    # Stamped afterwards: no picture in it is newer.
                    return self._robot.get_observation(), self._clock.now_ns()
            except ConnectionError as error:
                if attempt == _READ_TRIES:
                    raise RobotError(f"{self._what} does not answer: {error}. Check its cable and power.") from error
                log.warning("%s: asked again after: %s", self._what, error)
            except Exception as error:
                raise RobotError(f"{self._what} cannot be read: {type(error).__name__}: {error}.") from error
        raise AssertionError("the loop returns or raises")

    def _state_of(self, seen: dict[str, Any]) -> np.ndarray:
        missing = [name for name in self._states if name not in seen]
        if missing:
            raise RobotError(f"{self._what} did not measure {', '.join(missing)}; it promised to in its features.")
        return np.array([seen[name] for name in self._states], np.float32)

    def _send(self, action: np.ndarray) -> np.ndarray:
        """float32[da]: what was sent of `action`, within the limits of the spec and of this robot's calibration."""
        wanted = np.clip(action, *self.reach)
        goals = {name: float(value) for name, value in zip(self._actions, wanted, strict=True)}
        try:
            with self._bus:
                sent = self._robot.send_action(dict(goals)) or {}
                self._sent = goals
        except Exception as error:
            raise RobotError(
                f"{self._what} did not take its command: {type(error).__name__}: {error}. Check its cable and power."
            ) from error
        done = np.array([sent.get(name, goal) for name, goal in goals.items()], np.float32)
        # A joint that was pushed past its limit comes back by steps that begin outside; what is recorded stays inside.
        return np.clip(done, self.spec.action_low(), self.spec.action_high()).astype(np.float32)

    def _rest_pose(self) -> RestPose:
        """Where it begins; dimensions that the configuration does not name stay where they are measured."""
        rest, absolute = self.config.rest_pose, [d.meaning == CommandType.absolute for d in self.spec.action]
        seen, _ = self._observe()
        names = list(zip(self._actions, absolute, strict=True))
        if unknown := [name for name, target in names if target and name in rest and name not in seen]:
            raise ConfigError(f"{self._what}: rest_pose moves {', '.join(unknown)}, which is not measured.")
        goal = [rest.get(name, seen.get(name, 0.0)) if target else 0.0 for name, target in names]
        within = np.clip(goal, *self.reach).astype(np.float32)
        return RestPose(within, self.config.rest_speed, self.config.rest_tolerance)

    def _detach_cameras(self) -> list[NewestCamera]:
        """Put a `NewestCamera` in the place of each camera of lerobot's robot and of its arms."""
        stand_ins: dict[int, NewestCamera] = {}
        for _, part in components(self._robot):
            cameras: Any = getattr(part, "cameras", None)
            if isinstance(cameras, dict):
                for name, camera in cameras.items():
                    cameras[name] = stand_ins.setdefault(id(camera), NewestCamera(name, camera, self._clock))
        return list(stand_ins.values())

    def _close_cameras(self) -> None:
        for camera in self._cameras:
            camera.disconnect()

    def _frame(self, camera: CameraSpec, image: Any, time_ns: int) -> Frame:
        """Of `image` with its time: the same `Frame` as before while it is the same picture."""
        before = self._frames.get(camera.name)
        if before is not None and before[0] is image:
            return before[1]
        # The picture itself says which camera it is from: names differ where a robot is made of two arms.
        taken_ns = next((c.given.time_ns for c in self._cameras if c.given and c.given.image is image), None)
        if taken_ns is None and before is not None and np.array_equal(before[0], image):
            return before[1]
        try:
            whole = to_rgb(image)
        except InvalidDataError as error:
            raise RobotError(f"{self._what}: camera '{camera.name}': {error} Check its configuration.") from error
        same = whole.shape[:2] == (camera.height, camera.width)
        small = whole if same else resize_image(whole, camera.height, camera.width)
        frame = Frame(time_ns if taken_ns is None else taken_ns, small, None if same else whole)
        self._frames[camera.name] = image, frame
        return frame
