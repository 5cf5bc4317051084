"""The benchmark of a world that changes: its goals, and a very small run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.table import Goal, render
from benchmarks.drift import runs
from benchmarks.drift.__main__ import DriftRun, back_after, report
from benchmarks.drift.runs import DriftSize, DriftWorld, RecipeBudget
from hal.drivers.metaworld.changes import WorldChanges
from tests.extras import needs

pytestmark = needs("metaworld")
ARM = DriftWorld("arm", "state", WorldChanges(lag=1.5))
PUSH = DriftWorld("push", "state", WorldChanges(tasks=("push",), friction=0.3))
SIZE = DriftSize((ARM, PUSH), {"state": RecipeBudget(2, 5, 0.1)}, (0, 1), 720, 360, 1)


def run_of(before: float, push: Sequence[float], pick_place: Sequence[float], old: float = 0.0) -> DriftRun:
    every = [{"push": one, "pick-place": other} for one, other in zip(push, pick_place, strict=True)]
    points = [
        LearningPoint(100.0 * n, 0.0, 240 * n, 20 * n, 1000 + 50 * n, 1.0, tasks) for n, tasks in enumerate(every)
    ]
    tasks = {"push": before, "pick-place": before}
    return DriftRun(tasks, points, dict.fromkeys(tasks, old))


def goals(one: DriftRun, other: DriftRun) -> list[Goal]:
    found = {(world.name, seed): run for world in SIZE.worlds for seed, run in ((0, one), (1, other))}
    made = report(SIZE, found)
    assert "| arm |" in render(made, "x")
    return made.goals


def test_changed_tasks_have_to_come_back_and_the_others_to_stay() -> None:
    back = run_of(0.9, (0.3, 0.7, 0.9), (0.9, 0.9, 0.9))
    almost = run_of(0.9, (0.3, 0.9, 0.82), (0.9, 0.9, 0.9))
    arm, push, kept = goals(back, almost)
    assert [one.name.split(":")[0] for one in (arm, push, kept)] == [
        "arm, tasks changed",
        "push, tasks changed",
        "push, tasks as it was",
    ]
    assert (arm.value, push.value, kept.value) == (pytest.approx(0.02), pytest.approx(0.04), pytest.approx(0.0))
    assert arm.holds and push.holds and kept.holds

    forgetful = run_of(0.9, (0.3, 0.7, 0.9), (0.9, 0.9, 0.82))
    arm, push, kept = goals(forgetful, forgetful)
    assert (arm.holds, push.holds, kept.holds) == (True, True, False), "the mean of both tasks is 0.04 below"
    assert not goals(run_of(0.9, (0.3, 0.9, 0.8), (0.9, 0.9, 0.9)), almost)[1].holds, "what it was in between is past"


def test_it_is_back_from_the_measurement_on_after_which_none_is_too_low() -> None:
    def at(*push: float) -> float:
        return back_after(run_of(0.9, push, push), ("push",))

    assert at(0.3, 0.7, 0.9) == 200
    assert at(0.3, 0.86, 0.9) == 100
    assert at(0.86, 0.9, 0.9) == 0
    assert at(0.3, 0.9, 0.8) == float("inf")


def test_in_which_tasks_a_world_changed() -> None:
    assert runs.changed_tasks(PUSH) == ("push",)
    assert runs.changed_tasks(ARM) == ("push", "pick-place")


def test_a_change_is_of_the_robots_that_practise_and_that_measure() -> None:
    recipe = runs.make_recipe("state", SIZE, ARM.changes)
    assert recipe.unpaced_config.changes == recipe.robot_config.changes == ARM.changes
    assert recipe.algorithm.needs().target.recent.share == SIZE.recent_share


@pytest.mark.slow
def test_a_fleet_that_has_learned_goes_on_in_a_changed_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = replace(SIZE, seeds=(0,))
    before = runs.learn(size, tmp_path, "state", 0)
    assert before.keys() == {"push", "pick-place"}
    points = runs.adapt(size, tmp_path, ARM, 0)
    assert [point.robot_steps for point in points] == [0, 360, 720]
    assert 60 < points[-1].gradient_steps <= 72
    assert points[-1].human_steps > points[0].human_steps > 100, "the demonstrations are still there"
    assert runs.learn(size, tmp_path, "state", 0) == before
    assert runs.adapt(size, tmp_path, ARM, 0) == points, "kept"
    asked = []
    monkeypatch.setattr(runs, "success_in", lambda recipe, weights, episodes: asked.append(recipe) or {"push": 0.5})
    assert runs.demonstrate_old(size, tmp_path, ARM, 0) == {"push": 0.5}
    assert asked[0].unpaced_config.changes == ARM.changes
