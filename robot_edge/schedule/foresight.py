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
from hal.safety import SafetyLimits, braked, limited, make_guard, moved, standing
from wire.types import Meaning, RobotSpec

_PAST = 64
"""executed actions kept"""


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
        self.own = True
        """whether what was executed last is what was chosen"""

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
            return self._clipped(wanted)
        coming = np.empty((len(wanted), len(self._low)), np.float32)
        moving = moved(self._guard, standing(self._past[-min(2, len(self._past))]), self._past[-1])
        for i, action in enumerate(wanted):
            if action is None:
                coming[i] = braked(self._guard, moving, state)
            else:
                coming[i] = limited(self._guard, moving, action, state)
            moving = moved(self._guard, moving, coming[i])
            if self._guard.walls and self._motion is not None:
                state = self._motion.roll(state, np.concatenate([self.past, coming[:i]]), coming[i : i + 1])
        return coming

    def chose(self, tick: int, action: np.ndarray | None, state: np.ndarray) -> None:
        """The schedule has `action` for `tick`, None for none; `state`: float32[ds] as seen then."""
        self._chosen = (tick, action, state)

    def watch(self) -> None:
        """Begin to add up what differs."""
        self._drift[:] = 0

    @property
    def drifted(self) -> bool:
        """Whether the robot is no longer where it was reckoned to be, since `watch`."""
        return bool((np.abs(self._drift) > self._allowed).any())

    def executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot did at `tick`."""
        if self._chosen is None or self._chosen[0] != tick:
            # The schedule was not even asked at this tick, so somebody else was in control.
            self.own = False
        else:
            self._compare(action, *self._chosen[1:])
        self._past.append(np.array(action, np.float32))

    def _compare(self, executed: np.ndarray, chosen: np.ndarray | None, state: np.ndarray) -> None:
        expected = self._clipped([None])[0] if chosen is None else np.clip(chosen, self._low, self._high)
        if not (executed != expected).any():
            # As it mostly is, and nothing needs to be reckoned.
            self._drift[self._absolute] = 0
            self.own = True
            return
        if self._guard is not None:
            # Did the limits do that?
            expected = self.coming([chosen], state)[0]
        # Before anything was executed nobody knows what to expect.
        difference = np.where(np.isnan(expected), 0.0, executed - expected.astype(np.float64))
        self.own = not (np.abs(difference) > self._allowed).any()
        self._drift = np.where(self._absolute, difference, self._drift + difference)

    def _clipped(self, wanted: Sequence[np.ndarray | None]) -> np.ndarray:
        """float32[n, da] within the spec's bounds, where nothing limits how fast the robot moves."""
        clipped = np.empty((len(wanted), len(self._low)), np.float32)
        last = self._past[-1] if self._past else np.full(len(self._low), np.nan, np.float32)
        for i, action in enumerate(wanted):
            clipped[i] = np.where(self._absolute, last, np.float32(0)) if action is None else action
            last = clipped[i]
        return np.clip(clipped, self._low, self._high, out=clipped)
