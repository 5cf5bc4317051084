"""The drill of the rollout, very small."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.rollout.fleet import Quality
from benchmarks.rollout.trials import LineCase, TrialCase, run_line, run_trial
from cloud_learner.rollout.config import RolloutConfig

CONFIG = RolloutConfig(canary=0.2)


def test_a_bad_version_moves_the_canaries_and_nobody_else() -> None:
    outcome = run_trial(TrialCase("bad", 0.95, Quality(0.0), is_bad=True), CONFIG, seed=1)
    assert not outcome.promoted
    assert outcome.share_of_robots == 0.2
    assert outcome.episodes < 30
    assert outcome.minutes < 10


def test_a_good_version_is_promoted() -> None:
    case = TrialCase("good", 0.95, Quality(0.95), is_bad=False)
    assert run_trial(case, CONFIG, seed=1).promoted
    assert run_trial(case, CONFIG, seed=1) == run_trial(case, CONFIG, seed=1)


def test_a_line_that_loses_is_watched() -> None:
    line = LineCase("down", 0.95, -0.04, 600.0, versions=12)
    watched, alone = run_line(line, 1), run_line(dataclasses.replace(line, is_watched=False), 1)
    assert watched.end_loss < alone.end_loss


def test_the_drill_stops_a_bad_version_at_the_canary_of_a_real_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("metaworld")
    from benchmarks.rollout import drill as module
    from benchmarks.rollout.drill import Drill
    from benchmarks.rollout.drill_fleet import DrillFleet
    from benchmarks.rollout.training import TrainedPolicy, changed, shuffled
    from cloud_learner.training.config import ActionCheckConfig
    from cloud_learner.training.publishing.action_check import ActionCheck, HeldSource
    from fleet.config.recipes import get_recipe

    monkeypatch.setattr(module, "_BEFORE_S", 1.0)
    recipe = get_recipe("state")
    policy = recipe.make_policy(recipe.spec, 0)
    # nothing was recorded: it looks at nothing
    check = ActionCheck(policy, HeldSource(lambda count, draw: [], lambda rows: []), ActionCheckConfig())
    trained = TrainedPolicy(recipe, policy, policy.module, [policy.save()], check)
    with DrillFleet(tmp_path, trained, canary=0.2) as fleet:
        drill = Drill(fleet, trained)
        outcome = drill.unchecked(changed(policy.module, shuffled, 1), 0.0)
        broken = drill.unchecked(changed(policy.module, lambda values, _: values / 0, 1), 0.0)
    assert (outcome.stopped_by, outcome.at_once, outcome.back) == ("canary", 2, 10)
    assert outcome.seconds is not None
    assert 0 < outcome.episodes < 60
    assert (broken.stopped_by, broken.at_once, broken.back) == ("gateway", 0, 10)
    assert "not finite" in broken.why
