"""Whether the times and pictures of an observation can be believed. Each check remembers what came before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robot_edge.control.config import ObservationLimits
from robot_edge.control.mode import NO_HOLD, Hold, HoldReason
from wire.types import Frame, Observation, RobotSpec

_DRIFT = 1e-3
"""how much slower a robot's clock may run than control's without being taken for one that stands still"""
_SAMPLE = 8
"""every so many rows and columns of a picture are compared before all of them"""


class ClockCheck:
    """Times that go on: an observation's against the one before it and against control's clock."""

    def __init__(self, spec: RobotSpec, config: ObservationLimits) -> None:
        self._name = f"robot '{spec.embodiment}'"
        self._state = f"the state of {self._name}"
        self._config = config
        self._last: tuple[int, int] | None = None
        """(time of the observation before, when control had it), ns"""
        self._behind_ns = 0.0
        """how far the robot's clock is behind control's when nothing is late; clocks may have other origins"""

    def find(self, observation: Observation, now_ns: int) -> Hold:
        """A jump or an observation too old. After a jump the new time is the one to go on from."""
        config, last, behind_ns = self._config, self._last, now_ns - observation.time_ns
        self._last = observation.time_ns, now_ns
        if last is None:
            self._behind_ns = behind_ns
            return NO_HOLD
        # Some robots' clocks run a little slower: that must not add up to an age over the hours.
        self._behind_ns = min(behind_ns, self._behind_ns + _DRIFT * max(0, now_ns - last[1]))
        change_s = (observation.time_ns - last[0]) / 1e9
        ahead_s = change_s - (now_ns - last[1]) / 1e9
        if change_s < 0 or ahead_s > config.jump_s:
            self._behind_ns = behind_ns
            how = f"went back by {-change_s:.3f} s" if change_s < 0 else f"jumped ahead by {ahead_s:.3f} s"
            return Hold(HoldReason.clock_jump, f"the clock of {self._name} {how} between two observations.")
        age_s = (behind_ns - self._behind_ns) / 1e9
        return _stale(HoldReason.stale_state, self._state, age_s, config.state_stale_s)


@dataclass(slots=True)
class _Streak:
    """New frames that all show the same picture."""

    sample: np.ndarray
    """uint8[h / 8, w / 8, 3]"""
    whole: np.ndarray | None
    """uint8[h, w, 3], once the sample has repeated"""
    low: np.ndarray
    """float32[ds]: where the robot was meanwhile"""
    high: np.ndarray
    last: np.ndarray
    count: int = 0


class CameraCheck:
    """One camera: its frames go on, are of the past, and are not all the same while the robot moves."""

    def __init__(self, name: str, spec: RobotSpec, config: ObservationLimits) -> None:
        self._name = name
        self._what = f"camera '{name}': its frame"
        self._config = config
        self._range = np.array([d.high - d.low for d in spec.state], np.float32)
        self._time_ns: int | None = None
        self._knows_time = False
        """whether that is of this scene"""
        self._since_ns = 0
        """when this frame came, by control's clock: one that is old stays so, whatever time its robot says it is"""
        self._streak: _Streak | None = None

    def reset(self) -> None:
        """Times may be others from now on; the frame that is there is no newer."""
        self._streak, self._knows_time = None, False

    def find(self, observation: Observation, frame: Frame, now_ns: int) -> Hold:
        """A frame that goes back in time, is of the future, is too old or shows what many before it showed."""
        config, last_ns = self._config, self._time_ns if self._knows_time else None
        if frame.time_ns != self._time_ns:
            self._since_ns = now_ns
        self._time_ns, self._knows_time = frame.time_ns, True
        if last_ns is not None and frame.time_ns > last_ns and config.repeated_frames:
            self._compare(frame.image, observation.state)
        what = self._what
        if last_ns is not None and frame.time_ns < last_ns:
            back_s = (last_ns - frame.time_ns) / 1e9
            return Hold(HoldReason.clock_jump, f"{what} is {back_s:.3f} s older than the one before it.")
        ahead_s = (frame.time_ns - observation.time_ns) / 1e9
        if ahead_s > config.future_s:
            return Hold(HoldReason.clock_jump, f"{what} is {ahead_s:.3f} s newer than its observation.")
        age_s = max(-ahead_s, (now_ns - self._since_ns) / 1e9)
        if stale := _stale(HoldReason.stale_camera, what, age_s, config.camera_stale_s):
            return stale
        streak = self._streak
        if streak is not None and streak.count >= config.repeated_frames and self._went_far(streak):
            return Hold(
                HoldReason.frozen_camera,
                f"camera '{self._name}' repeats its picture: {streak.count} new frames are all the same"
                + (" while the robot moved." if not config.repeats_while_still else "."),
            )
        return NO_HOLD

    def _compare(self, image: np.ndarray, state: np.ndarray) -> None:
        streak, sample = self._streak, image[::_SAMPLE, ::_SAMPLE]
        same = streak is not None and np.array_equal(streak.sample, sample)
        if streak is not None and same and streak.whole is not None:
            same = np.array_equal(streak.whole, image)
        if streak is None or not same:
            began = state.copy()
            self._streak = _Streak(sample.copy(), None, began, began, began)
            return
        if streak.whole is None:
            # Copied only now: a driver may reuse its memory, and a living camera seldom gets here.
            streak.whole = image.copy()
            streak.low, streak.high, streak.last = state.copy(), state.copy(), state.copy()
            return
        moved = bool((np.abs(state - streak.last) > self._config.moving * self._range).any())
        streak.count += moved or self._config.repeats_while_still
        streak.last = state.copy()
        streak.low, streak.high = np.minimum(streak.low, state), np.maximum(streak.high, state)

    def _went_far(self, streak: _Streak) -> bool:
        far = streak.high - streak.low >= self._config.repeated_span * self._range
        return self._config.repeats_while_still or bool(far.any())


