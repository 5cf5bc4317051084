"""What each episode of an index was, by the sources that a recipe names, as labels that a sampler draws by.

`sampling.target.by_verdicts` has a target, and batches, read them in place of what is recorded. Nothing but an
episode's outcome is read so: no step becomes a person's, and no episode a demonstration.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.labels import OpenVerdicts
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.rewards.agreement import FAILURE, NOBODY_KNOWS, SUCCESS, agree
from cloud_learner.rewards.config import LABEL, OUTCOME, SIMULATOR, RewardConfig
from cloud_learner.rewards.episode_ends import ended_episodes
from cloud_learner.rewards.model_labels import LabelModel, ModelLabels
from wire.types import EpisodeOutcome, RobotSpec

log = logging.getLogger(__name__)
_BY_RECORD = {OUTCOMES.index(EpisodeOutcome.success): SUCCESS, OUTCOMES.index(EpisodeOutcome.failure): FAILURE}
_AT_ONCE = 10_000


def open_verdicts(config: RewardConfig) -> OpenVerdicts:
    """For `ReplayDataset`."""
    return lambda ledger, index: VerdictReader(ledger, index, config)


class VerdictReader:
    """Brings verdicts up to date in one index, at the cost of what was said and added."""

    def __init__(self, ledger: Ledger, index: SegmentIndex, config: RewardConfig) -> None:
        self._index, self._config = index, config
        self._people = _PeopleLabels(ledger, index) if LABEL in config.sources else None
        self._models = [_ModelScores(ModelLabels(ledger, kind), index) for kind in config.models]
        self._segments = self._forgotten = 0
        """how much of the index was looked at"""
        self.verdicts: np.ndarray = np.zeros(0, np.float32)
        """float32[episodes], as `agree` says, by the index's dense number"""
        self._said_doubt = False

    def refresh(self) -> bool:
        """As `IndexLabels.refresh`. Raises `StorageError`."""
        index, before = self._index, self._segments
        changed = [one.refresh() for one in ([self._people] if self._people else []) + self._models]
        grown = len(index) > before or len(index.forgotten) > self._forgotten
        self._segments, self._forgotten = len(index), len(index.forgotten)
        if not (grown or any(changed)):
            return False
        old, self.verdicts = self.verdicts, self._judge()
        differs = np.ones(len(self.verdicts), bool)
        differs[: len(old)] = self.verdicts[: len(old)] != old
        segments = np.union1d(index.members(np.flatnonzero(differs)), np.arange(before, len(index)))
        return len(index.put_labels(index.row[segments], self.verdicts[index.episode[segments]])) > 0

    def record(self) -> np.ndarray:
        """float32[episodes]: what the record says, nan where nothing."""
        index, size = self._index, len(self._index.episode_numbers)
        record: np.ndarray = np.full(size, np.nan, np.float32)
        readers: dict[str, Callable[[], np.ndarray]] = {OUTCOME: self._outcomes, SIMULATOR: self._by_return}
        for name in self._config.sources:
            if name in readers and len(index):
                record = np.where(np.isnan(record), readers[name](), record)
        return record

    def _judge(self) -> np.ndarray:
        size = len(self._index.episode_numbers)
        nothing = np.full(size, np.nan, np.float32)
        models = {one.labels.kind: one.verdicts() for one in self._models}
        record = self.record()
        person = self._people.values() if self._people is not None else nothing
        verdicts = agree(person, record, models, self._config.doubt)
        doubted = int(((verdicts == NOBODY_KNOWS) & ~np.isnan(record)).sum())
        if doubted and not self._said_doubt:
            self._said_doubt = True
            log.warning(
                "rewards: %d of %d episodes that are recorded as judged count as unjudged, since a model contradicts: "
                "`vla-fleet rewards show` names them, `vla-fleet buffer label EPISODE success=1` settles one.",
                doubted,
                int((~np.isnan(record)).sum()),
            )
        return verdicts

    def _outcomes(self) -> np.ndarray:
        outcome = self._index.outcome(_any_segment(self._index))
        found = np.full(len(outcome), np.nan, np.float32)
        for number, said in _BY_RECORD.items():
            found[outcome == number] = said
        return found

    def _by_return(self) -> np.ndarray:
        """Of episodes that are here from their first to their last segment."""
        index, size, there = self._index, len(self._index.episode_numbers), ~self._index.gone
        least = self._config.success_return
        assert least is not None
        returns = np.bincount(index.episode[there], index.reward_sum[there], minlength=size)
        here = np.bincount(index.episode[there], minlength=size)
        whole = np.zeros(size, bool)
        last = np.flatnonzero(index.last & there)
        whole[index.episode[last]] = here[index.episode[last]] == index.index[last] + 1
        said = np.where(returns >= least, SUCCESS, FAILURE)
        return np.where(whole, said, np.nan).astype(np.float32)


