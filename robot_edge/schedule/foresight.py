"""What the robot is about to execute, and whether it did.

Asynchronous strategies reckon with actions that are decided but not executed yet. They count as they will be executed:
after the limits of `hal.safety`, which also bound how fast the set-point moves where one chunk follows another, and how
the robot brakes to hold where there is no action. Somebody else may act instead; then the reckoning was wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hal.motion import Motion
from hal.safety import Guard, SafetyLimits, braked, limited, make_guard, moved, standing
from wire.types import Meaning, RobotSpec

_PAST = 64
"""executed actions kept"""


_Executed = tuple[np.ndarray, tuple[int, np.ndarray | None, np.ndarray] | None, tuple[np.ndarray, ...]]
"""what was executed; the tick, the action and the state of what was chosen for it; what was executed before"""


class Foresight:
    """One robot's near future as far as it is decided. Feed it `chose` and `executed` at every tick."""

    def __init__(
        self,
        spec: RobotSpec,
        safety: SafetyLimits | None = None,
        motion: Motion | None = None,
        *,
        off_target: float = 0.05,
        off_course: float = 0.15,
    ) -> None:
        """`safety`: the limits of the control loop; `motion` is needed only for its walls, where the robot goes.

        By how much of a dimension's range what is executed may differ from what was chosen: `off_target` for absolute
        dimensions; `off_course` for deltas and velocities, which add up over the ticks that were reckoned with.
        """
        self._low, self._high = spec.action_low(), spec.action_high()
        self._absolute = np.array([d.meaning is Meaning.absolute for d in spec.action], bool)
        span = self._high.astype(np.float64) - self._low
        self._allowed = np.where(self._absolute, off_target, off_course) * np.where(np.isfinite(span), span, 1.0)
        self._guard = make_guard(spec, safety) if safety is not None and safety != SafetyLimits() else None
        self._motion = motion
        self.reset()

    def reset(self) -> None:
        """A new episode: the robot stands still and nobody has acted."""
        self._past: deque[np.ndarray] = deque(maxlen=_PAST)
        self._chosen: tuple[int, np.ndarray | None, np.ndarray] | None = None
        self._drift: np.ndarray = np.zeros(len(self._low))
        self._own = True
        self._unreckoned: deque[_Executed] = deque(maxlen=_PAST)

    @property
    def past(self) -> np.ndarray:
        """float32[m, da]: executed in this episode, oldest first, at most the last 64."""
        return np.array(self._past, np.float32).reshape(-1, len(self._low))

    def coming(self, wanted: Sequence[np.ndarray | None], state: np.ndarray) -> np.ndarray:
        """float32[n, da]: how `wanted` will be executed from now on, None standing for no action: the robot brakes.

        `state`: float32[ds] as seen now. Before anything was executed nobody knows what hold is for absolute
        dimensions: those are NaN.
        """
        if self._guard is None or not self._past:
            return self._clipped(wanted, self._past)
        return self._limited(self._guard, wanted, state, self._past)

    def chose(self, tick: int, action: np.ndarray | None, state: np.ndarray) -> None:
        """The schedule has `action` for `tick`, None for none; `state`: float32[ds] as seen then."""
        self._chosen = (tick, action, state)

    def executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot did at `tick`."""
        # What it means is reckoned when somebody asks: while others act nobody does, at most ticks.
        chosen = self._chosen if self._chosen is not None and self._chosen[0] == tick else None
        done = np.array(action, np.float32)
        self._unreckoned.append((done, chosen, tuple(self._past)[-2:]))
        self._past.append(done)

    def watch(self) -> None:
        """Begin to add up what differs."""
        self._reckon()
        self._drift[:] = 0

    @property
    def own(self) -> bool:
        """Whether what was executed last is what was chosen."""
        self._reckon()
        return self._own

    @property
    def drifted(self) -> bool:
        """Whether the robot is no longer where it was reckoned to be, since `watch`."""
        self._reckon()
        return bool((np.abs(self._drift) > self._allowed).any())

    def _reckon(self) -> None:
        while self._unreckoned:
            executed, chosen, before = self._unreckoned.popleft()
            # A schedule that was not even asked at that tick: somebody else was in control.
            self._own = chosen is not None and self._as_chosen(executed, chosen[1], chosen[2], before)

    def _as_chosen(
        self, executed: np.ndarray, chosen: np.ndarray | None, state: np.ndarray, before: tuple[np.ndarray, ...]
    ) -> bool:
        expected = self._clipped([chosen], before)[0] if chosen is None else np.clip(chosen, self._low, self._high)
        if not (executed != expected).any():
            # As it mostly is, and nothing needs to be reckoned.
            self._drift[self._absolute] = 0
            return True
        if self._guard is not None and before:
            # Did the limits do that?
            expected = self._limited(self._guard, [chosen], state, before)[0]
        # Before anything was executed nobody knows what to expect.
        difference = np.where(np.isnan(expected), 0.0, executed - expected.astype(np.float64))
        self._drift = np.where(self._absolute, difference, self._drift + difference)
        return not (np.abs(difference) > self._allowed).any()

    def _limited(
        self, guard: Guard, wanted: Sequence[np.ndarray | None], state: np.ndarray, past: Sequence[np.ndarray]
    ) -> np.ndarray:
        coming = np.empty((len(wanted), len(self._low)), np.float32)
        moving = moved(guard, standing(past[-min(2, len(past))]), past[-1])
        for i, action in enumerate(wanted):
            if action is None:
                coming[i] = braked(guard, moving, state)
            else:
                coming[i] = limited(guard, moving, action, state)
            moving = moved(guard, moving, coming[i])
            if guard.walls and self._motion is not None and i + 1 < len(wanted):
                state = self._motion.roll(state, np.concatenate([self.past, coming[:i]]), coming[i : i + 1])
        return coming

    def _clipped(self, wanted: Sequence[np.ndarray | None], past: Sequence[np.ndarray]) -> np.ndarray:
        """float32[n, da] within the spec's bounds, where nothing limits how fast the robot moves."""
        clipped = np.empty((len(wanted), len(self._low)), np.float32)
        last = past[-1] if past else np.full(len(self._low), np.nan, np.float32)
        for i, action in enumerate(wanted):
            clipped[i] = np.where(self._absolute, last, np.float32(0)) if action is None else action
            last = clipped[i]
        return np.clip(clipped, self._low, self._high, out=clipped)
