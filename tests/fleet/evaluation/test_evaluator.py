"""The evaluator: fetches, measures on its own seeds, reports, and keeps its cadence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet.evaluation.evaluator import Conditions, EvaluatedRobot, Evaluator, EvaluatorConfig, rollout
from hal.drivers.fake import FakeConfig, FakeExpert, FakeRobot
from hal.interfaces.robot import Feedback
from policies.interface.policy import Policy
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.scheduler import ChunkScheduler
from wire.clock import ManualClock
from wire.errors import RejectedError, SpecMismatchError
from wire.messages import Message
from wire.messages.gateway import (
    GATE,
    Evaluate,
    Evaluation,
    FetchWeights,
    Hello,
    HelloAck,
    ReintroduceRequest,
    Rejection,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.memory_channel import MemoryServer
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, PolicyVersion, Prefix

TASKS = ("go-left", "go-up")
SECOND = 1_000_000_000


class Knowing:
    """Plays the expert when its weights say so, else stands still."""

    horizon = 16
    trained = PolicyCapabilities()
    corrector = None

    def __init__(self, robot: FakeRobot) -> None:
        self.spec, self.version, self._expert, self.good = robot.spec, 0, FakeExpert(robot), False

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(0, np.float32), observation.time_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        wanted = self._expert.propose(observation) if self.good else np.zeros(4, np.float32)
        return ActionChunk(np.tile(wanted, (16, 1)), tick, 1, self.version, 0, 0)

    def load(self, weights: bytes, version: int) -> None:
        self.good, self.version = weights == b"good", version


def scheduler(robot: FakeRobot) -> ChunkScheduler:
    return make_scheduler(ChunkingConfig("aligned", execute_ticks=4), robot.spec, PolicyCapabilities())


def evaluated_robot(robot: FakeRobot, policy: Policy, tasks: tuple[str, ...], name: str = "") -> EvaluatedRobot:
    conditions = Conditions(delay=repeat(1))
    return EvaluatedRobot(robot, policy, lambda trained: scheduler(robot), tasks, 60, conditions, name)


class Bench:
    def __init__(self, root: Path, only: Evaluate | None = None, more: tuple[EvaluatedRobot, ...] = ()) -> None:
        self.clock = ManualClock(SECOND)
        self.server = MemoryServer()
        self.robot = FakeRobot(FakeConfig(tasks=TASKS))
        self.robot.connect()
        self.said: list[Message] = []
        self.weights: dict[int, bytes] = {}
        self.evaluator = Evaluator(
            "evaluator",
            [evaluated_robot(self.robot, Knowing(self.robot), TASKS, "one"), *more],
            self.server.connect("evaluator"),
            root,
            self.clock,
            EvaluatorConfig(episodes=2, every_s=10.0),
            only,
        )

    def announce(self, number: int, data: bytes) -> None:
        self.weights[number] = data
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 0, 0, 0)
        self.server.send("evaluator", VersionAvailable(version, 1))

    def turn(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.evaluator.step()
            while (item := self.server.recv()) is not None:
                message = item[1]
                self.said.append(message)
                if isinstance(message, FetchWeights):
                    data = self.weights[message.number][message.offset :]
                    self.server.send("evaluator", WeightBytes(message.number, message.offset, data))
                if isinstance(message, Hello):
                    self.server.send("evaluator", HelloAck("c", 1, 1))

    def found(self) -> list[Evaluation]:
        return [m for m in self.said if isinstance(m, Evaluation)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.robot.close()


def test_versions_are_measured_on_the_same_held_out_seeds(bench: Bench) -> None:
    bench.announce(1, b"bad")
    bench.turn()
    bench.clock.advance(11 * SECOND)
    bench.announce(2, b"good")
    bench.turn()
    first, second = bench.found()
    assert (first.number, first.success) == (1, {"go-left": 0.0, "go-up": 0.0})
    assert (second.number, second.success) == (2, {"go-left": 1.0, "go-up": 1.0})
    assert first.first_seed == second.first_seed == 1_000_000
    assert (first.label, first.episodes) == ("cadence", 2)


class Joining(Knowing):
    """Of a robot that joins with version 2."""

    def load(self, weights: bytes, version: int) -> None:
        if version < 2:
            raise SpecMismatchError("no version for this robot yet")
        super().load(weights, version)


def test_robots_of_several_shapes_are_measured_in_turn_once_a_version_drives_them(tmp_path: Path) -> None:
    other = FakeRobot(FakeConfig(tasks=("go-up", "go-right")))
    other.connect()
    bench = Bench(tmp_path, more=(evaluated_robot(other, Joining(other), ("go-up", "go-right"), "other"),))
    bench.announce(1, b"good")
    bench.turn()
    bench.clock.advance(11 * SECOND)
    bench.announce(2, b"good")
    bench.turn()
    first, second = bench.found()
    assert first.success == {"go-left": 1.0, "go-up (one)": 1.0}
    assert second.success == {"go-left": 1.0, "go-up (one)": 1.0, "go-up (other)": 1.0, "go-right": 1.0}
    hello = next(message for message in bench.said if isinstance(message, Hello))
    assert hello.spec is None and hello.tasks == ("go-left", "go-up", "go-right")
    for robot in (other, bench.robot):
        robot.close()


def test_the_cadence_is_kept_and_nothing_is_measured_twice(bench: Bench) -> None:
    bench.announce(1, b"bad")
    bench.turn(60)
    assert len(bench.found()) == 1
    bench.announce(2, b"good")
    bench.turn(60)
    assert len(bench.found()) == 1
    bench.clock.advance(11 * SECOND)
    bench.turn(60)
    assert [e.number for e in bench.found()] == [1, 2]


def test_one_version_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Evaluate(3, 4, 2_000_000, "after"))
    bench.announce(5, b"bad")
    bench.turn()
    assert bench.found() == []
    assert not bench.evaluator.done
    bench.clock.advance(2 * SECOND)
    bench.turn()
    assert any(isinstance(m, Evaluate) and m.number == 3 for m in bench.said)
    bench.announce(3, b"good")
    bench.turn()
    assert bench.evaluator.done
    (found,) = bench.found()
    assert (found.number, found.episodes, found.label, found.first_seed) == (3, 4, "after", 2_000_000)
    bench.robot.close()


def ask(bench: Bench, number: int, first_seed: int, episodes: int = 2) -> Evaluate:
    """As the gateway does."""
    asked = Evaluate(number, episodes, first_seed, GATE)
    bench.announce(number, bench.weights[number])
    bench.server.send("evaluator", asked)
    return asked


def test_what_the_gateway_asks_for_is_measured_on_its_seeds_with_each_outcome(bench: Bench) -> None:
    bench.announce(1, b"bad")
    bench.turn()
    bench.weights[2] = b"good"
    ask(bench, 2, 3_000_000)
    bench.turn()
    ask(bench, 1, 3_000_000)
    bench.turn()
    curve, new, old = bench.found()
    assert (curve.label, new.label, old.label) == ("cadence", GATE, GATE)
    assert (new.number, new.first_seed, new.outcomes) == (2, 3_000_000, dict.fromkeys(TASKS, (True, True)))
    assert (old.number, old.outcomes) == (1, dict.fromkeys(TASKS, (False, False)))
    # the curve has its next point in its time, of what is new
    bench.clock.advance(11 * SECOND)
    bench.announce(2, b"good")
    bench.turn()
    assert [(one.number, one.label) for one in bench.found()[3:]] == [(2, "cadence")]


def test_what_was_asked_for_twice_is_measured_once_and_said_twice(bench: Bench) -> None:
    bench.weights[2] = b"good"
    bench.evaluator._next_point_ns = 100 * SECOND
    for _ in range(2):
        ask(bench, 2, 3_000_000)
        bench.turn()
    first, second = bench.found()
    assert first.started_ns == second.started_ns and first.outcomes == second.outcomes


def test_what_nobody_waits_for_any_more_is_given_up(bench: Bench) -> None:
    bench.weights |= {2: b"good", 3: b"bad"}
    bench.evaluator._next_point_ns = 100 * SECOND
    ask(bench, 2, 3_000_000, episodes=50)
    bench.turn(10)
    assert bench.evaluator.busy
    ask(bench, 3, 3_000_000)
    bench.turn()
    assert [one.number for one in bench.found()] == [3]


def test_one_that_measures_one_version_ends_when_that_is_not_to_be_had(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Evaluate(3, 4, 2_000_000, "after"))
    bench.turn(2)
    bench.server.send("evaluator", Rejection("version 3 cannot be measured: its weights are gone."))
    with pytest.raises(RejectedError, match="version 3 cannot be measured"):
        bench.turn(2)
    bench.robot.close()


def test_a_gateway_that_restarted_is_greeted_again(bench: Bench) -> None:
    bench.turn(2)
    greetings = len([m for m in bench.said if isinstance(m, Hello)])
    bench.server.send("evaluator", ReintroduceRequest())
    bench.turn(2)
    assert len([m for m in bench.said if isinstance(m, Hello)]) == greetings + 1


def test_a_rollout_is_deterministic_and_late_chunks_only_cost_time(bench: Bench) -> None:
    policy = Knowing(bench.robot)
    policy.load(b"good", 1)
    results = [
        rollout(bench.robot, policy, scheduler(bench.robot), "go-left", 5, max_ticks, Conditions(delay=repeat(delay)))
        for max_ticks, delay in ((60, 0), (60, 0), (60, 3), (2, 0))
    ]
    assert [one.success for one in results] == [True, True, True, False]
    assert results[0].steps == results[1].steps < results[2].steps
    assert results[3].steps == 2


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_a_rollout_ends_with_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    policy, write = Knowing(bench.robot), bench.robot.write
    written: list[np.ndarray] = []
    policy.load(b"good", 1)

    def ends(action: np.ndarray) -> Feedback:
        written.append(action)
        return msgspec.structs.replace(write(action), **{flag: len(written) == 3})

    monkeypatch.setattr(bench.robot, "write", ends)
    assert not rollout(bench.robot, policy, scheduler(bench.robot), "go-left", 5, 60, Conditions()).success
    assert len(written) == 3
