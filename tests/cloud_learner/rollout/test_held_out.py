"""A candidate waits for its held-out success, while there is somebody to measure it."""

from __future__ import annotations

import random

import pytest

from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.held_out import FIRST_SEED, ROUND_SEEDS, HeldOutRequest, HeldOutTrial
from cloud_learner.rollout.records import DecisionKind, VersionState
from wire.errors import ConfigError

S = 1_000_000_000
ROBOTS = [f"arm{number}" for number in range(10)]
TASKS = ("reach", "push")


def make(**settings: object) -> RolloutController:
    controller = RolloutController(RolloutConfig(**{"gate_success": 0.2, **settings}))  # type: ignore[arg-type]
    controller.set_robots(dict.fromkeys(ROBOTS, ""), 0)
    controller.set_evaluator(True, 0)
    controller.on_version(1, 0, 0)
    return controller


def measure(controller: RolloutController, success: dict[int, float], most: int = 1000) -> None:
    """As evaluators do, until nothing is wanted or so many were measured. Each scene is as hard for every version."""
    for _ in range(most):
        if not (wanted := controller.wanted_measurements):
            return
        dice, chance, count = random.Random(wanted[0].first_seed), success[wanted[0].number], wanted[0].episodes
        outcomes = {task: [dice.random() < chance for _ in range(count)] for task in TASKS}
        assert controller.on_measured(wanted[0], outcomes, 0)


def state_of(controller: RolloutController, number: int) -> VersionState:
    return next(one.state for one in controller.versions() if one.number == number)


def reason(controller: RolloutController, number: int) -> str:
    return next(one.reason for one in controller.versions() if one.number == number)


# --- the test ---------------------------------------------------------------------------------------------------------


def decided(before: float, after: float, dice: random.Random, margin: float = 0.2) -> tuple[bool, int]:
    trial = HeldOutTrial.begin(2, 1, FIRST_SEED, margin, 0.05, 0.05)
    while (found := trial.decision()) is None:
        for request in trial.missing():
            chance = before if request.number == 1 else after
            trial.add(request, {task: [dice.random() < chance for _ in range(request.episodes)] for task in TASKS})
    return found, trial.pairs


@pytest.mark.parametrize(
    ("before", "after", "least", "most"),
    [
        (0.8, 0.8, 0.9, 1.0),
        (0.95, 0.95, 0.9, 1.0),
        (0.8, 0.6, 0.0, 0.08),
        (0.95, 0.75, 0.0, 0.08),
        (0.8, 0.0, 0.0, 0.0),
    ],
)
def test_it_lets_in_what_is_as_good_and_not_what_is_worse_by_the_margin(
    before: float, after: float, least: float, most: float
) -> None:
    dice, runs = random.Random(7), 100
    found = [decided(before, after, dice) for _ in range(runs)]
    assert least <= sum(passed for passed, _ in found) / runs <= most
    assert max(pairs for _, pairs in found) <= 210, "it ends"


def test_what_does_nothing_is_refused_after_few_pairs_and_what_always_succeeds_passes() -> None:
    dice = random.Random(1)
    assert decided(1.0, 0.0, dice) == (False, 10)
    passed, pairs = decided(1.0, 1.0, dice)
    assert passed and pairs <= 40


def test_pairs_are_of_the_same_seed_and_a_round_counts_whole() -> None:
    trial = HeldOutTrial.begin(2, 1, FIRST_SEED, 0.2, 0.05, 0.05)
    first, second = trial.missing()
    assert (first.number, second.number, first.first_seed) == (2, 1, second.first_seed)
    assert trial.add(first, {"reach": [True, True, False, False, True]})
    assert trial.pairs == 0 and trial.missing() == [second]
    assert not trial.add(first, {"reach": [True] * 5}), "it came before"
    assert not trial.add(second, {"reach": [True] * 4}), "one is lacking"
    assert not trial.add(second, {})
    assert not trial.add(HeldOutRequest(1, FIRST_SEED + 5), {"reach": [True] * 5}), "of other seeds"
    assert trial.add(second, {"reach": [True, False, True, False, True], "other": [True] * 5})
    assert (trial.pairs, trial.whole.wins, trial.whole.worse.total) == (5, 3, 0.0)
    assert trial.text().startswith("3 of 5 held-out episodes succeeded; of version 1, 3 of 5")
    assert [one.number for one in trial.missing()] == [1, 2], "what was measured last is loaded"
    assert trial.missing()[0].first_seed == FIRST_SEED + ROUND_SEEDS