class _PeopleLabels:
    """What people said of episodes since."""

    def __init__(self, ledger: Ledger, index: SegmentIndex) -> None:
        self._ledger, self._index, self._newest = ledger, index, 0
        self._said: dict[int, float] = {}
        """by the ledger's number of the episode"""

    def refresh(self) -> bool:
        said, self._newest = self._ledger.episode_labels("success", self._newest)
        self._said.update(said)
        return bool(said)

    def values(self) -> np.ndarray:
        numbers = self._index.episode_numbers
        found = np.full(len(numbers), np.nan, np.float32)
        if self._said:
            said = np.array(sorted(self._said))
            at = np.minimum(np.searchsorted(said, numbers), len(said) - 1)
            here = said[at] == numbers
            found[here] = np.array([self._said[number] for number in said[at[here]].tolist()], np.float32)
        return found


class _ModelScores:
    """What the newest model of a kind says."""

    def __init__(self, labels: ModelLabels, index: SegmentIndex) -> None:
        self.labels, self._index = labels, index
        self._revision = self._segments = 0
        self._newest: LabelModel | None = None
        self._scores: dict[int, tuple[float, int]] = {}
        """(score, model) by dense number of the episode"""

    def refresh(self) -> bool:
        index, newest = self._index, self.labels.newest()
        rows, self._revision = self.labels.labelled_since(self._revision)
        said = index.find(np.array(rows, np.int64))
        looked = np.union1d(said[said >= 0], np.arange(self._segments, len(index)))
        # all segments of an episode are labelled alike
        looked, self._segments = looked[index.last[looked]], len(index)
        for begin in range(0, len(looked), _AT_ONCE):
            some = index.row[looked[begin : begin + _AT_ONCE]]
            for row, score in self.labels.read(some.tolist()).items():
                self._scores[int(index.episode[index.find(np.array([row]))[0]])] = score.score, score.number
        changed, self._newest = newest != self._newest, newest
        return changed or bool(len(rows))

    def count_by_model(self) -> dict[int, int]:
        """Episodes by the number of the model that said something of them last."""
        return dict(sorted(Counter(number for _, number in self._scores.values()).items()))

    def verdicts(self) -> np.ndarray:
        scores = np.full(len(self._index.episode_numbers), np.nan, np.float32)
        numbers = np.zeros(len(scores), np.int64)
        if self._scores:
            at = np.fromiter(self._scores, np.int64)
            scores[at], numbers[at] = map(np.array, zip(*self._scores.values(), strict=True))
        return self._newest.verdicts(scores, numbers) if self._newest is not None else np.full_like(scores, np.nan)


def _any_segment(index: SegmentIndex) -> np.ndarray:
    """int64[episodes]: number of a segment of each."""
    found = np.zeros(len(index.episode_numbers), np.int64)
    found[index.episode] = np.arange(len(index))
    return found


class ModelSummary(msgspec.Struct, frozen=True):
    """What the models of a kind have said, and where the newest says something else than people and the record."""

    models: tuple[LabelModel, ...]
    by_model: dict[int, int]
    """episodes by the number of the model that said something of them last"""
    ended: int
    """episodes that could be labelled"""
    says_success: int
    says_failure: int
    agrees: int
    """with people's labels and the record"""
    contradicts: tuple[str, ...]
    """ids of the episodes of which these say otherwise: a person should look at them first"""


def summarize(ledger: Ledger, spec: RobotSpec, tasks: Sequence[str], kind: str) -> ModelSummary:
    """Of the episodes of robots with `spec` in these tasks. Raises `StorageError`."""
    index, labels = SegmentIndex(tuple(tasks)), ModelLabels(ledger, kind)
    index.extend(ledger.index(0, spec.data_hash))
    firm = VerdictReader(ledger, index, RewardConfig(sources=(LABEL, OUTCOME)))
    firm.refresh()
    model = _ModelScores(labels, index)
    model.refresh()
    said, known = model.verdicts(), firm.verdicts
    both = ~np.isnan(said) & (known != NOBODY_KNOWS)
    others = np.flatnonzero(both & (said != known))
    rows = index.row[_any_segment(index)[others]].tolist()
    places = ledger.places(rows)
    return ModelSummary(
        models=labels.models(),
        by_model=model.count_by_model(),
        ended=len(ended_episodes(index)),
        says_success=int((said == SUCCESS).sum()),
        says_failure=int((said == FAILURE).sum()),
        agrees=int((both & (said == known)).sum()),
        contradicts=tuple(places[row].episode for row in rows if row in places),
    )
