"""RECAP in a whole fleet and on what that recorded: robots act by what it learns, and it resumes to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.buffer.control import POLICY
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from fleet.launch.learning import open_offline_trainer

pytestmark = pytest.mark.slow
STEPS = 12


def recipe(**settings: object) -> Recipe:
    given = [f"algorithm.{name}={value}" for name, value in {"horizon_ticks": 60, "window": 512, **settings}.items()]
    plain = fake()
    training = replace(plain.training, batch=8, publish_every_s=0.5)
    return Overrides(algorithm="recap", set_=given).applied(replace(plain, training=training, checkpoint_every_s=1e6))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessFleet]:
    """Two robots that worked for some episodes, with the scripted operator."""
    made = InProcessFleet(tmp_path_factory.mktemp("fleet"), recipe())
    made.turn(300)
    yield made
    made.close()


def test_robots_act_by_what_it_learns_of_their_own_steps(fleet: InProcessFleet) -> None:
    newest = fleet.ledger.newest_version().version.number
    assert newest >= 2
    for robot in fleet.robots:
        acting = robot.inference._swap.active
        assert acting.advised and 2 <= acting.version <= newest
    learner = fleet.trainer.learner
    assert int(learner.algorithm.critic.window.noted) > 0, "the policy's own steps were judged"
    found = []
    for _ in range(40):
        batch = fleet.trainer._source.next()
        own = (batch["actor"] == POLICY) & batch["online"]
        found += own.tolist()
        assert np.isin(batch["outcome"][own], (0, 1)).all() and (batch["ticks_to_end"][own] >= 0).all()
    assert 0 < np.mean(found) < 1


def trained(run: Path, data: DataDirectory, stop: int = STEPS) -> tuple[bytes, dict[str, object]]:
    with open_offline_trainer(recipe(), data, DataDirectory(run), 0, STEPS) as trainer:
        while trainer.learner.gradient_steps < stop:
            trainer.step()
        trainer.save()
        return trainer.weights(), trainer.learner.state().tensors


def test_stopped_and_started_again_it_learns_the_same(fleet: InProcessFleet, tmp_path: Path) -> None:
    whole, tensors = trained(tmp_path / "whole", fleet.data)
    half, _ = trained(tmp_path / "halves", fleet.data, stop=STEPS // 2)
    again, restored = trained(tmp_path / "halves", fleet.data)
    assert again == whole != half
    assert int(tensors["value/module/window.noted"]) > 0
    assert [name for name, one in tensors.items() if not one.equal(restored[name])] == []
