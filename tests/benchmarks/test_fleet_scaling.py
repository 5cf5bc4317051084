"""The benchmark of fleets of several sizes: what it makes of curves and periods, what it keeps, a very small run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from benchmarks.common.keeping import kept
from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.table import Result, render
from benchmarks.fleet_scaling import learning
from benchmarks.fleet_scaling import periods as periods_module
from benchmarks.fleet_scaling.__main__ import report, speedup
from benchmarks.fleet_scaling.learning import TimeToSuccess, learning_curve, time_to_success
from benchmarks.fleet_scaling.periods import TrainingPeriod, TrainingPeriods, training_periods
from benchmarks.fleet_scaling.runs import FULL, QUICK, ScalingSize, make_recipe
from fleet.config.recipe import Recipe

torch = pytest.importorskip("torch")

SIZE = ScalingSize("state", (1, 4), (0, 1), 100, 300, 2, 3)
TINY = ScalingSize("fake", (1, 2), (0,), 80, 160, 1, 2, level=2.0, period_robots=2, period_every_s=(0.2, 0.1))
SLOW = TrainingPeriod(2.0, 0.25, 4.0, 0.5, 0.25, 4.5)
QUICKER = TrainingPeriod(1.0, 0.25, 3.25, 0.5, 0.5, 3.0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def curve(*successes: float, robots: int = 1) -> list[LearningPoint]:
    """A measurement every 100 robot steps, at 10 Hz."""
    return [
        LearningPoint(10.0 * n / robots, one, 100.0 * n, 50.0 * n, 20.0 * n, 3.0 * n, {})
        for n, one in enumerate(successes)
    ]


def reports(one: list[LearningPoint], four: list[LearningPoint], periods: list[TrainingPeriod]) -> Result:
    curves = {(robots, seed): found for robots, found in ((1, one), (4, four)) for seed in SIZE.seeds}
    return report(SIZE, curves, [TrainingPeriods(7, [SLOW]), TrainingPeriods(2, periods)])


def test_time_is_interpolated_between_the_last_below_and_the_first_above() -> None:
    found = time_to_success(curve(0.2, 0.4, 0.6, 1.0), 0.7)
    assert found.point == LearningPoint(22.5, pytest.approx(0.7), 225.0, 112.5, 45.0, 6.75, {})
    assert not found.censored and str(found) == "22.5"
    assert time_to_success(curve(0.2, 0.9, 0.3, 0.9), 0.9).point.robot_s == 10.0, "the first one counts"
    assert time_to_success(curve(0.9), 0.8).point.robot_s == 0.0


def test_a_run_without_success_is_censored_at_its_end() -> None:
    found = time_to_success(curve(0.2, 0.4, 0.79), 0.8)
    assert found == TimeToSuccess(curve(0.2, 0.4, 0.79)[-1], censored=True)
    assert str(found) == "> 20.0"


def test_a_fleet_is_compared_by_mean_times() -> None:
    def times(*seconds: float) -> list[TimeToSuccess]:
        return [TimeToSuccess(LearningPoint(one, 0.8, 0, 0, 0, 0, {}), censored=False) for one in seconds]

    assert speedup(times(30.0, 90.0), times(10.0, 20.0)) == (4.0, [3.0, 4.5])


def test_goals_hold_of_what_was_reached_and_not_of_what_was_given_up() -> None:
    found = reports(curve(0.2, 0.8), curve(0.2, 0.8, robots=4), [SLOW])
    assert [(goal.value, goal.holds) for goal in found.goals] == [(4.0, True), (7.0 / 4.5, False)]
    found = reports(curve(0.2, 0.4, 0.6), curve(0.2, 0.3, 0.7, robots=4), [replace(SLOW, episode_s=23.0)])
    assert [goal.holds for goal in found.goals] == [False, True], "four robots were given up"
    assert "4 of 4 were" in render(found, "x") and "| > 5.0 (5.0 to 5.0) | > 5.0, > 5.0 |" in render(found, "x")
    found = reports(curve(0.2, 0.4, 0.6), curve(0.2, 0.8, robots=4), [SLOW])
    assert found.goals[0].holds and found.goals[0].value == 8.0, "at least: one robot takes longer than it was given"
    assert [row["times as fast as one"] for row in found.rows] == ["1.00", "> 8.00"]
    found = reports(curve(0.2, 0.8), curve(0.2, 0.4, robots=4), [SLOW])
    assert found.rows[1]["times as fast as one"] == "< 4.00" and not found.goals[0].holds
    found = reports(curve(0.2, 0.8), curve(0.2, 0.8, robots=4), [SLOW])
    assert found.rows[1]["times as fast as one"] == "4.00 (4.00 to 4.00)"


def test_a_synchronous_period_waits_for_everything_and_an_asynchronous_one_for_the_learner() -> None:
    assert (SLOW.asynchronous_s, SLOW.synchronous_s) == (4.5, 7.0)
    found = reports(curve(0.2, 0.8), curve(0.2, 0.8), [SLOW, QUICKER, SLOW])
    (table,) = found.more.values()
    assert [row["training period (s)"] for row in table[2:]] == ["4.00 (3.00 to 4.50)", "6.50 (5.50 to 7.00)"]
    assert [row["times"] for row in table] == [None, 7.0 / 4.5, None, 6.5 / 4.0]
    assert [row["episode (s, simulated)"] for row in table] == [None, 2.0, None, 5 / 3]
    assert [row["a version after"][:2] for row in table] == ["7 ", "7 ", "2 ", "2 "]


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return made

    path = tmp_path / "run.json"
    assert kept(path, make) == kept(path, make) == made == [1]
    with pytest.raises(ZeroDivisionError):
        kept(tmp_path / "other.json", lambda: 1 / 0)
    assert list(tmp_path.iterdir()) == [path], "nothing of what failed"


def test_a_run_that_was_stopped_goes_on_with_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []

    def made_up(size: ScalingSize, recipe: Recipe, robots: int, seed: int) -> Iterator[LearningPoint]:
        begun.append((robots, seed))
        yield from curve(0.2, 0.9)

    monkeypatch.setattr(learning, "learning_curve", made_up)
    for robots, seed in ((1, 0), (4, 0), (1, 0), (1, 1)):
        assert learning.kept_learning_curve(SIZE, tmp_path, robots, seed) == curve(0.2, 0.9)
    assert begun == [(1, 0), (4, 0), (1, 1)]


@pytest.mark.parametrize("size", [FULL, QUICK, TINY])
def test_all_fleets_are_measured_after_the_same_number_of_robot_steps(size: ScalingSize) -> None:
    assert 1 in size.robots and size.give_up % size.measure_every == 0
    assert all(size.measure_every % robots == 0 for robots in size.robots)
    assert (size.measure_every * size.gradient_steps).is_integer()


def test_robots_that_cannot_share_the_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 robots cannot share 80 steps"):
        next(learning_curve(TINY, make_recipe(TINY), 3, 0))


@pytest.mark.slow
def test_twice_the_robots_take_half_the_time_for_as_many_steps() -> None:
    found: dict[int, list[LearningPoint]] = {}
    for robots in TINY.robots:
        recipe = make_recipe(TINY)
        recipe = replace(recipe, training=replace(recipe.training, pretrain_steps=20))
        found[robots] = list(learning_curve(TINY, recipe, robots, 0))
        assert [point.robot_steps for point in found[robots]] == [0, 80, 160]
        assert [point.gradient_steps for point in found[robots]] == [0, 50, 100]
        assert 0 == found[robots][0].compute_s < found[robots][1].compute_s < found[robots][2].compute_s
    period_s = make_recipe(TINY).spec.period_ns / 1e9
    for robots, points in found.items():
        assert [point.robot_s for point in points] == pytest.approx([n * period_s / robots for n in (0, 80, 160)])
    assert found[1][0].success == found[2][0].success


@pytest.mark.slow
def test_a_period_has_its_gradient_steps_its_version_and_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, load = [], periods_module._load

    def note(fleet: InProcessFleet) -> None:
        load(fleet)
        newest = fleet.ledger.newest_version()
        assert newest is not None
        trained.append((newest.version.gradient_steps, fleet.trainer.learner.gradient_steps))

    monkeypatch.setattr(periods_module, "_load", note)
    recipe = make_recipe(TINY)
    recipe = replace(recipe, training=replace(recipe.training, pretrain_steps=20))
    found = list(training_periods(TINY, recipe))
    assert [len(one.periods) for one in found] == [TINY.periods] * 3
    more, less, last = (one.gradient_steps for one in found)
    assert less >= 1 and abs(more - 2 * less) <= 1 and last >= 1
    # the version of a period is made by its last step
    assert all(one == other for one, other in trained[1:])
    assert np.diff([one for one, _ in trained]).tolist()[1:] == [
        steps for steps in (more, less, last) for _ in range(TINY.periods)
    ]
    longest_s = (recipe.loop.max_ticks + 20) * recipe.spec.period_ns / 1e9
    for period in (period for one in found for period in one.periods):
        assert 0.1 < period.episode_s <= longest_s
        assert min(period.arrival_s, period.gradient_s, period.version_s, period.loading_s, period.beside_s) > 0
