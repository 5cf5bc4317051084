"""What the robot is about to execute, and whether it did.

Asynchronous strategies reckon with actions that are decided but not executed yet. They count as they will be executed:
after the limits of `hal.safety`, which also bound how fast the set-point moves where one chunk follows another, and how
the robot brakes to hold where there is no action. Somebody else may act instead; then the reckoning was wrong.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np

from hal.limits import hold_action, limit_action
from hal.safety import Safety, SafetyLimits
from wire.types import Meaning, RobotSpec

_PAST = 64
"""executed actions kept"""


class Foresight:
    """One robot's near future as far as it is decided. Feed it `chose` and `executed` at every tick."""

    def __init__(self, spec: RobotSpec, safety: SafetyLimits | None = None, tolerance: float = 0.1) -> None:
        """`safety`: the limits of the control loop.

        `tolerance`: by how much of a dimension's range what is executed may differ from what was chosen; deltas and
        velocities add up over the ticks that were reckoned with.
        """
        self._spec = spec
        self._low, self._high = spec.action_low(), spec.action_high()
        self._absolute = np.array([d.meaning is Meaning.absolute for d in spec.action], bool)
        span = self._high.astype(np.float64) - self._low
        self._allowed = tolerance * np.where(np.isfinite(span), span, 1.0)
        self._safety = Safety(spec, safety) if safety is not None and safety != SafetyLimits() else None
        self.reset()

    def reset(self) -> None:
        """A new episode: the robot stands still and nobody has acted."""
        self._past: deque[np.ndarray] = deque(maxlen=_PAST)
        self._expected: tuple[int, np.ndarray] | None = None
        self._drift: np.ndarray = np.zeros(self._spec.action_dim)
        self.own = True
        """whether what was executed last is what was chosen"""
        if self._safety is not None:
            self._safety.reset()

    @property
    def past(self) -> np.ndarray:
        """float32[m, da]: executed in this episode, oldest first, at most the last 64."""
        return np.array(self._past, np.float32).reshape(-1, self._spec.action_dim)

    def coming(self, wanted: Sequence[np.ndarray | None], state: np.ndarray) -> np.ndarray:
        """float32[n, da]: how `wanted` will be executed from now on, None standing for no action: the robot brakes.

        `state`: float32[ds] as seen now. Before anything was executed nobody knows what hold is for absolute
        dimensions: those are NaN.
        """
        last: np.ndarray | None = self._past[-1] if self._past else None
        safety = copy.copy(self._safety)
        coming = np.empty((len(wanted), self._spec.action_dim), np.float32)
        for i, action in enumerate(wanted):
            if last is None:
                coming[i] = np.where(self._absolute, np.nan, 0) if action is None else self._clipped(action)
            elif safety is None:
                coming[i] = hold_action(self._spec, last) if action is None else self._clipped(action)
            else:
                coming[i] = safety.limit(safety.brake(last) if action is None else action, last, state)
                safety.note(coming[i], last)
            last = None if np.isnan(coming[i]).any() else coming[i]
        return coming

    def chose(self, tick: int, action: np.ndarray | None, state: np.ndarray) -> None:
        """The schedule has `action` for `tick`, None for none; `state`: float32[ds] as seen then."""
        self._expected = (tick, self.coming([action], state)[0])

    def watch(self) -> None:
        """Begin to add up what differs."""
        self._drift[:] = 0

    @property
    def drifted(self) -> bool:
        """Whether the robot is no longer where it was reckoned to be, since `watch`."""
        return bool((np.abs(self._drift) > self._allowed).any())

    def executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot did at `tick`."""
        if self._expected is None or self._expected[0] != tick:
            # nobody asked for an action at this tick, so the schedule was not in control
            self.own = False
            expected = np.full(self._spec.action_dim, np.nan, np.float32)
        else:
            expected = self._expected[1]
        difference = np.where(np.isnan(expected), 0.0, action - expected.astype(np.float64))
        if self._expected is not None and self._expected[0] == tick:
            self.own = not (np.abs(difference) > self._allowed).any()
        self._drift = np.where(self._absolute, difference, self._drift + difference)
        if self._safety is not None:
            self._safety.note(action, self._past[-1] if self._past else action)
        self._past.append(np.array(action, np.float32))

    def _clipped(self, action: np.ndarray) -> np.ndarray:
        return limit_action(self._spec, action)
