"""What does a buffer that is durable and larger than memory cost, against arrays in memory and other buffers?

In one run: samples per second with less and less memory, beside the peers; the time to append a segment while the
buffer grows; the time to open it. All contenders take turns in rounds, because machines are shared.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer.data import HORIZON, Scale
from benchmarks.buffer.growth import At, Growth, flatness, measure_growth, rows_of
from benchmarks.buffer.ours import Ours, cache_for_all, feed_config, fill, smallest_cache
from benchmarks.buffer.peers import Contender, Flat, LeRobot, TorchRL, versions
from benchmarks.common.cpu import Others, cpu_seconds
from benchmarks.common.table import Goal, Result, require, run
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.location import BufferLocation

ECHO = 8.0
RAM = "array in RAM"
KINDS = {4: "cameras 20 Hz", 1: "a frame per step"}
"""by control steps per frame"""


@dataclass(frozen=True, slots=True)
class BufferSize:
    """How much of everything."""

    episodes: int = 160
    frames: int = 128
    """of each camera in each episode"""
    batch: int = 256
    rounds: int = 5
    turn_s: float = 2.0
    warm_s: float = 45.0
    torchrl_bytes: int = 2 << 30
    lerobot_steps: int = 1024
    workers: int = 2
    growth: Growth = field(default_factory=Growth)
    peers: bool = True


FULL = BufferSize()
QUICK = BufferSize(
    episodes=4,
    frames=24,
    batch=32,
    rounds=1,
    turn_s=0.1,
    warm_s=0.2,
    workers=0,
    growth=Growth(sizes=(5, 10), rounds=1, appends=5, openings=1),
    peers=False,
)


def measure(quick: bool) -> Result:
    """Both kinds of data, then growth."""
    size = QUICK if quick else FULL
    if size.peers:
        require("tensordict", "torchrl", extra="peers")
        require("lerobot", extra="lerobot")
    logging.basicConfig(level=logging.WARNING)
    others = Others()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for steps_per_frame in KINDS:
        with _folder() as folder:
            found = _sampling(folder, size, Scale(size.episodes, size.frames, steps_per_frame))
        rows += found
        goals += _sampling_goals(KINDS[steps_per_frame], found)
    with _folder() as folder:
        grown = measure_growth(folder, size.growth)
    return Result(
        "The buffer: sampling speed, bytes, appending and opening",
        rows,
        goals + _growth_goals(grown),
        [*_notes(size, grown), others.note()],
        {"Appending and opening as the buffer grows": rows_of(grown)},
    )


# --- sampling ---------------------------------------------------------------------------------------------------------


def _sampling(folder: Path, size: BufferSize, scale: Scale) -> list[dict[str, Any]]:
    """One row for each contender."""
    place = BufferLocation(folder / "ours")
    _say(f"{KINDS[scale.steps_per_frame]}: {scale.steps:,} steps, {scale.decoded_bytes / 1e9:.2f} GB of frames")
    raw = fill(place, scale)
    spec = scale.spec()

    def config(cache: int, echo: float = ECHO) -> DatasetConfig:
        ahead = {"workers": size.workers} if size.workers else {"prefetch": 0}
        return feed_config(cache, size.batch, echo, **ahead)

    least = smallest_cache(place, spec, config(0))
    caches: tuple[tuple[str, int, float], ...] = (
        ("1.0", cache_for_all(place, spec, scale, config(0)), ECHO),
        ("0.5", scale.decoded_bytes // 2, ECHO),
        ("0.1", max(least, scale.decoded_bytes // 10), ECHO),
        ("0", least, ECHO),
        ("0.1, each decoded step drawn once", max(least, scale.decoded_bytes // 10), 1.0),
    )
    makers: list[Callable[[], Contender]] = [
        lambda: Flat.in_memory(raw, size.batch),
        lambda: Flat.mapped(raw, size.batch, folder / "mapped"),
    ]
    if size.peers:
        rows_fit = size.torchrl_bytes // (2 * scale.size**2 * 3)
        makers += [
            lambda: TorchRL(raw, size.batch, folder / "torchrl", rows_fit),
            lambda: LeRobot(raw, size.batch, folder / "lerobot", size.lerobot_steps // scale.episode_steps),
        ]
    with ExitStack() as open_now:
        contenders: list[Contender] = []
        for name, cache, echo in caches:
            ours = open_now.enter_context(closing(Ours(f"ours, cache {name}", place, spec, config(cache, echo))))
            ours.warm_up(size.warm_s)
            _say(f"{ours.name}: warm with {ours.memory_bytes / 1e6:.0f} MB")
            contenders.append(ours)
        for make_one in makers:
            contenders.append(open_now.enter_context(closing(make_one())))
            _say(f"{contenders[-1].name}: {contenders[-1].stored_steps:,} steps stored")
        before = [one.drawn_and_loaded() if isinstance(one, Ours) else (0, 0.0) for one in contenders]
        speeds = _rounds(contenders, size)
        ram = next(speed for one, speed in zip(contenders, speeds, strict=True) if one.name == RAM)
        return [
            _row(one, speed, ram, scale, start) for one, speed, start in zip(contenders, speeds, before, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one turn."""

    per_s: float
    per_cpu_s: float
    """samples per second of processor time, of all processes: other work on the machine hardly changes it"""


