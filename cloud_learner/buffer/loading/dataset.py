"""The trainer's view of the buffer: an endless iterator of batches, the same ones whatever the number of workers.

Plans are made `lead` batches ahead, in the thread that asks for batches, so that what they need is loaded in time; what
`refresh` finds therefore shows up `lead` batches later. Loading happens in `workers` processes, and up to `prefetch`
batches are gathered in a thread before they are asked for: both change when work is done, never what a batch holds.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading import resume
from cloud_learner.buffer.loading.ahead import Ahead, Inline, Maker
from cloud_learner.buffer.loading.batch_builder import BatchBuilder
from cloud_learner.buffer.loading.config import DatasetConfig, FeedStats
from cloud_learner.buffer.loading.decoding.block import ReadSegments
from cloud_learner.buffer.loading.decoding.loader import FreshSegments, InlineLoader, Loader
from cloud_learner.buffer.loading.decoding.orders import LoadOrders, Order
from cloud_learner.buffer.loading.decoding.processes import ProcessLoader
from cloud_learner.buffer.loading.frame_cache import FrameCache
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.step_cache import StepCache
from cloud_learner.buffer.loading.windows import Batch, Shape
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.plan import PlannerStats, SamplingPlan, SamplingPlanner
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from policies.interface.policy import NormalizationData
from wire.errors import ConfigError, CorruptDataError, InvalidDataError
from wire.messages.gateway import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_PLANNED_SHARE = 0.95
"""of the cache; the rest is for what is being loaded ahead of its turn"""
_EMPTY_BATCHES = 100
_SEGMENTS_AT_ONCE = 256


class Planning(Protocol):
    """The part of a `SamplingPlanner` that a feed needs."""

    def refresh(self, newest_version: int) -> None: ...
    def rebuild(self, newest_version: int) -> None: ...
    def next(self) -> SamplingPlan: ...
    def note(self, task: str, online: bool, loss: float) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> bool: ...
    @property
    def stats(self) -> PlannerStats: ...


class Reader(Protocol):
    """The part of a `SegmentStore` that a feed needs."""

    def read(self, rows: Any) -> ReadSegments: ...


class ReplayDataset:
    """Batches as `windows` documents. The arrays of a batch may be overwritten by the next call of `next`.

    Not for several threads at once, except `offer`.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: Reader,
        spec: RobotSpec,
        config: DatasetConfig,
        place: BufferLocation | None = None,
        planner: type[SamplingPlanner] = SamplingPlanner,
    ) -> None:
        """`place`: where loading processes find the buffer; needed for `workers`. Call `refresh` or `restore` first.

        Raises `ConfigError` for what cannot work.
        """
        if config.workers and place is None:
            raise ConfigError("feed: loading processes need to know the place of the buffer; use open_dataset.")
        if config.rolled and len(config.rolled) != spec.state_dim:
            raise ConfigError(
                f"feed: rolled names {len(config.rolled)} state dimensions, robot '{spec.embodiment}' has "
                f"{spec.state_dim}; use the `rolled` of its motion."
            )
        self.config = config
        self.universe = SegmentIndex(tuple(config.tasks), config.rank, config.world)
        self._ledger, self._store, self._spec = ledger, store, spec
        target = config.target
        offsets = config.max_offset, config.offset_share, config.rolled, config.later, config.history
        shape = Shape(config.horizon, config.ticks_ahead, config.ticks_per_frame, *offsets)
        self._layout = Layout.of(spec, shape.lookahead, target.starts, target.continues, config.history)
        self._pool = StepCache(self._layout)
        self._arena = FrameCache(self._layout.shapes, config.cache_bytes)
        self._fresh = FreshSegments(config.fresh_bytes)
        self._orders = LoadOrders(self.universe, self._layout, self._pool.bytes_of)
        self.planner: Planning = planner(
            self.universe,
            target,
            self._orders.cost,
            int(config.cache_bytes * _PLANNED_SHARE),
            config.batch,
            config.seed,
            config.echo,
        )
        self._generation = ledger.generation()
        self._version = 0
        """newest policy version that the planner knows"""
        self._loader: Loader
        if config.workers and place is not None:
            self._loader = ProcessLoader(self._arena, place, self._layout, config.workers, self._fresh)
        else:
            self._loader = InlineLoader(self._arena, store.read, self._layout, self._fresh)
        self._assembly = BatchBuilder(
            self._pool, self._arena, self._loader, self._layout, shape, tuple(config.tasks.values()), config.seed
        )
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            # the loader may have processes
            undo.callback(self._arena.close)
            undo.callback(self._loader.close)
            self._maker: Maker = (
                Ahead(self._assembly, config.prefetch, config.pin)
                if config.prefetch
                else Inline(self._assembly, config.pin)
            )
            undo.pop_all()
        self._pending: deque[Order] = deque()
        """planned and not delivered"""
        self._drawn: set[int] = set()
        self._batches = 0
        self._closed = False

    # --- what is there --------------------------------------------------------------------------------------------

    def refresh(self, limit: int | None = None) -> int:
        """Take in up to `limit` segments that were committed since the last call; how many were looked at.

        After a prune or when damage was found, everything is looked at again. Raises `StorageError` if the ledger
        cannot be read and `ConfigError` if the cache is too small for what came.
        """
        generation = self._ledger.generation()
        if generation != self._generation:
            return self._rebuild(generation)
        index = self._ledger.index(self.universe.watermark, self._spec.hash, limit)
        added, version = self.universe.extend(index), self._newest_version()
        self._orders.note_added(added)
        self._look_elsewhere()
        if len(added) or version != self._version:
            self.planner.refresh(version)
        self._version = version
        return len(index.row)

    def submit(self, row: int, segment: Segment) -> None:
        """A segment that was just committed as ledger row `row`: it need not be read when it is needed soon."""
        if segment.episode.spec_hash == self._spec.hash and segment.episode.task in self.config.tasks:
            self._fresh.add(row, segment)

    @property
    def newest_row(self) -> int:
        """Ledger row of the newest segment looked at."""
        return self.universe.watermark

    @property
    def eligible_steps(self) -> int:
        """Steps at which a window may begin."""
        return self.planner.stats.eligible_steps

    @property
    def segments(self) -> int:
        """Segments in memory."""
        return len(self._pool)

    def finished(self, source: str) -> int:
        """Episodes of that source, 'online' or 'demonstration', that are committed from their first to last segment."""
        universe = self.universe
        there = ~universe.gone & (universe.demonstration == (source == "demonstration"))
        segments = np.bincount(universe.episode[there], minlength=len(universe.episode_numbers))
        last = there & universe.last
        return int((segments[universe.episode[last]] == universe.index[last] + 1).sum())

    def examples(self, steps: int = 100_000) -> NormalizationData:
        """States at which windows may begin and chunks of their actions, of all such steps or about `steps` of them.

        They are read from whole segments spread evenly over what is there; chunks overlap by half. Raises
        `StorageError`.
        """
        startable = self._orders.startable(np.arange(len(self.universe)))
        able = np.flatnonzero((startable > 0) & ~self.universe.gone)
        share = min(1.0, steps / max(1, int(startable[able].sum())))
        chosen = (
            able[np.unique(np.linspace(0, len(able) - 1, max(1, round(share * len(able)))).astype(int))]
            if len(able)
            else able
        )
        horizon = self.config.horizon
        states: list[np.ndarray] = [np.zeros((0, self._spec.state_dim), np.float32)]
        chunks: list[np.ndarray] = [np.zeros((0, horizon, self._spec.action_dim), np.float32)]
        for first in range(0, len(chosen), _SEGMENTS_AT_ONCE):
            rows = self.universe.row[chosen[first : first + _SEGMENTS_AT_ONCE]].tolist()
            for segment in self._store.read(rows).segments.values():
                table = np.array(self._layout.starts[segment.episode.source == "demonstration"])
                imitable = table[segment.actor]
                states.append(segment.state[imitable])
                if len(imitable) < horizon:
                    continue
                whole = np.flatnonzero(sliding_window_view(imitable, horizon).all(1))
                windows = sliding_window_view(segment.executed, horizon, 0).transpose(0, 2, 1)
                chunks.append(windows[whole[:: max(1, horizon // 2)]].astype(np.float32))
        return NormalizationData(np.concatenate(states), np.concatenate(chunks))

    # --- batches --------------------------------------------------------------------------------------------------

    def next(self) -> Batch:
        """The next batch.

        Raises `InvalidDataError` while there is no step to learn from, `StorageError` while the store cannot be read
        (ask again then), and `ConfigError` if the cache is too small.
        """
        if self._closed:
            raise InvalidDataError("a feed that was closed has no next batch.")
        for _ in range(_EMPTY_BATCHES):
            while len(self._pending) < self.config.lead:
                self._put(self._orders.order(self.planner.next()))
            batch = self._maker.take()
            self._pending.popleft()
            if batch is not None:
                self._batches += 1
                self._drawn.update(np.unique(batch["episode"]).tolist())  # type: ignore[call-overload]
                return batch
        raise CorruptDataError(
            f"no step of {_EMPTY_BATCHES} batches in a row can be read: the log says why; check the store with "
            "`vla-fleet buffer verify`."
        )

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def note(self, task: str, online: bool, loss: float) -> None:
        """A loss on that part of the data, for an adaptive share of online data."""
        self.planner.note(task, online, loss)

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        """`note` for the parts of a delivered batch, whose samples or images had `losses`, float32[b]."""
        task, online = np.asarray(batch["task"]), np.asarray(batch["online"])
        for number, name in enumerate(self.config.tasks):
            for part in (False, True):
                here = (task == number) & (online == part)
                if here.any():
                    self.note(name, part, float(losses[here].mean()))

    def drawn_episodes(self) -> set[int]:
        """Ledger numbers of the episodes of the batches delivered since the last call."""
        drawn, self._drawn = self._drawn, set()
        return drawn

    @property
    def stats(self) -> FeedStats:
        loader = self._loader.stats
        return FeedStats(
            batches=self._batches,
            segments=len(self._pool),
            bytes=self._arena.frame_bytes + self._pool.bytes,
            newest_row=self.newest_row,
            loaded=loader.segments,
            from_gateway=loader.from_gateway,
            damaged=loader.damaged,
            unreadable_frames=loader.unreadable_frames,
            replaced=self._assembly.replaced,
            restarts=loader.restarts,
        )

    # --- going on after a stop ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able: what `restore` needs to go on with the batch after the one delivered last."""
        return resume.pack(
            self.config, self.planner.state(), self.universe.watermark, iter(self._pending), self._batches, self._drawn
        )

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on where `state` was taken, on a new feed with the same config, instead of its first `refresh`.

        The same batches follow as would have there; False if segments were pruned or damaged meanwhile, so that others
        do. Raises `InvalidDataError` for a state that does not fit, `StorageError` if the ledger cannot be read.
        """
        saved = resume.unpack(state, self.config)
        if len(self.universe):
            raise InvalidDataError("feed: restore a state before the first refresh, or into a new feed.")
        self._generation = self._ledger.generation()
        index = self._ledger.index(0, self._spec.hash)
        self.universe.extend(resume.until(index, saved.watermark))
        try:
            same = self.planner.restore(saved.planner)
        except (InvalidDataError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            # the segments are known by now: the planner has to hear of them, for nothing else will tell it
            self._orders.note_all()
            self.planner.rebuild(self._newest_version())
            raise InvalidDataError(f"feed: the state of the plan cannot be used: {error}") from error
        for planned, plan, whole in resume.plans(saved.pending, self.universe):
            # each was made when more was known than for the one before
            self._orders.note_all()
            order = self._orders.order(plan, planned.watermark)
            self._put(msgspec.structs.replace(order, draws=planned.draws, watermark=planned.watermark))
            same = same and whole
        self._orders.note_all()
        self._batches, self._drawn = saved.batches, saved.drawn
        return same

    def close(self) -> None:
        """End threads and processes. Batches delivered stay as they are."""
        if self._closed:
            return
        self._closed = True
        # whoever waits for a segment is woken first
        self._loader.close()
        self._maker.close()
        self._arena.close()
        self._closing.close()

    def __enter__(self) -> ReplayDataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- within ---------------------------------------------------------------------------------------------------

    def _put(self, order: Order) -> None:
        for job in order.jobs:
            self._loader.submit(job)
        self._pending.append(order)
        self._maker.put(order)

    def _rebuild(self, generation: int) -> int:
        before = self.universe.watermark
        index = self._ledger.index(0, self._spec.hash)
        gone = self.universe.rebuild(index)
        self._generation = generation
        log.info("%d segments left the buffer; sampling begins anew.", len(gone))
        self._orders.note_all()
        self._version = self._newest_version()
        self.planner.rebuild(self._version)
        return int((index.row > before).sum())

    def _look_elsewhere(self) -> None:
        waiting = list(self._assembly.elsewhere)
        if waiting:
            sealed = [row for row, place in self._ledger.places(waiting).items() if place.journal is None]
            self._assembly.elsewhere.difference_update(sealed)
            self._orders.note_readable(sealed)

    def _newest_version(self) -> int:
        newest = self._ledger.newest_version()
        return newest.version.number if newest else 0


def open_dataset(place: BufferLocation, spec: RobotSpec, config: DatasetConfig) -> ReplayDataset:
    """A feed from the buffer at `place`. Raises `StorageError` if there is none."""
    ledger, store = place.open_reader()
    with contextlib.ExitStack() as undo:
        undo.callback(ledger.close)
        undo.callback(store.close)
        feed = ReplayDataset(ledger, store, spec, config, place)
        feed._closing = undo.pop_all()
    return feed
