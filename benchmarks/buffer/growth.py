"""How the buffer behaves as it grows: time to append a segment, and time to open, at some numbers of episodes.

One buffer is filled, episode by episode, and copied whenever it has one of the sizes. Then the sizes take turns, so
that what else the machine does hits all of them. The episodes that fill it are short and their pictures empty; what is
measured are appends of segments as an edge sends them.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.buffer.data import CAMERAS, JPEG_QUALITY, SEGMENT_STEPS, Scale, encoded_frames, motion, segments
from benchmarks.buffer.ours import CLOCK, ROBOT, feed_config
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.store import SegmentStore
from robot_edge.uplink.segments import encode_jpeg
from wire.messages.gateway import ACTORS, Segment
from wire.types import RobotSpec

FILL_SEGMENTS = 3
FILL_STEPS = 8
"""of each of the segments that fill"""
_FILL_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Growth:
    """Sizes to measure at, and how much."""

    sizes: tuple[int, ...] = (1_000, 10_000, 50_000)
    """episodes"""
    rounds: int = 5
    appends: int = 120
    """in each round at each size"""
    openings: int = 5


@dataclass(slots=True)
class At:
    """What was measured at one size."""

    episodes: int
    append_s: list[float] = field(default_factory=list)
    append_sealing_s: list[float] = field(default_factory=list)
    """while a shard was being made in the same process"""
    seal_s: list[float] = field(default_factory=list)
    """for each shard"""
    read_s: list[float] = field(default_factory=list)
    """to open as a trainer, up to the first plan"""
    write_s: list[float] = field(default_factory=list)
    """to open as a gateway"""
    segments: int = 0
    segment_bytes: int = 0


def measure_growth(folder: Path, growth: Growth) -> list[At]:
    """`growth` in `folder`."""
    scale = Scale(1, 128, 4)
    found = []
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-", dir=_quick_folder()) as filling:
        for episodes in _fill(Path(filling), scale.spec(), growth.sizes):
            shutil.copytree(filling, folder / str(episodes))
            found.append(At(episodes))
    # none of it waits to be written when the clock starts
    os.sync()
    _take_turns(folder, growth, scale, found)
    return found


def _take_turns(folder: Path, growth: Growth, scale: Scale, found: list[At]) -> None:
    """Open each of the buffers in `folder`, then append to all of them."""
    for _ in range(growth.openings):
        for at in found:
            _open(folder / str(at.episodes), scale.spec(), at)
    writers = [BufferLocation(folder / str(at.episodes)).open_writer() for at in found]
    fresh = [_fresh_segments(scale) for _ in found]
    for _ in range(growth.rounds):
        for _ in range(growth.appends):
            for at, (_, store), coming in zip(found, writers, fresh, strict=True):
                at.append_s.append(_append(store, next(coming)))
        for at, (ledger, store), coming in zip(found, writers, fresh, strict=True):
            _seal_beside(ledger, store, coming, at)
    for at, (ledger, store), coming in zip(found, writers, fresh, strict=True):
        at.segment_bytes = _size(next(coming))
        store.close()
        ledger.close()


def flatness(found: list[At], quantile: float) -> float:
    """The last size's time to append over that of the first."""
    first, last = (np.quantile(at.append_s, quantile) for at in (found[0], found[-1]))
    return float(last / first)


def rows_of(found: list[At]) -> list[dict[str, Any]]:
    """For tables."""
    rows = []
    for at in found:
        alone, busy = np.quantile(at.append_s, [0.5, 0.99]) * 1e3, np.quantile(at.append_sealing_s, [0.5, 0.99]) * 1e3
        rows.append(
            {
                "episodes": at.episodes,
                "segments": at.segments,
                "append p50 ms": float(alone[0]),
                "p99 ms": float(alone[1]),
                "appends": len(at.append_s),
                "while sealing p50 ms": float(busy[0]),
                "while sealing p99 ms": float(busy[1]),
                "to seal a shard ms": float(np.median(at.seal_s) * 1e3),
                "open to read s": float(np.median(at.read_s)),
                "open to write s": float(np.median(at.write_s)),
            }
        )
    return rows


