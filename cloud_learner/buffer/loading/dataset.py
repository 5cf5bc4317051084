"""The trainer's view of the buffer: an endless iterator of batches, the same ones whatever the number of threads.

Batches are planned `lead` ahead, in the thread that asks for them, so that what they need is loaded in time; what
`refresh` finds therefore shows up `lead` batches later. Loading happens in `workers` threads, and up to `prefetch`
batches are gathered in another before they are asked for: both change when work is done, never what a batch holds.

Where not all fits in the cache and loading is what the trainer waits for, each step is drawn more often while it is in
memory: `echo` doubles, up to `max_echo`, and halves again when there is no more waiting. Only this follows the clock.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.batch_builder import AwaitedSegments, BatchBuilder
from cloud_learner.buffer.loading.cache import FrameCache
from cloud_learner.buffer.loading.config import DatasetConfig, DatasetState, DatasetStats, PendingBatch
from cloud_learner.buffer.loading.decode import FreshSegments
from cloud_learner.buffer.loading.labels import OpenVerdicts, open_labels, read_labels
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.loader import DRAW, LoadPlan, LoadPlanner, SegmentLoader
from cloud_learner.buffer.loading.normalization import read_examples
from cloud_learner.buffer.loading.windows import Batch
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.sampler import BatchPlan, Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.store.store import ReadResult, SegmentStore
from policies.interface.policy import NormalizationData
from wire.errors import ConfigError, CorruptDataError, InvalidDataError, StorageError
from wire.messages.gateway import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_PLANNED_SHARE = 0.95
"""of the cache that is planned with; the rest is for what is being loaded ahead of its turn"""
_EMPTY_BATCHES = 100
_ECHO_S = 5.0
"""between looks at what the trainer waits for"""
_WAITS, _WAITS_NOT = 0.5, 0.05
"""parts of the time spent waiting above and below which echo changes"""


class ReplayDataset:
    """Batches as `windows` documents. The arrays of a batch may be overwritten by the next call of `next`.

    Not for several threads at once, except `submit`.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: SegmentStore,
        spec: RobotSpec,
        config: DatasetConfig,
        sampler: type[Sampler] = Sampler,
        verdicts: OpenVerdicts | None = None,
    ) -> None:
        """Call `refresh` or `restore` first. Raises `ConfigError` for what cannot work."""
        if config.rolled and len(config.rolled) != spec.state_dim:
            raise ConfigError(
                f"dataset: rolled names {len(config.rolled)} state dimensions, robot '{spec.embodiment}' has "
                f"{spec.state_dim}; use the `rolled` of its motion."
            )
        self.config = config
        self.universe = SegmentIndex(tuple(config.tasks), config.validation, config.held_out, config.until_row)
        self._ledger, self._store, self._spec = ledger, store, spec
        self._layout = Layout(spec, config)
        self._frames = FrameCache(self._layout.shapes, config.cache_bytes)
        self._fresh = FreshSegments(config.fresh_bytes)
        self._planner = LoadPlanner(self.universe, self._layout)
        self.sampler = sampler(
            self.universe, config.target, self._cost, config.cache_bytes, config.batch, config.seed, config.echo
        )
        self._index_labels = open_labels(ledger, self.universe, config.target.label, verdicts)
        self._generation, self._changed = ledger.generation(), False
        """what the index follows, and whether it changed in a way that the sampler does not know of"""
        self._version = 0
        """newest policy version that the sampler knows"""
        self._loader = SegmentLoader(self._frames, self._read, self._layout, config.workers)
        self._builder = BatchBuilder(self._frames, self._loader, self._layout)
        self._awaited = AwaitedSegments(ledger, self._builder, self._planner)
        self._closing = contextlib.ExitStack()
        self._pending: deque[LoadPlan] = deque()
        """planned and not delivered"""
        self._left_over: np.ndarray = np.zeros(0, np.int64)
        """in memory for what was pending at the last stop: leaves with the next plan"""
        self._drawn: set[int] = set()
        self._batches = self._sampled = self._recorded = 0
        """batches; steps that were drawn, and that were recorded"""
        self._counted_from = (0, 0)
        """what `_sampled` and `_recorded` were when `ahead_of_data` began to count"""
        self._labelled = 0
        """newest revision of the steps' labels that was looked at"""
        self._looked_s = time.perf_counter()
        self._closed = False

    # --- what is there --------------------------------------------------------------------------------------------

    def refresh(self, limit: int | None = None) -> int:
        """Take in up to `limit` segments that were committed since the last call; how many were looked at.

        And forget what was pruned or found damaged. Raises `StorageError` if the ledger cannot be read and
        `ConfigError` if the cache is too small for what came: where there was something before, `next` goes on with
        that, and what came is left out of this dataset for good.
        """
        self._look_for_gone()
        index = self._ledger.index(self.universe.watermark, self._spec.data_hash, limit)
        added = self.universe.extend(index)
        self._changed |= len(added) > 0
        self._recorded += int(self.universe.steps[added].sum())
        self._planner.note_added(added)
        self._awaited.poll()
        if self.config.labels:
            rows, self._labelled = self._ledger.labelled_since(self._labelled, self.config.labels)
            self._planner.note_labelled(rows)
        self._changed |= self._index_labels.refresh()
        before, self._version = self._version, self._newest_version()
        if self._changed or self._version != before:
            # the sampler itself knows what it has to make up for
            self._changed = False
            try:
                self.sampler.refresh(self._version)
            except ConfigError:
                self._leave_out(added)
                raise
        return len(index.row)

    def submit(self, row: int, segment: Segment) -> None:
        """A segment that was just committed as ledger row `row`: it need not be read when it is needed soon."""
        if segment.episode.task not in self.config.tasks:
            return
        # a robot may have other limits; what cannot be told now is read from the store, which says why
        with contextlib.suppress(InvalidDataError, StorageError):
            if self._store.spec(segment.episode.spec_hash).data_hash == self._spec.data_hash:
                self._fresh.add(row, segment)

    def pop_wanted_pictures(self) -> tuple[str, ...]:
        """Ids of segments of which the target wants pictures that a relay holds back: ask for them now."""
        return self._awaited.pop_wanted()

    @property
    def newest_row(self) -> int:
        """Ledger row of the newest segment looked at."""
        return self.universe.watermark

    @property
    def eligible_steps(self) -> int:
        """Steps at which a window may begin, base data aside."""
        return self.sampler.stats.eligible_steps

    @property
    def ahead_of_data(self) -> bool:
        """Whether as many steps were drawn as `samples_per_insert` allows for what was recorded: of both, what came
        since `count_from_now`."""
        most, (sampled, recorded) = self.config.samples_per_insert, self._counted_from
        return bool(most) and self._sampled - sampled >= most * (self._recorded - recorded)

    def count_from_now(self) -> None:
        """Begin a count for `ahead_of_data`: what was drawn and recorded before has nothing to do with it."""
        self._counted_from = self._sampled, self._recorded

    def finished(self, source: str) -> int:
        """Episodes of that source, 'online' or 'demonstration', that are committed from their first to last segment;
        base data aside."""
        base = [number for number, task in enumerate(self.config.tasks) if task in self.config.target.mix.base]
        return self.universe.finished(source == "demonstration", base)

    def examples(self, steps: int = 100_000) -> NormalizationData:
        """States and chunks to fit a normalisation to: `normalization.read_examples`, whose errors it raises."""
        startable = self._planner.startable(np.arange(len(self.universe)))
        startable[self.universe.left_out] = 0
        return read_examples(self.universe.row, startable, self._store.read, self._layout, self.config.horizon, steps)

    # --- batches --------------------------------------------------------------------------------------------------

    def next(self) -> Batch:
        """The next batch.

        Raises `InvalidDataError` while there is no step to learn from, `StorageError` while the store cannot be read
        (ask again then), and `ConfigError` if the cache is too small.
        """
        if self._closed:
            raise InvalidDataError("a dataset that was closed has no next batch.")
        self._adapt_echo()
        for _ in range(_EMPTY_BATCHES):
            while len(self._pending) < self.config.lead:
                self._put(self._planner.plan(self._next_plan()))
            batch = self._builder.take()
            self._pending.popleft()
            if batch is not None:
                self._batches += 1
                self._sampled += self.config.batch * self.config.ticks_per_frame
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
        self.sampler.note(task, online, loss)

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
    def stats(self) -> DatasetStats:
        return DatasetStats(
            **msgspec.structs.asdict(self._builder.counts),
            batches=self._batches,
            segments=len(self._builder.steps),
            bytes=self._frames.frame_bytes + self._builder.steps.bytes,
            newest_row=self.newest_row,
            echo=self.echo,
            from_gateway=self._fresh.given,
            rollout_steps=self.sampler.stats.rollout_steps,
            stale_steps=self.sampler.stats.stale_steps,
        )

    @property
    def echo(self) -> float:
        """Draws of a step now, on average, while it is in memory; 1 where all fits."""
        return self.sampler.echo if self.sampler.stats.sweeping_strata else 1.0

    # --- going on after a stop ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able: what `restore` needs to go on with the batch after the one delivered last."""
        pending = tuple(
            PendingBatch(plan.number, plan.watermark, plan.newest_version, plan.draws.tobytes())
            for plan in self._pending
        )
        counts = self._batches, self._sampled, self._recorded, tuple(sorted(self._drawn)), self._counted_from
        state = DatasetState(self.config.settings(), self.sampler.state(), self.universe.watermark, pending, *counts)
        return msgspec.to_builtins(state)

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on where `state` was taken, on a new dataset with the same config, instead of its first `refresh`.

        The same batches follow as would have there, however many ranks share them now; False if others do, since
        segments were pruned or damaged, or labels that the target goes by changed. Raises `InvalidDataError` for a
        state that does not fit, `StorageError` if the ledger cannot be read.
        """
        try:
            saved = msgspec.convert(dict(state), DatasetState)
            draws = [np.frombuffer(pending.draws, DRAW) for pending in saved.pending]
        except (msgspec.ValidationError, ValueError) as error:
            raise InvalidDataError(f"dataset: the state cannot be read ({error}); begin anew without it.") from error
        ours = self.config.settings()
        for name in sorted({**ours, **saved.settings}):
            if saved.settings.get(name) != ours.get(name):
                raise InvalidDataError(
                    f"dataset: the state was taken with {name} {saved.settings.get(name)}, this one has "
                    f"{ours.get(name)}."
                )
        if len(self.universe):
            raise InvalidDataError("dataset: restore a state before the first refresh, or into a new dataset.")
        self._generation = self._ledger.generation()
        self.universe.extend(self._ledger.index(0, self._spec.data_hash), saved.watermark)
        self._index_labels.refresh()
        self._batches, self._sampled, self._drawn = saved.batches, saved.sampled, set(saved.drawn)
        self._recorded = max(saved.recorded, int(self.universe.steps.sum()))
        self._counted_from = saved.counted_from
        try:
            same = self.sampler.restore(saved.sampler)
        except (InvalidDataError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            # the segments are known by now: the sampler has to hear of them, for nothing else will tell it
            self.sampler.refresh(self._newest_version())
            raise InvalidDataError(f"dataset: the state of the sampler cannot be used: {error}") from error
        numbers = [self.universe.find(each["segment"]) for each in draws]
        for position, (pending, each) in enumerate(zip(saved.pending, draws, strict=True)):
            mine = np.unique(numbers[position][numbers[position] >= 0])
            same = same and len(mine) == len(np.unique(each["segment"]))
            held = self._planner.loaded
            drop, load = np.setdiff1d(held, np.concatenate(numbers[position:])), np.setdiff1d(mine, held)
            # each was made when more was known than for the one before
            self._planner.note_all()
            plan = BatchPlan(pending.number, drop, load, mine, mine, np.zeros(0), pending.newest_version)
            self._put(self._planner.plan(plan, pending.watermark, each))
        self._planner.note_all()
        self._left_over = self._planner.loaded
        return same

    def close(self) -> None:
        """End threads. Batches delivered stay as they are."""
        if self._closed:
            return
        self._closed = True
        # whoever waits for a segment is woken first
        self._loader.close()
        self._builder.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- within ---------------------------------------------------------------------------------------------------

    def _next_plan(self) -> BatchPlan:
        plan = self.sampler.next()
        if len(self._left_over):
            plan = msgspec.structs.replace(plan, drop=np.union1d(plan.drop, self._left_over))
            self._left_over = self._left_over[:0]
        return plan

    def _put(self, plan: LoadPlan) -> None:
        self._pending.append(plan)
        self._builder.put(plan)

    def _adapt_echo(self) -> None:
        config, passed_s = self.config, time.perf_counter() - self._looked_s
        if passed_s < _ECHO_S:
            return
        waited_s, self._builder.waited_s, self._looked_s = self._builder.waited_s, 0.0, time.perf_counter()
        if not self.sampler.stats.sweeping_strata:
            return
        before, share = self.sampler.echo, waited_s / passed_s
        if share > _WAITS:
            self.sampler.echo = max(before, min(config.max_echo, before * 2))
        elif share < _WAITS_NOT:
            self.sampler.echo = max(config.echo, before / 2)
        if self.sampler.echo != before:
            log.info("loading takes %.0f%% of the time: echo is %g from now on.", share * 100, self.sampler.echo)

    def _cost(self, segments: np.ndarray) -> np.ndarray:
        """int64[k] bytes of `cache_bytes` that the sampler reckons with for each of the int64[k] segments."""
        return np.ceil(self._planner.cost(segments) / _PLANNED_SHARE).astype(np.int64)

    def _look_for_gone(self) -> None:
        generation = self._ledger.generation()
        if generation == self._generation:
            return
        gone, self._generation = self.universe.forget(*self._ledger.gone_since(self._generation)), generation
        if len(gone):
            self._changed = True
            self._planner.note_all()
            log.info("%d segments left the buffer.", len(gone))

    def _leave_out(self, added: np.ndarray) -> None:
        """Go on without segments that the cache is too small for, if there are others."""
        if 0 < len(added) < len(self.universe):
            self.universe.forget((), self.universe.row[added])
            self._planner.note_all()
            self.sampler.refresh(self._version)

    def _read(self, rows: Sequence[int]) -> ReadResult:
        """What the gateway gave, the rest from the store, and the labels of all. For any thread."""
        fresh, names = self._fresh.get(rows), self.config.labels
        others = [row for row in rows if row not in fresh]
        found = self._store.read(others) if others else ReadResult({}, {})
        labels = read_labels(self._ledger, rows, names)
        return ReadResult({**found.segments, **fresh}, found.damaged, found.elsewhere, labels)

    def _newest_version(self) -> int:
        return newest.version.number if (newest := self._ledger.newest_version()) else 0


def open_dataset(place: BufferLocation, spec: RobotSpec, config: DatasetConfig) -> ReplayDataset:
    """A dataset on the buffer at `place`. Raises `StorageError` if there is none."""
    ledger, store = place.open_reader()
    with contextlib.ExitStack() as undo:
        undo.callback(ledger.close)
        undo.callback(store.close)
        dataset = ReplayDataset(ledger, store, spec, config)
        dataset._closing = undo.pop_all()
    return dataset
