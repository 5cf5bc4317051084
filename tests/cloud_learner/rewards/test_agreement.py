"""No single model's word admits anything."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from cloud_learner.rewards.agreement import FAILURE, NOBODY_KNOWS, SUCCESS, agree, by_thresholds

NOTHING = float("nan")
SAID = (SUCCESS, FAILURE, NOTHING)


def one(person: float, record: float, *models: float, doubt: bool = False) -> float:
    by_kind = {f"m{number}": np.array([said], np.float32) for number, said in enumerate(models)}
    return float(agree(np.array([person]), np.array([record]), by_kind, doubt)[0])


@pytest.mark.parametrize("doubt", [False, True])
@pytest.mark.parametrize("model", SAID)
def test_one_model_alone_judges_no_episode(model: float, doubt: bool) -> None:
    assert one(NOTHING, NOTHING, model, doubt=doubt) == NOBODY_KNOWS


@pytest.mark.parametrize("doubt", [False, True])
def test_whatever_one_model_says_no_verdict_is_another_than_without_it_or_none(doubt: bool) -> None:
    """The invariant, over everything that can be said: a model takes away at most."""
    for person, record, model in itertools.product(SAID, repeat=3):
        without, with_it = one(person, record), one(person, record, model, doubt=doubt)
        assert with_it in (without, NOBODY_KNOWS), (person, record, model)


def test_two_kinds_that_say_the_same_judge_and_three_must_not_disagree() -> None:
    assert one(NOTHING, NOTHING, SUCCESS, SUCCESS) == SUCCESS
    assert one(NOTHING, NOTHING, FAILURE, FAILURE) == FAILURE
    assert one(NOTHING, NOTHING, SUCCESS, FAILURE) == NOBODY_KNOWS
    assert one(NOTHING, NOTHING, SUCCESS, SUCCESS, FAILURE) == NOBODY_KNOWS
    assert one(NOTHING, NOTHING, SUCCESS, SUCCESS, NOTHING) == SUCCESS


@pytest.mark.parametrize("record", [SUCCESS, FAILURE])
def test_models_do_not_overrule_the_record_and_doubt_only_takes_away(record: float) -> None:
    other = 1 - record
    assert one(NOTHING, record, other, other) == record
    assert one(NOTHING, record, other, doubt=True) == NOBODY_KNOWS
    assert one(NOTHING, record, other, other, doubt=True) == NOBODY_KNOWS
    assert one(NOTHING, record, record, doubt=True) == record


@pytest.mark.parametrize("doubt", [False, True])
@pytest.mark.parametrize("person", [SUCCESS, FAILURE])
def test_a_person_has_the_last_word(person: float, doubt: bool) -> None:
    for record, first, second in itertools.product(SAID, repeat=3):
        assert one(person, record, first, second, doubt=doubt) == person


def test_nothing_but_a_persons_command_writes_a_persons_label() -> None:
    root = Path(__file__).resolve().parents[3]
    rooms = ("cloud_learner", "fleet", "robot_edge", "policies", "hal", "wire")
    users = {
        str(path.relative_to(root))
        for room in rooms
        for path in (root / room).rglob("*.py")
        if "label_episode" in path.read_text()
    }
    ledger = "cloud_learner/buffer/ledger"
    assert users == {f"{ledger}/notes.py", f"{ledger}/ledger.py", "fleet/cli/stored/buffer.py"}


def test_scores_between_the_thresholds_say_nothing() -> None:
    said = by_thresholds(np.array([0.0, 0.2, 0.5, 0.9, 1.0, np.nan]), 0.9, 0.2)
    np.testing.assert_array_equal(said, [0, 0, np.nan, 1, 1, np.nan])
    assert np.isnan(by_thresholds(np.array([0.0, 1.0]), None, None)).all()
