"""What the robot is about to execute, and whether it did.

Asynchronous strategies reckon with actions that are decided but not executed yet. They count as they will be executed:
after the limits of `hal.safety.limiter`, which also bound how fast the set-point moves where one chunk follows another,
and how the robot brakes to hold where there is no action. Somebody else may act instead; then the reckoning was wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from hal.interfaces.dynamics import DynamicsModel
from hal.safety.bounds import hold_numbers, limit_numbers
from hal.safety.limiter import CompiledLimits, SafetyLimits, compile_limits, limited_numbers, speeds_of
from wire.types import CommandType, RobotSpec

_PAST = 64
"""executed actions kept"""


_Executed = tuple[np.ndarray, tuple[int, np.ndarray | None, np.ndarray] | None, np.ndarray]
"""what was executed; the tick, the action and the state of what was chosen for it; the last two executed before"""


class ActionPredictor:
    """One robot's near future as far as it is decided. Feed it `on_action_selected` and `on_executed` at every tick."""

    def __init__(
        self,
        spec: RobotSpec,
        safety: SafetyLimits | None = None,
        motion: DynamicsModel | None = None,
        *,
        off_target: float = 0.05,
        off_course: float = 0.15,
    ) -> None:
        """`safety`: the limits of the control loop; `motion` is needed only for its walls, where the robot goes.

        By how much of a dimension's range what is executed may differ from what was chosen: `off_target` for absolute
        dimensions; `off_course` for deltas and velocities, which add up over the ticks that were reckoned with.
        """
        self._spec = spec
        self._low, self._high = spec.action_low(), spec.action_high()
        self._sides = list(zip(self._low.tolist(), self._high.tolist(), strict=True))
        self._absolute = [d.meaning is CommandType.absolute for d in spec.action]
        span = (self._high.astype(np.float64) - self._low).tolist()
        shares = [off_target if absolute else off_course for absolute in self._absolute]
        self._allowed = [share * width for share, width in zip(shares, span, strict=True)]
        self._guard = compile_limits(spec, safety) if safety is not None and safety != SafetyLimits() else None
        self._motion = motion
        self.reset()

    def reset(self) -> None:
        """A new episode: the robot stands still and nobody has acted."""
        self._memory = np.zeros((2 * _PAST, self._spec.action_dim), np.float32)
        self._done = 0
        """rows of it that are filled"""
        self._chosen: tuple[int, np.ndarray | None, np.ndarray] | None = None
        self._drift = [0.0] * self._spec.action_dim
        self._own = True
        self._unreckoned: deque[_Executed] = deque(maxlen=_PAST)

    @property
    def past(self) -> np.ndarray:
        """float32[m, da]: executed in this episode, oldest first, at most the last 64."""
        return self._memory[max(0, self._done - _PAST) : self._done].copy()

    def predict(self, wanted: Sequence[np.ndarray | None], state: np.ndarray) -> np.ndarray:
        """float32[n, da]: how `wanted` will be executed from now on, None standing for no action: the robot brakes.

        `state`: float32[ds] as seen now. Before anything was executed nobody knows what hold is for absolute
        dimensions: those are NaN.
        """
        past = self.past
        if self._guard is None or not len(past):
            return self._clipped(wanted, past)
        return self._limited(self._guard, wanted, state, past)

    def on_action_selected(self, tick: int, action: np.ndarray | None, state: np.ndarray) -> None:
        """The scheduler has `action` for `tick`, None for none; `state`: float32[ds] as seen then."""
        self._chosen = (tick, action, state)

    def on_executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot did at `tick`."""
        # What it means is reckoned when somebody asks: while others act nobody does, at most ticks.
        chosen = self._chosen if self._chosen is not None and self._chosen[0] == tick else None
        if self._done == len(self._memory):
            self._memory[:_PAST], self._done = self._memory[_PAST:].copy(), _PAST
        end = self._done
        self._memory[end] = action
        self._done += 1
        self._unreckoned.append((self._memory[end].copy(), chosen, self._memory[max(0, end - 2) : end].copy()))

    def reset_drift(self) -> None:
        """Begin to add up what differs."""
        self._reckon()
        self._drift = [0.0] * len(self._drift)

    @property
    def last_action_was_ours(self) -> bool:
        """Whether what was executed last is what was chosen."""
        self._reckon()
        return self._own

    @property
    def has_drifted(self) -> bool:
        """Whether the robot is no longer where it was reckoned to be, since `reset_drift`."""
        self._reckon()
        return self._is_off(self._drift)

    def _reckon(self) -> None:
        while self._unreckoned:
            executed, chosen, before = self._unreckoned.popleft()
            # A scheduler that was not even asked at that tick: somebody else was in control.
            self._own = chosen is not None and self._as_chosen(executed, chosen[1], chosen[2], before)

    def _as_chosen(
        self, executed: np.ndarray, chosen: np.ndarray | None, state: np.ndarray, before: np.ndarray
    ) -> bool:
        if executed.tolist() == self._unlimited(chosen, before):
            # As it mostly is, and nothing needs to be reckoned.
            self._drift = [0.0 if ends else drift for ends, drift in zip(self._absolute, self._drift, strict=True)]
            return True
        if self._guard is not None and len(before):
            # Did the limits do that?
            expected = self._limited(self._guard, [chosen], state, before)[0]
        else:
            expected = self._clipped([chosen], before)[0]
        # Before anything was executed nobody knows what to expect.
        pairs = zip(executed.tolist(), expected.tolist(), strict=True)
        off = [0.0 if math.isnan(wanted) else done - wanted for done, wanted in pairs]
        triples = zip(self._absolute, off, self._drift, strict=True)
        self._drift = [now if ends else drift + now for ends, now, drift in triples]
        return not self._is_off(off)

    def _unlimited(self, chosen: np.ndarray | None, before: np.ndarray) -> list[float]:
        """`_clipped` of one action as plain numbers; [] before anything was executed."""
        if chosen is not None:
            numbers = chosen.tolist()
        elif len(before):
            numbers = [last if ends else 0.0 for ends, last in zip(self._absolute, before[-1].tolist(), strict=True)]
        else:
            return []
        return [min(max(number, low), high) for number, (low, high) in zip(numbers, self._sides, strict=True)]

    def _is_off(self, difference: list[float]) -> bool:
        return any(abs(off) > most for off, most in zip(difference, self._allowed, strict=True))

    def _limited(
        self, guard: CompiledLimits, wanted: Sequence[np.ndarray | None], state: np.ndarray, past: np.ndarray
    ) -> np.ndarray:
        spec, coming = self._spec, np.empty((len(wanted), self._spec.action_dim), np.float32)
        last, measured = past[-1].tolist(), state.tolist()
        speeds = speeds_of(guard, last, past[-min(2, len(past))].tolist())
        walled = guard.has_walls
        for i, action in enumerate(wanted):
            target = limit_numbers(spec, action) if action is not None else hold_numbers(spec, np.array(last))
            executed = limited_numbers(guard, target, last, speeds, measured)
            speeds, last = speeds_of(guard, executed, last), executed
            coming[i] = executed
            if walled and self._motion is not None and i + 1 < len(wanted):
                measured = self._motion.rollout(state, past, coming[: i + 1]).tolist()
        return coming

    def _clipped(self, wanted: Sequence[np.ndarray | None], past: np.ndarray) -> np.ndarray:
        """float32[n, da] within the spec's bounds, where nothing limits how fast the robot moves."""
        clipped = np.empty((len(wanted), self._spec.action_dim), np.float32)
        last = past[-1] if len(past) else np.full(self._spec.action_dim, np.nan, np.float32)
        for i, action in enumerate(wanted):
            clipped[i] = np.where(self._absolute, last, np.float32(0)) if action is None else action
            last = clipped[i]
        return np.minimum(np.maximum(clipped, self._low), self._high)
