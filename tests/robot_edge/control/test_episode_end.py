"""What is recorded of an episode's end: what its last action led to, why it ended; and the chunks it was made of."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.check import traces_of
from hal.drivers.fake import FAKE_TASKS, FakeConfig, Faults
from hal.interfaces.robot import Feedback
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.mode import HoldReason, Mode
from robot_edge.uplink.segments import SegmentBuilder
from tests import samples
from tests.robot_edge.control.test_loop import Bench
from wire.codec import decode, encode
from wire.errors import InvalidDataError, RobotDisconnectedError
from wire.messages import Message
from wire.messages.gateway import (
    Job,
    OperatorCommand,
    RecordedChunk,
    Segment,
    Stop,
    VersionActivated,
)
from wire.messages.local import EpisodeEnded, EpisodeLost, EpisodeStarted, FrameRecorded, StepRecorded
from wire.messages.recording import FlowTrace

LENGTH = 30
"""of an episode of `Bench`, in ticks"""


def ends(bench: Bench) -> list[EpisodeEnded]:
    return [message for message in bench.said if isinstance(message, EpisodeEnded)]


def chunks(bench: Bench) -> list[RecordedChunk]:
    return [m.chunk for m in bench.said if isinstance(m, StepRecorded) and m.chunk is not None]


def segments(said: list[Message]) -> list[Segment]:
    """What the uplink makes of it."""
    found: list[Segment | None] = []
    builder = SegmentBuilder(samples.episode(), 20)
    for message in said:
        match message:
            case EpisodeStarted(episode=episode):
                builder = SegmentBuilder(episode, 20)
            case FrameRecorded(camera=camera, frame=frame):
                builder.frame(camera, frame.time_ns, frame.image)
            case StepRecorded(step=step, chunk=chunk, trace=trace):
                found.append(builder.step(step, chunk, trace=trace))
            case EpisodeEnded(outcome=outcome, ended_ns=ended_ns, terminal=terminal):
                found.append(builder.end(outcome, ended_ns, terminal))
    return [segment for segment in found if segment is not None]


def to_goal(bench: Bench, ticks: int = 500) -> Bench:
    """Until the episode's end is there, or for so many ticks."""
    bench.answer = np.zeros(4, np.float32)
    bench.tick(3)
    while not bench.outcomes() and bench.loop._tick < ticks:
        way = (bench.robot.goal - bench.robot._state[:3]) / 0.01
        bench.answer = np.append(np.clip(way, -1, 1), 0).astype(np.float32)
        bench.tick()
    return bench


# --- the terminal observation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("camera_every_ticks", [1, 4])
def test_what_the_last_action_led_to_is_recorded_before_the_scene_is_reset(camera_every_ticks: int) -> None:
    bench = Bench(FakeConfig(camera_every_ticks=camera_every_ticks)).ready()
    bench.answer = np.array([0.5, 0, 0, 0], np.float32)
    bench.tick(LENGTH)
    last = bench.steps()[-1]
    assert (last.tick, last.truncated, bench.outcomes()) == (LENGTH - 1, True, [])
    bench.tick()
    (end,) = ends(bench)
    assert (end.outcome, len(bench.steps())) == ("failure", LENGTH)
    assert end.terminal is not None and end.terminal.time_ns > last.time_ns
    led_to = last.state + np.array([0.005, 0, 0, 0], np.float32)
    np.testing.assert_allclose(end.terminal.state, led_to, atol=1e-6)
    frames = [m.frame.time_ns for m in bench.said if isinstance(m, FrameRecorded)]
    assert end.terminal.frame_times_ns == {"front": frames[-1]}
    assert (frames[-1] > last.frames["front"]) == (camera_every_ticks == 1)
    assert len([m for m in bench.said if isinstance(m, EpisodeStarted)]) == 1
    assert bench.loop.mode is Mode.reset
    bench.tick(3)
    assert len([m for m in bench.said if isinstance(m, EpisodeStarted)]) == 2
    assert bench.loop.tracker.ended == bench.loop.inbox.finished == 1


def test_what_success_led_to_comes_after_the_tail() -> None:
    bench = to_goal(Bench(max_ticks=500, tail_ticks=3).ready())
    (end,), steps = ends(bench), bench.steps()
    assert end.outcome == "success" and end.terminal is not None
    assert [step.terminated for step in steps[-2:]] == [False, True]
    assert end.terminal.time_ns == steps[-1].time_ns + bench.robot.spec.period_ns
    moved = end.terminal.state[:3] - steps[-1].state[:3]
    np.testing.assert_allclose(moved, 0.01 * steps[-1].executed[:3], atol=1e-6)


