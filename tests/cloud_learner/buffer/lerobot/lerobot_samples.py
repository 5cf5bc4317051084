"""A real buffer with a few episodes, and LeRobot datasets made of it, for the tests of export and import."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# read once, when huggingface_hub is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import cv2
import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.lerobot.importer import import_dataset
from cloud_learner.buffer.lerobot.mapping import DatasetMapping
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.store import SegmentStore
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.messages.gateway import ACTORS, Segment
from wire.types import RobotSpec

HUMAN = ACTORS.index("human")
SPEC = fake_spec(cameras=2)


class Buffer:
    """Ledger and store of a writer below `path`, with what was put in."""

    def __init__(self, path: Path) -> None:
        self.ledger: Ledger
        self.store: SegmentStore
        self.ledger, self.store = BufferLocation(path).open_writer()
        self.put: dict[str, tuple[Segment, ...]] = {}

    def add(self, segments: tuple[Segment, ...], spec: RobotSpec = SPEC) -> None:
        self.ledger.see_robot(segments[0].episode.robot, spec, "clock", 1)
        assert None not in self.store.append_all([(segment, 1) for segment in segments], 2)
        self.put[segments[0].episode.id] = segments

    def seal(self) -> None:
        assert seal(self.store, 10**18, force=True).segments

    def rows(self) -> list[int]:
        return [row.row for row in self.ledger.segments_after(0, 10_000)]

    def segments(self) -> list[Segment]:
        """Everything that is stored, in the order of its commits."""
        found = self.store.read(self.rows())
        assert not found.damaged
        return [found.segments[row] for row in self.rows()]

    def close(self) -> None:
        self.store.close()
        self.ledger.close()


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    made = Buffer(tmp_path / "buffer")
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Buffer]:
    """An empty buffer to import into."""
    made = Buffer(tmp_path / "other")
    yield made
    made.close()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LeRobot's own reader copies parquet files to the cache of `datasets`: keep that below `tmp_path`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def joined(segments: tuple[Segment, ...] | list[Segment], name: str) -> np.ndarray:
    """[T, ...] a column over segments."""
    return np.concatenate([getattr(segment, name) for segment in segments])


def shown(segments: tuple[Segment, ...] | list[Segment], camera: str) -> list[np.ndarray]:
    """For every step the picture it saw, uint8[h, w, 3] RGB."""
    pictures: dict[int, np.ndarray] = {}
    found = []
    for segment in segments:
        frames = segment.frames[camera]
        for time, jpeg in zip(frames.times_ns.tolist(), frames.encoded, strict=True):
            decoded = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
            pictures[time] = cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB)
        found += [pictures[time] for time in segment.frame_times_ns[camera].tolist()]
    return found


def with_columns(segments: tuple[Segment, ...], **columns: np.ndarray) -> tuple[Segment, ...]:
    """The segments with whole columns replaced."""
    found, at = [], 0
    for segment in segments:
        here = slice(at, at + segment.steps)
        found.append(msgspec.structs.replace(segment, **{name: column[here] for name, column in columns.items()}))
        at += segment.steps
    return tuple(found)


def two_episodes(buffer: Buffer, steps: int = 24) -> None:
    """One finished episode of a policy with a correction, in a shard; one demonstration in the journal."""
    actor = [0] * (steps // 2) + [HUMAN] * (steps - steps // 2)
    buffer.add(fake_episode(SPEC, "online-0", steps=steps, segment_steps=10, actor=actor, seed=1))
    buffer.seal()
    demonstration = fake_episode(
        SPEC,
        "demo-0",
        robot="r2",
        task="window-open",
        source="demonstration",
        steps=steps - 4,
        segment_steps=10,
        actor=[HUMAN] * (steps - 4),
        seed=2,
    )
    buffer.add(demonstration)


def taken(root: Path, mapping: DatasetMapping | None = None, **options) -> list[Segment]:
    """The segments that an import of `root` stores in an empty buffer."""
    with tempfile.TemporaryDirectory() as directory, contextlib.closing(Buffer(Path(directory))) as made:
        import_dataset(made.ledger, made.store, root, mapping, **options)
        return made.segments()


def episodes(segments: list[Segment]) -> list[list[Segment]]:
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.episode.id, []).append(segment)
    return list(found.values())