def _stale(reason: HoldReason, what: str, age_s: float, limit_s: float) -> Hold:
    if age_s <= limit_s:
        return NO_HOLD
    return Hold(reason, f"{what} is {age_s * 1e3:.0f} ms old; at most {limit_s * 1e3:.0f} ms are safe.")


class ObservationMonitor:
    """`check` once per tick; `report_failure` instead when there is no valid observation."""

    def __init__(self, spec: RobotSpec, config: ObservationLimits, notify: Callable[[str, str], None]) -> None:
        """`notify(kind, detail)`: tells the operator of a hold that begins, or that it has recovered."""
        self._spec = spec
        self._config = config
        self._notify = notify
        self.issue = NO_HOLD
        """what people were told of and is not over yet"""
        self._about = ""
        self._good = 0
        self._cameras = {camera.name: CameraCheck(camera.name, spec, config) for camera in spec.cameras}
        self.reset()

    def reset(self) -> None:
        """An episode begins: the scene and the robot's clocks may be others. A hold goes on until it is over."""
        self._clock = ClockCheck(self._spec, self._config)
        for camera in self._cameras.values():
            camera.reset()

    def check(self, observation: Observation, now_ns: int) -> Hold:
        """Why the robot must not move on `observation`, which is valid. `now_ns`: control's clock, which need not be
        the robot's.
        """
        found, about = self._clock.find(observation, now_ns), ""
        # All cameras look at every observation, also behind another fault: their memory must not have holes.
        for name, check in self._cameras.items():
            one = check.find(observation, observation.images[name], now_ns)
            if one and not found:
                found, about = one, name
        return self._judge(found, about)

    def report_failure(self, why: str) -> Hold:
        """The robot could not be read, or what it said is not valid."""
        return self._judge(Hold(HoldReason.bad_observation, why), "")

    def _judge(self, found: Hold, about: str) -> Hold:
        """The hold that follows. `about`: the camera that was found wanting, '' for the robot."""
        before = self.issue
        if found:
            # Ages in the text grow with every tick; another reason or another camera is what is new.
            if (before.reason, self._about) != (found.reason, about):
                self._notify("hold", found.detail)
            self.issue, self._about, self._good = found, about, 0
            return found
        if not before:
            return NO_HOLD
        self._good += 1
        if self._good > self._config.recover_ticks:
            self.issue = NO_HOLD
            self._notify("recovered", f"no longer: {before.detail}")
            return NO_HOLD
        return Hold(before.reason, f"was until {self._good} ticks ago: {before.detail}")
