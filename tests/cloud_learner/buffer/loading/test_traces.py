"""Batches bring how the chunks came about that the policy acted by, each from the step on at which it began to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.windows import Batch
from cloud_learner.buffer.sampling.target import uniform
from tests.cloud_learner.buffer.loading.memory_buffer import POLICY, MemoryBuffer, record, robot
from tests.cloud_learner.buffer.loading.reference import Reference
from tests.cloud_learner.buffer.loading.test_dataset import config, copied
from wire.errors import ConfigError
from wire.messages.recording import FlowTrace, RecordedChunk
from wire.types import RobotSpec

HORIZON, EXECUTED, POINTS = 6, 4, 2


def with_chunks(spec: RobotSpec, number: int, points: int = POINTS) -> list:
    """An episode of which the policy did its part by chunks of four steps, made from what was seen 0 to 2 steps
    before."""
    rng = np.random.default_rng(number)
    found, begun = [], set()
    for segment in record(spec, f"e{number}", [13, 9, 15], number):
        tick = segment.first_tick + np.arange(segment.steps)
        own = segment.actor == POLICY
        chunk_tick = np.where(own, tick // EXECUTED * EXECUTED, -1).astype(np.int32)
        chunks, traces = [], []
        for i in np.flatnonzero(own).tolist():
            if int(chunk_tick[i]) in begun:
                continue
            begun.add(int(chunk_tick[i]))
            seen = max(0, i - int(rng.integers(0, 3)))
            looked = min((times[seen] for times in segment.frame_times_ns.values()), default=segment.times_ns[i])
            age = float(segment.times_ns[i] - looked) / spec.period_ns
            values = rng.normal(size=(points, HORIZON * spec.action_dim)).astype(np.float32)
            trace = FlowTrace(
                int(chunk_tick[i]), int(rng.integers(5)), values, rng.normal(size=3).astype(np.float32), age
            )
            actions = np.zeros((HORIZON, spec.action_dim), np.float32)
            log_prob = float(np.float32(rng.normal()))
            observed_ns = int(segment.times_ns[i])
            chunks.append(RecordedChunk(int(chunk_tick[i]), 1, actions, observed_ns, 1, log_prob))
            traces.append(trace)
        changes = {"chunk_tick": chunk_tick, "chunks": tuple(chunks), "traces": tuple(traces)}
        found.append(msgspec.structs.replace(segment, **changes))
    return found


def filled(spec: RobotSpec, **options: int) -> MemoryBuffer:
    buffer = MemoryBuffer(spec)
    for number in range(6):
        buffer.add(*with_chunks(spec, number, **options))
    return buffer


def batches(buffer: MemoryBuffer, count: int = 40, **options: object) -> Iterator[Batch]:
    given = {"horizon": HORIZON, "traces": POINTS, **options}
    with ReplayDataset(buffer, buffer, buffer.robot, config(**given)) as data:  # type: ignore[arg-type]
        data.refresh()
        for _ in range(count):
            batch = data.next()
            yield copied(batch) | {"traces": {name: one.copy() for name, one in batch["traces"].items()}}


def expected(buffer: MemoryBuffer) -> dict[tuple[int, int], tuple[RecordedChunk, FlowTrace, int]]:
    """(the chunk, its trace, how many steps before its frames were the newest) by episode and tick of its first step;
    without those whose frames the segment's steps did not see."""
    found = {}
    for segment in buffer.segments.values():
        times = list(segment.frame_times_ns.values())
        for chunk, trace in zip(segment.chunks, segment.traces, strict=True):
            first = int(np.flatnonzero((segment.chunk_tick == chunk.first_tick) & (segment.actor == POLICY))[0])
            looked = segment.times_ns[first] - trace.age_ticks * buffer.robot.period_ns
            lead = 0
            while times and first >= lead and min(one[first - lead] for one in times) > looked + 1000:
                lead += 1
            if first >= lead:
                found[buffer.numbers[segment.episode.id], segment.first_tick + first] = chunk, trace, lead
    return found


