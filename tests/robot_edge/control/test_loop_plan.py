"""The control loop and its strategy: chosen by the checkpoint, refused when it does not fit, fed with what happened."""

from __future__ import annotations

import numpy as np
import pytest

from hal.drivers.fake import FAKE_LIMITS, FAKE_TASKS, FakeConfig, FakeRobot, Faults
from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.strategies.future_state import FutureStateScheduler
from robot_edge.control.config import LoopConfig, ObservationLimits
from robot_edge.control.loop import ControlLoop
from robot_edge.control.mode import HoldReason, Mode
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError
from wire.messages import Message
from wire.messages.gateway import EdgeEvent, Job, OperatorCommand, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeEnded, EpisodeLost, StepRecorded
from wire.transport.memory_channel import memory_pair
from wire.types import ActionChunk, Actor, PolicyCapabilities, Step

ALIGNED = PolicyCapabilities(trained_max_delay=8, state_aligned=True)


class Bench:
    """A loop whose inference answers `delay` ticks late."""

    def __init__(
        self, strategy: str, faults: Faults | None = None, safety: SafetyLimits | None = None, **config: float
    ) -> None:
        self.clock = ManualClock()
        self.robot = FakeRobot(FakeConfig(faults=faults or Faults()), self.clock)
        self.robot.connect()
        self.uplink, uplink = memory_pair()
        self.inference, inference = memory_pair()
        motion = SpecMotion(self.robot.spec, [ActionStateMapping(f"move_{axis}", axis, 0.01) for axis in "xyz"])
        limits = safety or FAKE_LIMITS
        self.loop = ControlLoop(
            "robot-0",
            "session",
            LimitedRobot(self.robot, limits),
            uplink,
            inference,
            lambda trained: make_scheduler(ChunkingConfig(strategy), self.robot.spec, trained, motion, safety=limits),
            self.clock,
            LoopConfig(
                **{"max_ticks": 40, **config}, observation_limits=ObservationLimits(recover_ticks=2), safety=limits
            ),
        )
        self.said: list[Message] = []
        self.asked: list[ChunkRequest] = []
        self.delay = 4
        self.action = np.array([0.4, 0.0, 0.0, 0.0], np.float32)
        self._coming: list[tuple[int, ChunkReply]] = []
        self._now = 0
        self.uplink.send(Job("j", FAKE_TASKS, 500_000))

    def applied(self, number: int, trained: PolicyCapabilities) -> Bench:
        self.uplink.send(VersionActivated("robot-0", number, 0, trained))
        return self

    def tick(self, count: int = 1) -> Bench:
        for _ in range(count):
            self._now += 1
            while self._coming and self._coming[0][0] <= self._now:
                self.inference.send(self._coming.pop(0)[1])
            self.loop.tick()
            self.answer(self.delay)
            while (message := self.uplink.recv()) is not None:
                self.said.append(message)
        return self

    def answer(self, delay: int) -> None:
        while (request := self.inference.recv()) is not None:
            if isinstance(request, ChunkRequest):
                self.asked.append(request)
                actions = np.tile(self.action, (16, 1))
                chunk = ActionChunk(actions, request.first_tick, 12_500_000, self.loop.inbox.version, 0, 0)
                reply = ChunkReply(chunk, tick=request.tick)
                if delay:
                    self._coming.append((self._now + delay, reply))
                else:
                    self.inference.send(reply)

    def steps(self) -> list[Step]:
        return [m.step for m in self.said if isinstance(m, StepRecorded)]

    def events(self) -> list[tuple[str, str]]:
        return [(m.kind, m.detail) for m in self.said if isinstance(m, EdgeEvent)]


def test_auto_follows_the_checkpoint_and_asks_with_the_state_to_come() -> None:
    bench = Bench("auto").applied(1, ALIGNED).tick(30)
    assert isinstance(bench.loop.chunks.scheduler, FutureStateScheduler)
    steps = bench.steps()
    # the first request of all does not know the delay yet
    ahead = [request for request in bench.asked[1:] if request.first_tick > request.tick]
    assert ahead
    first = bench.loop.tracker.first_tick
    states = {first + step.tick: step.state for step in steps}
    for request in ahead:
        assert request.first_tick - request.tick == bench.delay
        if request.first_tick in states:
            # the fake robot does exactly what its motion says
            np.testing.assert_allclose(request.state, states[request.first_tick], atol=1e-5)
    assert {step.delay_ticks for step in steps if step.chunk_tick >= 0} == {bench.delay}
    assert bench.loop.tracker.starved == 0


