"""The control loop against the fake robot, tick by tick, with a test as uplink and inference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hal.drivers.fake import FAKE_LIMITS, FAKE_TASKS, FakeConfig, FakeExpert, FakeRobot, Faults
from hal.safety.limited_robot import LimitedRobot
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.control.config import GateConfig, LoopConfig
from robot_edge.control.loop import ControlLoop
from robot_edge.control.mode import HoldReason, Mode
from tests.people import Person
from wire.clock import ManualClock
from wire.errors import RobotError
from wire.messages import Message
from wire.messages.gateway import EdgeEvent, EdgeStatus, Job, Nack, OperatorCommand, Stop, VersionActivated
from wire.messages.local import (
    ChunkReply,
    ChunkRequest,
    EpisodeEnded,
    EpisodeLost,
    EpisodeStarted,
    FrameRecorded,
    StepRecorded,
)
from wire.messages.recording import FlowTrace
from wire.transport.memory_channel import memory_pair
from wire.types import ActionChunk, Actor, Step


class Bench:
    """A loop whose other processes are played by the test."""

    def __init__(self, config: FakeConfig | None = None, *, operated: bool = False, **limits: int) -> None:
        self.clock = ManualClock()
        self.robot = FakeRobot(config or FakeConfig(), self.clock)
        self.robot.connect()
        self.chunking = ChunkingConfig("aligned")
        self.uplink, uplink = memory_pair()
        self.inference, inference = memory_pair()
        self.loop = ControlLoop(
            "robot-0",
            "session",
            LimitedRobot(self.robot, FAKE_LIMITS),
            uplink,
            inference,
            lambda trained: make_scheduler(self.chunking, self.robot.spec, trained),
            self.clock,
            LoopConfig(**{"max_ticks": 30, "tail_ticks": 2, "gate": GateConfig(min_ticks=5), **limits}),
            FakeExpert(self.robot) if operated else None,
        )
        self.person = Person(self.clock)
        self.said: list[Message] = []
        self.asked: list[ChunkRequest] = []
        self.scenes: list[str] = []
        """episodes that inference heard of"""
        self.answer: np.ndarray | None = np.zeros(4, np.float32)
        """the action of every chunk; None: inference is silent"""
        self.trace: FlowTrace | None = None
        """of every chunk"""

    def ready(self) -> Bench:
        self.uplink.send(Job("j", FAKE_TASKS, 500_000))
        self.uplink.send(VersionActivated("robot-0", 3, 0))
        return self

    def tick(self, count: int = 1) -> Bench:
        for _ in range(count):
            self.loop.tick()
            while (request := self.inference.recv()) is not None:
                if isinstance(request, EpisodeStarted):
                    self.scenes.append(request.episode.id)
                    continue
                assert isinstance(request, ChunkRequest)
                self.asked.append(request)
                if self.answer is not None:
                    actions = np.tile(self.answer, (16, 1)).astype(np.float32)
                    chunk = ActionChunk(actions, request.first_tick, 12_500_000, 3, 0, 0, 7, -2.5, trace=self.trace)
                    self.inference.send(ChunkReply(chunk, tick=request.tick))
            while (message := self.uplink.recv()) is not None:
                self.said.append(message)
        return self

    def lose_episode(self) -> bool:
        """The uplink says that it has not all of the running one."""
        assert self.loop.tracker.episode is not None
        return self.uplink.send(EpisodeLost(self.loop.tracker.episode.id))

    def steps(self) -> list[Step]:
        return [m.step for m in self.said if isinstance(m, StepRecorded)]

    def outcomes(self) -> list[str]:
        return [m.outcome for m in self.said if isinstance(m, EpisodeEnded)]


def test_a_robot_holds_until_it_has_a_job_and_a_version() -> None:
    bench = Bench().tick()
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_job)
    bench.uplink.send(Job("j", FAKE_TASKS, 500_000))
    bench.tick()
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_version)
    assert bench.steps() == []
    bench.uplink.send(VersionActivated("robot-0", 3, 0))
    bench.tick(3)
    assert bench.loop.mode is Mode.policy
    assert bench.steps()


def test_a_person_demonstrates_before_there_is_a_version() -> None:
    bench = Bench()
    bench.uplink.send(Job("j", FAKE_TASKS, 500_000))
    bench.uplink.send(bench.person("take_over"))
    for number in range(10):
        action = (0.1 * (number % 2 + 1), *(0.0 for _ in range(bench.loop.robot.spec.action_dim - 1)))
        bench.uplink.send(bench.person("command", *action))
        bench.tick()
    assert Actor.human in {step.actor for step in bench.steps()}
    bench.uplink.send(bench.person("hand_back"))
    bench.tick(3)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_version)


def test_every_tick_of_an_episode_is_recorded_in_order_with_who_acted() -> None:
    bench = Bench().ready().tick(35)
    episode = next(m.episode for m in bench.said if isinstance(m, EpisodeStarted))
    steps = bench.steps()[:30]
    assert [s.tick for s in steps] == list(range(30))
    assert steps[0].actor is Actor.hold
    assert {s.actor for s in steps[1:]} == {Actor.policy}
    assert {s.version for s in steps} == {3}
    assert {s.delay_ticks for s in steps[1:]} == {1}
    assert [s.truncated for s in steps] == [False] * 29 + [True]
    assert bench.outcomes()[0] == "failure"
    assert (episode.task, episode.seed) == (FAKE_TASKS[0], 500_000)
    second = [m.episode for m in bench.said if isinstance(m, EpisodeStarted)][1]
    assert (second.task, second.seed) == (FAKE_TASKS[1], 500_001)
    assert second.id != episode.id
    assert bench.scenes == [episode.id, second.id]


def test_frames_are_sent_once_and_before_the_steps_that_saw_them() -> None:
    bench = Bench().ready().tick(20)
    known: set[int] = set()
    for message in bench.said:
        if isinstance(message, FrameRecorded):
            assert message.frame.time_ns not in known
            known.add(message.frame.time_ns)
        if isinstance(message, StepRecorded):
            assert set(message.step.frames.values()) <= known
    assert len(known) == 5


def test_a_status_says_more_than_the_reason_of_a_hold() -> None:
    bench = Bench(status_every_ticks=1).ready()
    bench.answer = None
    bench.tick(2)
    bench.inference.send(ChunkReply(None, "no version is loaded", bench.asked[-1].tick))
    bench.tick(2)
    status = [m for m in bench.said if isinstance(m, EdgeStatus)][-1]
    assert (status.reason, status.detail) == (HoldReason.no_action.value, "no version is loaded")
    assert status.fault == ""


def test_without_fresh_actions_the_robot_stands_still_and_comes_back() -> None:
    bench = Bench(max_ticks=500).ready()
    bench.answer = np.full(4, 0.5, np.float32)
    bench.tick(10)
    assert bench.loop.mode is Mode.policy
    bench.answer = None
    bench.tick(20)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_action)
    last = bench.steps()[-1]
    assert last.actor is Actor.hold
    # a delta action is never repeated; the gripper keeps what it was told
    assert last.executed.tolist() == [0, 0, 0, 0.5]
    bench.answer = np.zeros(4, np.float32)
    bench.tick(45)
    assert bench.loop.mode is Mode.policy


def test_what_is_recorded_is_what_was_executed() -> None:
    bench = Bench().ready()
    bench.answer = np.array([5.0, -5.0, 0.1, 0.0], np.float32)
    bench.tick(5)
    step = bench.steps()[-1]
    assert step.proposed.tolist() == pytest.approx([5.0, -5.0, 0.1, 0.0])
    assert step.executed.tolist() == pytest.approx([1.0, -1.0, 0.1, 0.0])


def test_an_action_that_is_not_a_number_brings_hold() -> None:
    bench = Bench().ready()
    bench.answer = np.array([np.nan, 0, 0, 0], np.float32)
    bench.tick(5)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.bad_action)
    step = bench.steps()[-1]
    # The gateway would not take what is not finite, and with it none of the steps beside it.
    assert np.isfinite(step.executed).all() and np.isfinite(step.proposed).all()


@pytest.mark.parametrize("faults", [Faults(nan_state=True, from_tick=5), Faults(raise_on_read=True, from_tick=5)])
def test_a_robot_that_reports_nonsense_holds_with_the_reason(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(replace(FakeConfig(), faults=faults)).ready().tick(15)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.bad_observation)
    assert "hold:" in caplog.text
    assert all(np.isfinite(s.state).all() for s in bench.steps())


def test_a_robot_that_never_answers_is_held_and_the_operator_told() -> None:
    bench = Bench(replace(FakeConfig(), faults=Faults(raise_on_read=True))).ready().tick(3)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.bad_observation)
    (event,) = [m for m in bench.said if isinstance(m, EdgeEvent)]
    assert event.kind == "hold" and "does not answer" in event.detail


def test_a_camera_that_stands_still_brings_hold() -> None:
    bench = Bench(replace(FakeConfig(), faults=Faults(frozen_camera=True)), max_ticks=200).ready()
    bench.tick(60)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.stale_camera)


def test_the_scripted_operator_takes_over_when_the_policy_goes_wrong() -> None:
    bench = Bench(operated=True).ready()
    bench.answer = -np.ones(4, np.float32)
    bench.tick(25)
    actors = [s.actor for s in bench.steps()]
    assert Actor.script in actors
    assert actors.index(Actor.script) >= 3
    status = [m for m in bench.said if isinstance(m, EdgeStatus)][-1]
    assert status.interventions >= 1


def test_a_person_outranks_the_scripted_operator_and_pauses_the_time_limit() -> None:
    bench = Bench(operated=True).ready()
    bench.answer = -np.ones(4, np.float32)
    bench.tick(3)
    bench.uplink.send(bench.person("take_over"))
    for _ in range(60):
        bench.uplink.send(bench.person("command", 0.0, 0.0, 0.3, 0.0))
        bench.tick()
    assert bench.loop.mode is Mode.human
    assert bench.outcomes() == []
    assert {s.actor for s in bench.steps()[5:]} == {Actor.human}
    bench.uplink.send(bench.person("hand_back"))
    bench.tick(40)
    assert bench.outcomes() == ["failure"] or bench.outcomes() == ["success"]


def test_estop_ends_the_episode_and_nothing_starts_until_somebody_starts_it() -> None:
    bench = Bench().ready().tick(5)
    bench.uplink.send(OperatorCommand("robot-0", "estop", stop="1", operator="anna"))
    bench.tick(10)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.estop, HoldReason.estop)
    assert bench.outcomes() == ["aborted"]
    bench.uplink.send(bench.person("take_over"))
    bench.uplink.send(bench.person("command", 1.0, 0.0, 0.0, 0.0))
    bench.tick(5)
    assert bench.loop.mode is Mode.estop
    bench.uplink.send(bench.person("hand_back"))
    bench.uplink.send(OperatorCommand("robot-0", "start"))
    bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop="1"))
    bench.tick(5)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.not_started)
    bench.uplink.send(OperatorCommand("robot-0", "start"))
    bench.tick(5)
    assert bench.loop.mode is Mode.policy


def test_commands_that_a_stalled_link_kept_do_not_move_the_robot() -> None:
    bench = Bench().ready().tick(5)
    bench.uplink.send(bench.person("take_over"))
    bench.tick(2)
    made_ns = bench.clock.now_ns() - 1_000_000_000
    for number in range(20):
        late = bench.person("command", 1.0, 0, 0, 0, captured_ns=made_ns + number * 30_000_000)
        bench.uplink.send(late)
    bench.tick(3)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.operator_idle)
    bench.uplink.send(bench.person("command", 1.0, 0, 0, 0))
    bench.tick(1)
    assert bench.loop.mode is Mode.human
    bench.uplink.send(late)
    bench.tick(1)
    assert bench.loop.mode is Mode.human, "what was overtaken changes nothing"


def test_a_release_takes_back_the_stop_it_names_and_no_other() -> None:
    bench = Bench().ready().tick(5)
    for stop, who in (("1", "anna"), ("2", "the pedal")):
        bench.uplink.send(OperatorCommand("robot-0", "estop", stop=stop, operator=who))
    bench.tick(2)
    for release in ("1", "0", "1", ""):
        bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop=release))
        bench.uplink.send(OperatorCommand("robot-0", "start"))
        bench.tick(3)
        assert bench.loop.mode is Mode.estop
    assert bench.loop.driver.stop_state.stops == {"2": "the pedal"}


def test_a_stopped_robot_is_neither_connected_nor_reset() -> None:
    bench = Bench()
    bench.loop.driver.start_disconnected()
    bench.robot.close()
    bench.uplink.send(OperatorCommand("robot-0", "estop", stop="1"))
    bench.ready().tick(20)
    assert bench.loop.mode is Mode.estop
    with pytest.raises(RobotError, match="reset"):
        bench.robot.read()
    bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop="1"))
    bench.uplink.send(OperatorCommand("robot-0", "start"))
    assert bench.tick(20).loop.mode is Mode.policy


def test_a_spool_that_cannot_be_written_holds_the_robot() -> None:
    bench = Bench().ready().tick(5)
    bench.uplink.send(Nack("the disk is full"))
    bench.tick(2)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.storage)
    bench.uplink.send(Nack(""))
    bench.tick(2)
    # What was planned when the robot was stopped is not for a robot that stood still meanwhile.
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_action)
    assert bench.asked[-1].tick == bench.loop._tick
    bench.tick()
    assert bench.loop.mode is Mode.policy


def test_an_episode_of_which_the_uplink_lost_steps_ends() -> None:
    bench = Bench().ready().tick(5)
    bench.lose_episode()
    bench.tick(2)
    assert bench.outcomes() == ["aborted"]
    assert len([m for m in bench.said if isinstance(m, EpisodeStarted)]) == 2


def test_stop_ends_the_episode() -> None:
    bench = Bench().ready().tick(5)
    bench.uplink.send(Stop())
    bench.tick()
    assert bench.loop.inbox.stopping
    assert bench.outcomes() == ["aborted"]
    bench.loop.close()


class Deaf:
    """A line with nobody at the other end."""

    def send(self, message: Message) -> bool:
        return False

    def recv(self) -> Message | None:
        return None

    def close(self) -> None:
        return


def test_without_a_recorder_the_robot_holds_and_memory_does_not_grow() -> None:
    bench = Bench(max_ticks=10_000).ready().tick(5)
    bench.loop.tracker.recorder._channel = Deaf()
    bench.tick(200)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_recorder)
    assert len(bench.loop.tracker.recorder._waiting) < 40
