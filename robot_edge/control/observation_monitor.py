"""Alive, fresh and valid: whether what a robot reports may be acted on.

Each check is small, keeps its own memory and names the thing it found; `ObservationMonitor` asks them in order, the
first answer is the reason to hold. What was wrong must be right for some ticks in a row before the robot moves again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from hal.safety.limiter import check_age
from policies.interface.policy import check_observation
from robot_edge.control.config import ObservationLimits
from robot_edge.control.mode import NO_HOLD, Hold, HoldReason
from wire.errors import InvalidDataError
from wire.types import Frame, Observation, RobotSpec

_DRIFT = 1e-3
"""how much slower a robot's clock may run than control's without being taken for one that stands still"""
_SAMPLE = 8
"""every so many rows and columns of a picture are compared before all of them"""


class CheckResult(msgspec.Struct, frozen=True):
    """What became of one observation."""

    fault: Hold = NO_HOLD
    """why the robot must not move on it"""
    valid: bool = True
    """whether the observation's numbers and pictures can be used at all, moving or not"""


_FIT = CheckResult()


class Issue(NamedTuple):
    """One thing that is wrong."""

    reason: HoldReason
    thing: str
    """what it is about: a camera's name, '' for the robot"""
    detail: str


class ObservationMonitor:
    """`check` once per tick; `report_failure` instead when the robot could not be read."""

    def __init__(self, spec: RobotSpec, config: ObservationLimits, notify: Callable[[str, str], None]) -> None:
        """`notify(kind, detail)`: tells the operator of a hold that begins, or that it has recovered."""
        self._spec = spec
        self._config = config
        self._notify = notify
        self._issue: Issue | None = None
        self._good = 0
        self.reset()

    def reset(self) -> None:
        """An episode begins: the scene and the robot's clocks may be others. A hold goes on until it is over."""
        self._clock = ClockCheck(self._spec, self._config)
        self._cameras = {
            camera.name: CameraCheck(camera.name, self._spec, self._config) for camera in self._spec.cameras
        }

    @property
    def has_issue(self) -> bool:
        """Whether a hold that it told of is not over yet."""
        return self._issue is not None

    def check(self, observation: Observation, now_ns: int) -> CheckResult:
        """`now_ns`: control's clock, which need not be the robot's."""
        try:
            check_observation(self._spec, observation)
        except InvalidDataError as error:
            return self.report_failure(str(error))
        found = self._clock.find(observation, now_ns)
        # All cameras look at every observation, also behind another fault: their memory must not have holes.
        for name, check in self._cameras.items():
            one = check.find(observation, observation.images[name])
            found = found or one
        return self._judge(found, valid=True)

    def report_failure(self, why: str) -> CheckResult:
        """The robot could not be read, or what it said is not valid."""
        return self._judge(Issue(HoldReason.bad_observation, "", why), valid=False)

    def _judge(self, found: Issue | None, valid: bool) -> CheckResult:
        before = self._issue
        if found is not None:
            self._issue, self._good = found, 0
            # Ages in the text grow with every tick; another reason or another camera is what is new.
            if before is None or before[:2] != found[:2]:
                self._notify("hold", found.detail)
            return CheckResult(Hold(found.reason, found.detail), valid)
        if before is None:
            return _FIT
        self._good += 1
        if self._good > self._config.recover_ticks:
            self._issue = None
            self._notify("recovered", f"no longer: {before.detail}")
            return _FIT
        return CheckResult(Hold(before.reason, f"was until {self._good} ticks ago: {before.detail}"), valid)


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

    def find(self, observation: Observation, now_ns: int) -> Issue | None:
        """A jump or an observation too old. After a jump the new time is the one to go on from."""
        config, last, behind_ns = self._config, self._last, now_ns - observation.time_ns
        self._last = observation.time_ns, now_ns
        if last is None:
            self._behind_ns = behind_ns
            return None
        # Some robots' clocks run a little slower: that must not add up to an age over the hours.
        self._behind_ns = min(behind_ns, self._behind_ns + _DRIFT * max(0, now_ns - last[1]))
        change_s = (observation.time_ns - last[0]) / 1e9
        ahead_s = change_s - (now_ns - last[1]) / 1e9
        if change_s < 0 or ahead_s > config.jump_s:
            self._behind_ns = behind_ns
            how = f"went back by {-change_s:.3f} s" if change_s < 0 else f"jumped ahead by {ahead_s:.3f} s"
            return Issue(HoldReason.clock_jump, "", f"the clock of {self._name} {how} between two observations.")
        try:
            check_age(self._state, 0, round(behind_ns - self._behind_ns), config.state_stale_s)
        except InvalidDataError as error:
            return Issue(HoldReason.stale_state, "", str(error))
        return None


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
        self._streak: _Streak | None = None

    def find(self, observation: Observation, frame: Frame) -> Issue | None:
        """A frame that goes back in time, is of the future, is too old or shows what many before it showed."""
        config, last_ns = self._config, self._time_ns
        self._time_ns = frame.time_ns
        if last_ns is not None and frame.time_ns > last_ns and config.repeated_frames:
            self._compare(frame.image, observation.state)
        what = self._what
        if last_ns is not None and frame.time_ns < last_ns:
            back_s = (last_ns - frame.time_ns) / 1e9
            return Issue(HoldReason.clock_jump, self._name, f"{what} is {back_s:.3f} s older than the one before it.")
        ahead_s = (frame.time_ns - observation.time_ns) / 1e9
        if ahead_s > config.future_s:
            return Issue(HoldReason.clock_jump, self._name, f"{what} is {ahead_s:.3f} s newer than its observation.")
        try:
            check_age(what, frame.time_ns, observation.time_ns, config.camera_stale_s, config.future_s)
        except InvalidDataError as error:
            return Issue(HoldReason.stale_camera, self._name, str(error))
        streak = self._streak
        if streak is not None and streak.count >= config.repeated_frames and self._went_far(streak):
            return Issue(
                HoldReason.frozen_camera,
                self._name,
                f"camera '{self._name}' repeats its picture: {streak.count} new frames are all the same"
                + (" while the robot moved." if not config.repeats_while_still else "."),
            )
        return None

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
