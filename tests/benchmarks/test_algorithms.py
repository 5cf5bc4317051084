"""The benchmark of algorithms: what it makes of curves, and a very small run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.algorithms import runs
from benchmarks.algorithms.__main__ import reached, report
from benchmarks.algorithms.runs import CONTROL, OFFLINE, AlgorithmsSize
from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.table import Result, render
from tests.extras import needs

SIZE = AlgorithmsSize(("push",), (CONTROL, "recap"), (0, 1), 300, 100, 2)


def curve(*successes: float, human: float = 30.0) -> list[LearningPoint]:
    """A measurement every 100 robot steps."""
    return [LearningPoint(10.0 * n, one, 100.0 * n, 60.0 * n, human * n, 1.0, {}) for n, one in enumerate(successes)]


def reports(control: list[LearningPoint], recap: list[LearningPoint]) -> Result:
    found = {CONTROL: control, "recap": recap, OFFLINE: curve(0.2, 0.8)}
    return report(SIZE, {("push", name, seed): found[name] for name in found for seed in SIZE.seeds})


def test_human_steps_are_interpolated_where_the_level_is_crossed_first() -> None:
    assert reached(curve(0.2, 0.8, 1.0, 0.5, 1.0), "human_steps", 0.9) == pytest.approx(45.0)
    assert reached(curve(0.95, 0.2), "human_steps", 0.9) == 0.0
    assert reached(curve(0.2, 0.8), "human_steps", 0.9) == float("inf")


def test_the_best_needs_a_third_of_the_help_or_gets_where_the_control_does_not() -> None:
    found = reports(curve(0.2, 0.4, 0.95), curve(0.2, 0.4, 0.95, human=9.0))
    assert [(goal.value, goal.holds) for goal in found.goals[-1:]] == [(pytest.approx(30 / 9), True)]
    assert not reports(curve(0.2, 0.4, 0.95), curve(0.2, 0.4, 0.95, human=11.0)).goals[-1].holds
    assert reports(curve(0.2, 0.4, 0.6), curve(0.2, 0.4, 0.95)).goals[-1].holds, "where the control never was"
    found = reports(curve(0.2, 0.4, 0.6), curve(0.2, 0.4, 0.1))
    assert [goal.holds for goal in found.goals] == [True, False, False], "recap ends below its start"
    assert "2 of 2 never" in render(found, "x")
    offline = found.rows[-1]
    assert (offline["algorithm"], offline["at the end"], offline["until 0.9"]) == (OFFLINE, "0.80 (0.80 to 0.80)", None)


@pytest.mark.slow
@needs("metaworld")
def test_a_very_small_run_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = replace(SIZE, steps=60, measure_every=30, episodes=1)
    make = runs.make_recipe

    def short(task: str, algorithm: str) -> object:
        recipe = make(task, algorithm)
        return replace(recipe, training=replace(recipe.training, pretrain_steps=5), demonstrations=1)

    monkeypatch.setattr(runs, "make_recipe", short)
    found = {name: runs.measure(size, tmp_path, "push", name, 0) for name in (*SIZE.algorithms, OFFLINE)}
    for name in SIZE.algorithms:
        assert [point.robot_steps for point in found[name]] == [0, 30, 60]
        assert found[name][-1].gradient_steps == 2 * int(30 * size.gradient_steps)
    begin, end = found[OFFLINE]
    assert begin.human_steps <= found[CONTROL][-1].human_steps <= end.human_steps
    assert end.gradient_steps == found[CONTROL][-1].gradient_steps
