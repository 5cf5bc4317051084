"""Training without a fleet: it resumes to the byte, and what it takes to begin is said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.interface import DataNeeds
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from fleet.launch.learning import dataset_config, make_trainer, open_offline_trainer
from wire.clock import ManualClock
from wire.errors import InvalidDataError, PolicyError
from wire.transport.memory_channel import MemoryServer

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    """Demonstrations of the fake recipe."""
    root = tmp_path_factory.mktemp("data")
    rehearsal = InProcessFleet(root, fake(), robots=0)
    rehearsal.ledger.take_snapshot("then")
    rehearsal.close()
    return DataDirectory(root)


def recipe(**training: object) -> Recipe:
    plain = fake()
    return replace(plain, training=replace(plain.training, batch=4, **training), checkpoint_every_s=1e6)


def trained(run: DataDirectory, data: DataDirectory, steps: int = STEPS, stop: int = 0, **more: object) -> bytes:
    with open_offline_trainer(recipe(), data, run, 0, steps, **more) as trainer:
        while not trainer.finished and (not stop or trainer.learner.gradient_steps < stop):
            trainer.step()
        trainer.save()
        return trainer.weights()


def test_stopped_and_started_again_it_learns_the_same(data: DataDirectory, tmp_path: Path) -> None:
    whole = trained(DataDirectory(tmp_path / "whole"), data)
    run = DataDirectory(tmp_path / "halves")
    half = trained(run, data, stop=3)
    assert trained(run, data) == whole != half
    assert trained(run, data) == whole, "there is nothing left to do"
    assert trained(run, data, steps=STEPS + 1) != whole


def test_a_gradient_step_is_saved_once(data: DataDirectory, tmp_path: Path) -> None:
    run = DataDirectory(tmp_path / "run")
    with open_offline_trainer(replace(recipe(), checkpoint_every_s=0.0), data, run, 0, STEPS) as trainer:
        for _ in range(3):
            trainer.step()
        there = sorted(run.training.iterdir())
        trainer.save()
        assert sorted(run.training.iterdir()) == there
    with open_offline_trainer(recipe(), data, run, 0, STEPS) as trainer:
        trainer.save()
        assert sorted(run.training.iterdir()) == there
        trainer.step()
        trainer.save()
        assert sorted(run.training.iterdir()) != there


def test_a_kill_costs_what_came_after_the_checkpoint(data: DataDirectory, tmp_path: Path) -> None:
    run = DataDirectory(tmp_path / "run")
    whole = trained(DataDirectory(tmp_path / "whole"), data)
    with open_offline_trainer(replace(recipe(), checkpoint_every_s=0.0), data, run, 0, STEPS) as trainer:
        for _ in range(4):
            trainer.step()
    # a file of the newest is torn, as by a power failure
    newest = next(max(run.training.iterdir()).glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    with open_offline_trainer(recipe(), data, run, 0, STEPS) as trainer:
        assert trainer.learner.gradient_steps == 3
    assert trained(run, data) == whole


def test_it_begins_with_given_weights_and_leaves_their_normalisation(data: DataDirectory, tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "first")
    first.root.mkdir()
    first.trained.write_bytes(trained(first, data))
    warm = Overrides(from_=str(first.root)).applied(recipe())
    with open_offline_trainer(warm, data, DataDirectory(tmp_path / "warm"), 0, STEPS) as trainer:
        assert trainer.weights() == first.trained.read_bytes()
        trainer.step()
        assert trainer.weights() != first.trained.read_bytes()


def test_a_snapshot_is_what_it_was(data: DataDirectory, tmp_path: Path) -> None:
    with open_offline_trainer(recipe(), data, DataDirectory(tmp_path), 0, STEPS, "then") as trainer:
        assert trainer.source.eligible_steps > 0
    with (
        pytest.raises(InvalidDataError, match="snapshot"),
        open_offline_trainer(recipe(), data, DataDirectory(tmp_path), 0, STEPS, "never"),
    ):
        pass


class Judged(HGDagger):
    """Learns from what a job wrote."""

    name = "judged"

    def needs(self) -> DataNeeds:
        return replace(super().needs(), labels=("value",))


def test_labels_that_nobody_wrote_are_missed_before_the_first_step(data: DataDirectory, tmp_path: Path) -> None:
    mine = DataDirectory(Path(shutil.copytree(data.root, tmp_path / "copy")))
    judged = replace(recipe(), algorithm=Judged())
    with (
        pytest.raises(InvalidDataError, match=r"'judged' learns from the step labels value, .* hg-dagger"),
        open_offline_trainer(judged, mine, DataDirectory(tmp_path / "run"), 0, STEPS),
    ):
        pass
    ledger, store = mine.buffer.open_writer()
    segment = next(iter(ledger.segments_after(0)))
    ledger.put_step_labels("value", {segment.row: np.ones(segment.steps)})
    store.close()
    ledger.close()
    with open_offline_trainer(judged, mine, DataDirectory(tmp_path / "run"), 0, STEPS) as trainer:
        assert trainer.step()["loss"] > 0


def test_a_fleet_goes_on_without_labels_and_that_is_said(
    data: DataDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = DataDirectory(Path(shutil.copytree(data.root, tmp_path / "copy")))
    for algorithm, said in ((Judged(), True), (recipe().algorithm, False)):
        caplog.clear()
        line = MemoryServer().connect("trainer")
        make_trainer(replace(recipe(), algorithm=algorithm), "trainer", mine, line, 0, clock=ManualClock()).close()
        assert ("learns from the step labels value, which no step of the buffer has yet" in caplog.text) == said


def test_an_algorithm_bounds_how_often_steps_are_drawn_unless_the_recipe_does() -> None:
    class Sparing(HGDagger):
        def needs(self) -> DataNeeds:
            return replace(super().needs(), samples_per_insert=4.0)

    for given, found in ((0.0, 4.0), (7.0, 7.0)):
        asked = replace(recipe(), algorithm=Sparing(), samples_per_insert=given)
        assert dataset_config(asked, asked.make_policy(asked.spec, 0), 0).samples_per_insert == found


def test_what_it_cannot_begin_with_is_said(data: DataDirectory, tmp_path: Path) -> None:
    other = replace(recipe(), instructions={"fly": "fly away"}, tasks=("fly",))
    with (
        pytest.raises(InvalidDataError, match=r"no step to learn from on the tasks fly\. Record or import"),
        open_offline_trainer(other, data, DataDirectory(tmp_path / "a"), 0, STEPS),
    ):
        pass
    run = DataDirectory(tmp_path / "b")
    trained(run, data, stop=1)
    small = Overrides(policy="flow:small").applied(recipe())
    with (
        pytest.raises(PolicyError, match="another network"),
        open_offline_trainer(small, data, run, 0, STEPS),
    ):
        pass
    shutil.rmtree(run.root)
