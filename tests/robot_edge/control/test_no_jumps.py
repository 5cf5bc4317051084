"""A robot with absolute actions never jumps: each chunk is executed from where the robot is.

The policy moves at one speed from the state it is asked with, and nothing limits the robot, so whatever moves its
set-point faster is an action at a tick it was not made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, repeat

import numpy as np
import pytest

from hal.interfaces.dynamics import SpecMotion
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.control.config import EpisodeRules, GateConfig, LoopConfig, ObservationLimits
from robot_edge.control.loop import ControlLoop
from robot_edge.control.mode import HoldReason, Mode
from tests.people import Person
from wire.clock import ManualClock
from wire.errors import RobotError
from wire.messages.gateway import Job, Nack, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, StepRecorded
from wire.transport.memory_channel import memory_pair
from wire.types import ActionChunk, Dimension, Observation, PolicyCapabilities, RobotSpec, Step

STRATEGIES = ["sync", "naive", "aligned", "ensemble", "future_state", "rtc_guided", "rtc_trained", "residual"]
EVERYTHING = PolicyCapabilities(trained_max_delay=8, state_aligned=True, prefix_trained=True, residual_trained=True)
SPEED, HORIZON, START = 3.0, 16, 50.0
SPEC = RobotSpec(
    embodiment="slider",
    state=(Dimension("x", "m", -1e5, 1e5),),
    action=(Dimension("x", "m", -1e5, 1e5),),
    cameras=(),
    control_hz=50.0,
)


class Slider:
    """A robot that is where it is told to be."""

    spec, tasks = SPEC, ("slide",)

    def __init__(self, clock: ManualClock) -> None:
        self.x = START
        self.unreadable = self.refuses = False
        self._clock = clock

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def reset(self, task: str, seed: int) -> None:
        self.x = START

    def read(self) -> Observation:
        if self.unreadable:
            raise RobotError("the line is silent")
        return Observation(self._clock.now_ns(), np.array([self.x], np.float32), {}, "slide")

    def write(self, action: np.ndarray) -> Feedback:
        if self.refuses:
            raise RobotError("not now")
        self.x = float(action[0])
        return Feedback(action)


class Backwards:
    """A scripted operator who wants to go the other way."""

    def propose(self, observation: Observation) -> np.ndarray:
        return observation.state - np.float32(SPEED)

    def progress(self) -> float:
        return 0.0


def onwards(request: ChunkRequest) -> ChunkReply:
    actions = request.state + SPEED * np.arange(1, HORIZON + 1, dtype=np.float32)[:, None]
    observed_ns = request.observation.time_ns
    chunk = ActionChunk(actions, request.first_tick, SPEC.period_ns, 1, observed_ns, observed_ns)
    return ChunkReply(chunk, tick=request.tick)


@dataclass(frozen=True)
class Moved:
    """One tick of the loop."""

    by: float
    mode: Mode
    reason: HoldReason


@dataclass
class Bench:
    """A loop on a slider; `delays`, in ticks, of the answers to its requests in turn, None for one that is lost.

    `quick`: commands wait for answers that take no time; otherwise these count in the tick after.
    """

    strategy: str
    delays: Iterator[int | None] = field(default_factory=lambda: repeat(6))
    operated: bool = False
    quick: bool = False
    blend_s: float = 0.5
    attended: bool = False
    """a person resets the scene"""

    def __post_init__(self) -> None:
        self.clock = ManualClock(10**9)
        self.robot = Slider(self.clock)
        self.uplink, uplink = memory_pair()
        self.inference, inference = memory_pair()
        chunking = ChunkingConfig(self.strategy, timeout_ticks=12)
        self.loop = ControlLoop(
            "robot-0",
            "session",
            LimitedRobot(self.robot),
            uplink,
            inference,
            lambda trained: make_scheduler(chunking, SPEC, trained, SpecMotion(SPEC)),
            self.clock,
            LoopConfig(
                max_ticks=100_000,
                episodes=EpisodeRules(reset_by_person=self.attended),
                hand_back_blend_s=self.blend_s,
                write_after_s=0.01 if self.quick else 0.0,
                observation_limits=ObservationLimits(recover_ticks=1),
                gate=GateConfig(min_ticks=5, gripper_weight=1.0, disagreement=0.3),
            ),
            Backwards() if self.operated else None,
        )
        self.person_at_page = Person(self.clock)
        self.rows: list[Moved] = []
        self.steps: list[Step] = []
        self._coming: list[tuple[int, ChunkReply]] = []
        self._sleep, self.clock.sleep_until = self.clock.sleep_until, self._sleep_until  # type: ignore[method-assign]
        self.uplink.send(Job("j", ("slide",), 0))
        self.uplink.send(VersionActivated("robot-0", 1, 0, EVERYTHING))

    def tick(self, count: int = 1) -> list[Moved]:
        for _ in range(count):
            before = self.robot.x
            self._answer()
            self.loop.tick()
            self.rows.append(Moved(self.robot.x - before, self.loop.mode, self.loop.hold.reason))
            self._ask(len(self.rows) - 1)
            while (message := self.uplink.recv()) is not None:
                if isinstance(message, StepRecorded):
                    self.steps.append(message.step)
        return self.rows[-count:]

    def _ask(self, now: int) -> None:
        while (request := self.inference.recv()) is not None:
            if isinstance(request, ChunkRequest) and (delay := next(self.delays)) is not None:
                self._coming.append((now + delay, onwards(request)))

    def _answer(self) -> None:
        now = len(self.rows)
        for _, reply in [late for late in self._coming if late[0] <= now]:
            self.inference.send(reply)
        self._coming = [late for late in self._coming if late[0] > now]

    def _sleep_until(self, deadline_ns: int) -> None:
        self._sleep(deadline_ns)
        if deadline_ns % SPEC.period_ns:
            self._ask(len(self.rows))
            self._answer()

    def skip(self, periods: int) -> None:
        """The loop is kept from its next ticks."""
        self.clock.advance((periods + 1) * SPEC.period_ns)

    def person(self, kind: str, *action: float) -> None:
        self.uplink.send(self.person_at_page(kind, *action))

    def check(self) -> None:
        """That nobody but a person moved the robot faster than `SPEED` in a tick, or half as much more where the policy
        comes in gently after a person: chunks made of where it was to be and of where it is follow each other then.

        `naive` begins each chunk with its first action, although the robot moved on while it was made: jumping from one
        chunk to the next is its nature. From where somebody else left the robot it does not jump.
        """
        blends = self.blend_s > 0 and self.person_at_page.sequence > 0
        from_rest = True
        for at, row in enumerate(self.rows):
            if row.mode is not Mode.human and (from_rest or self.strategy != "naive"):
                assert abs(row.by) <= SPEED * (1.5 if blends else 1.001), f"tick {at}: {row}"
            if row.mode is Mode.policy:
                from_rest = False
            elif row.reason is not HoldReason.no_action:
                from_rest = True


def acts(rows: list[Moved]) -> list[bool]:
    return [row.mode is Mode.policy for row in rows]


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestAll:
    def test_the_first_chunk_begins_at_its_beginning(self, strategy: str) -> None:
        bench = Bench(strategy)
        rows = bench.tick(30)
        bench.check()
        assert acts(rows)[:8] == [False] * 6 + [True] * 2
        assert rows[6].by == pytest.approx(SPEED)
        assert {step.chunk_tick for step in bench.steps if step.delay_ticks >= 0} >= {6}

    @pytest.mark.parametrize("ticks", [1, 3, 12])
    def test_after_readings_that_failed_it_goes_on_from_where_it_stood(self, strategy: str, ticks: int) -> None:
        bench = Bench(strategy)
        bench.tick(20)
        bench.robot.unreadable = True
        rows = bench.tick(ticks)
        assert {(row.mode, row.reason, row.by) for row in rows} == {(Mode.hold, HoldReason.bad_observation, 0.0)}
        bench.robot.unreadable = False
        goes_on = acts(bench.tick(20)).index(True)
        bench.check()
        # it recovers for a tick, another one shows that it may go on, then it waits for a chunk asked for after that
        assert goes_on == 8

    def test_a_quick_answer_counts_at_the_tick_it_was_asked_in(self, strategy: str) -> None:
        bench = Bench(strategy, repeat(0), quick=True)
        assert all(acts(bench.tick(40)))
        bench.skip(3)
        # asked for anew, or for a robot that was foretold to stand still for a tick
        assert acts(bench.tick(20)).count(False) <= 1
        bench.check()

    def test_after_a_hold_it_goes_on_from_where_it_stood(self, strategy: str) -> None:
        bench = Bench(strategy)
        bench.tick(20)
        bench.uplink.send(Nack("the disk is full"))
        assert {row.reason for row in bench.tick(9)} == {HoldReason.storage}
        bench.uplink.send(Nack(""))
        assert any(acts(bench.tick(20)))
        bench.check()

    def test_after_a_refused_command_it_goes_on_from_where_it_stood(self, strategy: str) -> None:
        bench = Bench(strategy)
        bench.tick(20)
        bench.robot.refuses = True
        assert {row.reason for row in bench.tick(4)} <= {HoldReason.safety, HoldReason.no_action}
        bench.robot.refuses = False
        assert any(acts(bench.tick(20)))
        bench.check()

    @pytest.mark.parametrize("ticks", [1, 30])
    def test_after_a_person_it_goes_on_from_where_the_person_left_it(self, strategy: str, ticks: int) -> None:
        bench = Bench(strategy)
        bench.tick(20)
        bench.person("take_over")
        bench.person("command", bench.robot.x)
        for _ in range(ticks):
            bench.person("command", bench.robot.x - 40.0)
            bench.tick()
        assert bench.rows[-1].mode is Mode.human and bench.rows[-1].by == pytest.approx(-40.0)
        left_at = bench.robot.x
        bench.person("hand_back")
        rows = bench.tick(20)
        bench.check()
        assert acts(rows).index(True) == 7
        assert bench.robot.x == pytest.approx(left_at + sum(row.by for row in rows))

    def test_the_scripted_operator_takes_over_and_hands_back(self, strategy: str) -> None:
        bench = Bench(strategy, operated=True)
        modes = [row.mode for row in bench.tick(150)]
        bench.check()
        backs = [i for i, (a, b) in enumerate(pairwise(modes)) if a is Mode.script and b is not Mode.script]
        assert len(backs) >= 2 and Mode.policy in modes[backs[0] : backs[1]]
        assert bench.loop._scripted.takeovers == sum(b is Mode.script is not a for a, b in pairwise(modes))

    @pytest.mark.parametrize("periods", [1, 5])
    def test_after_skipped_periods_it_asks_at_once_from_where_it_is(self, strategy: str, periods: int) -> None:
        bench = Bench(strategy)
        bench.tick(20)
        tick = bench.loop._tick
        bench.skip(periods)
        rows = bench.tick(20)
        bench.check()
        assert bench.loop._tick == tick + periods + 20
        assert acts(rows).index(True) == 6
        ticks = [step.tick for step in bench.steps]
        assert [b - a for a, b in pairwise(ticks) if b - a != 1] == [periods + 1]

    @pytest.mark.parametrize("seed", range(6))
    def test_whatever_happens(self, strategy: str, seed: int) -> None:
        rng = np.random.default_rng((seed, STRATEGIES.index(strategy)))

        def delays() -> Iterator[int | None]:
            usual = int(rng.integers(0, 9))
            while True:
                draw = rng.random()
                yield None if draw < 0.1 else int(rng.integers(0, 25)) if draw < 0.3 else usual

        bench = Bench(strategy, delays(), operated=seed % 2 == 1, quick=seed % 3 == 0, blend_s=0.5 * (seed < 3))

        def person() -> None:
            bench.person("take_over")
            for _ in range(int(rng.integers(1, 20))):
                bench.person("command", bench.robot.x + rng.normal(0, 30))
                bench.tick()
            bench.person("hand_back")

        def unreadable() -> None:
            bench.robot.unreadable = True
            bench.tick(int(rng.integers(1, 15)))
            bench.robot.unreadable = False

        def refuses() -> None:
            bench.robot.refuses = True
            bench.tick(int(rng.integers(1, 5)))
            bench.robot.refuses = False

        def full() -> None:
            bench.uplink.send(Nack("the disk is full"))
            bench.tick(int(rng.integers(1, 20)))
            bench.uplink.send(Nack(""))

        events: list[Callable[[], None]] = [
            person, unreadable, refuses, full, lambda: bench.skip(int(rng.integers(1, 8)))
        ]  # fmt: skip
        for _ in range(12):
            bench.tick(int(rng.integers(0, 40)))
            events[rng.integers(len(events))]()
        bench.tick(60)
        bench.check()
        assert sum(acts(bench.rows)) > 10 and any(acts(bench.rows[-60:]))