def test_a_task_that_is_done_before_time_is_over_is_a_success_however_little_of_the_tail_is_left() -> None:
    whole = len(to_goal(Bench(max_ticks=500, tail_ticks=5).ready()).steps())
    for limit in (whole, whole - 1, whole - 3, whole - 5):
        bench = to_goal(Bench(max_ticks=limit, tail_ticks=5).ready())
        last = bench.steps()[-1]
        assert (len(bench.steps()), bench.outcomes(), last.terminated, last.truncated) == (
            limit,
            ["success"],
            True,
            False,
        )
    assert to_goal(Bench(max_ticks=whole - 6, tail_ticks=5).ready()).outcomes() == ["failure"]


@pytest.mark.parametrize("message", [OperatorCommand("robot-0", "estop"), Stop(), VersionActivated("robot-0", 4, 0)])
def test_what_is_broken_off_after_the_task_was_done_is_a_success(message: Message) -> None:
    whole = len(to_goal(Bench(max_ticks=500, tail_ticks=5).ready()).steps())
    bench = Bench(max_ticks=500, tail_ticks=5).ready()
    bench.uplink.send(Job("j", FAKE_TASKS, 500_000, version=3))
    to_goal(bench, whole - 2).uplink.send(message)
    bench.tick(1 + isinstance(message, OperatorCommand))
    bench.loop.close()
    bench.said += iter(bench.uplink.recv, None)
    assert bench.outcomes() == ["success"]
    last = segments(bench.said)[-1]
    assert (last.terminated[-1], last.truncated[-1]) == (True, False)
    assert bench.loop.inbox.finished == 1


class EndsByItself:
    """The fake robot in an environment that says after `after` actions how it ended."""

    def __init__(self, bench: Bench, after: int, **flags: bool) -> None:
        self._write, self._left, self._flags = bench.robot.write, after, flags

    def __call__(self, action: np.ndarray) -> Feedback:
        self._left -= 1
        over = self._flags if self._left <= 0 else {}
        return msgspec.structs.replace(self._write(action), **over)


@pytest.mark.parametrize(
    ("flags", "outcome", "terminated"),
    [
        ({"terminated": True}, "failure", True),
        ({"truncated": True}, "failure", False),
        ({"terminated": True, "truncated": True}, "failure", True),
        ({"terminated": True, "success": True}, "success", True),
        ({"truncated": True, "success": True}, "success", True),
    ],
)
def test_an_environment_that_ends_by_itself_ends_the_episode(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], outcome: str, terminated: bool
) -> None:
    bench = Bench().ready()
    monkeypatch.setattr(bench.robot, "write", EndsByItself(bench, 12, **flags))
    while not bench.outcomes():
        bench.tick()
    (end,), steps = ends(bench), bench.steps()
    assert (len(steps), end.outcome, bench.loop.inbox.finished) == (12, outcome, 1)
    assert end.terminal is not None and end.terminal.time_ns > steps[-1].time_ns
    assert (steps[-1].terminated, steps[-1].truncated) == (terminated, not terminated)
    assert not any(step.terminated or step.truncated for step in steps[:-1])
    assert [m.outcome for m in bench.said if isinstance(m, StepRecorded)] == [""] * 11 + [outcome]


@pytest.mark.parametrize("ticks", [LENGTH, LENGTH + 1, LENGTH + 2])
def test_an_episode_of_which_the_uplink_lost_steps_does_not_count(ticks: int) -> None:
    bench = Bench().ready().tick(LENGTH - 1)
    assert bench.loop.tracker.episode is not None
    lost = EpisodeLost(bench.loop.tracker.episode.id)
    bench.tick(ticks - LENGTH + 1)
    bench.uplink.send(lost)
    bench.uplink.send(lost)
    bench.tick(2)
    assert bench.loop.inbox.finished == 0
    bench.tick(LENGTH + 2)
    assert bench.loop.inbox.finished == 1


@pytest.mark.parametrize(
    "message",
    [VersionActivated("robot-0", 4, 0), Job("other", FAKE_TASKS, 7), EpisodeLost("another"), Stop()],
)
def test_nothing_that_comes_after_the_last_step_changes_how_the_episode_ended(message: Message) -> None:
    bench = Bench().ready()
    bench.uplink.send(Job("j", FAKE_TASKS, 500_000, version=3))
    bench.tick(LENGTH)
    bench.uplink.send(message)
    bench.tick()
    (end,) = ends(bench)
    assert (end.outcome, end.terminal is None, bench.loop.inbox.finished) == ("failure", False, 1)


