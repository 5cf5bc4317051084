"""Whether there are enough demonstrations to begin with."""

from __future__ import annotations

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from wire.clock import Clock
from wire.types import EpisodeSource

_COUNT_NS = 1_000_000_000


class DemonstrationCount:
    """Of one dataset."""

    def __init__(self, source: ReplayDataset, ledger: Ledger, wanted: int, by_people: bool, clock: Clock) -> None:
        """`wanted` finished episodes; `by_people`: what people drive online demonstrates, too."""
        self._source, self._ledger, self._clock = source, ledger, clock
        self._wanted, self._by_people = wanted, by_people
        self._next_count_ns = clock.now_ns()

    @property
    def complete(self) -> bool:
        """Whether that many are there. Raises `StorageError` when they cannot be counted."""
        config = self._source.config
        shown = self._source.finished(EpisodeSource.demonstration)
        if self._by_people and self._source.eligible_steps:
            shown += self._source.finished(EpisodeSource.online)
        if shown >= self._wanted:
            return True
        if not config.validation or self._clock.now_ns() < self._next_count_ns:
            return False
        # Those that are held out have been recorded as well, and nobody records others in their place.
        self._next_count_ns = self._clock.now_ns() + _COUNT_NS
        own = config.tasks.keys() - config.target.mix.base
        counts = (
            episodes
            for task, source, outcome, episodes, *_ in self._ledger.shares()
            if source == EpisodeSource.demonstration and outcome and task in own
        )
        return sum(counts) >= self._wanted
