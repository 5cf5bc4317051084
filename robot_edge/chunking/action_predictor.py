"""What the robot is about to execute, and whether it did.

Asynchronous strategies reckon with actions that are decided but not executed yet. They count as they will be executed:
after the limits of `hal.safety.limiter`, which also bound how fast the set-point moves where one chunk follows another,
and how the robot brakes to hold where there is no action. Somebody else may act instead; then the reckoning was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hal.interfaces.dynamics import DynamicsModel
from hal.safety.limiter import Aims, approached, hold_numbers, limit_numbers, limited_numbers, speeds_of
from hal.safety.limits import SafetyLimits, compile_limits
from wire.types import CommandType, RobotSpec

_PAST = 64
"""executed actions kept"""
_OFF_TARGET, _OFF_COURSE = 0.05, 0.15
"""by how much of a dimension's range what is executed may differ from what was chosen: an absolute one; a delta or
velocity, which add up over the ticks that were reckoned with"""


class ActionPredictor:
    """One robot's near future as far as it is decided. Feed it `on_action_selected` and `on_executed` at every tick."""

    def __init__(
        self, spec: RobotSpec, safety: SafetyLimits | None = None, motion: DynamicsModel | None = None
    ) -> None:
        """`safety`: the limits of the control loop; `motion` is needed only for its walls, where the robot goes."""
        self._spec = spec
        self._sides = list(zip(spec.action_low().tolist(), spec.action_high().tolist(), strict=True))
        self._absolute = [d.meaning is CommandType.absolute for d in spec.action]
        self._allowed = [
            (_OFF_TARGET if absolute else _OFF_COURSE) * (high - low)
            for absolute, (low, high) in zip(self._absolute, self._sides, strict=True)
        ]
        self._limits = compile_limits(spec, safety or SafetyLimits())
        self._walled = any(axis.walls for axis in self._limits.axes)
        self._motion = motion
        self.reset()

    def reset(self) -> None:
        """A new episode: the robot stands still and nobody has acted."""
        self._memory = np.zeros((2 * _PAST, self._spec.action_dim), np.float32)
        self._done = 0
        """rows of it that are filled"""
        self._chosen: tuple[int, np.ndarray | None, np.ndarray] | None = None
        self._drift = [0.0] * self._spec.action_dim
        self._aims: Aims | None = None
        """where the limiter has the robot go"""
        self.last_action_was_ours = True
        """whether what was executed last is what was chosen"""

    @property
    def past(self) -> np.ndarray:
        """float32[m, da]: executed in this episode, oldest first, at most the last 64."""
        return self._memory[max(0, self._done - _PAST) : self._done].copy()

    def predict(self, wanted: Sequence[np.ndarray | None], state: np.ndarray) -> np.ndarray:
        """float32[n, da]: how `wanted` will be executed from now on, None standing for no action: the robot brakes.

        `state`: float32[ds] as seen now. Something must have been executed: before, nobody knows what hold is.
        """
        return self._limited(wanted, state, self.past)

    def on_action_selected(self, tick: int, action: np.ndarray | None, state: np.ndarray) -> None:
        """The scheduler has `action` for `tick`, None for none; `state`: float32[ds] as seen then."""
        self._chosen = (tick, action, state)

    def on_executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot did at `tick`."""
        if self._done == len(self._memory):
            self._memory[:_PAST], self._done = self._memory[_PAST:].copy(), _PAST
        before, executed = self._memory[max(0, self._done - 2) : self._done], self._memory[self._done]
        executed[:] = action
        self._done += 1
        chosen = self._chosen if self._chosen is not None and self._chosen[0] == tick else None
        # A scheduler that was not even asked at that tick: somebody else was in control.
        self.last_action_was_ours = chosen is not None and self._as_chosen(executed, chosen[1], chosen[2], before)
        last = (before[-1] if len(before) else executed).tolist()
        aimed = chosen[1] if chosen is not None else None
        self._aims = None if aimed is None else approached(self._limits, self._bounded(aimed), last, self._aims)[1]

    def reset_drift(self) -> None:
        """Begin to add up what differs."""
        self._drift = [0.0] * len(self._drift)

    @property
    def has_drifted(self) -> bool:
        """Whether the robot is no longer where it was reckoned to be, since `reset_drift`."""
        return self._is_off(self._drift)

    def _as_chosen(
        self, executed: np.ndarray, chosen: np.ndarray | None, state: np.ndarray, before: np.ndarray
    ) -> bool:
        unlimited = self._unlimited(executed, chosen, before)
        if executed.tolist() == unlimited:
            # As it mostly is, and nothing needs to be reckoned.
            self._drift = [0.0 if ends else drift for ends, drift in zip(self._absolute, self._drift, strict=True)]
            return True
        # Did the limits do that?
        expected = self._limited([chosen], state, before)[0].tolist() if len(before) else unlimited
        pairs = zip(executed.tolist(), expected, strict=True)
        off = [done - wanted for done, wanted in pairs]
        triples = zip(self._absolute, off, self._drift, strict=True)
        self._drift = [now if ends else drift + now for ends, now, drift in triples]
        return not self._is_off(off)

    def _unlimited(self, executed: np.ndarray, chosen: np.ndarray | None, before: np.ndarray) -> list[float]:
        """What is executed for `chosen` where nothing limits how fast the robot moves."""
        if chosen is not None:
            return self._bounded(chosen)
        # Before anything was executed nobody knows what hold is: whatever was done first is it.
        last = before[-1] if len(before) else executed
        return self._bounded(np.where(self._absolute, last, 0.0))

    def _bounded(self, action: np.ndarray) -> list[float]:
        return [min(max(number, low), high) for number, (low, high) in zip(action.tolist(), self._sides, strict=True)]

    def _is_off(self, difference: list[float]) -> bool:
        return any(abs(off) > most for off, most in zip(difference, self._allowed, strict=True))

    def _limited(self, wanted: Sequence[np.ndarray | None], state: np.ndarray, past: np.ndarray) -> np.ndarray:
        spec, limits, coming = self._spec, self._limits, np.empty((len(wanted), self._spec.action_dim), np.float32)
        last, measured = past[-1].tolist(), state.tolist()
        speeds, aims = speeds_of(limits, last, past[-min(2, len(past))].tolist()), self._aims
        for i, action in enumerate(wanted):
            if action is not None:
                target, aims = approached(limits, limit_numbers(spec, action), last, aims)
            else:
                target, aims = hold_numbers(spec, np.array(last)), None
            executed = limited_numbers(limits, target, last, speeds, measured)
            speeds, last = speeds_of(limits, executed, last), executed
            coming[i] = executed
            if self._walled and self._motion is not None and i + 1 < len(wanted):
                measured = self._motion.rollout(state, past, coming[: i + 1]).tolist()
        return coming