def test_an_emergency_stop_after_the_last_step_stops_the_robot_and_the_episode_stays_what_it_was() -> None:
    bench = Bench().ready().tick(LENGTH)
    bench.uplink.send(OperatorCommand("robot-0", "estop"))
    bench.tick()
    assert [(end.outcome, end.terminal is None) for end in ends(bench)] == [("failure", False)]
    assert bench.loop.mode is Mode.estop


def test_a_loop_that_is_closed_after_the_last_step_keeps_the_outcome() -> None:
    bench = Bench().ready().tick(LENGTH)
    bench.loop.close()
    ended = [m for m in iter(bench.uplink.recv, None) if isinstance(m, EpisodeEnded)]
    assert [(end.outcome, end.terminal) for end in ended] == [("failure", None)]


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(nan_state=True, from_tick=LENGTH), HoldReason.bad_observation),
        (Faults(clock_back=True, from_tick=LENGTH), HoldReason.clock_jump),
        (Faults(future_frame=True, from_tick=LENGTH), HoldReason.clock_jump),
        (Faults(raise_on_read=True, from_tick=LENGTH), HoldReason.bad_observation),
    ],
)
def test_an_observation_that_may_not_be_acted_on_is_no_terminal_one(faults: Faults, reason: HoldReason) -> None:
    bench = Bench(replace(FakeConfig(), faults=faults)).ready().tick(LENGTH + 1)
    (end,) = ends(bench)
    assert (end.outcome, end.terminal) == ("failure", None)
    assert bench.loop.driver.observation_fault.reason is reason


def test_a_driver_that_is_lost_after_the_last_step_leaves_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench().ready().tick(LENGTH)

    def gone() -> None:
        raise RobotDisconnectedError("the driver is gone.")

    monkeypatch.setattr(bench.robot, "read", gone)
    bench.tick()
    assert [(end.outcome, end.terminal) for end in ends(bench)] == [("failure", None)]
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_robot)


@pytest.mark.parametrize(
    "message",
    [OperatorCommand("robot-0", "estop"), Stop(), EpisodeLost("robot-0-session-000000"), VersionActivated("r", 4, 0)],
)
def test_an_episode_that_is_broken_off_is_truncated_and_has_no_terminal_observation(message: Message) -> None:
    bench = Bench().ready()
    bench.uplink.send(Job("j", FAKE_TASKS, 500_000, version=3))
    bench.tick(25)
    bench.uplink.send(message)
    bench.tick()
    (end,) = ends(bench)
    assert (end.outcome, end.terminal) == ("aborted", None)
    last = segments(bench.said[: bench.said.index(end) + 1])[-1]
    assert last.last and last.truncated.tolist() == [False] * (last.steps - 1) + [True]
    assert not last.terminated.any()


# --- segments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "terminated"), [("success", True), ("failure", False), ("aborted", False)])
def test_exactly_the_last_step_says_how_the_episode_ended(outcome: str, terminated: bool) -> None:
    builder = SegmentBuilder(samples.episode(), 3)
    cut = [builder.step(samples.step(tick)) for tick in range(7)]
    found = [*(segment for segment in cut if segment is not None), builder.end(outcome, 5)]
    flags = [(s.terminated.tolist(), s.truncated.tolist()) for s in found if s is not None]
    assert flags == [([False] * 3, [False] * 3)] * 2 + [([terminated], [not terminated])]


@pytest.mark.parametrize(
    ("outcome", "flag"), [("success", "terminated"), ("failure", "terminated"), ("failure", "truncated")]
)
def test_control_that_dies_before_it_saw_what_the_last_action_led_to_has_recorded_how_it_ended(
    outcome: str, flag: str
) -> None:
    builder = SegmentBuilder(samples.episode(), 3)
    builder.step(msgspec.structs.replace(samples.step(0), **{flag: True}), outcome=outcome)
    segment = builder.end("aborted", 5)
    assert segment is not None
    assert (segment.outcome, segment.terminal) == (outcome, None)
    assert (segment.terminated.tolist(), segment.truncated.tolist()) == ([flag == "terminated"], [flag == "truncated"])


