"""The drill of the rollout, very small."""

from __future__ import annotations

import dataclasses

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
