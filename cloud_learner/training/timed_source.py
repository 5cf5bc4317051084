"""The learner's batches, and how long they were waited for."""

from __future__ import annotations

import numpy as np

from cloud_learner.buffer.loading.dataset import ReplayDataset
from policies.interface.policy import Batch
from wire.clock import Clock


class TimedSource:
    """A `BatchSource` that counts."""

    def __init__(self, source: ReplayDataset, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self.draws_a_batch = source.config.batch * source.config.ticks_per_frame
        self.draws = self._waited_ns = 0

    def next(self) -> Batch:
        began_ns = self._clock.now_ns()
        try:
            batch = self._source.next()
        finally:
            self._waited_ns += self._clock.now_ns() - began_ns
        self.draws += self.draws_a_batch
        return batch

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        self._source.note_losses(batch, losses)

    def pop_waited_ns(self) -> int:
        """Nanoseconds waited since the last call."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns
