"""Datasets on a buffer in memory, with a sampler that does whatever it may."""

from __future__ import annotations

import contextlib
import logging
import re
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloud_learner.buffer.loading import dataset
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.decode import FreshSegments
from cloud_learner.buffer.sampling.sampler import BatchPlan, Sampler
from cloud_learner.buffer.sampling.shares import OnlineShare, TaskMix
from cloud_learner.buffer.sampling.target import Recent, by_actor, imitation, uniform
from tests.cloud_learner.buffer.loading.memory_buffer import (
    HOLD,
    HUMAN,
    POLICY,
    SCRIPT,
    TASKS,
    ChaosSampler,
    MemoryBuffer,
    record,
    robot,
)
from tests.cloud_learner.buffer.loading.reference import Reference
from wire.errors import ConfigError, CorruptDataError, InvalidDataError, StorageError
from wire.messages.gateway import CameraFrames

CAMERAS = {
    "none": [],
    "one": [(16, 16, 20.0)],
    "two": [(16, 16, 20.0), (16, 16, 10.0)],
    "two shapes": [(16, 16, 20.0), (8, 24, 40.0)],
}


def config(**options) -> DatasetConfig:
    defaults = {"tasks": TASKS, "target": uniform(), "batch": 8, "cache_bytes": 4_000_000, "prefetch": 0, "lead": 3}
    # an echo that follows the clock would make other batches
    defaults["max_echo"] = options.get("echo", 1.0)
    return DatasetConfig(**(defaults | options))


def copied(batch):
    return {
        k: {c: i.copy() for c, i in v.items()} if isinstance(v, dict) else list(v) if k == "instructions" else v.copy()
        for k, v in batch.items()
    }


def same(a, b) -> bool:
    if a.keys() != b.keys():
        return False
    for name in a:
        if isinstance(a[name], dict):
            if a[name].keys() != b[name].keys() or any(not np.array_equal(a[name][c], b[name][c]) for c in a[name]):
                return False
        elif name == "instructions":
            if a[name] != b[name]:
                return False
        elif not (
            a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f")
        ):
            return False
    return True


class Watched(ReplayDataset):
    """Knows what the buffer held when the plan of the last batch was made."""

    def __init__(self, buffer, settings, sampler=ChaosSampler):
        self.buffer = buffer
        self.references = {}
        self.now = None
        watched = self

        class Noting(sampler):
            def next(self):
                plan = super().next()
                u = watched.universe
                episodes = u.episode_numbers[u.episode[plan.segments]].tolist()
                ticks = (u.first_tick[plan.segments] + plan.offsets).tolist()
                watched.references[plan.number] = watched.now, list(zip(episodes, ticks, strict=True))
                return plan

        super().__init__(buffer, buffer, buffer.robot, settings, sampler=Noting)
        self.made = []
        take = self._builder.take

        def counted():
            number = self._pending[0].number
            batch = take()
            self.made.append(number)
            return batch

        self._builder.take = counted
        self.look()

    def look(self):
        """The buffer changed and is refreshed from."""
        c = self.config
        self.now = Reference(
            self.buffer,
            c.target,
            c.horizon,
            c.ticks_ahead,
            self.newest_row,
            c.max_offset,
            c.rolled,
            c.n_step,
            c.gamma,
        )

    def refresh(self, limit=None):
        found = super().refresh(limit)
        self.look()
        return found

    def check(self, batch):
        """That it is the batch that was planned; draws that cannot be read are replaced by the next that can."""
        reference, planned = self.references[self.made[-1]]
        able = [at in reference.starts for at in planned]
        drawn = []
        for i in range(len(planned)):
            episode, tick = next(
                planned[k % len(planned)] for k in range(i, 2 * len(planned)) if able[k % len(planned)]
            )
            assert batch["episode"][i] == episode
            drawn.append(tick)
            if self.config.ticks_per_frame == 1 and not self.config.max_offset:
                assert batch["tick"][i] == tick
        for i in range(len(batch["episode"])):
            for j in range(self.config.ticks_per_frame) if self.config.ticks_per_frame > 1 else [None]:
                reference.check(batch, i, j, drawn[i] if self.config.max_offset else None, drawn[i])


@pytest.mark.parametrize("sampler", [ChaosSampler, Sampler])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.slow
def test_every_window_is_what_brute_force_finds(sampler, data):
    draw = data.draw
    spec = robot(CAMERAS[draw(st.sampled_from(list(CAMERAS)))])
    buffer = MemoryBuffer(spec)
    settings = config(
        target=draw(st.sampled_from([uniform(), *(imitation(recovery_weight=weight) for weight in (1.0, 0.3, 0.0))])),
        horizon=draw(st.sampled_from([1, 2, 5, 16, 33])),
        ticks_ahead=draw(st.sampled_from([(), (1,), (3, 12), (40,)])),
        n_step=(n_step := draw(st.sampled_from([0, 1, 4, 25]))),
        ticks_per_frame=1 if n_step else draw(st.sampled_from([1, 1, 3])),
        max_offset=draw(st.sampled_from([0, 1, 7, 30])),
        rolled=draw(st.sampled_from([(), (True, False, True), (False, False, False)])),
        later=draw(st.booleans()),
        history=draw(st.sampled_from([0, 0, 1, 3, 25])),
        prefetch=draw(st.sampled_from([0, 2])),
        batch=draw(st.sampled_from([1, 6])),
        seed=draw(st.integers(0, 1000)),
    )
    coming = []
    for e in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
        finished = draw(st.booleans())
        if finished and draw(st.booleans()):
            lengths.append(0)
        coming += record(
            spec,
            f"e{e}",
            lengths,
            e,
            source=draw(st.sampled_from(["online", "demonstration"])),
            task=draw(st.sampled_from(list(TASKS))),
            finished=finished,
            early=draw(st.booleans()),
        )
    missing = draw(st.sets(st.integers(0, len(coming) - 1), max_size=2))
    coming = [segment for number, segment in enumerate(coming) if number not in missing]
    order = draw(st.permutations(range(len(coming)))) if draw(st.booleans()) else list(range(len(coming)))
    queue = [coming[i] for i in order]
    damaged = draw(st.sets(st.integers(1, max(1, len(queue))), max_size=2))
    with Watched(buffer, settings, sampler) as feed:
        while True:
            some, queue = queue[: (n := draw(st.integers(1, 6)))], queue[n:]
            rows = buffer.add(*some)
            buffer.damaged |= damaged & set(rows)
            if draw(st.booleans()):
                for row, segment in zip(rows, some, strict=True):
                    if row not in damaged:
                        feed.submit(row, segment)
            feed.refresh(draw(st.sampled_from([None, 2])))
            if draw(st.integers(0, 5)) == 0:
                buffer.prune(draw(st.sampled_from(["e0", "e1"])))
                feed.refresh()
            for _ in range(draw(st.integers(0, 5))):
                try:
                    batch = feed.next()
                except (InvalidDataError, CorruptDataError):
                    break
                feed.check(batch)
            if not queue:
                break
        assert feed.stats.bytes <= settings.cache_bytes


# --- the same batches, however they are made --------------------------------------------------------------------------


def fleet(spec, episodes=12, seed=0):
    """Episodes of both sources and tasks, some unfinished, in an order in which several robots may have sent them."""
    rng = np.random.default_rng(seed)
    found = []
    for e in range(episodes):
        lengths = rng.integers(1, 50, int(rng.integers(1, 6))).tolist()
        source = "demonstration" if e % 3 == 0 else "online"
        found.append(
            record(
                spec,
                f"e{e}",
                lengths,
                seed + e,
                source=source,
                task=list(TASKS)[e % 2],
                finished=e % 4 != 1,
                early=True,
            )
        )
    queue = []
    while any(found):
        queue.append(found[int(rng.choice([i for i, left in enumerate(found) if left]))].pop(0))
    return queue


def life(feed, buffer, queue, batches=40, start=0):
    """Batches of a feed whose buffer grows meanwhile, always after the same batches."""
    made = []
    for number in range(start, batches):
        if number % 4 == 0:
            rows = buffer.add(*queue[number : number + 4])
            for row in rows[::2]:
                feed.submit(row, buffer.segments[row])
            feed.refresh()
        if number % 7 == 0:
            feed.note("drawer-open", True, 0.5 + number)
        made.append(copied(feed.next()))
    return made


ADAPTIVE = uniform(Recent(0.2, 20), mix=TaskMix(online=OnlineShare(at_least=1)))


@pytest.mark.parametrize("sampler", [ChaosSampler, Sampler])
@pytest.mark.parametrize(
    ("ticks_per_frame", "offsets"), [(1, {}), (4, {"history": 2}), (4, {"max_offset": 9, "later": True})]
)
@pytest.mark.slow
def test_prefetching_changes_no_batch(sampler, ticks_per_frame, offsets):
    spec = robot(CAMERAS["two"])
    made = []
    for prefetch in (0, 1, 2):
        buffer = MemoryBuffer(spec)
        queue = fleet(spec)
        buffer.add(*queue[:5])
        options = config(
            prefetch=prefetch,
            ticks_per_frame=ticks_per_frame,
            seed=3,
            target=ADAPTIVE,
            cache_bytes=700_000,
            batch=32,
            **offsets,
        )
        with ReplayDataset(buffer, buffer, spec, options, sampler=sampler) as feed:
            made.append(life(feed, buffer, queue[5:]))
    for other in made[1:]:
        assert all(same(a, b) for a, b in zip(made[0], other, strict=True))
    # another seed gives others
    buffer = MemoryBuffer(spec)
    buffer.add(*queue[:5])
    with ReplayDataset(
        buffer, buffer, spec, config(seed=4, ticks_per_frame=ticks_per_frame, **offsets), sampler=sampler
    ) as feed:
        feed.refresh()
        assert not same(copied(feed.next()), made[0][0])


@pytest.mark.parametrize("stop", [1, 9, 22])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", [ChaosSampler, Sampler])
@pytest.mark.parametrize("offsets", [{}, {"max_offset": 8, "rolled": (True, True, False), "later": True, "history": 3}])
@pytest.mark.slow
def test_a_feed_goes_on_where_it_stopped(sampler, stop, prefetch, offsets):
    spec = robot(CAMERAS["two shapes"])
    buffer, queue = MemoryBuffer(spec), fleet(spec)
    buffer.add(*queue[:5])
    options = config(
        prefetch=prefetch,
        ticks_per_frame=2,
        lead=5,
        target=ADAPTIVE,
        cache_bytes=700_000,
        batch=32,
        echo=4.0,
        **offsets,
    )
    with ReplayDataset(buffer, buffer, spec, options, sampler=sampler) as feed:
        made = life(feed, buffer, queue[5:], stop)
        state = msgspec.json.decode(msgspec.json.encode(feed.state()))
        drawn = set(state["drawn"])
        assert drawn == {int(e) for batch in made for e in batch["episode"]}
        expect = life(feed, buffer, queue[5:], stop + 25, start=stop)
    # the buffer as it was when it stopped
    again = buffer.until(state["watermark"])
    with ReplayDataset(again, again, spec, options, sampler=sampler) as feed:
        assert feed.restore(state)
        assert feed.drawn_episodes() == drawn
        assert feed.drawn_episodes() == set()
        found = life(feed, again, queue[5:], stop + 25, start=stop)
    assert all(same(a, b) for a, b in zip(expect, found, strict=True))
    # a buffer that has grown since: what is planned already, and until the next refresh, is the same
    with ReplayDataset(buffer, buffer, spec, options, sampler=sampler) as feed:
        assert feed.restore(state)
        found = [copied(feed.next()) for _ in range(-stop % 4)]
    assert all(same(a, b) for a, b in zip(expect, found, strict=False))


def test_a_state_that_does_not_fit_is_refused():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*record(spec, "e", [20], 0))
    with ReplayDataset(buffer, buffer, spec, config(), sampler=ChaosSampler) as feed:
        with pytest.raises(InvalidDataError, match="cannot be read"):
            feed.restore({})
        feed.refresh()
        with pytest.raises(InvalidDataError, match="before the first refresh"):
            feed.restore(feed.state())
        state = feed.state()
    offsets = config(max_offset=3)
    with (
        ReplayDataset(buffer, buffer, spec, offsets, sampler=ChaosSampler) as feed,
        pytest.raises(InvalidDataError, match="max_offset 0, this one has 3"),
    ):
        feed.restore(state)
    with ReplayDataset(buffer, buffer, spec, offsets, sampler=ChaosSampler) as feed:
        feed.refresh()
        state = feed.state()
    with (
        ReplayDataset(buffer, buffer, spec, config(), sampler=ChaosSampler) as feed,
        pytest.raises(InvalidDataError, match="max_offset 3, this one has 0"),
    ):
        feed.restore(state)


# --- what may go wrong ------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused():
    for wrong in (
        {"batch": 0},
        {"horizon": 0},
        {"lead": 2, "prefetch": 2},
        {"ticks_ahead": (3, 3)},
        {"ticks_ahead": (0,)},
        {"seed": -1},
        {"workers": -1},
        {"max_offset": -1},
        {"history": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            config(**wrong)
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    with pytest.raises(ConfigError, match="rolled names 2 state dimensions, robot 'fake' has 3"):
        ReplayDataset(buffer, buffer, spec, config(rolled=(True, False)), sampler=ChaosSampler)
    with pytest.raises(ConfigError, match="does not hold one frame"):
        ReplayDataset(buffer, buffer, spec, config(cache_bytes=100), sampler=ChaosSampler)


def test_nothing_to_learn_from_is_said_and_goes_away():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    with ReplayDataset(buffer, buffer, spec, config(prefetch=2), sampler=ChaosSampler) as feed:
        assert feed.refresh() == 0
        for _ in range(2):
            with pytest.raises(InvalidDataError, match="no step to learn from"):
                feed.next()
        buffer.add(*record(spec, "e", [30], 1))
        assert feed.refresh() == 1
        assert feed.next()["state"].shape == (8, 3)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_store_that_fails_for_a_while_loses_no_batch(prefetch):
    spec = robot(CAMERAS["one"])
    made = []
    for failing in (False, True):
        buffer = MemoryBuffer(spec)
        buffer.add(*fleet(spec))
        read, calls = buffer.read, [0]

        def flaky(rows, read=read, calls=calls):
            calls[0] += 1
            # now and then it lasts for all that a job reads
            if failing and calls[0] % 8 < 3:
                raise StorageError("the store is away.")
            return read(rows)

        buffer.read = flaky
        with ReplayDataset(buffer, buffer, spec, config(prefetch=prefetch), sampler=ChaosSampler) as feed:
            feed.refresh()
            batches, failures = [], 0
            while len(batches) < 10:
                try:
                    batches.append(copied(feed.next()))
                except StorageError as error:
                    assert "is away" in str(error)
                    failures += 1
            assert (failures > 0) == failing
            made.append(batches)
    assert all(same(a, b) for a, b in zip(*made, strict=True))


def test_segments_and_frames_that_cannot_be_read_are_named_once_and_left_out(caplog):
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    segments = record(spec, "e", [20, 20, 20], 5)
    frames = segments[2].frames["camera0"]
    broken = CameraFrames(frames.times_ns, (b"\xff\xd8\xff nothing", *frames.encoded[1:]))
    buffer.add(*segments[:2], msgspec.structs.replace(segments[2], frames={"camera0": broken}))
    buffer.damaged.add(2)
    with caplog.at_level(logging.ERROR), Watched(buffer, config()) as feed:
        feed.refresh()
        feed.look()
        for _ in range(30):
            feed.check(feed.next())
        stats = feed.stats
    assert stats.damaged > 0
    assert stats.unreadable_frames > 0
    assert stats.replaced > 0
    named = [r.getMessage() for r in caplog.records]
    assert len(named) == 2
    assert any("row 2 is left out" in m and "damaged" in m for m in named)
    assert any("row 3 cannot be decoded" in m for m in named)


def test_when_nothing_at_all_can_be_read_it_says_so():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.damaged.update(buffer.add(*record(spec, "e", [20, 20], 5)))
    with ReplayDataset(buffer, buffer, spec, config(), sampler=ChaosSampler) as feed:
        feed.refresh()
        with pytest.raises(CorruptDataError, match="buffer verify"):
            feed.next()


def test_what_lies_in_another_journal_is_loaded_when_it_was_sealed():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    buffer.add(*record(spec, "a", [30], 1))
    buffer.elsewhere.update(buffer.add(*record(spec, "b", [30], 2)))
    with ReplayDataset(buffer, buffer, spec, config(batch=16), sampler=HoldAll) as feed:
        feed.refresh()
        assert {int(e) for _ in range(10) for e in feed.next()["episode"]} == {1}
        assert feed.stats.damaged == 0
        feed.refresh()
        assert {int(e) for _ in range(10) for e in feed.next()["episode"]} == {1}
        buffer.elsewhere.clear()
        feed.refresh()
        assert {int(e) for _ in range(10) for e in feed.next()["episode"]} == {1, 2}


def test_windows_reach_into_what_was_sealed_in_another_journal_later():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    rows = buffer.add(*record(spec, "a", [20, 20], 1))
    buffer.elsewhere.add(rows[1])

    def reaches(feed):
        """Whether the windows that begin in the first segment find all their steps."""
        batches = [copied(feed.next()) for _ in range(10)]
        late = [(batch["tick"] > 4) & (batch["tick"] < 20) for batch in batches]
        found = [pad for batch, here in zip(batches, late, strict=True) for pad in batch["action_is_pad"][here]]
        assert found
        return ~np.array(found).any(1)

    with ReplayDataset(buffer, buffer, spec, config(batch=64), sampler=HoldAll) as feed:
        feed.refresh()
        assert not reaches(feed).any()
        buffer.elsewhere.clear()
        feed.refresh()
        reaches(feed)
        assert reaches(feed).all()


def test_what_was_sealed_between_a_look_at_the_ledger_and_its_loading_is_not_forgotten():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    first, second, third = record(spec, "a", [20, 20, 20], 1)
    (_, row) = buffer.add(first, second)
    buffer.elsewhere.add(row)
    with ReplayDataset(buffer, buffer, spec, config(batch=64), sampler=HoldAll) as feed:
        feed.refresh()
        feed.next()
        buffer.add(third)
        feed.refresh()
        buffer.elsewhere.clear()
        # until what the new one calls for is loaded
        for _ in range(feed.config.lead + 1):
            feed.next()
        feed.refresh()
        for _ in range(feed.config.lead):
            feed.next()
        before = feed.stats.replaced
        batches = [copied(feed.next()) for _ in range(10)]
    assert feed.stats.replaced == before
    ticks = np.concatenate([batch["tick"] for batch in batches])
    pads = np.concatenate([batch["action_is_pad"] for batch in batches])
    assert {tick // 20 for tick in ticks.tolist()} == {0, 1, 2}
    assert not pads[ticks < 40].any()


def test_no_frame_of_what_was_sealed_in_another_journal_later_stays_missing():
    spec = robot([(16, 16, 2.0)])
    buffer = MemoryBuffer(spec)
    segments = record(spec, "e", [20, 20], 5, source="demonstration")
    rows = buffer.add(*(msgspec.structs.replace(s, actor=np.full(s.steps, HUMAN, np.uint8)) for s in segments))
    buffer.elsewhere.add(rows[0])
    with ReplayDataset(buffer, buffer, spec, config(batch=64), sampler=HoldAll) as feed:
        feed.refresh()
        seen = {tick for _ in range(20) for tick in feed.next()["tick"].tolist()}
        assert min(seen) > 20, "the frame that was seen last came with the segment before"
        buffer.elsewhere.clear()
        feed.refresh()
        for _ in range(3):
            feed.next()
        before = feed.stats.replaced
        assert {tick for _ in range(20) for tick in feed.next()["tick"].tolist()} == set(range(40))
        assert feed.stats.replaced == before


@pytest.mark.parametrize("seed", range(12))
def test_whatever_becomes_of_other_journals_and_labels_batches_show_what_there_is(seed):
    rng = np.random.default_rng(seed)
    spec = robot(CAMERAS["one"])
    buffer, queue = MemoryBuffer(spec), fleet(spec, episodes=4, seed=seed)
    options = {"max_offset": int(rng.choice([0, 7]))} if seed % 2 else {"n_step": int(rng.choice([1, 4, 25]))}
    options |= {"history": int(rng.choice([0, 3])), "labels": ("advantage",)}
    with Watched(buffer, config(**options), Sampler) as feed:
        for _ in range(8):
            rows = buffer.add(*queue[:3])
            del queue[:3]
            if rng.random() < 0.7:
                some = rng.choice(list(buffer.segments), 3)
                buffer.put_step_labels(
                    {r: np.float32(rng.normal(size=buffer.segments[r].steps)) for r in some.tolist()}
                )
            buffer.elsewhere.update(rows[:2])
            feed.refresh()
            for _ in range(int(rng.integers(5))):
                with contextlib.suppress(CorruptDataError, InvalidDataError):
                    feed.next()
            buffer.elsewhere.clear()
            if rng.random() < 0.5:
                feed.next()
            feed.refresh()
            for _ in range(feed.config.lead):
                feed.next()
            steps = {
                (buffer.numbers[segment.episode.id], segment.first_tick + t): buffer.labels[row][t]
                for row, segment in buffer.segments.items()
                for t in range(segment.steps if row in buffer.labels else 0)
            }
            for _ in range(3):
                batch = feed.next()
                feed.check(batch)
                drawn = zip(batch["episode"].tolist(), batch["tick"].tolist(), strict=True)
                due = [steps.get(at, np.nan) for at in drawn]
                np.testing.assert_array_equal(batch["labels"]["advantage"], np.float32(due))


def test_a_window_that_begins_in_the_next_segment_has_the_label_that_was_written_there_last():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    segments = record(spec, "e", [20, 20], 3, source="demonstration")
    segments = [msgspec.structs.replace(s, actor=np.full(s.steps, HUMAN, np.uint8)) for s in segments]
    first, second = buffer.add(*segments)
    settings = config(horizon=4, batch=64, max_offset=6, labels=("advantage",))
    with ReplayDataset(buffer, buffer, spec, settings) as feed:
        buffer.put_step_labels({first: np.zeros(20, np.float32), second: np.zeros(20, np.float32)})
        feed.refresh()
        for _ in range(5):
            feed.next()
        buffer.put_step_labels({second: np.ones(20, np.float32)})
        feed.refresh()
        for _ in range(3):
            feed.next()
        for _ in range(10):
            batch = feed.next()
            assert np.array_equal(batch["labels"]["advantage"], batch["tick"] >= 20)


@pytest.mark.parametrize("why", ["damaged", "elsewhere"])
def test_what_has_labels_and_cannot_be_read_is_left_out_like_anything_else(why):
    spec = robot([])
    buffer = MemoryBuffer(spec)
    rows = buffer.add(*record(spec, "a", [20, 20], 1), *record(spec, "b", [20], 2))
    buffer.put_step_labels({row: np.full(20, row, np.float32) for row in rows})
    getattr(buffer, why).add(rows[1])
    with ReplayDataset(buffer, buffer, spec, config(batch=64, labels=("advantage",)), sampler=HoldAll) as feed:
        feed.refresh()
        found = {label for _ in range(10) for label in feed.next()["labels"]["advantage"].tolist()}
        assert found == {rows[0], rows[2]}
        assert feed.stats.replaced > 0


def test_what_is_in_memory_stays_though_it_cannot_be_read_again_when_more_of_its_episode_comes():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    first, second = record(spec, "a", [20, 20], 1)
    rows = buffer.add(first)
    with ReplayDataset(buffer, buffer, spec, config(batch=64), sampler=HoldAll) as feed:
        feed.refresh()
        feed.next()
        buffer.elsewhere.update(rows)
        buffer.add(second)
        feed.refresh()
        ticks = np.concatenate([feed.next()["tick"] for _ in range(10)])
        assert {tick < 20 for tick in ticks.tolist()} == {True, False}
        assert (feed.stats.replaced, feed.stats.segments) == (0, 2)


class HoldAll(ChaosSampler):
    """Loads everything once, and draws anywhere."""

    def next(self):
        rng = np.random.default_rng([self.seed, self.number])
        eligible = self._eligible()
        there = list(eligible)
        load = [s for s in there if s not in self.loaded]
        self.loaded |= set(load)
        segments = np.array([there[i] for i in rng.integers(0, len(there), self.batch)], np.int64)
        offsets = np.array([rng.choice(eligible[s]) for s in segments.tolist()], np.int64)
        self.number += 1
        return BatchPlan(
            self.number - 1, np.zeros(0, np.int64), np.array(load), segments, offsets, offsets * 0.0, self.version
        )


def test_a_cache_that_is_too_small_says_so_and_is_never_exceeded():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    with ReplayDataset(buffer, buffer, spec, config(cache_bytes=30_000, lead=1), sampler=HoldAll) as feed:
        for e in range(20):
            buffer.add(*record(spec, f"e{e}", [20], e))
        feed.refresh()
        with pytest.raises(ConfigError, match="cache_bytes"):
            feed.next()
        assert feed.stats.bytes <= 30_000


def test_what_the_error_says_is_enough_is_enough():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    buffer.add(*record(spec, "e0", [39] * 3, 1, source="demonstration"), *record(spec, "e1", [39] * 3, 2))
    feed = ReplayDataset(buffer, buffer, spec, config(cache_bytes=45_000))
    with feed, pytest.raises(ConfigError, match="memory of 45000 bytes") as caught:
        feed.refresh()
    (enough,) = re.findall(r"Set cache_bytes to at least (\d+)", str(caught.value))
    with ReplayDataset(buffer, buffer, spec, config(cache_bytes=int(enough))) as feed:
        feed.refresh()
        for _ in range(20):
            feed.next()


def test_what_is_too_large_for_the_cache_is_left_out_and_what_was_there_goes_on():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    with ReplayDataset(buffer, buffer, spec, config(cache_bytes=60_000, batch=32)) as feed:
        buffer.add(*record(spec, "large", [200], 1, source="demonstration"))
        with pytest.raises(ConfigError, match="cache_bytes"):
            feed.refresh()
    buffer = MemoryBuffer(spec)
    with ReplayDataset(buffer, buffer, spec, config(cache_bytes=60_000, batch=32)) as feed:
        for e in range(4):
            buffer.add(*record(spec, f"e{e}", [20], e, source="demonstration"))
        feed.refresh()
        feed.next()
        buffer.add(*record(spec, "large", [200], 9, source="demonstration"))
        with pytest.raises(ConfigError, match="Set cache_bytes to at least"):
            feed.refresh()
        assert {int(e) for _ in range(30) for e in feed.next()["episode"]} == {1, 2, 3, 4}
        buffer.add(*record(spec, "small", [20], 10, source="demonstration"))
        feed.refresh()
        assert {int(e) for _ in range(60) for e in feed.next()["episode"]} == {1, 2, 3, 4, 6}


@pytest.mark.parametrize("cameras", ["one", "two shapes"])
@pytest.mark.parametrize("cache_bytes", [250_000, 600_000])
@pytest.mark.slow
def test_whatever_is_planned_stays_within_the_cache(cameras, cache_bytes):
    spec = robot(CAMERAS[cameras])
    buffer, queue = MemoryBuffer(spec), fleet(spec, episodes=30)
    options = config(cache_bytes=cache_bytes, batch=64, echo=3.0, target=imitation())
    most = 0
    with ReplayDataset(buffer, buffer, spec, options) as feed:
        for number in range(120):
            if number % 10 == 0:
                for row, segment in zip(buffer.add(*queue[:12]), queue[:12], strict=False):
                    feed.submit(row, segment)
                del queue[:12]
                feed.refresh()
            feed.next()
            assert feed._frames.bytes <= cache_bytes
            assert feed.stats.bytes <= cache_bytes
            most = max(most, feed.stats.bytes)
        # all of it is used where not everything fits
        assert most > 0.5 * min(cache_bytes, 500_000)
        assert feed.stats.loaded > len(buffer.segments)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_fault_in_the_code_is_raised_where_a_batch_is_asked_for(prefetch, monkeypatch):
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*record(spec, "e", [20], 0))
    monkeypatch.setattr(buffer, "read", lambda rows: 1 / 0)
    feed = ReplayDataset(buffer, buffer, spec, config(prefetch=prefetch), sampler=ChaosSampler)
    feed.refresh()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            feed.next()
    feed.close()
    with pytest.raises(InvalidDataError, match="closed"):
        feed.next()


def test_damage_that_the_ledger_learns_of_later_takes_neighbours_back():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    rows = buffer.add(*record(spec, "e", [8, 8, 8, 8], 3))
    with Watched(
        buffer,
        config(target=uniform(), batch=32),
    ) as feed:
        feed.refresh()
        for _ in range(10):
            feed.check(feed.next())
        buffer.mark_damaged(rows[2])
        feed.refresh()
        for _ in range(10):
            # plans made before may still show what is gone
            feed.next()
        for _ in range(10):
            feed.check(feed.next())


def test_what_was_pruned_before_its_turn_came_is_no_damage(caplog):
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    for e in range(6):
        buffer.add(*record(spec, f"e{e}", [20], e, source="demonstration"))
    with caplog.at_level(logging.ERROR), ReplayDataset(buffer, buffer, spec, config(lead=8)) as feed:
        feed.refresh()
        feed.next()
        for row in list(buffer.segments)[1:]:
            buffer.prune(f"e{row - 1}")
            del buffer.stored[row]
        feed.refresh()
        for _ in range(20):
            feed.next()
        assert feed.stats.replaced > 0
        assert feed.stats.damaged == 0
    assert not caplog.records


def test_what_is_found_damaged_while_it_is_in_memory_is_not_said_to_be_left_out(caplog):
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    first, second = record(spec, "a", [20, 20], 1)
    rows = buffer.add(first)
    with caplog.at_level(logging.ERROR), ReplayDataset(buffer, buffer, spec, config(), sampler=HoldAll) as feed:
        feed.refresh()
        feed.next()
        buffer.damaged.update(rows)
        buffer.add(second)
        feed.refresh()
        for _ in range(10):
            feed.next()
        assert (feed.stats.segments, feed.stats.damaged) == (2, 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "ledger row 1 cannot be read again" in said and "stays in training: it is damaged" in said


# --- what it tells ----------------------------------------------------------------------------------------------------


def test_fresh_segments_are_not_read_again():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    other = robot(CAMERAS["two"])
    with ReplayDataset(buffer, buffer, spec, config(), sampler=HoldAll) as feed:
        for segment in record(spec, "e", [10, 10, 10, 10], 0):
            (row,) = buffer.add(segment)
            feed.submit(row, segment)
        feed.submit(99, record(other, "o", [10], 0)[0])
        feed.refresh()
        feed.next()
        assert buffer.reads == []
        assert feed.stats.from_gateway >= 4
        assert feed.stats.loaded == 4


def test_fresh_segments_of_a_robot_with_other_limits_are_taken():
    spec = robot(CAMERAS["one"])
    wider = msgspec.structs.replace(spec.action[0], high=spec.action[0].high + 1)
    other = msgspec.structs.replace(spec, action=(wider, *spec.action[1:]))
    assert (other.hash != spec.hash) and other.data_hash == spec.data_hash
    buffer = MemoryBuffer(spec)
    buffer.specs[other.hash] = other
    with ReplayDataset(buffer, buffer, spec, config(), sampler=HoldAll) as feed:
        for segment in record(other, "e", [10, 10], 0):
            feed.submit(*buffer.add(segment), segment)
        feed.refresh()
        feed.next()
        assert buffer.reads == []


def test_fresh_segments_take_no_more_than_they_may():
    spec = robot(CAMERAS["one"])
    fresh = FreshSegments(20_000)
    segments = record(spec, "e", [20] * 8, 0)
    for row, segment in enumerate(segments):
        fresh.add(row, segment)
    kept = fresh.get(range(8))
    assert 1 <= len(kept) < 8
    assert max(kept) == 7
    assert sum(sum(len(j) for f in s.frames.values() for j in f.encoded) for s in kept.values()) < 20_000


def test_finished_episodes_and_states():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    segments = [
        *record(spec, "a", [10, 10], 0, source="demonstration"),
        *record(spec, "b", [10], 1, source="demonstration", finished=False),
        *record(spec, "c", [10, 10, 10], 2)[1:],
        *record(spec, "d", [10, 10], 3),
    ]
    buffer.add(*segments)
    with ReplayDataset(buffer, buffer, spec, config(target=imitation()), sampler=HoldAll) as feed:
        assert feed.examples().states.shape == (0, 3)
        assert feed.refresh(limit=4) == 4
        assert (feed.finished("demonstration"), feed.finished("online"), feed.newest_row) == (1, 0, 4)
        assert feed.refresh() == 3
        assert (feed.finished("demonstration"), feed.finished("online"), feed.newest_row) == (1, 1, 7)
        table = [imitation().starts(s.actor, s.episode.source == "demonstration") for s in segments]
        expect = np.concatenate([s.state[able] for s, able in zip(segments, table, strict=True)])
        np.testing.assert_array_equal(np.sort(feed.examples().states, 0), np.sort(expect, 0))
        assert 0 < len(feed.examples(steps=len(expect) // 3).states) < len(expect)


def test_example_chunks_are_what_was_executed_in_runs_that_are_all_imitable():
    spec, horizon = robot([]), 4
    buffer = MemoryBuffer(spec)
    segments = [
        *record(spec, "a", [40, 3, 25], 0, source="demonstration"),
        *(s for e in range(6) for s in record(spec, f"b{e}", [30, 30], 1 + e)),
    ]
    buffer.add(*segments)
    allowed, runs = [], 0
    for s in segments:
        able = imitation().starts(s.actor, s.episode.source == "demonstration")
        allowed += [s.executed[t : t + horizon] for t in range(s.steps - horizon + 1) if able[t : t + horizon].all()]
        runs += int((able[1:] & ~able[:-1]).sum()) if s.episode.source == "online" else 0
    assert runs > 3, "people must come and go, or nothing would be shown"
    with ReplayDataset(buffer, buffer, spec, config(target=imitation(), horizon=horizon), sampler=HoldAll) as feed:
        assert feed.examples().chunks.shape == (0, horizon, spec.action_dim)
        feed.refresh()
        chunks = feed.examples().chunks
        assert chunks.dtype == np.float32
        # every second start of those that are allowed, so that neighbours overlap by half
        assert len(allowed) / 3 < len(chunks) < len(allowed)
        known = {chunk.tobytes() for chunk in np.stack(allowed)}
        assert {chunk.tobytes() for chunk in chunks} <= known


@pytest.mark.parametrize("options", [{}, {"history": 3}])
def test_a_state_fits_only_feeds_with_the_same_history(options):
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*fleet(spec))
    with ReplayDataset(buffer, buffer, spec, config(**options), sampler=HoldAll) as feed:
        feed.refresh()
        feed.next()
        state = feed.state()
        assert state["settings"]["history"] == options.get("history", 0)
    with (
        ReplayDataset(buffer, buffer, spec, config(history=5), sampler=HoldAll) as other,
        pytest.raises(InvalidDataError, match="history"),
    ):
        other.restore(state)


ALL_THAT_IS_RANDOM = {"max_offset": 3, "offset_share": 0.6, "later": True}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        ALL_THAT_IS_RANDOM,
        {**ALL_THAT_IS_RANDOM, "ticks_per_frame": 3, "history": 2, "echo": 2.0, "cache_bytes": 250_000},
        {"ticks_per_frame": 2, "target": uniform(factors=(by_actor({"human": 3, "policy": 1}),))},
        {"n_step": 2, "prefetch": 2},
    ],
)
def test_ranks_bring_together_what_one_brings_alone(world, options):
    spec = robot(CAMERAS["two"])
    buffer = MemoryBuffer(spec)
    buffer.add(*fleet(spec))
    with contextlib.ExitStack() as closing:
        group = [{"rank": rank, "world": world} for rank in range(world)]
        feeds = [
            closing.enter_context(ReplayDataset(buffer, buffer, spec, config(**options, **mine)))
            for mine in ({}, *group)
        ]
        for feed in feeds:
            feed.refresh()
        for _ in range(30):
            alone, *parts = (copied(feed.next()) for feed in feeds)
            assert {len(part["task"]) for part in parts} == {8 // world}
            assert same(joined(parts), alone)


def joined(parts):
    """The batch of which ranks have these."""
    whole = {}
    for name, first in parts[0].items():
        if name == "instructions":
            whole[name] = [one for part in parts for one in part[name]]
        elif isinstance(first, dict):
            whole[name] = {key: np.concatenate([part[name][key] for part in parts]) for key in first}
        else:
            whole[name] = np.concatenate([part[name] for part in parts])
    return whole


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 3)])
def test_ranks_that_cannot_share_a_batch_evenly_are_refused(rank, world):
    with pytest.raises(ConfigError, match=f"rank {rank} of {world}, counted from 0, has no even share of a batch of 8"):
        config(rank=rank, world=world)


def test_a_closed_feed_can_be_closed_again_and_an_iterator_goes_on():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    buffer.add(*fleet(spec))
    feed = ReplayDataset(buffer, buffer, spec, config(prefetch=2), sampler=ChaosSampler)
    feed.refresh()
    numbers = [int(batch["tick"][0]) for batch, _ in zip(feed, range(5), strict=False)]
    assert len(numbers) == 5
    assert feed.stats.batches >= 5
    feed.close()
    feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


# --- what is drawn is what is due -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [{}, {"max_offset": 6}])
def test_no_window_begins_at_a_step_without_weight_that_saw_the_same_image(offsets):
    spec = robot([(16, 16, 5.0)])
    buffer = MemoryBuffer(spec)
    for e in range(6):
        buffer.add(*record(spec, f"e{e}", [60], e))
    target = uniform(factors=(by_actor({"human": 3, "script": 1}),))
    with ReplayDataset(buffer, buffer, spec, config(target=target, ticks_per_frame=4, batch=64, **offsets)) as feed:
        feed.refresh()
        actors = np.concatenate([feed.next()["actor"].flatten() for _ in range(100)])
    counts = np.bincount(actors, minlength=4)
    assert counts[POLICY] == counts[HOLD] == 0
    if not offsets:
        steps = np.concatenate([segment.actor for segment in buffer.segments.values()])
        due = 3 * (steps == HUMAN).sum() / (steps == SCRIPT).sum()
        assert counts[HUMAN] / counts[SCRIPT] == pytest.approx(due, rel=0.15)


