"""Priorities that a job writes into the ledger, on their way to batches."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.labels import Priorities, finite_mean
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import by_label, uniform
from tests.cloud_learner.buffer.loading.memory_buffer import HUMAN, TASKS, MemoryBuffer, record, robot
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec

STEPS, EPISODES, LEAD = 20, 30, 3
SMALL = 60_000
"""bytes, which a part of the episodes fills"""


def a_buffer() -> MemoryBuffer:
    """Demonstrations of one segment, by people from the first to the last step."""
    spec = robot([(16, 16, 20.0)])
    buffer = MemoryBuffer(spec)
    for number in range(EPISODES):
        add(buffer, f"e{number}", number)
    return buffer


def add(buffer: MemoryBuffer, name: str, seed: int) -> int:
    (segment,) = record(buffer.robot, name, [STEPS], seed, source="demonstration")
    return buffer.add(msgspec.structs.replace(segment, actor=np.full(STEPS, HUMAN, np.uint8)))[0]


def say(buffer: MemoryBuffer, priorities: dict[int, float]) -> None:
    buffer.put_step_labels({row: np.full(STEPS, value, np.float32) for row, value in priorities.items()})


def opened(buffer: MemoryBuffer, **options) -> ReplayDataset:
    defaults = {"batch": 64, "cache_bytes": 4_000_000, "prefetch": 0, "lead": LEAD, "max_echo": 1.0, "horizon": 4}
    target = uniform(factors=(by_label("priority", least=0.001, unknown=1.0),))
    return ReplayDataset(
        buffer, buffer, buffer.robot, DatasetConfig(tasks=TASKS, target=target, **(defaults | options))
    )


def shares(feed: ReplayDataset, batches: int) -> np.ndarray:
    """float64[episodes + 1] of the draws of each, by its number in the ledger."""
    for _ in range(LEAD):
        feed.next()
    drawn = np.concatenate([np.array(feed.next()["episode"]) for _ in range(batches)])
    return np.bincount(drawn, minlength=EPISODES + 1) / len(drawn)


@pytest.mark.parametrize("cache_bytes", [4_000_000, SMALL])
def test_what_a_job_writes_while_training_moves_what_is_drawn_at_the_next_refresh(cache_bytes):
    buffer = a_buffer()
    with opened(buffer, cache_bytes=cache_bytes) as feed:
        feed.refresh()
        assert bool(feed.sampler.stats.sweeping_strata) == (cache_bytes == SMALL)
        assert shares(feed, 40)[1:].max() < 3 / EPISODES, "who has no priority is drawn like the others"
        # a third of the data is worth nine times the rest, and what nobody looked at as much as that
        say(buffer, {row: 9.0 if row <= 10 else 1.0 for row in range(1, 21)})
        read, loaded = len(buffer.reads), feed.stats.loaded
        feed.refresh()
        if cache_bytes != SMALL:
            found = shares(feed, 60)
            assert len(buffer.reads) == read and feed.stats.loaded == loaded, "nothing was read or decoded for it"
        else:
            found = shares(feed, 150)
        assert found[1:11].sum() == pytest.approx(90 / 110, abs=0.05)
        assert found[11:21].sum() == pytest.approx(10 / 110, abs=0.04)
        assert found[21:].sum() == pytest.approx(10 / 110, abs=0.04)
        batch = feed.next()
        due = np.where(np.asarray(batch["episode"]) <= 10, 9, 1) / (110 * STEPS)
        np.testing.assert_allclose(batch["probability"], due)


def test_weights_for_importance_sampling_come_out_even():
    """The mean of anything, weighted by 1 / (N P(i)), is that over all steps (arXiv 1511.05952, eq. of section 3.4)."""
    buffer = a_buffer()
    say(buffer, {row: float(row) for row in range(1, EPISODES + 1)})
    with opened(buffer) as feed:
        feed.refresh()
        total, weighted = 0.0, np.zeros(EPISODES + 1)
        for _ in range(150):
            batch = feed.next()
            weight = 1 / (EPISODES * STEPS * np.asarray(batch["probability"]))
            weighted += np.bincount(batch["episode"], weight, minlength=EPISODES + 1)
            total += weight.sum()
        assert total / (150 * 64) == pytest.approx(1, abs=0.1)
        np.testing.assert_allclose(weighted[5:] / total, 1 / EPISODES, atol=0.012)


@pytest.mark.parametrize("options", [{"prefetch": 2}, {"prefetch": 2, "workers": 2}])
def test_batches_do_not_depend_on_when_they_are_gathered(options):
    found = []
    for more in ({}, options):
        buffer = a_buffer()
        grouped = {"ticks_per_frame": 2, "max_offset": 3, "cache_bytes": SMALL}
        with opened(buffer, **grouped, **more) as feed:
            feed.refresh()
            mine = []
            for turn in range(12):
                say(buffer, {row: float((row * (turn + 1)) % 7) for row in range(1 + turn, 20 + turn, 2)})
                feed.refresh()
                mine += [np.array(feed.next()["tick"]) for _ in range(2)]
            found.append(np.stack(mine))
    np.testing.assert_array_equal(*found)


def test_a_segment_that_had_its_priority_before_it_was_looked_at_has_it():
    buffer = a_buffer()
    with opened(buffer) as feed:
        feed.refresh(limit=5)
        say(buffer, {row: float(row) for row in range(1, EPISODES + 1)})
        feed.refresh(limit=5)
        np.testing.assert_array_equal(feed.universe.label, np.arange(1, 11))
        say(buffer, {add(buffer, "late", 99): 77.0})
        feed.refresh()
        np.testing.assert_array_equal(feed.universe.label, [*range(1, EPISODES + 1), 77])


@pytest.mark.parametrize("cache_bytes", [4_000_000, SMALL])
def test_batches_go_on_after_a_stop_unless_priorities_changed(cache_bytes):
    buffer = a_buffer()
    with opened(buffer, cache_bytes=cache_bytes) as feed:
        for turn in range(3):
            say(buffer, {row: float((row * (turn + 1)) % 5) for row in range(1, 20)})
            feed.refresh()
            for _ in range(4):
                feed.next()
        state = msgspec.json.decode(msgspec.json.encode(feed.state()))
        expect = [{k: np.array(batch[k]) for k in ("episode", "tick", "probability")} for batch in take(feed, 20)]
    with opened(buffer, cache_bytes=cache_bytes) as feed:
        assert feed.restore(state)
        for batch, due in zip(take(feed, 20), expect, strict=True):
            for name, values in due.items():
                np.testing.assert_array_equal(batch[name], values)
    say(buffer, {3: 100.0})
    with opened(buffer, cache_bytes=cache_bytes) as feed:
        assert not feed.restore(state)
        assert shares(feed, 20)[3] > 0.3


def take(feed: ReplayDataset, count: int):
    return (feed.next() for _ in range(count))


def test_the_mean_is_of_what_is_finite():
    assert finite_mean(np.float32([1, np.nan, np.inf, 3, -np.inf])) == 2
    assert np.isnan(finite_mean(np.float32([np.nan, np.inf])))
    largest = np.finfo(np.float32).max
    assert finite_mean(np.full(4, largest)) == largest


def test_priorities_come_from_a_ledger(tmp_path):
    spec = fake_spec(1, size=16)
    with contextlib.closing(Ledger.open(tmp_path / "ledger.db")) as ledger:
        ledger.see_robot("r1", spec, "clock", 1)
        index = SegmentIndex(("a",))
        priorities = Priorities(ledger, index, "priority")
        rows = []
        for name, task in (("e1", "a"), ("e2", "b"), ("e3", "a")):
            (segment,) = fake_episode(spec, name, task=task, steps=4, seed=len(rows))
            rows += ledger.commit_segments([(segment, Journaled(1, 0, 1, "0" * 64), 1)], 2)
        index.extend(ledger.index(0, spec.data_hash))
        assert not priorities.refresh() and np.isnan(index.label).all()
        # another name, and a task that is not here
        ledger.put_step_labels("value", {rows[0]: np.ones(4)})
        ledger.put_step_labels("priority", {rows[1]: np.ones(4)})
        assert not priorities.refresh()
        ledger.put_step_labels("priority", {rows[0]: np.array([1, 3, np.nan, np.inf])})
        assert priorities.refresh()
        np.testing.assert_array_equal(index.label, [2, np.nan])
        assert not priorities.refresh()
        ledger.put_step_labels("priority", {rows[0]: np.full(4, np.nan), rows[2]: np.full(4, -1.0)})
        assert priorities.refresh()
        np.testing.assert_array_equal(index.label, [np.nan, -1])
