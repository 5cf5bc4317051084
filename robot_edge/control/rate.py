"""Absolute deadlines for the control loop, with its lateness counted."""

from __future__ import annotations

import numpy as np

from wire.clock import Clock

_BINS = 2000


class Rate:
    """Wakes the loop every `period_ns`. A late tick does not move the deadlines after it.

    A tick is *missed* when it starts a whole period late or more; deadlines that passed meanwhile are skipped, so that
    the robot is never commanded twice in a row to catch up.
    """

    def __init__(self, period_ns: int, clock: Clock) -> None:
        self.period_ns = period_ns
        self.ticks = 0
        self.missed = 0
        self.skipped = 0
        """deadlines that passed before the running tick began"""
        self._clock = clock
        self.due_ns = self.next_ns = clock.now_ns() + period_ns
        """when the running tick should have begun, and when the next one is to begin"""
        # lateness in steps of 1% of the period, the last bin holds the rest
        self._histogram = np.zeros(_BINS, np.int64)

    def restart(self) -> None:
        """Begin anew from now, after something that was allowed to take long (a reset)."""
        self.next_ns = self._clock.now_ns() + self.period_ns

    def wait(self) -> int:
        """Sleep until the next deadline and return how late it woke, in ns (never negative)."""
        self.due_ns = self.next_ns
        self._clock.sleep_until(self.next_ns)
        late_ns = max(0, self._clock.now_ns() - self.next_ns)
        self.ticks += 1
        self._histogram[min(_BINS - 1, late_ns * 100 // self.period_ns)] += 1
        self.skipped = late_ns // self.period_ns
        self.missed += bool(self.skipped)
        self.next_ns += (self.skipped + 1) * self.period_ns
        return late_ns

    def late_s(self, quantile: float) -> float:
        """Lateness in seconds that `quantile` of the ticks stay below, to 1% of the period; 0 before any tick."""
        if not self.ticks:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self._histogram), quantile * self.ticks))
        return (at + 1) * self.period_ns / 100e9
