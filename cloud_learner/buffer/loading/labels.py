"""What jobs say of steps, out of the ledger: what batches bring, and the priorities that a target goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import VERDICT
from wire.errors import ConfigError

_AT_ONCE = 10_000
"""segments whose labels are in memory while their means are taken"""


class IndexLabels(Protocol):
    """Brings the labels of an index up to date."""

    def refresh(self) -> bool:
        """Take in what was said since the last call; whether anything is another. Raises `StorageError`."""
        ...


OpenVerdicts = Callable[[Ledger, SegmentIndex], IndexLabels]
"""What reads verdicts (`sampling.target.by_verdicts`) of an index's episodes, as labels of all their segments"""


def open_labels(ledger: Ledger, index: SegmentIndex, name: str, verdicts: OpenVerdicts | None) -> IndexLabels:
    """What a target goes by that goes by `name`. Raises `ConfigError` without `verdicts` where it goes by these."""
    if name != VERDICT:
        return Priorities(ledger, index, name)
    if verdicts is None:
        raise ConfigError("dataset: the target goes by verdicts, and nothing reads them: give `verdicts`.")
    return verdicts(ledger, index)


class Priorities:
    """Means of one step label by segment, brought up to date in one index."""

    def __init__(self, ledger: Ledger, index: SegmentIndex, name: str) -> None:
        """`name` of a label of `Ledger.put_step_labels`; with '' nothing is ever looked for."""
        self._ledger, self._index, self._name = ledger, index, name
        self._revision = 0
        """newest revision of the steps' labels that was looked at"""
        self._segments = 0
        """how many of the index's, the first ones, were looked at"""

    def refresh(self) -> bool:
        """Take in what was said since the last call, and of what the index added; whether anything is another.

        Costs what was said and added. Raises `StorageError` if the ledger cannot be read (ask again then).
        """
        if not self._name:
            return False
        # first: what is said while the rest is read is found again by the next call
        rows, revision = self._ledger.labelled_since(self._revision, (self._name,))
        said = self._index.find(np.array(rows, np.int64))
        wanted = self._index.row[np.union1d(said[said >= 0], np.arange(self._segments, len(self._index)))]
        means: list[float] = []
        for begin in range(0, len(wanted), _AT_ONCE):
            some = wanted[begin : begin + _AT_ONCE].tolist()
            labels = self._ledger.step_labels(some, (self._name,))
            means += [finite_mean(labels[row][self._name]) if row in labels else np.nan for row in some]
        self._revision, self._segments = revision, len(self._index)
        return len(self._index.put_labels(wanted, np.array(means, np.float32))) > 0


def read_labels(ledger: Ledger, rows: Sequence[int], names: Sequence[str]) -> dict[int, np.ndarray]:
    """float32[T, L] by ledger row, nan where nothing was said; rows of which nothing was said are absent."""
    labels = {}
    for row, said in ledger.step_labels(rows, names).items() if names else ():
        nothing = np.full(len(next(iter(said.values()))), np.nan, np.float32)
        labels[row] = np.stack([said.get(name, nothing) for name in names], 1)
    return labels


def finite_mean(label: np.ndarray) -> float:
    """Of those of float32[T] that are finite, nan if none is."""
    finite = label[np.isfinite(label)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else np.nan