def test_the_terminal_observation_and_its_frame_come_with_the_last_segment() -> None:
    bench = Bench(FakeConfig(camera_every_ticks=1)).ready().tick(LENGTH + 1)
    first, last = segments(bench.said)
    assert (first.terminal, first.steps, last.steps) == (None, 20, 10)
    assert last.terminal is not None
    assert last.terminal.frame_times_ns["front"] == last.frames["front"].times_ns[-1] > last.frame_times_ns["front"][-1]


# --- chunks ---------------------------------------------------------------------------------------------------------


def test_each_chunk_is_recorded_once_with_the_first_step_that_executed_an_action_of_it() -> None:
    bench = Bench().ready().tick(LENGTH + 1)
    steps, found = bench.steps(), chunks(bench)
    assert len(found) > 2
    assert [chunk.first_tick for chunk in found] == sorted({step.chunk_tick for step in steps if step.chunk_tick >= 0})
    for chunk in found:
        assert (chunk.version, chunk.actions.shape, chunk.actions.dtype) == (3, (16, 4), np.float32)
    with_chunk = [m.step for m in bench.said if isinstance(m, StepRecorded) and m.chunk is not None]
    assert [step.chunk_tick for step in with_chunk] == [chunk.first_tick for chunk in found]
    assert [step.tick for step in with_chunk] == [
        next(step.tick for step in steps if step.chunk_tick == chunk.first_tick) for chunk in found
    ]
    by_segment = segments(bench.said)
    assert [c.first_tick for segment in by_segment for c in segment.chunks] == [c.first_tick for c in found]
    for segment in by_segment:
        assert {chunk.first_tick for chunk in segment.chunks} <= set(segment.chunk_tick.tolist())


def test_how_a_chunk_came_about_is_recorded_with_it_and_once() -> None:
    bench = Bench(max_ticks=500)
    bench.trace = FlowTrace(0, 2, np.ones((2, 64), np.float32), np.zeros(4, np.float32), 1.5)
    bench.ready().tick(60)
    by_segment = [decode(encode(segment)) for segment in segments(bench.said)]
    assert len([chunk for segment in by_segment for chunk in segment.chunks]) > 2
    for segment in by_segment:
        assert {(chunk.seed, chunk.log_prob) for chunk in segment.chunks} <= {(7, -2.5)}
        assert [one.first_tick for one in traces_of(segment)] == [chunk.first_tick for chunk in segment.chunks]
        for one in traces_of(segment):
            assert (one.step, one.age_ticks) == (2, 1.5)
            np.testing.assert_array_equal(one.points, bench.trace.points)
            np.testing.assert_array_equal(one.state, bench.trace.state)
    plain = segments(Bench(max_ticks=500).ready().tick(60).said)
    assert plain and all(segment.traces is msgspec.UNSET for segment in plain)


def test_chunks_of_which_nothing_was_executed_are_not_recorded() -> None:
    bench = Bench(max_ticks=500).ready().tick(3)
    before = len(chunks(bench))
    bench.uplink.send(bench.person("take_over"))
    for _ in range(40):
        bench.uplink.send(bench.person("command", 0.0, 0.0, 0.3, 0.0))
        bench.tick()
    assert bench.loop.mode is Mode.human
    assert len({step.chunk_tick for step in bench.steps()}) > before + 2, "chunks came meanwhile"
    assert len(chunks(bench)) == before
    bench.uplink.send(bench.person("hand_back"))
    bench.tick(3)
    assert chunks(bench)[before].first_tick == bench.steps()[-1].chunk_tick


def test_a_chunk_that_is_executed_faster_is_recorded_as_it_was_made() -> None:
    bench = Bench().ready()
    bench.answer = np.array([0.1, 0.2, 0.0, 0.4], np.float32)
    bench.chunking = ChunkingConfig("naive", speed_up=2)
    bench.tick(LENGTH)
    assert {round(float(step.executed[0]), 3) for step in bench.steps()[5:]} == {0.2}
    for chunk in chunks(bench):
        assert chunk.actions.tolist() == np.tile(bench.answer, (16, 1)).tolist()
    assert [c.first_tick for c in chunks(bench)] == sorted({s.chunk_tick for s in bench.steps() if s.chunk_tick >= 0})


def test_a_terminal_observation_whose_frame_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench().ready().tick(LENGTH)

    def overwritten(episode: object, observation: object) -> None:
        raise InvalidDataError("the frame was overwritten.")

    monkeypatch.setattr(bench.loop.tracker.recorder, "_put_frames", overwritten)
    bench.tick()
    assert [(end.outcome, end.terminal) for end in ends(bench)] == [("failure", None)]
