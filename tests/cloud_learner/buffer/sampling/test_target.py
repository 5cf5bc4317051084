"""Factors, mixes and the adaptive online share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cloud_learner.buffer.control import RECOVERY
from cloud_learner.buffer.sampling.shares import OnlineShare, TaskMix
from cloud_learner.buffer.sampling.target import (
    Factor,
    Moment,
    Recent,
    SamplingDistribution,
    StepRuns,
    acted_steps,
    by_actor,
    by_label,
    by_outcome,
    imitation,
    lag_half_life,
    max_lag,
    uniform,
)
from wire.errors import ConfigError

NOW = Moment(10)


def runs(
    actor=(0, 1, 2, 3),
    version=(1, 5, 9, 10),
    demonstration=(False,) * 4,
    outcome=(0, 1, 2, -1),
    label=(np.nan,) * 4,
    lag=(0,) * 4,
) -> StepRuns:
    return StepRuns(
        np.array(actor, np.uint8),
        np.array(version, np.int32),
        np.array(demonstration),
        np.array(outcome, np.int8),
        np.array(label, np.float32),
        np.array(lag),
    )


def test_people_and_scripts_are_imitated_and_in_demonstrations_everybody_but_hold():
    assert imitation().weights(runs(), NOW).tolist() == [0, 1, 1, 0]
    assert imitation().weights(runs(demonstration=(True,) * 4), NOW).tolist() == [1, 1, 1, 0]
    assert imitation().starts(np.array([0, 1, 2, 3], np.uint8), True).tolist() == [True, True, True, False]
    assert imitation().starts(np.array([0, 1, 2, 3], np.uint8), False).tolist() == [False, True, True, False]
    assert uniform().weights(runs(), NOW).tolist() == [1, 1, 1, 0]
    assert uniform().continues(np.array([0, 3], np.uint8), False).tolist() == [True, False]


def test_a_recovery_counts_as_the_config_says():
    # human, its recovery, script, policy; in demonstrations too
    some = runs(actor=(1, 1 | RECOVERY, 2, 0))
    assert imitation().weights(some, NOW).tolist() == [1, 1, 1, 0]
    assert imitation().factors == imitation(recovery_weight=0).factors == ()
    assert imitation(recovery_weight=0.25).weights(some, NOW).tolist() == [1, 0.25, 1, 0]
    assert imitation(factors=(by_actor({"human": 2, "script": 1}),), recovery_weight=3).weights(some, NOW).tolist() == [
        2,
        6,
        1,
        0,
    ]
    without = imitation(recovery_weight=0)
    assert without.weights(some, NOW).tolist() == [1, 0, 1, 0]
    assert without.continues(some.actor, np.ones(4, bool)).tolist() == [True, False, True, True]
    assert uniform().weights(some, NOW).tolist() == [1, 1, 1, 1]
    for wrong in (-1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="recovery"):
            imitation(recovery_weight=wrong)


def test_weights_by_actor_and_outcome():
    assert by_actor({"human": 3, "policy": 0.5}).weigh(runs(), NOW).tolist() == [0.5, 3, 0, 0]
    assert by_outcome({"success": 2, "failure": 0.25}).weigh(runs(), NOW).tolist() == [2, 0.25, 0, 1]
    assert by_outcome({"success": 2}, unknown=0, other=1).weigh(runs(), NOW).tolist() == [2, 1, 1, 0]


def test_staleness_is_bounded_hard_or_softly_but_never_that_of_a_demonstration():
    assert max_lag(5).weigh(runs(), NOW).tolist() == [0, 1, 1, 1]
    assert lag_half_life(5).weigh(runs(), NOW) == pytest.approx([0.5 ** (9 / 5), 0.5, 0.5**0.2, 1])
    demonstrated = runs(demonstration=(True,) * 4, version=(0,) * 4)
    assert max_lag(5).weigh(demonstrated, NOW).tolist() == [1, 1, 1, 1]
    assert lag_half_life(5).weigh(demonstrated, NOW).tolist() == [1, 1, 1, 1]
    # relative weights do not depend on the moment, and a newest version of 0 does not overflow
    first, later = (lag_half_life(2).weigh(runs(version=(3, 4, 5, 6)), Moment(v)) for v in (7, 20))
    assert first / first.sum() == pytest.approx(later / later.sum())
    assert np.isfinite(lag_half_life(0.001).weigh(runs(version=(2_000_000,) * 4), Moment(0))).all()


def test_a_priority_has_a_floor_an_exponent_and_a_weight_for_what_nobody_looked_at():
    some = runs(label=(4.0, np.nan, -3.0, 0.0))
    np.testing.assert_allclose(by_label("p", 0.5, least=0.01, unknown=7.0).weigh(some, NOW), [2, 7, 0.1, 0.1])
    np.testing.assert_array_equal(by_label("p", 0).weigh(some, NOW), 1)
    # the largest there can be is still a weight
    largest = runs(label=(np.finfo(np.float32).max,) * 4)
    assert np.isfinite(uniform(factors=(by_label("p", 4.0),)).weights(largest, NOW)).all()
    for wrong in (
        {"exponent": -1.0},
        {"exponent": 5.0},
        {"exponent": np.nan},
        {"least": -1.0},
        {"least": np.inf},
        {"unknown": np.nan},
        {"name": ""},
    ):
        with pytest.raises(ConfigError, match="by_label"):
            by_label(**{"name": "p", **wrong})


def test_a_target_goes_by_one_label():
    assert uniform().label == ""
    assert uniform(factors=(by_actor({"human": 1}), by_label("p"), by_label("p", 0.5))).label == "p"
    with pytest.raises(ConfigError, match="labels p, q"):
        uniform(factors=(by_label("p"), by_label("q")))


def test_factors_multiply_and_only_starts_have_weight():
    target = SamplingDistribution(
        (by_actor({"human": 3, "policy": 2, "hold": 1}), max_lag(5)), TaskMix(), Recent(), acted_steps, acted_steps
    )
    assert target.weights(runs(), NOW).tolist() == [0, 3, 0, 0]


def test_a_factor_that_answers_nonsense_is_refused():
    for wrong in (lambda r, m: -np.ones(4), lambda r, m: np.full(4, np.nan), lambda r, m: np.ones((4, 4))):
        with pytest.raises(ConfigError, match="factor"):
            uniform(factors=(Factor(wrong),)).weights(runs(), NOW)


def test_names_and_numbers_that_cannot_be_are_refused_with_what_was_meant():
    with pytest.raises(ConfigError, match="Did you mean 'human'"):
        by_actor({"humann": 1})
    with pytest.raises(ConfigError, match="Did you mean 'success'"):
        by_outcome({"succes": 1})
    for wrong in (
        lambda: by_actor({"human": -1}),
        lambda: by_outcome({}, unknown=math.inf),
        lambda: max_lag(-1),
        lambda: lag_half_life(0),
        lambda: Recent(1.5),
        lambda: Recent(0.5, 0),
        lambda: TaskMix(online=1.2),
        lambda: TaskMix(shares={"a": 0}),
        lambda: TaskMix(shares={"a": math.nan}),
        lambda: OnlineShare(at_least=300),
        lambda: OnlineShare(low=0.9, high=0.1),
    ):
        with pytest.raises(ConfigError):
            wrong()
