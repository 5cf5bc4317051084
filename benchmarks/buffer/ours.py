"""This project's buffer as `benchmarks.buffer` runs it: filled as a gateway fills it, read as a trainer reads it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks.buffer.data import HORIZON, TASK, Raw, Scale, make
from benchmarks.buffer.peers import folder_bytes
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.sampling.target import uniform
from wire.errors import ConfigError
from wire.messages.gateway import Segment
from wire.types import RobotSpec

ROBOT = "robot-0"
CLOCK = "benchmark"
_STEADY_BATCHES = 150
_STEADY_GROWTH = 1.02


def fill(place: BufferLocation, scale: Scale) -> Raw:
    """Put `scale` through journal and ledger, then all of it into shards; the same data flat."""
    ledger, store = place.open_writer()
    ledger.see_robot(ROBOT, scale.spec(), CLOCK, time.monotonic_ns())

    def take(segment: Segment) -> None:
        now_ns = time.monotonic_ns()
        store.append_all([(segment, now_ns)], now_ns)

    raw = make(scale, take)
    seal(store, time.monotonic_ns(), force=True)
    store.close()
    ledger.close()
    # the journal file that was open goes when the next writer begins
    for one in place.open_writer():
        one.close()
    return raw


def feed_config(cache_bytes: int, batch: int, echo: float, **more: Any) -> DatasetConfig:
    """What a trainer asks for that learns from every step."""
    return DatasetConfig(
        tasks={TASK: "open the drawer"},
        target=uniform(),
        batch=batch,
        horizon=HORIZON,
        cache_bytes=cache_bytes,
        echo=echo,
        max_echo=echo,
        **more,
    )


class Ours:
    """A dataset with loading threads and batches gathered ahead."""

    def __init__(self, name: str, place: BufferLocation, spec: RobotSpec, config: DatasetConfig) -> None:
        self.name = name
        self.stored_bytes = folder_bytes(place.data)
        self.cache_bytes = config.cache_bytes
        self.ahead = config.lead + config.prefetch
        self._batch = config.batch
        self.feed = open_dataset(place, spec, config)
        self.feed.refresh()
        universe = self.feed.universe
        self.stored_steps = int(universe.steps.sum())
        self._steps_each = self.stored_steps / max(1, len(universe))

    def warm_up(self, limit_s: float) -> None:
        """Until what lies in memory grows no more: from then on the rate is what a long training sees."""
        end = time.monotonic() + limit_s
        before = -1.0
        while (now := float(self.feed.stats.segments)) > before * _STEADY_GROWTH and time.monotonic() < end:
            before = now
            for _ in range(_STEADY_BATCHES):
                self.feed.next()

    def batch(self) -> Mapping[str, Any]:
        return self.feed.next()

    def drawn_and_loaded(self) -> tuple[int, float]:
        """Samples delivered, and steps that were loaded and decoded for them, so far."""
        stats = self.feed.stats
        return stats.batches * self._batch, stats.loaded * self._steps_each

    @property
    def memory_bytes(self) -> int:
        """in use, of the cache"""
        return self.feed.stats.bytes

    def close(self) -> None:
        self.feed.close()


def cache_for_all(place: BufferLocation, spec: RobotSpec, scale: Scale, config: DatasetConfig) -> int:
    """Bytes of cache in which everything fits: frames, steps, and what is set aside for what may come."""
    cache = scale.decoded_bytes
    while not _resident(place, spec, msgspec.structs.replace(config, cache_bytes=cache)):
        cache += scale.decoded_bytes // 20
    return cache


def smallest_cache(place: BufferLocation, spec: RobotSpec, config: DatasetConfig) -> int:
    """The least bytes of cache that a feed accepts, to within an eighth or so."""
    cache = 1 << 20
    while True:
        try:
            _resident(place, spec, msgspec.structs.replace(config, cache_bytes=cache))
            return cache
        except ConfigError:
            cache += max(cache // 8, 1 << 16)


def _resident(place: BufferLocation, spec: RobotSpec, config: DatasetConfig) -> bool:
    """Whether all may stay in memory with this cache. Raises `ConfigError` if nothing can be done with it."""
    with open_dataset(place, spec, msgspec.structs.replace(config, workers=0, prefetch=0)) as feed:
        feed.refresh()
        feed.sampler.next()
        return feed.sampler.stats.sweeping_strata == 0
