"""Does sampling hold its speed while a fleet writes, and is every sample whole?

One process takes in what 20 robots record, 80 steps a second each, through the gateway's own `Ingest`, and seals it.
This one samples from the same buffer with a `ReplayDataset` and looks at every sample: its state, all its actions and
its pictures must be those of one stretch of one episode. Writing pauses and goes on in turns, so that both speeds are
of the same minutes.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.buffer.data import ACTIONS, CAMERAS, CONTROL_HZ, JPEG_QUALITY, SEGMENT_STEPS, STATES, Scale, Scene
from benchmarks.buffer.data import segments as segments_of
from benchmarks.buffer.ours import CLOCK, feed_config
from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, run
from cloud_learner.buffer.loading.dataset import ReplayDataset, open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.gateway.storage.ingest import Ingest
from robot_edge.uplink.segments import encode_jpeg
from wire import codec
from wire.messages.gateway import ACTORS, Segment

EPISODE_SEGMENTS = 5
_BITS = 16
_CELL = 8
"""A number is painted into a picture as a row of so many black and white squares of so many pixels."""
_REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class LoadSize:
    """How much of everything."""

    robots: int = 20
    turns: int = 4
    writing_s: float = 15.0
    """in each turn"""
    idle_s: float = 10.0
    """before each turn, and once after the last"""
    before: int = 80
    """episodes that are there and sealed when it begins"""
    cache_bytes: int = 512 << 20
    batch: int = 256
    workers: int = 1
    warm_s: float = 20.0
    echo: float = 8.0


FULL = LoadSize()
QUICK = LoadSize(
    robots=2, turns=1, writing_s=1.5, idle_s=0.5, before=2, cache_bytes=96 << 20, batch=32, workers=0, warm_s=0.2
)
SCALE = Scale(1, EPISODE_SEGMENTS * SEGMENT_STEPS // 4, 4)


class WrittenLoad(msgspec.Struct, frozen=True):
    """What the writing process says in the end."""

    segments: int
    due: int
    """segments that the robots recorded in the time of writing"""
    bytes: int
    cores: float
    """processor cores used while writing"""
    accept_ms: tuple[float, float]
    """median and 99th percentile of taking one segment in"""
    late_ms: float
    """the most that a segment was taken in after it was due"""
    others: dict[str, int]
    """outcomes that are not 'stored'"""


@dataclass(slots=True)
class Checked:
    """What was found in all samples."""

    samples: int = 0
    mixed: int = 0
    """samples whose parts are not of one stretch of one episode"""
    numbers: dict[int, int] = field(default_factory=dict)
    """the episode's number in its states, by its number in the ledger"""


def measure(quick: bool) -> Result:
    """Turns of sampling alone and sampling beside writing."""
    logging.basicConfig(level=logging.WARNING)
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as name:
        return _measure(BufferLocation(Path(name)), size)


def _measure(place: BufferLocation, size: LoadSize) -> Result:
    context = multiprocessing.get_context("spawn")
    going, stop = context.Event(), context.Event()
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(place, size, going, stop, theirs), name="writer")
    writer.start()
    theirs.close()
    assert ours.recv() == "ready"
    others = Others()
    checked = Checked()
    idle: list[float] = []
    loaded: list[float] = []
    config = feed_config(size.cache_bytes, size.batch, size.echo, workers=size.workers)
    with open_dataset(place, SCALE.spec(), config) as feed:
        feed.refresh()
        _sample(feed, ours, size.warm_s, checked)
        for turn in range(size.turns + 1):
            idle.append(_sample(feed, ours, size.idle_s, checked))
            if turn < size.turns:
                going.set()
                loaded.append(_sample(feed, ours, size.writing_s, checked))
                going.clear()
            sys.stderr.write(f"alone {idle[-1]:,.0f} samples/s, beside writing {loaded[-1]:,.0f}\n")
        stop.set()
        going.set()
        while not isinstance(written := _receive(feed, ours), WrittenLoad):
            pass
        feed.refresh()
        stats = feed.stats
        seen = int(feed.universe.steps.sum())
    writer.join()
    expected = size.before * SCALE.episode_steps + written.segments * SEGMENT_STEPS
    # a turn of writing against the turns of idling on both sides of it
    shares = [found / ((idle[n] + idle[n + 1]) / 2) for n, found in enumerate(loaded)]
    share = float(np.median(shares))
    kept_up = written.segments / max(1, written.due)
    rows = [
        {
            "sampling": "alone",
            "samples/s": round(float(np.median(idle))),
            "lowest to highest": f"{min(idle):,.0f} to {max(idle):,.0f}",
            "of alone": 1.0,
        },
        {
            "sampling": f"while {size.robots} robots' steps come in",
            "samples/s": round(float(np.median(loaded))),
            "lowest to highest": f"{min(loaded):,.0f} to {max(loaded):,.0f}",
            "of alone": share,
        },
    ]
    goals = [
        Goal("sampling while writing, of sampling alone", share, "at least 0.7", share >= 0.7),
        Goal("samples that are not whole", float(checked.mixed), "0", checked.mixed == 0),
        Goal("steps missing for the sampler in the end", float(expected - seen), "0", expected == seen),
        Goal("segments taken in, of those recorded meanwhile", kept_up, "at least 0.95", kept_up >= 0.95),
        Goal("segments refused", float(sum(written.others.values())), "0", not written.others),
    ]
    return Result(
        "The buffer under load: sampling while a fleet writes",
        rows,
        goals,
        [*_notes(size, written, checked, stats), others.note()],
    )