def test_cameras_of_two_shapes_that_do_not_keep_their_rates_fit_what_was_planned():
    """The ledger keeps one number of frames; here nearly all are of the large camera, which was to be the slow one."""
    planned, real = robot([(32, 32, 2.0), (8, 8, 40.0)]), robot([(32, 32, 40.0), (8, 8, 2.0)])
    buffer = MemoryBuffer(planned)
    for e in range(30):
        for segment in record(real, f"e{e}", [40, 40], e, source="demonstration"):
            episode = msgspec.structs.replace(segment.episode, spec_hash=planned.hash)
            buffer.add(msgspec.structs.replace(segment, episode=episode))
    with ReplayDataset(buffer, buffer, planned, config(cache_bytes=1_500_000, batch=64)) as feed:
        feed.refresh()
        for _ in range(150):
            feed.next()
            assert feed._frames.bytes <= 1_500_000
        assert feed.sampler.stats.sweeping_strata
        assert feed.stats.loaded > 60


def test_echo_rises_while_loading_is_what_the_trainer_waits_for_and_falls_again(monkeypatch):
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    buffer.add(*fleet(spec, episodes=30))
    monkeypatch.setattr(dataset, "_ECHO_S", 0.0)
    options = config(cache_bytes=250_000, batch=64, max_echo=8.0)
    with ReplayDataset(buffer, buffer, spec, options) as feed:
        feed.refresh()
        assert feed.echo == 1
        for _ in range(20):
            feed.next()
            feed._builder.waited_s = 1e6
        assert feed.echo == feed.stats.echo == 8
        for _ in range(20):
            feed.next()
            feed._builder.waited_s = 0.0
        assert feed.echo == 1
    # where all fits it means nothing
    with ReplayDataset(buffer, buffer, spec, config(max_echo=8.0)) as feed:
        feed.refresh()
        for _ in range(5):
            feed.next()
            feed._builder.waited_s = 1e6
        assert feed.echo == feed.sampler.echo == 1