def _rounds(contenders: list[Contender], size: BufferSize) -> list[list[Speed]]:
    """Speeds by contender and round."""
    speeds: list[list[Speed]] = [[] for _ in contenders]
    for number in range(size.rounds):
        for one, found in zip(contenders, speeds, strict=True):
            found.append(_turn(one, size))
            # what works ahead fills its queue again, not in the turn of the next one
            time.sleep(min(10.0, one.ahead * size.batch / found[-1].per_s))
        _say(f"round {number + 1}: " + ", ".join(f"{speed[-1].per_s:,.0f}" for speed in speeds))
    return speeds


def _turn(one: Contender, size: BufferSize) -> Speed:
    """One contender now."""
    for _ in range(one.ahead):
        one.batch()
    batches, busy, before = 0, cpu_seconds(), time.perf_counter()
    while (took := time.perf_counter() - before) < size.turn_s or batches < max(2, one.ahead // 4):
        one.batch()
        batches += 1
    return Speed(batches * size.batch / took, batches * size.batch / max(1e-3, cpu_seconds() - busy))


def _row(
    one: Contender, speeds: list[Speed], ram: list[Speed], scale: Scale, before: tuple[int, float]
) -> dict[str, Any]:
    stored = one.stored_bytes / one.stored_steps
    speed = [found.per_s for found in speeds]
    row: dict[str, Any] = {
        "data": KINDS[scale.steps_per_frame],
        "who": one.name,
        "samples/s": round(float(np.median(speed))),
        "lowest to highest": f"{min(speed):,.0f} to {max(speed):,.0f}",
        # of the same round: both had the machine as it was then
        "of array in RAM": float(np.median([mine / theirs.per_s for mine, theirs in zip(speed, ram, strict=True)])),
        "samples per CPU s": round(float(np.median([found.per_cpu_s for found in speeds]))),
        "cache MB": None,
        "draws per decoded step": None,
        "bytes per step on disk": round(stored) or None,
        "of raw frames twice": stored / _raw_twice(scale) or None,
    }
    if isinstance(one, Ours):
        drawn, loaded = (now - then for now, then in zip(one.drawn_and_loaded(), before, strict=True))
        row["cache MB"] = round(one.cache_bytes / 1e6)
        row["draws per decoded step"] = drawn / loaded if loaded else None
    return row


def _raw_twice(scale: Scale) -> int:
    """Bytes of the frames of observation and next observation."""
    return 2 * 2 * scale.size**2 * 3


def _sampling_goals(kind: str, rows: list[dict[str, Any]]) -> list[Goal]:
    by_name = {row["who"]: row for row in rows}
    share = by_name["ours, cache 1.0"]["of array in RAM"]
    tenth = by_name["ours, cache 0.1"]["samples/s"]
    stored = by_name["ours, cache 1.0"]["of raw frames twice"]
    return [
        Goal(f"{kind}: all in memory, of the array in RAM", share, "at least 0.5", share >= 0.5),
        Goal(f"{kind}: samples/s at cache ratio 0.1", float(tenth), "at least 20000", tenth >= 20_000),
        Goal(f"{kind}: bytes per step, of raw frames twice", stored, "at most 0.25", stored <= 0.25),
    ]


# --- growth -----------------------------------------------------------------------------------------------------------


def _growth_goals(found: list[At]) -> list[Goal]:
    first, last = found[0].episodes, found[-1].episodes
    goals = []
    for name, quantile in (("p50", 0.5), ("p99", 0.99)):
        ratio = flatness(found, quantile)
        what = f"append {name} at {last:,} episodes, of that at {first:,}"
        goals.append(Goal(what, ratio, "at most 1.5", ratio <= 1.5))
    for name, times in (("read", found[-1].read_s), ("write", found[-1].write_s)):
        took = float(np.median(times))
        goals.append(Goal(f"open {last:,} episodes to {name}, s", took, "below 2", took < 2.0))
    return goals


def _notes(size: BufferSize, grown: list[At]) -> list[str]:
    return [
        f"A sample is a window of {HORIZON} actions with the two frames of 128x128x3 that its first step saw; batches "
        f"of {size.batch}. {size.rounds} rounds in which all take turns of {size.turn_s} s; medians. What somebody has "
        "made ready ahead is taken before the clock starts.",
        f"Data: {size.episodes} episodes of {size.frames} pictures of each camera, JPEG of quality 95 as an edge makes "
        "them, 80 control steps a second.",
        f"Ours draws each decoded step {ECHO:.0f} times on average before it leaves memory (echo); at ratio 1.0 all "
        "stays. Ratio: bytes of cache over bytes of decoded frames; 1.0 is what all takes, with the steps and what is "
        "held ready for the next; 0 is the smallest cache it accepts. "
        f"{size.workers} loading threads, {feed_config(1, 1, ECHO).prefetch} batches ahead.",
        "The array in RAM and the memmap hold each frame once and are read with the fastest of three ways to pick "
        "rows; they know neither durability, nor growth, nor where a sample came from.",
        "torchrl: one row per step with its frames and its chunk of actions, sampled ahead by threads; it gets as many "
        f"steps as fit {size.torchrl_bytes / 1e9:.1f} GB. LeRobot: its default form, video (lossy), read by a "
        f"DataLoader of 2 processes; it gets {size.lerobot_steps:,} steps. Fewer steps can only help them. "
        f"{versions()}.",
        f"Appending: a segment of 80 steps with 40 pictures, {grown[-1].segment_bytes / 1e3:.0f} kB, until it is on "
        "disk (fsync), committed and may be acknowledged. The sizes take turns. `while sealing`: a shard is made "
        "meanwhile in another thread of the same process.",
        "Opening: in a new process; to read: ledger, store, index of all segments and the first plan; to write: "
        "ledger, store, and what a crash may have left.",
    ]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as name:
        yield Path(name)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(run("buffer", measure))