def decided_by_task(
    before: dict[str, float], after: dict[str, float], dice: random.Random, task_margin: float
) -> HeldOutTrial:
    trial = HeldOutTrial.begin(2, 1, FIRST_SEED, 0.2, 0.05, 0.05, task_margin)
    while trial.decision() is None:
        for request in trial.missing():
            chances = before if request.number == 1 else after
            won = {task: [dice.random() < chance for _ in range(ROUND_SEEDS)] for task, chance in chances.items()}
            trial.add(request, won)
    return trial


def test_one_lost_task_is_not_made_up_for_by_others() -> None:
    before, after = {"old": 0.9, "new": 0.2, "newer": 0.2}, {"old": 0.3, "new": 0.8, "newer": 0.8}
    dice, runs = random.Random(5), 60
    without = [decided_by_task(before, after, dice, 0.0) for _ in range(runs)]
    assert all(trial.decision() for trial in without), "without the bound it goes by all tasks together"
    assert all(trial.lost_task == "" for trial in without)
    found = [decided_by_task(before, after, dice, 0.3) for _ in range(runs)]
    assert sum(trial.decision() is False for trial in found) >= 0.95 * runs
    assert {trial.lost_task for trial in found if not trial.decision()} == {"old"}
    (said,) = {trial.text().split("; ")[-1].split(":")[0] for trial in found if not trial.decision()}
    assert said == "of old"


def test_a_version_that_is_as_good_in_each_task_passes_with_the_bound_too() -> None:
    dice, runs = random.Random(6), 60
    same = {"a": 0.9, "b": 0.6, "c": 0.95}
    found = [decided_by_task(same, same, dice, 0.3) for _ in range(runs)]
    assert sum(bool(trial.decision()) for trial in found) >= 0.85 * runs
    lost = {"a": 0.9, "b": 0.3, "c": 0.95}
    found = [decided_by_task(same, lost, dice, 0.3) for _ in range(runs)]
    assert sum(bool(trial.decision()) for trial in found) <= 0.08 * runs
    assert max(trial.pairs for trial in found) <= 3 * 95, "it ends"


def test_a_task_that_nobody_measures_any_more_holds_nothing_up() -> None:
    trial = HeldOutTrial.begin(2, 1, FIRST_SEED, 0.2, 0.05, 0.05, 0.3)
    for tasks in [("reach", "push")] + [("reach",)] * 20:
        for request in trial.missing():
            trial.add(request, {task: [True] * ROUND_SEEDS for task in tasks})
    assert trial.decision() is True and trial.tasks.keys() == {"reach"}


# --- in the rollout ---------------------------------------------------------------------------------------------------


def test_robots_act_by_a_version_only_once_it_was_measured() -> None:
    controller = make()
    assert controller.current == 1, "the first one replaces nothing"
    controller.on_version(2, 1, 0)
    assert {controller.version_for(robot) for robot in ROBOTS} == {1}
    assert "waits for its held-out success against version 1" in reason(controller, 2)
    measure(controller, {1: 0.9, 2: 0.9}, most=2)
    assert controller.current == 1 and "is being measured: " in reason(controller, 2)
    measure(controller, {1: 0.9, 2: 0.9})
    assert controller.current == 2
    assert "held-out success is not worse: " in reason(controller, 2) and "of the same" in reason(controller, 2)


def test_a_worse_one_is_refused_and_the_newest_is_next_with_seeds_of_its_own() -> None:
    controller = make()
    for number in (2, 3, 4):
        controller.on_version(number, number - 1, 0)
    seeds = [controller.wanted_measurements[0].first_seed]
    measure(controller, {1: 0.9, 2: 0.0}, most=2)
    assert state_of(controller, 2) is VersionState.refused
    (said,) = [one for one in controller.pop_decisions() if one.kind is DecisionKind.refused]
    assert said.version == 2 and said.reason.startswith("worse in held-out success: 0 of ")
    assert [one.number for one in controller.wanted_measurements] == [4, 1]
    assert controller.wanted_measurements[0].first_seed > seeds[0]
    measure(controller, {1: 0.9, 4: 0.9})
    assert controller.current == 4 and not controller.wanted_measurements, "3 was passed over"


def test_what_has_lost_a_task_is_refused_by_its_name() -> None:
    controller = make(gate_task=0.3)
    controller.on_version(2, 1, 0)
    while controller.wanted_measurements:
        (asked, *_) = controller.wanted_measurements
        won = asked.number == 1
        controller.on_measured(asked, {"reach": [won] * ROUND_SEEDS, "push": [not won] * ROUND_SEEDS}, 0)
    assert controller.current == 1 and state_of(controller, 2) is VersionState.refused
    (said,) = [one for one in controller.pop_decisions() if one.kind is DecisionKind.refused]
    assert said.reason.startswith("has lost reach in held-out success: "), said.reason
    assert "; of reach: 0 of " in said.reason