def raise_storage_error():
    raise StorageError("the database is away")


def test_a_prune_drops_from_memory_what_is_gone_and_nothing_else():
    spec = robot(CAMERAS["one"])
    buffer = MemoryBuffer(spec)
    for e in range(20):
        buffer.add(*record(spec, f"e{e}", [20, 20, 20], e, source="demonstration"))
    with ReplayDataset(buffer, buffer, spec, config(batch=64)) as feed:
        feed.refresh()
        for _ in range(100):
            feed.next()
        before = feed.stats
        assert before.segments == before.loaded >= 55
        buffer.prune("e3")
        feed.refresh()
        for _ in range(10):
            feed.next()
        assert before.segments - 3 <= feed.stats.segments < before.segments
        assert feed.stats.loaded == before.loaded
        assert buffer.asked == [0, 60], "what stays is not looked at again"


def test_what_left_is_known_though_the_ledger_was_away_meanwhile(monkeypatch):
    spec = robot([])
    buffer = MemoryBuffer(spec)
    for number in range(2):
        buffer.add(*record(spec, f"e{number}", [20], number, source="demonstration"))
    with ReplayDataset(buffer, buffer, spec, config()) as feed:
        feed.refresh()
        buffer.prune("e0")
        with monkeypatch.context() as patch:
            patch.setattr(buffer, "newest_version", raise_storage_error)
            with pytest.raises(StorageError):
                feed.refresh()
        feed.refresh()
        assert feed.universe.gone.tolist() == [True, False]
        assert feed.next()["episode"].tolist() == [2] * feed.config.batch


