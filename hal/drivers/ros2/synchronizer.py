"""What a robot on ROS 2 has said: messages come in from the node's threads, aligned observations go out to control."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hal.drivers.ros2.config import ImageTopic, Ros2Config
from hal.drivers.ros2.messages import FLAGS, StateReader, read_executed, stamp_ns
from hal.drivers.ros2.received import ReceivedPictures, ReceivedWrenches, Stamps, TopicState
from hal.drivers.ros2.time import StampOrder
from hal.interfaces.robot import Feedback
from wire.errors import InvalidDataError, RobotError
from wire.types import Frame, Observation, RobotSpec

_EXECUTED_KEPT = 16
_STRAY_MESSAGE_S = 1.0


class MessageSynchronizer:
    """`on_*` in the node's threads, the rest in control's."""

    def __init__(
        self, spec: RobotSpec, config: Ros2Config, topics: Mapping[str, str], stamps: Stamps, own_clock: bool
    ) -> None:
        """`topics`: names in full, of `joint_states`, each camera and each wrench, this by its name in `config`;
        `own_clock`: it is a simulation's.
        """
        self._spec = spec
        self._config = config
        self._topic = topics["joint_states"]
        self._stamps = stamps
        # Between two commands a stepped robot is as it was; that it can still be heard is what counts.
        self._aged_by_arrival = config.stepped or own_clock
        felt = {name for sensor in config.wrenches for name in sensor.axes}
        self._reader = StateReader(self._topic, spec.state, config.joints, config.fields, felt)
        self._wrenches = {
            sensor.topic: ReceivedWrenches(spec, config, sensor, topics[sensor.topic]) for sensor in config.wrenches
        }
        self._order = StampOrder(self._topic, config.jump_s)
        self._changed = threading.Condition()
        self._state: TopicState | None = None
        self._heard_ns = 0
        self._wrong: dict[str, str] = {}
        """what is wrong with the newest message, by topic"""
        self._jumps: list[str] = []
        self._last_ns = 0
        self._executed: OrderedDict[int, tuple[np.ndarray, dict[str, float]]] = OrderedDict()
        self._fence = 0
        self.pictures: dict[str, ReceivedPictures] = {}
        for camera in spec.cameras:
            how = config.cameras.get(camera.name, ImageTopic())
            self.pictures[camera.name] = ReceivedPictures(camera, config, topics[camera.name], how)

    # --- from the node ----------------------------------------------------------------------------------------------

    def on_state(self, message: Any) -> None:
        """A JointState of the robot."""
        with self._changed:
            try:
                stamp, time_ns, jump = self._stamps.read(message, self._topic)
                values = self._reader.read(message)
            except InvalidDataError as error:
                self._wrong[self._topic] = str(error)
                self._changed.notify_all()
                return
            self._wrong.pop(self._topic, None)
            self._heard_ns = time.monotonic_ns()
            self._note(jump)
            is_newest, jump = self._order.note(stamp)
            self._note(jump)
            # One of the scene before the last reset says nothing about this one.
            if is_newest and stamp >= self._fence:
                self._state = TopicState(stamp, time_ns, values)
                self._changed.notify_all()

    def on_wrench(self, sensor: str, message: Any) -> None:
        """A WrenchStamped of one of `config.wrenches`, by its topic there."""
        wrench = self._wrenches[sensor]
        with self._changed:
            try:
                stamp, time_ns, jump = self._stamps.read(message, wrench.topic)
            except InvalidDataError as error:
                self._wrong[wrench.topic] = str(error)
            else:
                self._wrong.pop(wrench.topic, None)
                self._note(jump)
                if stamp >= self._fence:
                    self._note(wrench.add(stamp, time_ns, message))
            self._changed.notify_all()

    def on_executed(self, message: Any) -> None:
        """What the robot did with a command."""
        with self._changed:
            try:
                self._executed[stamp_ns(message)] = read_executed(message, [d.name for d in self._spec.action])
                self._wrong.pop("executed", None)
            except InvalidDataError as error:
                self._wrong["executed"] = str(error)
            while len(self._executed) > _EXECUTED_KEPT:
                self._executed.popitem(last=False)
            self._changed.notify_all()

    def on_picture(self, camera: str, message: Any) -> None:
        """A picture of one of the spec's cameras."""
        pictures = self.pictures[camera]
        try:
            stamp, time_ns, jump = self._stamps.read(message, pictures.topic)
            frame = pictures.convert(message, time_ns)
        except InvalidDataError as error:
            with self._changed:
                self._wrong[pictures.topic] = str(error)
                self._changed.notify_all()
            return
        with self._changed:
            self._wrong.pop(pictures.topic, None)
            self._note(jump)
            if stamp >= self._fence:
                self._note(pictures.add(stamp, frame))
                self._changed.notify_all()

    def _note(self, jump: str) -> None:
        if jump:
            self._jumps.append(jump)
            # By another clock, what was before the reset can no longer be told.
            self._fence = 0

    # --- to control -------------------------------------------------------------------------------------------------

    def wait_for_any(self, timeout_s: float) -> str:
        """Wait for a valid JointState. '' or what is wrong."""
        with self._changed:
            if self._wait(lambda: self._heard_ns > 0, timeout_s):
                return ""
            return self._wrong.get(self._topic, f"nothing came on '{self._topic}'")

    def newest_picture(self, camera: str, timeout_s: float = 0.0) -> Frame:
        """Whatever the joint states are. Raises `RobotError` when none comes in time, or the newest does not fit."""
        pictures = self.pictures[camera]
        with self._changed:
            self._changed.wait_for(lambda: pictures.frames or self._wrong, timeout_s)
            if pictures.newest is None or self._wrong:
                why = self._wrong.get(pictures.topic, f"nothing came on '{pictures.topic}' within {timeout_s:g} s")
                raise RobotError(f"camera '{camera}': {why}")
            return pictures.frames[pictures.newest]

    def begin(self, fence: int) -> None:
        """A scene begins: forget what is stamped before `fence`."""
        with self._changed:
            self._fence = fence
            if self._state is not None and self._state.stamp < fence:
                self._state = None
            for pictures in self.pictures.values():
                pictures.clear_before(fence)
            for sensor in self._wrenches.values():
                sensor.newest = None
            self._jumps.clear()
            self._executed.clear()

    def wait_for_scene(self, timeout_s: float) -> list[str]:
        """Wait until everything has come since `begin`. Topics of which nothing has."""
        with self._changed:
            self._wait(lambda: not self._missing(), timeout_s)
            return self._missing()

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        # The first message may be a stray one; what is still wrong after a while will stay so.
        stray_s = min(_STRAY_MESSAGE_S, timeout_s)
        if self._changed.wait_for(done, stray_s):
            return True
        self._changed.wait_for(lambda: done() or bool(self._wrong), timeout_s - stray_s)
        return done()

    def _missing(self) -> list[str]:
        felt = [one.topic for one in self._wrenches.values() if one.newest is None]
        if self._state is None:
            return [self._topic, *felt, *(one.topic for one in self.pictures.values() if not one.frames)]
        return felt + [one.topic for one in self.pictures.values() if one.at(self._state.stamp) is None]

    def faults(self) -> str:
        """What is wrong with the newest messages, '' when nothing is."""
        with self._changed:
            return " ".join(self._wrong.values())

    def wait_for_executed(self, stamp: int, timeout_s: float) -> Feedback | None:
        """What came of the command stamped `stamp`; for a stepped robot, with what it saw after. None: no answer."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            if not self._changed.wait_for(lambda: stamp in self._executed or "executed" in self._wrong, timeout_s):
                return None
            if "executed" in self._wrong:
                raise RobotError(f"robot '{self._spec.embodiment}': {self._wrong['executed']}")
            executed, more = self._executed.pop(stamp)
            success, terminated, truncated = (more.get(flag, 0.0) > 0.5 for flag in FLAGS)
            feedback = Feedback(executed, more.get("reward", 0.0), success, terminated=terminated, truncated=truncated)
            if not self._config.stepped:
                return feedback
            if self._changed.wait_for(lambda: self._arrived(stamp, more), deadline - time.monotonic()):
                return feedback
            return None

    def _arrived(self, stamp: int, more: Mapping[str, float]) -> bool:
        # Different topics overtake each other: the state may be here before the picture that belongs to it.
        if self._state is None or self._state.stamp < stamp + int(more.get("joint_states", 0)):
            return False
        for name, pictures in self.pictures.items():
            after_ns = more.get(f"camera/{name}")
            if after_ns is not None and (pictures.newest or 0) < stamp + int(after_ns):
                return False
        return True

    @property
    def alive(self) -> bool:
        """Whether joint states came lately, of whatever scene."""
        return time.monotonic_ns() - self._heard_ns < self._config.max_age_s * 1e9

    def state(self) -> np.ndarray:
        """float32[ds]: the newest, NaN where a wrench belongs. Raises `RobotError` when it is too old."""
        with self._changed:
            return self._fresh_state(f"robot '{self._spec.embodiment}'").values.copy()

    def observation(self, text: str) -> Observation:
        """The newest state with the newest pictures that are not newer. Raises `RobotError` that says what is wrong."""
        with self._changed:
            who = f"robot '{self._spec.embodiment}'"
            if self._jumps:
                jumps, self._jumps = "; ".join(self._jumps), []
                raise RobotError(f"{who}: {jumps}. It holds for a moment and goes on by the new time.")
            state = self._fresh_state(who)
            images = {name: self._frame(who, pictures, state.stamp) for name, pictures in self.pictures.items()}
            # Mapping follows corrections of the clock: a picture may end up a few microseconds after its state.
            self._last_ns = max(self._last_ns, state.time_ns, *(frame.time_ns for frame in images.values()), 0)
            return Observation(self._last_ns, self._with_wrenches(who, state), images, text)

    def _with_wrenches(self, who: str, state: TopicState) -> np.ndarray:
        values, machine_ns = state.values.copy(), time.monotonic_ns()
        for sensor in self._wrenches.values():
            age_s = math.inf if sensor.newest is None else (machine_ns - sensor.newest.time_ns) / 1e9
            if sensor.newest is None or age_s > self._config.max_age_s:
                wrong = self._wrong.get(sensor.topic, "")
                raise RobotError(
                    f"{who}: the wrench on '{sensor.topic}' is {age_s:.2f} s old (limit {self._config.max_age_s:g} "
                    f"s){': ' + wrong if wrong else ''}. Is its sensor's node running? `ros2 topic hz {sensor.topic}`"
                )
            values[sensor.which] = sensor.newest.values
        return values

    def _fresh_state(self, who: str) -> TopicState:
        state, machine_ns = self._state, time.monotonic_ns()
        since_ns = self._heard_ns if self._aged_by_arrival or state is None else state.time_ns
        age_s = (machine_ns - since_ns) / 1e9
        if state is None or age_s > self._config.max_age_s:
            wrong = self._wrong.get(self._topic, "")
            raise RobotError(
                f"{who}: joint states on '{self._topic}' are {age_s:.2f} s old (limit {self._config.max_age_s:g} "
                f"s){': ' + wrong if wrong else ''}. The robot holds and goes on by itself when they come again; "
                f"is its node running? `ros2 topic hz {self._topic}`"
            )
        return state

    def _frame(self, who: str, pictures: ReceivedPictures, stamp: int) -> Frame:
        found = pictures.at(stamp)
        wrong = self._wrong.get(pictures.topic, "")
        if found is None:
            why = wrong or "none has come that is not newer than the joint states"
            raise RobotError(f"{who}: no picture of '{pictures.topic}' to go with the joint states: {why}.")
        skew_s = (stamp - found) / 1e9
        if skew_s > self._config.max_skew_s:
            raise RobotError(
                f"{who}: the newest picture of '{pictures.topic}' is {skew_s:.2f} s older than the joint states (limit "
                f"{self._config.max_skew_s:g} s){': ' + wrong if wrong else ''}. Is the camera's node running?"
            )
        return pictures.frames[found]