def test_the_canary_comes_after_it() -> None:
    controller = make(canary=0.2)
    controller.on_version(2, 1, 0)
    assert controller.canary == 0
    measure(controller, {1: 0.9, 2: 0.9})
    assert controller.canary == 2 and "held-out success is not worse" in reason(controller, 2)
    controller.on_version(3, 2, 0)
    assert not controller.wanted_measurements, "what it would replace is not known yet"


@pytest.mark.parametrize("measured", [0, 1])
def test_an_evaluator_that_is_gone_holds_nothing_up(measured: int) -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    measure(controller, {1: 0.9, 2: 0.9}, most=measured)
    assert controller.set_evaluator(False, S)
    assert controller.current == 2
    assert "the evaluator is gone" in reason(controller, 2)
    controller.on_version(3, 2, 2 * S)
    assert controller.current == 3, "nobody measures: as without the setting"
    assert controller.set_evaluator(True, 3 * S)
    controller.on_version(4, 3, 3 * S)
    assert controller.current == 3 and controller.wanted_measurements


def test_one_that_brings_nothing_is_waited_for_so_long_and_no_longer() -> None:
    controller = make(gate_timeout_s=100.0)
    controller.on_version(2, 1, 0)
    assert not controller.set_evaluator(True, 100 * S)
    assert controller.current == 1
    assert controller.set_evaluator(True, 101 * S)
    assert controller.current == 2 and "for 100 s" in reason(controller, 2)


def test_evaluators_without_a_task_in_common_hold_nothing_up() -> None:
    controller = make(gate_timeout_s=100.0)
    controller.on_version(2, 1, 0)
    for second in range(1, 1000):
        for request in controller.wanted_measurements:
            task = "lift" if request.number == 1 else "push"
            assert controller.on_measured(request, {task: [True] * request.episodes}, second * S)
        controller.set_evaluator(True, second * S)
    assert controller.current == 2
    assert "no task was measured of both versions: give all evaluators the same tasks" in reason(controller, 2)


def test_what_is_measured_is_kept_over_a_restart_and_its_files_stay() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.on_version(3, 2, 0)
    measure(controller, {1: 0.9, 2: 0.9}, most=3)
    wanted = controller.wanted_measurements
    assert 2 in controller.needed
    again = RolloutController(controller.config, controller.state())
    again.set_evaluator(True, 0)
    assert again.wanted_measurements == wanted and len(wanted) == 1
    measure(again, {1: 0.9, 2: 0.9, 3: 0.9})
    assert again.current == 3


def test_what_passed_while_nothing_may_be_promoted_waits_and_stays() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.freeze(True, 0)
    measure(controller, {1: 0.9, 2: 0.9})
    assert (controller.current, state_of(controller, 2)) == (1, VersionState.candidate)
    assert 2 in controller.needed
    controller.on_version(3, 2, 0)
    controller.freeze(False, 0)
    assert controller.current == 2, "the newer one was not measured yet"
    assert [one.number for one in controller.wanted_measurements] == [3, 2]


def test_a_trial_against_what_is_no_longer_current_begins_anew() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    measure(controller, {1: 0.9, 2: 0.9})
    controller.on_version(3, 2, 0)
    first = controller.wanted_measurements[0].first_seed
    controller.rollback(0)
    controller.freeze(False, 0)
    assert controller.current == 1
    assert [one.number for one in controller.wanted_measurements] == [3, 1]
    assert controller.wanted_measurements[0].first_seed > first
    controller.on_weights_gone([3], 0)
    assert not controller.wanted_measurements


def test_a_person_may_promote_what_was_refused_for_its_held_out_success() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    measure(controller, {1: 1.0, 2: 0.0})
    assert state_of(controller, 2) is VersionState.refused
    controller.promote(2, 0)
    assert controller.current == 2


def test_without_the_setting_an_evaluator_changes_nothing() -> None:
    controller = make(gate_success=0.0)
    controller.on_version(2, 1, 0)
    assert controller.current == 2 and not controller.wanted_measurements


@pytest.mark.parametrize(
    "wrong",
    [{"gate_success": 1.0}, {"gate_success": -0.1}, {"gate_timeout_s": 0.0}, {"gate_task": 1.0}, {"gate_task": 0.3}],
)
def test_a_gate_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RolloutConfig(**wrong)