def _notes(size: LoadSize, written: WrittenLoad, checked: Checked, stats: Any) -> list[str]:
    p50_ms, p99_ms = written.accept_ms
    return [
        f"{size.turns} turns of {size.writing_s:.0f} s of writing and {size.turns + 1} of {size.idle_s:.0f} s without. "
        f"Written: {written.segments:,} segments of {SEGMENT_STEPS} steps, {written.bytes / 1e6:,.0f} MB of pictures; "
        f"taking one in lasted {p50_ms:.1f} ms (median), {p99_ms:.1f} ms (p99), and none was committed later than "
        f"{written.late_ms:.0f} ms after it was due. Writing used {written.cores:.2f} of a core.",
        f"{checked.samples:,} samples checked, of {len(checked.numbers):,} episodes: episode and tick in the state and "
        "in every action, and both painted into both pictures. Checking is part of both speeds.",
        f"Cache {size.cache_bytes / 1e6:,.0f} MB, {size.workers} loading threads, echo {size.echo:.0f}; "
        f"{size.before} episodes at the beginning. {stats.from_gateway:,} segments came straight from the writer.",
    ]


# --- sampling ---------------------------------------------------------------------------------------------------------


def _sample(feed: ReplayDataset, inbox: Connection, seconds: float, checked: Checked) -> float:
    """Samples per second, as a trainer would take them: with what is fresh, and all of them looked at."""
    before = refreshed = time.perf_counter()
    batches = samples = 0
    while (now := time.perf_counter()) - before < seconds or not batches:
        while inbox.poll():
            _receive(feed, inbox)
        if now - refreshed > _REFRESH_S:
            feed.refresh()
            refreshed = now
        batch = feed.next()
        check(batch, checked)
        batches += 1
        samples += len(batch["tick"])  # type: ignore[arg-type]
    return samples / (time.perf_counter() - before)


def _receive(feed: ReplayDataset, inbox: Connection) -> WrittenLoad | None:
    """A fresh segment, or the end."""
    got = inbox.recv()
    if isinstance(got, WrittenLoad):
        return got
    row, data = got
    segment = codec.decode(data)
    assert isinstance(segment, Segment)
    feed.submit(row, segment)
    return None


