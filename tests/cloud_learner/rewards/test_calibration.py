"""From which score on a model is believed."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_learner.rewards.calibration import Thresholds, choose_thresholds, least_needed, measure
from wire.errors import ConfigError, InvalidDataError


def draw(seed: int, n: int, sharp: float = 4.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores that are calibrated, and outcomes."""
    rng = np.random.default_rng(seed)
    scores = 1 / (1 + np.exp(-sharp * rng.normal(size=n)))
    return scores, rng.random(n) < scores


def test_a_threshold_keeps_its_precision_as_often_as_promised() -> None:
    large, truth = draw(99, 200_000)
    broken = found = 0
    for seed in range(200):
        at = choose_thresholds(*draw(seed, 150), precision=0.9, confidence=0.9).success_at
        if at is not None:
            found += 1
            broken += truth[large >= at].mean() < 0.9
    assert found > 150
    assert broken <= 0.1 * 200 + 10


def test_it_takes_in_as_much_as_it_can_show() -> None:
    scores = np.linspace(0, 1, 200)
    got = choose_thresholds(scores, scores > 0.5, precision=0.9, confidence=0.9)
    assert got.notes == ()
    assert got.success_at is not None and got.failure_at is not None
    assert 0.45 < got.success_at < 0.5
    assert got.failure_at < got.success_at
    sharper = choose_thresholds(scores, scores > 0.5, precision=0.97, confidence=0.9).success_at
    assert sharper is not None and sharper > got.success_at


def test_equal_scores_go_together() -> None:
    scores = np.array([0.9] * 40 + [0.1] * 40)
    succeeded = np.array([True] * 25 + [False] * 15 + [False] * 40)
    assert choose_thresholds(scores, succeeded, 0.9, 0.9).success_at is None
    assert choose_thresholds(scores, succeeded, 0.9, 0.9).failure_at == 0.1


def test_too_few_of_a_class_are_said_plainly() -> None:
    assert least_needed(0.9, 0.9) == 22
    scores, succeeded = np.linspace(0, 1, 60), np.arange(60) >= 50
    got = choose_thresholds(scores, succeeded, 0.9, 0.9)
    assert got.success_at is None
    assert got.failure_at is not None
    (note,) = got.notes
    assert "never says success: 10 of the 60" in note
    assert "22" in note
    nothing = choose_thresholds(np.zeros(0), np.zeros(0, bool), 0.9, 0.9)
    assert (nothing.success_at, nothing.failure_at, len(nothing.notes)) == (None, None, 2)


def test_a_model_that_knows_nothing_says_nothing() -> None:
    rng = np.random.default_rng(0)
    got = choose_thresholds(rng.random(400), rng.random(400) < 0.5, 0.9, 0.9)
    assert got.success_at is None and got.failure_at is None
    assert "not right often enough" in got.notes[0]


def test_what_it_said_is_counted_by_hand() -> None:
    scores = np.array([0.05, 0.15, 0.55, 0.95, 1.0])
    found = measure(scores, np.array([False, True, True, True, False]), Thresholds(0.9, 0.2))
    assert (found.said_success, found.right_success, found.said_failure, found.right_failure) == (2, 1, 2, 1)
    assert [(one.low, one.episodes, one.successes) for one in found.bins] == [(0.0, 2, 1), (0.4, 1, 1), (0.8, 2, 1)]
    assert found.calibration_error == pytest.approx((2 * 0.4 + 0.45 + 2 * 0.475) / 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1, 1.5])
def test_scores_that_are_none_are_refused(bad: float) -> None:
    scores = np.array([0.5, bad])
    with pytest.raises(InvalidDataError, match="1 of 2 episodes"):
        choose_thresholds(scores, np.array([True, False]), 0.9, 0.9)


@pytest.mark.parametrize("wrong", [0.2, 1.0])
def test_a_precision_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="precision"):
        choose_thresholds(np.zeros(2), np.zeros(2, bool), wrong, 0.9)
