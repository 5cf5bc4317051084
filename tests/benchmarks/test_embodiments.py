"""The benchmark of robots of several shapes: what it makes of outcomes, its third robot, and a very small run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from benchmarks.common.table import render
from benchmarks.embodiments import runs
from benchmarks.embodiments.__main__ import report
from benchmarks.embodiments.runs import FIRST, JOB, PAIR, SECOND, THIRD, EmbodimentsRun, EmbodimentsSize
from fleet.config.recipes import get_recipe
from fleet.evaluation.held_out import MeasuredEpisode
from hal.conformance import check_robot
from hal.registry import make_operator, make_robot
from tests.extras import needs

pytestmark = [needs("gymnasium_robotics"), needs("metaworld")]
SIZE = EmbodimentsSize(own=(2, 4, 8), own_updates=(5, 7), episodes=10, own_episodes=10, seeds=(0, 1))


def outcomes(successes: int) -> list[MeasuredEpisode]:
    return [MeasuredEpisode("a", seed, seed < successes, 5) for seed in range(SIZE.episodes)]


def made_up(**successes: int) -> dict[tuple[int, str, str], list[list[MeasuredEpisode]]]:
    """Of every run 9 of 10, but for those that are said; of runs with `_7` only after so many updates."""
    every = [one for seed in SIZE.seeds for one in (*runs.first_runs(SIZE, seed), *runs.later_runs(SIZE, seed))]
    return {
        (one.seed, one.name, name): [
            outcomes(successes.get(f"{key}_{updates - before}", successes.get(key, 9))) for updates in one.updates
        ]
        for one in every
        for name in one.measured
        for key, before in [(one.name.replace(" ", "_"), SIZE.updates if one.after else 0)]
    }


def goals(**successes: int) -> list[bool]:
    return [goal.holds for goal in report(SIZE, made_up(**successes)).goals]


def test_goals_hold_when_nobody_loses_and_the_third_needs_less() -> None:
    assert goals(from_scratch_2=3, from_scratch_4=3) == [True, True, True]
    assert goals(from_scratch_2=3, from_scratch_4=3, joined_2=7) == [True, True, True]
    assert goals(from_scratch_2=3, joined_4=7) == [True, True, False], "8 against 4: what succeeds by chance is no end"
    assert goals() == [True, True, False], "both from 2 on"
    assert goals(from_scratch_2=3, joined_2_5=7) == [True, True, True], "by the best number of updates"
    assert goals(from_scratch_2_7=3, joined_2_5=7) == [True, True, False], "of each"
    assert goals(together=8, from_scratch_2=3) == [False, False, True]
    never = report(SIZE, made_up(from_scratch_2=3, from_scratch_4=3, from_scratch_8=3))
    assert never.goals[2].holds and never.goals[2].target == "less than more than 8"
    text = render(never, "x")
    assert (
        "+0.000 (-0." in text and "| 8 | 0.30 (0.30 to 0.30) | 0.30 (0.30 to 0.30) | 0.90 (0.90 to 0.90) | 0.90" in text
    )


def test_the_third_robot_keeps_the_rules_and_its_operator_succeeds() -> None:
    recipe = get_recipe(f"{JOB}@{THIRD}")
    found = check_robot(lambda: make_robot(recipe.robot, recipe.robot_config), "push")
    assert found.passed, found
    robot = make_robot(recipe.robot, recipe.robot_config)
    operator = make_operator(recipe.robot, robot)
    robot.connect()
    for seed in range(3):
        robot.reset("push", seed)
        assert any(robot.write(operator.propose(robot.read())).success for _ in range(recipe.loop.max_ticks))
    robot.close()


@pytest.mark.slow
def test_a_small_run_trains_all_and_lets_the_third_join(tmp_path: Path) -> None:
    size = replace(
        runs.QUICK,
        demonstrations={FIRST: 2, SECOND: 2},
        updates=3,
        own=(1,),
        own_updates=(1, 2),
        episodes=1,
        own_episodes=1,
    )
    runs.record(size, 0, tmp_path)
    together, *_ = runs.first_runs(size, 0)
    (joined,) = runs.later_runs(size, 0)
    assert set(runs.train_and_measure(size, together, tmp_path)) == set(PAIR)
    found = runs.train_and_measure(size, joined, tmp_path)
    assert set(found) == {*PAIR, THIRD} and all(len(one) == 2 and min(map(len, one)) >= 1 for one in found.values())
    scratch = EmbodimentsRun(0, "from scratch 1", (THIRD,), (1, 2), 1, measured=(THIRD,))
    again = [runs.train_and_measure(size, replace(scratch, name=name), tmp_path) for name in ("a", "b")]
    assert again[0] == again[1], "the same seed, the same outcomes"
    one, other = ((tmp_path / f"{name}-0" / "trained.safetensors").read_bytes() for name in ("a", "b"))
    assert one == other
