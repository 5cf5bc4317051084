"""An evaluator at a real gateway: it is asked, what it brings decides, and nothing waits for ever for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cloud_learner.rollout.config import RolloutConfig
from tests.cloud_learner.dispatch.hall import TASKS, Hall
from tests.cloud_learner.gateway.versions.test_rollout_service import acting, change, fleet, hear, listed, publish
from wire.messages import Message
from wire.messages.fleet import VersionAction
from wire.messages.gateway import GATE, Evaluate, Evaluation, Heartbeat, Hello, Rejection, VersionAvailable
from wire.transport.memory_channel import MemoryClient

GATED = RolloutConfig(gate_success=0.2)
Chance = Callable[[int, str, int], bool]


class FakeEvaluator:
    """Measures what it is asked for at once, by a table of outcomes."""

    def __init__(self, hall: Hall, name: str = "evaluator") -> None:
        self.channel: MemoryClient = hall.server.connect(name)
        self.received: list[Message] = []
        self.name = name
        self.hello()
        hall.gateway.poll()

    def hello(self) -> None:
        self.channel.send(Hello(self.name, "evaluator", "c", 1))

    def poll(self) -> list[Evaluate]:
        """What it was asked for since."""
        found = []
        while (message := self.channel.recv()) is not None:
            self.received.append(message)
            if isinstance(message, Evaluate):
                found.append(message)
        return found

    def answer(self, asked: Evaluate, succeeds: Chance) -> None:
        outcomes = {
            task: tuple(succeeds(asked.number, task, asked.first_seed + k) for k in range(asked.episodes))
            for task in TASKS
        }
        success = {task: sum(won) / len(won) for task, won in outcomes.items()}
        facts = asked.number, success, asked.episodes, asked.first_seed, asked.label, asked.first_seed, 1.0
        self.channel.send(Evaluation(*facts, outcomes))

    def work(self, hall: Hall, succeeds: Chance, most: int = 100) -> list[int]:
        """Until nothing is asked any more; which versions it measured."""
        measured: list[int] = []
        while len(measured) < most and (asked := self.poll()):
            self.answer(asked[-1], succeeds)
            measured.append(asked[-1].number)
            hall.gateway.poll()
        hear(hall)
        return measured

    def told(self) -> list[int]:
        return [message.version.number for message in self.received if isinstance(message, VersionAvailable)]


def good(number: int, task: str, seed: int) -> bool:
    return seed % 5 != 0


def test_robots_hear_of_a_version_once_it_was_measured(tmp_path: Path) -> None:
    hall = fleet(tmp_path, GATED)
    evaluator = FakeEvaluator(hall)
    publish(hall, 2)
    assert acting(hall) == [1] * 5
    measured = evaluator.work(hall, good)
    assert acting(hall) == [2] * 5
    assert measured == [2, 1, 1, 2] and evaluator.told()[:2] == [1, 2], "what it measures is announced to it"
    assert "held-out success is not worse" in listed(hall, hall.peer())[2].note
    rows = [row for row in hall.ledger.evaluations() if row.label == GATE]
    assert len(rows) == len(measured)
    assert not hall.view.snapshot()["measured"], "a round is no figure for people"


@pytest.mark.parametrize("canary", [0.0, 0.2])
def test_a_worse_one_acts_on_no_robot(tmp_path: Path, canary: float) -> None:
    hall = fleet(tmp_path, RolloutConfig(gate_success=0.2, canary=canary, control=0.0))
    evaluator = FakeEvaluator(hall)
    publish(hall, 2)
    evaluator.work(hall, lambda number, task, seed: number == 1)
    assert acting(hall) == [1] * 5
    console = hall.peer()
    found = listed(hall, console)[2]
    assert found.state == "refused" and found.note.startswith("worse in held-out success")
    assert any("version 2: refused: worse" in event["text"] for event in hall.view.snapshot()["events"])
    # a person may think otherwise
    assert not change(hall, console, VersionAction.promote, 2).refused
    assert acting(hall) == [2] * 5


def test_two_evaluators_measure_a_version_each(tmp_path: Path) -> None:
    hall = fleet(tmp_path, GATED)
    one, other = FakeEvaluator(hall, "evaluator-1"), FakeEvaluator(hall, "evaluator-2")
    publish(hall, 2)
    first, second = one.poll()[-1], other.poll()[-1]
    assert {first.number, second.number} == {1, 2} and first.first_seed == second.first_seed
    one.answer(first, good)
    other.answer(second, good)
    hall.gateway.poll()
    assert one.poll()[-1].first_seed > first.first_seed


def test_what_was_lost_is_asked_for_again_and_what_comes_twice_counts_once(tmp_path: Path) -> None:
    hall = fleet(tmp_path, GATED)
    evaluator = FakeEvaluator(hall)
    publish(hall, 2)
    (asked,) = evaluator.poll()
    hall.pass_time(9)
    assert evaluator.poll() == []
    hall.pass_time(2)
    (again,) = evaluator.poll()
    assert msgspec.structs.asdict(again) == msgspec.structs.asdict(asked)
    for _ in range(3):
        evaluator.answer(asked, good)
    hall.gateway.poll()
    assert [one.number for one in evaluator.poll()] == [1]
    trial = hall.gateway._rollout.controller.state().held_out
    assert trial is not None and (list(trial.found), trial.pairs) == ([2], 0)


def test_an_evaluator_that_falls_silent_is_waited_for_for_a_minute(tmp_path: Path) -> None:
    hall = fleet(tmp_path, GATED)
    FakeEvaluator(hall)
    publish(hall, 2)
    hall.pass_time(58)
    assert acting(hall) == [1] * 5
    hall.pass_time(4)
    assert acting(hall) == [2] * 5
    assert "the evaluator is gone" in listed(hall, hall.peer())[2].note
    publish(hall, 3)
    assert acting(hall) == [3] * 5


def test_one_that_lives_and_measures_nothing_is_waited_for_as_long_as_the_setting_says(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(gate_success=0.2, gate_timeout_s=120.0))
    evaluator = FakeEvaluator(hall)
    publish(hall, 2)
    for _ in range(29):
        hall.pass_time(4)
        evaluator.channel.send(Heartbeat(1))
    assert acting(hall) == [1] * 5
    hall.pass_time(10)
    assert acting(hall) == [2] * 5
    assert "for 120 s" in listed(hall, hall.peer())[2].note


def test_a_gateway_that_is_killed_goes_on_measuring(tmp_path: Path) -> None:
    hall = fleet(tmp_path, GATED)
    evaluator = FakeEvaluator(hall)
    publish(hall, 2)
    measured = evaluator.work(hall, good, most=3)
    hall = hall.killed()
    hear(hall)
    hall.pass_time(2)
    assert acting(hall) == [1] * 5, "it waits for evaluators to come back"
    evaluator.hello()
    hall.gateway.poll()
    measured += evaluator.work(hall, good)
    assert acting(hall) == [2] * 5
    assert len(measured) == 4, "nothing is measured twice"


def test_files_of_what_is_measured_stay(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(gate_success=0.2, keep=1, room_bytes=0.0))
    evaluator = FakeEvaluator(hall)
    for number in range(2, 9):
        publish(hall, number)
    here = {int(path.name.partition("-")[0]) for path in (tmp_path / "weights").glob("*.safetensors")}
    assert {1, 2, 8} <= here and not {4, 5, 6} & here
    measured = evaluator.work(hall, good)
    assert acting(hall) == [8] * 5 and set(measured) == {1, 2, 8}


@pytest.mark.parametrize("wrong", ["seeds", "label", "no outcomes", "too few", "of no task"])
def test_what_was_not_asked_for_decides_nothing(tmp_path: Path, wrong: str) -> None:
    hall = fleet(tmp_path, GATED)
    evaluator = FakeEvaluator(hall)
    publish(hall, 2)
    (asked,) = evaluator.poll()
    success = dict.fromkeys(TASKS, 1.0)
    outcomes = dict.fromkeys(TASKS, (True,) * asked.episodes)
    facts = {"number": 2, "success": success, "episodes": 5, "first_seed": asked.first_seed, "label": GATE}
    facts |= {"started_ns": 1, "duration_s": 1.0, "outcomes": outcomes}
    facts |= {
        "seeds": {"first_seed": asked.first_seed + 1},
        "label": {"label": "cadence"},
        "no outcomes": {"outcomes": {}},
        "too few": {"outcomes": dict.fromkeys(TASKS, (True,))},
        "of no task": {"success": {}},
    }[wrong]
    evaluator.channel.send(Evaluation(**facts))  # type: ignore[arg-type]
    hall.gateway.poll()
    evaluator.poll()
    trial = hall.gateway._rollout.controller.state().held_out
    assert trial is not None and trial.found == {}
    refused = any(isinstance(message, Rejection) for message in evaluator.received)
    assert refused == (wrong in ("too few", "of no task"))


def test_a_version_whose_file_is_gone_is_refused_to_whoever_wants_to_measure_it(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(keep=2, room_bytes=0.0), versions=8)
    evaluator = FakeEvaluator(hall)
    evaluator.poll()
    evaluator.received.clear()
    evaluator.channel.send(Evaluate(3, 5, 2_000_000, "before"))
    hall.gateway.poll()
    evaluator.poll()
    (said,) = evaluator.received
    assert isinstance(said, Rejection) and "version 3 cannot be measured: its weights are gone" in said.reason
    evaluator.channel.send(Evaluate(8, 5, 2_000_000, "after"))
    hall.gateway.poll()
    evaluator.poll()
    assert evaluator.told() == [8]
