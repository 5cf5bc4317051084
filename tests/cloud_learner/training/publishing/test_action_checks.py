"""A version of a shared network goes out if it may for every robot that it can drive."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_learner.training.config import ActionCheckConfig
from cloud_learner.training.publishing.action_check import ActionCheck, HeldSource
from cloud_learner.training.publishing.action_checks import ActionChecks
from cloud_learner.training.status import VersionFault, VersionRefusal
from tests.cloud_learner.training.publishing.test_action_check import Told, actions, observations
from wire.errors import SpecMismatchError


class Half(Told):
    """Acts by its half of the weights; an empty half is no row."""

    def __init__(self, half):
        super().__init__()
        self._half = half

    def load(self, weights, version):
        own = weights.split(b"|")[self._half]
        if not own:
            raise SpecMismatchError("no version for this robot yet")
        super().load(own, version)


def checks(rows=(4, 4)):
    found = {}
    for half, name in enumerate(("arm", "base")):
        source = HeldSource(
            lambda count, draw, half=half: list(range(rows[half])), lambda numbers: observations(numbers)
        )
        found[name] = ActionCheck(Half(half), source, ActionCheckConfig())
    both = ActionChecks(found)
    both.choose()
    return both


GOOD, MOVED, JUMPED = actions(0, 0.1, 0.2, 0.3), actions(0.1, 0.2, 0.3, 0.4), actions(0.6, 0.7, 0.8, 0.9)


def verdict(before, after, both):
    assert both.ready
    both.act(before, "parent")
    assert both.knows("parent")
    return both.compare(both.act(after, "child"), "parent")


def test_every_robot_is_looked_at_and_the_largest_change_counts():
    change, refusal = verdict(GOOD + b"|" + GOOD, GOOD + b"|" + MOVED, checks())
    assert change == pytest.approx(0.05) and refusal is None
    for after in (GOOD + b"|" + JUMPED, JUMPED + b"|" + GOOD):
        _, refusal = verdict(GOOD + b"|" + GOOD, after, checks())
        assert refusal.fault == VersionFault.moved
        name = "base" if after.startswith(GOOD) else "arm"
        assert refusal.detail.startswith(f"for '{name}': its actions are")


def test_who_has_no_row_or_nothing_to_act_on_holds_nobody_up():
    both = checks()
    change, refusal = verdict(GOOD + b"|", MOVED + b"|" + JUMPED, both)
    assert change == pytest.approx(0.05) and refusal is None, "the second one's first version has no parent"
    assert list(both.act(GOOD + b"|")) == ["arm"]
    assert both.change(both.act(GOOD + b"|"), both.act(MOVED + b"|" + GOOD)) == pytest.approx(0.05)
    lonely = checks((0, 4))
    assert lonely.ready
    assert list(lonely.act(GOOD + b"|" + GOOD)) == ["base"]
    assert not checks((0, 0)).ready


def test_a_version_that_cannot_act_for_one_is_refused():
    bad = np.full(4, np.nan, np.float32).tobytes()
    refusal = checks().act(GOOD + b"|" + bad)
    assert isinstance(refusal, VersionRefusal) and refusal.fault == VersionFault.cannot_act
    assert refusal.detail.startswith("for 'base': ")
