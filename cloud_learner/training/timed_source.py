"""The learner's batches, and how long they were waited for."""

from __future__ import annotations

from collections import Counter

import numpy as np

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.embodiment_mix import EmbodimentMix
from policies.interface.policy import Batch
from wire.clock import Clock

_ONLINE = ""
"""no task's name"""


class TimedSource:
    """A `BatchSource` that counts."""

    def __init__(self, source: ReplayDataset | EmbodimentMix, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self.draws_a_batch = source.config.batch * source.config.ticks_per_frame
        self.draws = self._waited_ns = 0
        self._names = {sentence: task for task, sentence in source.config.tasks.items()}
        self._drawn: Counter[str] = Counter()

    @property
    def batches_per_update(self) -> int:
        """See `BatchSource`."""
        return getattr(self._source, "batches_per_update", 1)

    def next(self) -> Batch:
        began_ns = self._clock.now_ns()
        try:
            batch: Batch = self._source.next()
        finally:
            self._waited_ns += self._clock.now_ns() - began_ns
        self.draws += np.asarray(batch["tick"]).size
        self._drawn.update(self._names[sentence] for sentence in batch["instructions"])
        self._drawn[_ONLINE] += int(np.asarray(batch["online"]).sum())
        return batch

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        self._source.note_losses(batch, losses)

    def pop_shares(self) -> dict[str, float]:
        """Of what was drawn since the last call: by task, and of online data."""
        drawn, self._drawn = self._drawn, Counter()
        online = drawn.pop(_ONLINE, 0)
        count = drawn.total()
        return {"online": online / count} | {task: drawn[task] / count for task in sorted(drawn)} if count else {}

    def pop_waited_ns(self) -> int:
        """Nanoseconds waited since the last call."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns
