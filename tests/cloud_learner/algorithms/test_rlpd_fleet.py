"""RLPD in a whole fleet and on what that recorded: robots act by what it learns, and it resumes to the byte."""

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
STEPS = 8


def recipe(warmup: int) -> Recipe:
    given = [f"algorithm.{name}={value}" for name, value in (("warmup", warmup), ("critics", 3), ("critic_width", 32))]
    plain = fake()
    training = replace(plain.training, batch=16, publish_every_s=0.5)
    return Overrides(algorithm="rlpd", set_=given).applied(replace(plain, training=training, checkpoint_every_s=1e6))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessFleet]:
    """Two robots that worked for some episodes, with the scripted operator."""
    made = InProcessFleet(tmp_path_factory.mktemp("fleet"), recipe(warmup=3))
    made.turn(300, gradient_steps_per_round=0.2)
    yield made
    made.close()


def test_robots_act_by_what_it_learns_of_their_own_steps(fleet: InProcessFleet) -> None:
    newest = fleet.ledger.newest_version().version.number
    assert newest >= 2
    for robot in fleet.robots:
        acting = robot.inference._swap.active
        assert acting.kind == "gaussian" and 2 <= acting.version <= newest
    algorithm = fleet.trainer.learner.algorithm
    assert int(algorithm.critic.learned) > 3
    assert np.isfinite(fleet.trainer.counts.metrics["actor_loss"]), "the critics have a say"
    assert algorithm.temperature.value.item() != pytest.approx(0.01, rel=1e-6)
    own = []
    for _ in range(20):
        batch = fleet.trainer._source.next()
        own += ((batch["actor"] == POLICY) & batch["online"]).tolist()
    assert 0 < np.mean(own) < 1


def trained(run: Path, data: DataDirectory, stop: int = STEPS) -> tuple[bytes, dict[str, object]]:
    with open_offline_trainer(recipe(warmup=1), data, DataDirectory(run), 0, STEPS) as trainer:
        while trainer.learner.gradient_steps < stop:
            trainer.step()
        trainer.save()
        return trainer.weights(), trainer.learner.state().tensors


def test_stopped_and_started_again_it_learns_the_same(fleet: InProcessFleet, tmp_path: Path) -> None:
    whole, tensors = trained(tmp_path / "whole", fleet.data)
    half, _ = trained(tmp_path / "halves", fleet.data, stop=STEPS // 2)
    again, restored = trained(tmp_path / "halves", fleet.data)
    assert again == whole != half
    assert int(tensors["critic/module/learned"]) > 1, "the critics have a say"
    assert [name for name, one in tensors.items() if not one.equal(restored[name])] == []
