"""The real evaluator at a real gateway: what it measures decides what robots act by."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cloud_learner.rollout.config import RolloutConfig
from fleet.evaluation.evaluator import Evaluator, EvaluatorConfig
from hal.drivers.fake import FakeConfig, FakeRobot
from tests.cloud_learner.dispatch.hall import Hall
from tests.cloud_learner.gateway.versions.test_rollout_service import acting, fleet, listed, publish
from tests.fleet.evaluation.test_evaluator import TASKS, Knowing, evaluated_robot

SECOND = 1_000_000_000


class Listed(Knowing):
    """Plays the expert by the versions that are listed as good."""

    def __init__(self, robot: FakeRobot, good: set[int]) -> None:
        super().__init__(robot)
        self._listed = good

    def load(self, weights: bytes, version: int) -> None:
        self.good, self.version = version in self._listed, version


def evaluated(root: Path, hall: Hall, good: set[int]) -> Evaluator:
    robot = FakeRobot(FakeConfig(tasks=TASKS))
    robot.connect()
    channel, config = hall.server.connect("evaluator"), EvaluatorConfig(episodes=1, every_s=20.0)
    one = evaluated_robot(robot, Listed(robot, good), TASKS)
    evaluator = Evaluator("evaluator", [one], channel, root / "cache", hall.clock, config)
    # the gateway's robots are of another kind
    session = evaluator.subscriber.session
    session._hello = msgspec.structs.replace(session._hello, spec=None)
    evaluator.subscriber._client.check.spec_hash = ""
    return evaluator


@pytest.mark.parametrize("good", [{1, 2}, {1}])
def test_a_version_acts_once_it_was_measured_and_only_if_it_is_no_worse(tmp_path: Path, good: set[int]) -> None:
    hall = fleet(tmp_path, RolloutConfig(gate_success=0.2))
    evaluator = evaluated(tmp_path, hall, good)
    for turn in range(600):
        hall.clock.advance(SECOND // 20)
        evaluator.step()
        if turn == 20:
            publish(hall, 2)
            assert acting(hall) == [1] * 5
        hall.gateway.poll()
        for edge in hall.edges:
            edge.poll()
    evaluator.robots[0].robot.close()
    assert acting(hall) == [2 if 2 in good else 1] * 5
    found = listed(hall, hall.peer())[2]
    assert found.state == ("promoted" if 2 in good else "refused") and "held-out success" in found.note
    curve = {row.number for row in hall.ledger.evaluations() if row.label == "cadence"}
    assert curve == good, "the curve goes on beside it"