def _quick_folder() -> str | None:
    """A file system in memory, where there is one with room: filling need not wait for a disk."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > _FILL_BYTES else None


def _fill(data: Path, spec: RobotSpec, sizes: tuple[int, ...]) -> Iterator[int]:
    """Fill the buffer at `data`, closed whenever it has one of `sizes` episodes."""
    patterns = _short_episodes(spec)
    done = 0
    for size in sizes:
        ledger, store = BufferLocation(data).open_writer()
        ledger.see_robot(ROBOT, spec, CLOCK, time.monotonic_ns())
        sealer = MaintenanceThread(store, every_s=1.0)
        sealer.start()
        for number in range(done, size):
            now_ns = time.monotonic_ns()
            for segment in _renamed(patterns[number % len(patterns)], number):
                store.append_all([(segment, now_ns)], now_ns)
        sealer.stop()
        store.close()
        ledger.close()
        done = size
        yield size


def _short_episodes(spec: RobotSpec) -> list[tuple[Segment, ...]]:
    """Some episodes of the fleet, half by its policy and half by a person in each segment."""
    scale = Scale(1, FILL_SEGMENTS * FILL_STEPS // 4, 4)
    rng = np.random.default_rng(0)
    actor = np.repeat([ACTORS.index("policy"), ACTORS.index("human")], FILL_STEPS // 2).astype(np.uint8)
    found = []
    for _ in range(16):
        empty = np.broadcast_to(rng.integers(0, 256, 3, dtype=np.uint8), (scale.size, scale.size, 3))
        encoded = ((encode_jpeg(empty, JPEG_QUALITY),) * scale.frames,) * len(CAMERAS)
        state, actions = motion(rng, scale.episode_steps, 0)
        found.append(
            tuple(
                msgspec.structs.replace(segment, actor=actor, version=np.ones(FILL_STEPS, np.int32))
                for segment in segments(scale, 0, state, actions, encoded, segment_steps=FILL_STEPS)
            )
        )
    return found


def _renamed(episode: tuple[Segment, ...], number: int) -> Iterator[Segment]:
    facts = msgspec.structs.replace(episode[0].episode, id=f"fill-{number:06d}", seed=number, source="online")
    for segment in episode:
        yield msgspec.structs.replace(segment, id=f"{facts.id}/{segment.index}", episode=facts)


def _fresh_segments(scale: Scale) -> Iterator[Segment]:
    """Segments as an edge sends them, episode after episode without end."""
    rng = np.random.default_rng(1)
    encoded = encoded_frames(rng, scale)
    number = 0
    while True:
        state, actions = motion(rng, scale.episode_steps, number)
        for segment in segments(scale, number, state, actions, encoded):
            if segment.steps == SEGMENT_STEPS:
                yield segment
        number += 1


def _append(store: SegmentStore, segment: Segment) -> float:
    """Seconds until the segment may be acknowledged."""
    before = time.perf_counter()
    now_ns = time.monotonic_ns()
    (row,) = store.append_all([(segment, now_ns)], now_ns)
    took = time.perf_counter() - before
    assert row is not None, f"{segment.id} was there already"
    return took


def _seal_beside(ledger: Ledger, store: SegmentStore, coming: Iterator[Segment], at: At) -> None:
    """Seal all there is in a thread, and go on appending."""

    def work() -> None:
        before = time.perf_counter()
        done = seal(store, time.monotonic_ns(), force=True)
        if done.shards:
            at.seal_s += [(time.perf_counter() - before) / done.shards] * done.shards

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        at.append_sealing_s.append(_append(store, next(coming)))
        # about as often as twenty robots send
        time.sleep(0.02)
    thread.join()


def _open(data: Path, spec: RobotSpec, at: At) -> None:
    """Open in a new process, as a trainer and as a gateway."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        read_s, at.segments = pool.submit(_open_to_read, data, spec).result()
        write_s = pool.submit(_open_to_write, data).result()
    at.read_s.append(read_s)
    at.write_s.append(write_s)


def _open_to_read(data: Path, spec: RobotSpec) -> tuple[float, int]:
    """(seconds until the first batch was planned, segments)"""
    before = time.perf_counter()
    feed = open_dataset(BufferLocation(data), spec, feed_config(256 << 20, 256, 8.0, prefetch=0))
    feed.refresh()
    feed.sampler.next()
    took = time.perf_counter() - before
    found = len(feed.universe)
    feed.close()
    return took, found


def _open_to_write(data: Path) -> float:
    before = time.perf_counter()
    ledger, store = BufferLocation(data).open_writer()
    took = time.perf_counter() - before
    store.close()
    ledger.close()
    return took


def _size(segment: Segment) -> int:
    return sum(len(image) for frames in segment.frames.values() for image in frames.encoded)