def test_a_checkpoint_that_was_not_trained_for_the_strategy_is_refused_and_a_later_one_taken() -> None:
    bench = Bench("future_state").applied(1, PolicyCapabilities()).tick(5)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.untrained)
    ((kind, detail),) = bench.events()
    assert kind == "refused"
    assert "trained_max_delay 0" in detail and "aligned" in detail
    assert bench.steps() == []
    bench.applied(2, ALIGNED).tick(12)
    assert bench.loop.mode is Mode.policy


def test_another_training_ends_the_episode_and_the_next_one_follows_it() -> None:
    bench = Bench("auto").applied(1, PolicyCapabilities()).tick(10)
    assert not isinstance(bench.loop.chunks.scheduler, FutureStateScheduler)
    bench.applied(2, ALIGNED).tick(3)
    assert [m.outcome for m in bench.said if isinstance(m, EpisodeEnded)] == ["aborted"]
    assert isinstance(bench.loop.chunks.scheduler, FutureStateScheduler)
    assert bench.tick(10).loop.mode is Mode.policy


def test_a_first_reading_that_is_not_valid_holds_without_a_command_and_recovers() -> None:
    bench = Bench("auto", faults=Faults(nan_state=True)).applied(1, ALIGNED)
    written: list[np.ndarray] = []
    write = bench.robot.write
    bench.robot.write = lambda action: (written.append(action), write(action))[1]  # type: ignore[method-assign]
    bench.tick(5)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.bad_observation)
    assert written == [], "nobody knows what holds a robot that was not seen yet"
    bench.uplink.send(OperatorCommand("robot-0", "estop"))
    assert bench.tick(2).loop.mode is Mode.estop
    bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop="web"))
    bench.uplink.send(OperatorCommand("robot-0", "start"))
    bench.robot.config = FakeConfig()
    assert bench.tick(12).loop.mode is Mode.policy


def test_a_later_episode_never_holds_at_the_place_of_the_one_before() -> None:
    bench = Bench("auto", max_ticks=12).applied(1, ALIGNED).tick(8)
    reset, write, written = bench.robot.reset, bench.robot.write, []

    def spoilt(task: str, seed: int) -> None:
        reset(task, seed)
        written.clear()
        bench.robot.config = FakeConfig(faults=Faults(nan_state=True))

    bench.robot.reset = spoilt  # type: ignore[method-assign]
    bench.robot.write = lambda action: (written.append(action), write(action))[1]  # type: ignore[method-assign]
    bench.tick(20)
    assert bench.loop.tracker.ended == 1
    assert bench.loop.hold.reason is HoldReason.bad_observation
    assert written == []


@pytest.mark.parametrize("wrong", [RobotError("the bus is busy"), np.full(4, np.nan, np.float32)])
def test_a_driver_that_does_not_take_a_command_is_held_and_tried_again(wrong: object) -> None:
    bench = Bench("auto").applied(1, ALIGNED).tick(10)
    write, failing = bench.robot.write, [True]

    def refuse(action: np.ndarray) -> Feedback:
        if not failing[0]:
            return write(action)
        if isinstance(wrong, RobotError):
            raise wrong
        return Feedback(wrong)  # type: ignore[arg-type]

    bench.robot.write = refuse  # type: ignore[method-assign]
    bench.tick(3)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.safety)
    assert bench.steps()[-1].executed.tolist() == [0, 0, 0, 0]
    failing[0] = False
    assert bench.tick(12).loop.mode is Mode.policy
    assert [kind for kind, _ in bench.events()] == ["hold", "recovered"]
    failing[0] = True
    bench.tick(60)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_robot)
    assert "took none of 41 commands" in bench.loop.driver.fault.detail
    failing[0] = False
    bench.tick(120)
    assert (bench.loop.mode, bench.loop.driver.fault.detail) == (Mode.policy, ""), "a second later it is tried again"
    assert [kind for kind, _ in bench.events()] == ["hold", "recovered"] * 2


