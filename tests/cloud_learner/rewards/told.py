"""A buffer of episodes that end as they are told to, and models that say what they are told to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import by_verdicts, uniform
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.rewards.calibration import Thresholds
from cloud_learner.rewards.interface import EpisodeEnd, SuccessModel
from cloud_learner.rewards.model_labels import LabelModel, ModelLabels
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.messages.gateway import Segment
from wire.types import RobotSpec

SPEC = fake_spec(0)
TASKS = {"drawer-open": "open the drawer"}
CONFIG = DatasetConfig(tasks=TASKS, target=by_verdicts(uniform()), batch=64, horizon=4, prefetch=0, lead=1)
HALF = Thresholds(0.5, 0.5 - 1e-6)


def episode(name: str, outcome: str, *, spec: RobotSpec = SPEC, steps: int = 20, **options: object) -> list[Segment]:
    """Of the policy's steps; its first state tells success (1) from all else (-1), with a little noise."""
    options = {"actor": [0] * steps, "segment_steps": 8, "seed": sum(map(ord, name))} | options
    told = []
    for segment in fake_episode(spec, name, steps=steps, **options):  # type: ignore[arg-type]
        state = segment.state.copy()
        state[:, 0] = (1 if outcome == "success" else -1) + 0.1 * state[:, 1]
        told.append(msgspec.structs.replace(segment, state=state, outcome=outcome if segment.last else ""))
    return told


def append(store: SegmentStore, *episodes: Sequence[Segment]) -> None:
    for segments in episodes:
        assert None not in store.append_all([(segment, 5) for segment in segments], 6)


@contextmanager
def opened(root: Path, *episodes: Sequence[Segment], spec: RobotSpec = SPEC) -> Iterator[tuple[Ledger, SegmentStore]]:
    ledger, store = BufferLocation(root).open_writer()
    try:
        ledger.see_robot("r1", spec, "clock", 1)
        append(store, *episodes)
        yield ledger, store
    finally:
        store.close()
        ledger.close()


def index_of(ledger: Ledger, spec: RobotSpec = SPEC) -> SegmentIndex:
    index = SegmentIndex(tuple(TASKS))
    index.extend(ledger.index(0, spec.data_hash))
    return index


def rows_of(ledger: Ledger, name: str) -> list[int]:
    return [segment.row for segment in ledger.segments_of(name)]


def label(ledger: Ledger, kind: str, scores: Mapping[str, float], sha256: str = "ab") -> LabelModel:
    """Have a model of that kind score episodes by their names."""
    labels = ModelLabels(ledger, kind)
    model = labels.adopt(sha256, HALF, "a test's")
    rows = {row: score for name, score in scores.items() for row in rows_of(ledger, name)}
    steps = {row: place.steps for row, place in ledger.places(list(rows)).items()}
    labels.put(model, rows, steps)
    return model


class ToldModel(SuccessModel):
    """Scores each episode as it was told to."""

    def __init__(self, scores: Mapping[str, float], sha256: str = "ab", steps: int = 5, spec: RobotSpec = SPEC) -> None:
        self.scores, self.sha256, self.steps, self.tasks = scores, sha256, steps, ()
        self._spec = spec
        self.seen: list[EpisodeEnd] = []

    def require(self, spec: RobotSpec) -> None:
        self._spec.require(spec, "a told model")

    def score(self, ends: Sequence[EpisodeEnd]) -> np.ndarray:
        self.seen += ends
        return np.array([self.scores[end.episode] for end in ends], np.float32)