def check(batch: Mapping[str, Any], checked: Checked) -> None:
    """Count the samples of which any part is not of the same stretch of the same episode."""
    state, actions, mask = batch["state"], batch["actions"], batch["mask"] > 0
    number, tick = state[:, 0].astype(np.int64), state[:, 1].astype(np.int64)
    good = (batch["tick"] == tick) & mask[:, 0] & (np.diff(mask.astype(np.int8), axis=1) <= 0).all(1)
    wanted = tick[:, None] + np.arange(mask.shape[1])
    good &= ((actions[:, :, 0] == number[:, None]) | ~mask).all(1) & ((actions[:, :, 1] == wanted) | ~mask).all(1)
    for camera, name in enumerate(CAMERAS):
        episode, frame = read_numbers(batch["images"][name])
        good &= (episode == number) & (frame == tick // SCALE.steps_per_frame * len(CAMERAS) + camera)
    for ledger_number, found in set(zip(batch["episode"].tolist(), number.tolist(), strict=True)):
        if checked.numbers.setdefault(ledger_number, found) != found:
            good &= batch["episode"] != ledger_number
    checked.samples += len(good)
    checked.mixed += int((~good).sum())


# --- writing ----------------------------------------------------------------------------------------------------------


def _write(place: BufferLocation, size: LoadSize, going: Event, stop: Event, outbox: Connection) -> None:
    """The gateway's part: everything is taken in when it is due, while `going`."""
    ledger, store = place.open_writer()
    names = [f"robot-{number:02d}" for number in range(size.robots)]
    for name in names:
        ledger.see_robot(name, SCALE.spec(), CLOCK, time.monotonic_ns())
    painted = PicturePainter()
    for number in range(size.before):
        for segment in painted.episode(number, names[number % size.robots], "demonstration"):
            store.append_all([(segment, time.monotonic_ns())], time.monotonic_ns())
    seal(store, time.monotonic_ns(), force=True)
    # on a robot encoding is done elsewhere: here it is done beforehand
    episodes = int(np.ceil(size.turns * (size.writing_s + 1) * CONTROL_HZ / SCALE.episode_steps)) + 1
    coming: list[Iterator[Segment]] = []
    for at, name in enumerate(names):
        first = size.before + at * episodes
        mine = [painted.episode(number, name, "online") for number in range(first, first + episodes)]
        coming.append(iter([segment for episode in mine for segment in episode]))
    ingest = Ingest(ledger, store)
    ingest.open()
    sealer = MaintenanceThread(store, every_s=1.0)
    sealer.start()
    outbox.send("ready")
    took: list[float] = []
    others: dict[str, int] = {}
    sent, pictures, latest, writing_s, used_s = 0, 0, 0.0, 0.0, 0.0
    every_s = SEGMENT_STEPS / CONTROL_HZ / size.robots
    while going.wait() and not stop.is_set():
        due = begun = time.perf_counter()
        busy = time.process_time()
        while going.is_set() and not stop.is_set():
            time.sleep(max(0.0, due - time.perf_counter()))
            robot = sent % size.robots
            segment = next(coming[robot])
            before = time.perf_counter()
            result = ingest.accept(names[robot], segment, time.monotonic_ns())
            now = time.perf_counter()
            took.append(now - before)
            latest = max(latest, now - due)
            if result.outcome == "stored":
                outbox.send((result.row, codec.encode(segment)))
            else:
                others[result.outcome] = others.get(result.outcome, 0) + 1
            pictures += sum(len(image) for frames in segment.frames.values() for image in frames.encoded)
            sent += 1
            due += every_s
        writing_s += time.perf_counter() - begun
        used_s += time.process_time() - busy
    sealer.stop()
    store.close()
    ledger.close()
    p50, p99 = (np.quantile(took, [0.5, 0.99]) * 1e3).tolist()
    outbox.send(
        WrittenLoad(sent, int(writing_s / every_s), pictures, used_s / writing_s, (p50, p99), latest * 1e3, others)
    )


class PicturePainter:
    """Episodes that say in every part to whom it belongs."""

    def __init__(self) -> None:
        scene = Scene(np.random.default_rng(0), SCALE.size)
        self._pictures = [scene.picture(number) for number in range(SCALE.frames)]

    def episode(self, number: int, robot: str, source: str) -> tuple[Segment, ...]:
        """The segments of episode `number`, which is in states, actions and pictures, with tick or frame."""
        state = np.zeros((SCALE.episode_steps, STATES), np.float32)
        actions = np.zeros((SCALE.episode_steps, ACTIONS), np.float32)
        for array in (state, actions):
            array[:, 0], array[:, 1] = number, np.arange(SCALE.episode_steps)
        encoded = tuple(
            tuple(
                encode_jpeg(paint_numbers(picture, number, frame * len(CAMERAS) + camera), JPEG_QUALITY)
                for frame, picture in enumerate(self._pictures)
            )
            for camera in range(len(CAMERAS))
        )
        found = segments_of(SCALE, number, state, actions, encoded, robot)
        return tuple(_as_source(segment, source) for segment in found)


def _as_source(segment: Segment, source: str) -> Segment:
    if source == "demonstration":
        return segment
    actor = np.full(segment.steps, ACTORS.index("policy"), np.uint8)
    episode = msgspec.structs.replace(segment.episode, source=source)
    return msgspec.structs.replace(segment, episode=episode, actor=actor, version=np.ones(segment.steps, np.int32))


def paint_numbers(picture: np.ndarray, first: int, second: int) -> np.ndarray:
    """A copy of uint8[h, w, 3] with two numbers of 16 bits as squares along its upper edge."""
    found = picture.copy()
    for row, number in enumerate((first, second)):
        bits = number >> np.arange(_BITS) & 1
        squares = np.repeat(bits * 255, _CELL).astype(np.uint8)
        found[row * _CELL : (row + 1) * _CELL, : _BITS * _CELL] = squares[:, None]
    return found


def read_numbers(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64[b] and int64[b]: what `paint_numbers` painted into uint8[b, h, w, 3]."""
    weights = 1 << np.arange(_BITS)
    middle = slice(_CELL // 2, _BITS * _CELL, _CELL)
    first, second = ((pictures[:, row * _CELL + _CELL // 2, middle, 1] > 127) @ weights for row in range(2))
    return first, second


if __name__ == "__main__":
    sys.exit(run("buffer.load", measure))