# --- which episodes, and how often ------------------------------------------------------------------------------------


def test_no_more_steps_are_drawn_than_the_recorded_ones_allow():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*record(spec, "e0", [20], 1))
    options = config(samples_per_insert=2.0, batch=10)
    with ReplayDataset(buffer, buffer, spec, options) as feed:
        feed.refresh()
        for _ in range(4):
            assert not feed.ahead_of_data
            feed.next()
        assert feed.ahead_of_data
        buffer.add(*record(spec, "e1", [10], 2))
        feed.refresh()
        assert not feed.ahead_of_data
        feed.next()
        state = feed.state()
    with ReplayDataset(buffer, buffer, spec, options) as feed:
        assert feed.restore(state)
        feed.next()
        assert feed.ahead_of_data
        buffer.prune("e0")
        feed.refresh()
        buffer.add(*record(spec, "e2", [5], 3))
        feed.refresh()
        assert not feed.ahead_of_data, "what was forgotten had been recorded all the same"
        feed.count_from_now()
        assert feed.ahead_of_data, "nothing is drawn before something is recorded"
        buffer.add(*record(spec, "e3", [10], 4))
        feed.refresh()
        for _ in range(2):
            assert not feed.ahead_of_data
            feed.next()
        assert feed.ahead_of_data
        state = feed.state()
    with ReplayDataset(buffer, buffer, spec, options) as feed:
        feed.restore(state)
        assert feed.ahead_of_data
        buffer.add(*record(spec, "e4", [5], 5))
        feed.refresh()
        assert not feed.ahead_of_data
        feed.next()
        assert feed.ahead_of_data
    with ReplayDataset(buffer, buffer, spec, config()) as feed:
        feed.refresh()
        feed.next()
        assert not feed.ahead_of_data