@pytest.mark.parametrize("cameras", [[], [(16, 16, 20.0)], [(16, 16, 40.0), (16, 16, 20.0)]])
@pytest.mark.parametrize("options", [{}, {"n_step": 3}, {"max_offset": 4, "ticks_ahead": (2,)}])
def test_a_chunks_trace_comes_with_its_first_step_and_the_frames_it_was_made_from(
    cameras: list[tuple[int, int, float]], options: dict[str, object]
) -> None:
    buffer = filled(robot(cameras))
    known, target = expected(buffer), uniform()
    options_of_windows = {**options, "max_offset": 20}
    reference = Reference(buffer, target, HORIZON, **({"ticks_ahead": ()} | options_of_windows))
    acts = {at for at, (segment, t) in reference.steps.items() if segment.actor[t] == POLICY}
    drawn: Counter[tuple[int, int]] = Counter()
    for batch in batches(buffer, target=target, **options):
        traces = batch["traces"]
        for i in range(len(batch["tick"])):
            at = int(batch["episode"][i]), int(batch["tick"][i])
            if traces["step"][i] < 0:
                continue
            chunk, trace, lead = known[at]
            drawn[at] += 1
            assert at in acts and traces["step"][i] == trace.step
            np.testing.assert_array_equal(traces["points"][i], trace.points)
            np.testing.assert_array_equal(traces["state"][i], trace.state)
            assert (traces["age"][i], traces["log_prob"][i]) == (np.float32(trace.age_ticks), chunk.log_prob)
            reference.check(batch, i, planned=at[1] - lead, drawn=at[1] - lead)
    assert len(drawn) > 0.8 * len(known) and len(known) > 15


def test_a_chunk_counts_by_its_executed_steps() -> None:
    buffer = filled(robot([]))
    known, counts = expected(buffer), Counter()
    for batch in batches(buffer, 400, cache_bytes=40_000_000):
        there = batch["traces"]["step"] >= 0
        counts.update(zip(batch["episode"][there].tolist(), batch["tick"][there].tolist(), strict=True))
    steps = {1: 0, EXECUTED: 0}
    for (number, tick), (chunk, *_) in known.items():
        segment, _ = Reference(buffer, uniform(), HORIZON).steps[number, tick]
        executed = int(((segment.chunk_tick == chunk.first_tick) & (segment.actor == POLICY)).sum())
        if executed in steps:
            steps[executed] += 1
            counts[executed] += counts[number, tick]
    assert 3 < counts[EXECUTED] / steps[EXECUTED] / (counts[1] / steps[1]) < 5


@pytest.mark.parametrize("points", [0, 3])
def test_recordings_without_traces_or_with_others_read_as_none(points: int) -> None:
    buffer = filled(robot([]), points=points or POINTS)
    if not points:
        for row, segment in buffer.segments.items():
            buffer.segments[row] = buffer.stored[row] = msgspec.structs.replace(segment, traces=msgspec.UNSET)
    for batch in batches(buffer, 5):
        assert (batch["traces"]["step"] == -1).all()


def test_where_two_chunks_are_of_one_tick_nobody_knows_which_a_step_was_of() -> None:
    buffer = filled(robot([]))
    for row, segment in buffer.segments.items():
        chunks = segment.chunks[:1] + segment.chunks
        buffer.segments[row] = buffer.stored[row] = msgspec.structs.replace(segment, chunks=chunks)
    first = {
        (buffer.numbers[one.episode.id], tick)
        for one in buffer.segments.values()
        if one.chunks
        for tick in (one.first_tick + np.flatnonzero(one.chunk_tick == one.chunks[0].first_tick)).tolist()
    }
    found = set()
    for batch in batches(buffer, 20):
        there = batch["traces"]["step"] >= 0
        found |= set(zip(batch["episode"][there].tolist(), batch["tick"][there].tolist(), strict=True))
    assert found and not found & first


def test_a_trace_of_unknown_probability_is_none() -> None:
    buffer = filled(robot([]))
    for row, segment in buffer.segments.items():
        chunks = tuple(msgspec.structs.replace(chunk, log_prob=float("nan")) for chunk in segment.chunks)
        buffer.segments[row] = buffer.stored[row] = msgspec.structs.replace(segment, chunks=chunks)
    for batch in batches(buffer, 5):
        assert (batch["traces"]["step"] == -1).all()


def test_who_does_not_ask_for_them_gets_the_batches_of_before() -> None:
    buffer = filled(robot([(16, 16, 20.0)]))
    given = config(horizon=HORIZON)
    with ReplayDataset(buffer, buffer, buffer.robot, given) as data:  # type: ignore[arg-type]
        data.refresh()
        assert "traces" not in data.next()
    assert given.settings() == config(horizon=HORIZON, traces=2).settings(), "a run goes on with the same draws"


def test_they_do_not_go_with_several_steps_of_a_frame() -> None:
    with pytest.raises(ConfigError, match=r"traces go with ticks_per_frame 1.*training.ticks_per_frame=1"):
        config(traces=2, ticks_per_frame=2)
