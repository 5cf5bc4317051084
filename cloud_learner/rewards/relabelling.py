"""Has a model judge what is in the buffer and what comes, beside robots and trainers.

What was done stands in the labels themselves: each episode's are written in one transaction with the model's number, so
a job that was killed goes on with what is not labelled yet, and two at once write nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.rewards.calibration import require_scores
from cloud_learner.rewards.episode_ends import ended_episodes, read_ends
from cloud_learner.rewards.interface import SuccessModel
from cloud_learner.rewards.model_labels import LabelModel, ModelLabels
from wire.types import RobotSpec

EPISODES_AT_ONCE = 16
"""in one transaction"""
_AT_ONCE = 10_000


class Relabelling:
    """Of the episodes of robots with `spec` in these tasks."""

    def __init__(
        self,
        ledger: Ledger,
        store: SegmentStore,
        spec: RobotSpec,
        tasks: Collection[str],
        kind: str,
        model: SuccessModel,
        adopted: LabelModel,
    ) -> None:
        """`adopted`: `model` as the labels know it. Raises `SpecMismatchError` for one of another robot."""
        model.require(spec)
        self.left_out: Counter[str] = Counter()
        """episodes that could not be judged, by reason"""
        self.labelled = 0
        """episodes"""
        self._ledger, self._store, self._spec, self._model, self._adopted = ledger, store, spec, model, adopted
        self._labels, self._kind = ModelLabels(ledger, kind), kind
        self._index = SegmentIndex(tuple(task for task in tasks if not model.tasks or task in model.tasks))
        self._looked: set[int] = set()
        """dense numbers of episodes that are labelled by it, or cannot be"""
        self._known = 0
        """segments whose labels were looked at"""

    def poll(self) -> int:
        """Label some of what is not; how many episodes are left after that, of those that have ended.

        Raises `StorageError`, and `InvalidDataError` for scores that are none and once a newer model was adopted:
        nothing of this call is written then.
        """
        index = self._index
        index.extend(self._ledger.index(index.watermark, self._spec.data_hash))
        self._note_labelled()
        waiting = [episode for episode in ended_episodes(index).tolist() if episode not in self._looked]
        some = waiting[:EPISODES_AT_ONCE]
        if some:
            self._label(some)
        return len(waiting) - len(some)

    def _note_labelled(self) -> None:
        """By an earlier run, or by another one beside this."""
        index = self._index
        for begin in range(self._known, len(index), _AT_ONCE):
            rows = index.row[begin : begin + _AT_ONCE]
            said = self._labels.read(rows.tolist())
            of = {row for row, one in said.items() if one.number >= self._adopted.number}
            last = index.find(np.array(sorted(of), np.int64))
            self._looked |= set(index.episode[last[index.last[last]]].tolist())
        self._known = len(index)

    def _label(self, episodes: list[int]) -> None:
        index = self._index
        ends, left_out = read_ends(index, episodes, self._store.read, self._spec, self._model.steps)
        self.left_out.update(left_out)
        if ends:
            scores = np.asarray(self._model.score(list(ends.values())), np.float32)
            require_scores(scores, f"{self._kind} model {self._adopted.number}")
            by_row: dict[int, float] = {}
            steps: dict[int, int] = {}
            for episode, score in zip(ends, scores.tolist(), strict=True):
                members = index.members(np.array([episode]))
                by_row |= dict.fromkeys(index.row[members].tolist(), score)
                steps |= dict(zip(index.row[members].tolist(), index.steps[members].tolist(), strict=True))
            if self._labels.put(self._adopted, by_row, steps):
                self.labelled += len(ends)
        self._looked |= set(episodes)