def test_episodes_are_held_out_for_good_and_by_nobody_twice():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*(segment for e in range(40) for segment in record(spec, f"e{e}", [3, 3], e)))
    drawn = {}
    for held_out in (False, True):
        with ReplayDataset(buffer, buffer, spec, config(validation=0.25, held_out=held_out)) as feed:
            feed.refresh()
            drawn[held_out] = set(feed.universe.episode_numbers.tolist())
    assert drawn[True] | drawn[False] == set(buffer.numbers.values())
    assert not drawn[True] & drawn[False]
    assert 4 <= len(drawn[True]) <= 16
    before = drawn[True]
    buffer.add(*(segment for e in range(40, 80) for segment in record(spec, f"e{e}", [3], e)))
    with ReplayDataset(buffer, buffer, spec, config(validation=0.25, held_out=True)) as feed:
        feed.refresh()
        assert before < set(feed.universe.episode_numbers.tolist())


@pytest.mark.parametrize("limit", [None, 3])
def test_nothing_after_the_last_row_asked_for_is_drawn(limit):
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*(segment for e in range(10) for segment in record(spec, f"e{e}", [5], e)))
    with ReplayDataset(buffer, buffer, spec, config(until_row=7)) as feed:
        while feed.refresh(limit):
            pass
        assert feed.universe.row.tolist() == [1, 2, 3, 4, 5, 6, 7]
        buffer.prune("e0")
        feed.refresh()
        assert feed.universe.row[~feed.universe.gone].tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_a_state_is_gone_on_from_with_more_or_fewer_ranks(before, after):
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*(segment for e in range(16) for segment in record(spec, f"e{e}", [20], e)))
    with ReplayDataset(buffer, buffer, spec, config(**ALL_THAT_IS_RANDOM, world=before, rank=before - 1)) as feed:
        feed.refresh()
        for _ in range(5):
            feed.next()
        state = feed.state()
    with ReplayDataset(buffer, buffer, spec, config(**ALL_THAT_IS_RANDOM)) as feed:
        feed.refresh()
        uninterrupted = [copied(feed.next()) for _ in range(40)][5:]
    parts = []
    for rank in range(after):
        with ReplayDataset(buffer, buffer, spec, config(**ALL_THAT_IS_RANDOM, world=after, rank=rank)) as feed:
            assert feed.restore(state)
            parts.append([copied(feed.next()) for _ in range(35)])
    assert all(same(joined(mine), alone) for *mine, alone in zip(*parts, uninterrupted, strict=True))


def test_a_normalisation_is_not_fitted_to_the_part_that_can_be_read():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    rows = buffer.add(*(segment for e in range(4) for segment in record(spec, f"e{e}", [40], e)))
    with ReplayDataset(buffer, buffer, spec, config(horizon=2)) as feed:
        feed.refresh()
        everything = feed.examples()
        buffer.elsewhere.update(rows[2:])
        with pytest.raises(StorageError, match="2 of the 4 segments"):
            feed.examples()
        buffer.elsewhere.clear()
        np.testing.assert_array_equal(feed.examples().states, everything.states)
