"""The benchmark of what a fleet learns without people: its expert, its goals, and a very small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.beyond_expert import runs
from benchmarks.beyond_expert.__main__ import report
from benchmarks.beyond_expert.runs import ALONE, BeyondExpertSize, ExpertResult
from benchmarks.common.learning_curve import LearningPoint, steps_of_success
from benchmarks.common.table import render
from fleet.evaluation.evaluator import RolloutResult
from tests.extras import needs

pytestmark = needs("metaworld")
SIZE = BeyondExpertSize(("push",), (ALONE, "a", "b"), (0, 1), 2, 10, 100, 50, 4)


def curve(success: float, steps: float) -> list[LearningPoint]:
    return [LearningPoint(n, success, 50 * n, 30 * n, 100, 1.0, {}, 100 - n * (100 - steps) / 2) for n in range(3)]


def goal(a: tuple[float, float], b: tuple[float, float]) -> tuple[str, float, bool]:
    by = {ALONE: (1.0, 50.0), "a": a, "b": b}
    found = {("push", name, seed): curve(*by[name]) for name in by for seed in SIZE.seeds}
    made = report(SIZE, {"push": ExpertResult(0.9, 100.0)}, found)
    assert "| a |" in render(made, "x")
    (only,) = made.goals
    return only.name.split(":")[0].split(", ")[1], only.value, only.holds


def test_the_fastest_counts_that_succeeds_as_often_as_the_expert_and_not_the_control() -> None:
    assert goal((0.9, 70.0), (0.95, 80.0)) == ("a", pytest.approx(0.3), True)
    assert goal((0.8, 60.0), (0.95, 80.0)) == ("b", pytest.approx(0.2), False)
    assert goal((0.8, 60.0), (0.8, 60.0))[::2] == ("none as successful", False)


def test_steps_are_those_of_what_succeeded() -> None:
    found = [RolloutResult(True, 10), RolloutResult(False, 200), RolloutResult(True, 20)]
    assert steps_of_success(found) == 15.0
    assert steps_of_success(found[1:2]) == float("inf")


@pytest.mark.slow
def test_the_expert_succeeds_and_a_fleet_goes_on_without_people(tmp_path: Path) -> None:
    size = BeyondExpertSize(("push",), ("chunk-edit",), (0,), 2, 10, 120, 60, 2)
    expert = runs.measure_expert(size, tmp_path, "push")
    assert expert.success == 1.0 and 20 < expert.steps < 150
    points = runs.measure(size, tmp_path, "push", "chunk-edit", 0)
    assert [point.robot_steps for point in points] == [0, 60, 120]
    assert len({point.human_steps for point in points}) == 1, "nobody helps"
    assert runs.measure(size, tmp_path, "push", "chunk-edit", 0)[-1].gradient_steps in (74, 75)