def test_after_a_stop_the_robot_is_slowed_down_to_rest() -> None:
    limits = SafetyLimits(acceleration={"move_x": 0.1 * 80 * 80})
    bench = Bench("aligned", safety=limits).applied(1, PolicyCapabilities()).tick(20)
    written: list[float] = []
    write = bench.robot.write
    bench.robot.write = lambda action: (written.append(float(action[0])), write(action))[1]  # type: ignore[method-assign]
    bench.uplink.send(OperatorCommand("robot-0", "estop"))
    bench.tick(10)
    np.testing.assert_allclose(written[:4], [0.3, 0.2, 0.1, 0.0], atol=1e-6)
    assert len(written) <= 5, "and then nothing is commanded any more"
    assert bench.loop.mode is Mode.estop


def test_a_quick_answer_counts_in_the_tick_it_was_asked_in_when_the_command_may_wait() -> None:
    bench = Bench("aligned", write_after_s=0.008).applied(1, PolicyCapabilities())
    clock, sleep = bench.clock, bench.clock.sleep_until
    began = []

    def answer(deadline_ns: int) -> None:
        sleep(deadline_ns)
        if deadline_ns % bench.robot.spec.period_ns:
            began.append(clock.now_ns() - bench.loop.rate.due_ns)
            bench.answer(0)

    clock.sleep_until = answer  # type: ignore[method-assign]
    bench.tick(20)
    assert {step.delay_ticks for step in bench.steps()} == {0}
    assert {step.actor for step in bench.steps()} == {Actor.policy}, "the first tick already has an action"
    assert set(began) == {8_000_000}
    with pytest.raises(ConfigError, match="write_after_s"):
        Bench("aligned", write_after_s=0.0125)


def test_an_episode_that_is_void_while_the_command_waits_ends_without_that_tick() -> None:
    bench = Bench("aligned", write_after_s=0.008).applied(1, PolicyCapabilities()).tick(5)
    sleep, sent = bench.clock.sleep_until, []

    def restarted(deadline_ns: int) -> None:
        sleep(deadline_ns)
        if deadline_ns % bench.robot.spec.period_ns and not sent:
            assert bench.loop.tracker.episode is not None
            sent.append(bench.uplink.send(EpisodeLost(bench.loop.tracker.episode.id)))

    bench.clock.sleep_until = restarted  # type: ignore[method-assign]
    steps = len(bench.steps())
    bench.tick(1)
    assert (sent, bench.loop.tracker.running, len(bench.steps())) == ([True], False, steps)
    bench.tick(5)
    assert bench.loop.tracker.running and len(bench.steps()) > steps


def test_a_joint_that_reports_nan_holds_tells_the_operator_once_and_recovers() -> None:
    bench = Bench("auto").applied(1, ALIGNED).tick(10)
    assert bench.loop.mode is Mode.policy
    bench.robot.config = FakeConfig(faults=Faults(nan_state=True))
    bench.tick(6)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.bad_observation)
    bench.robot.config = FakeConfig()
    bench.tick(12)
    assert bench.loop.mode is Mode.policy
    kinds = [kind for kind, _ in bench.events()]
    assert kinds == ["hold", "recovered"]
    assert "not finite in ['x', 'y', 'z', 'gripper_opening']" in bench.events()[0][1]


def test_starved_it_brakes_as_hard_as_it_may_and_stands() -> None:
    # from 0.4 cm a step to rest, at 0.1 cm a step per step
    limits = SafetyLimits(acceleration={"move_x": 0.1 * 80 * 80})
    bench = Bench("aligned", safety=limits).applied(1, PolicyCapabilities()).tick(20)
    assert bench.steps()[-1].executed[0] == np.float32(0.4)
    bench.delay = 10_000
    bench.tick(22)
    moved = [float(step.executed[0]) for step in bench.steps()]
    last = max(i for i, x in enumerate(moved) if x == np.float32(0.4))
    np.testing.assert_allclose(moved[last + 1 : last + 5], [0.3, 0.2, 0.1, 0.0], atol=1e-6)
    assert bench.steps()[last + 1].actor is Actor.hold
    assert not any(moved[last + 5 :])


def test_what_was_executed_after_limits_is_what_the_next_request_reckons_with() -> None:
    limits = SafetyLimits(velocity={"move_x": 0.25 * 80})
    bench = Bench("auto", safety=limits).applied(1, ALIGNED).tick(30)
    assert {round(float(step.executed[0]), 6) for step in bench.steps()[8:]} == {0.25}
    states = {bench.loop.tracker.first_tick + step.tick: step.state for step in bench.steps()}
    ahead = [r for r in bench.asked if r.first_tick > r.tick and r.first_tick in states]
    assert ahead
    for request in ahead:
        np.testing.assert_allclose(request.state, states[request.first_tick], atol=1e-5)
