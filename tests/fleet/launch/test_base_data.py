"""Demonstrations of tasks that are not the recipe's, kept in the mixture of a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.demonstrations import DemonstrationCount
from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from fleet.launch import learning
from hal.drivers.fake import FAKE_INSTRUCTIONS
from tests.fleet.launch.test_learning import show
from wire.clock import ManualClock
from wire.errors import ConfigError

OWN, BASE = ("go-left",), ("go-right", "go-up")


def recipe(tasks: tuple[str, ...], base_share: float = 0.0) -> Recipe:
    plain = fake()
    return replace(
        plain,
        tasks=tasks,
        instructions={task: FAKE_INSTRUCTIONS[task] for task in tasks},
        demonstrations=2,
        training=replace(plain.training, batch=8, pretrain_steps=2, base_share=base_share),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    found = DataDirectory(tmp_path_factory.mktemp("data"))
    show(found, recipe(OWN), 2)
    show(found, recipe(BASE), 4, 10)
    return found


def test_a_share_of_each_batch_is_base_data(data: DataDirectory) -> None:
    mixed = recipe(OWN, 0.25)
    ledger, store = data.buffer.open_reader()
    policy = mixed.make_policy(mixed.spec, 0)
    with ReplayDataset(ledger, store, mixed.spec, learning.dataset_config(mixed, policy, 0, BASE)) as dataset:
        while dataset.refresh():
            pass
        drawn = [sentence for _ in range(10) for sentence in dataset.next()["instructions"]]
    ledger.close()
    store.close()
    assert drawn.count(FAKE_INSTRUCTIONS["go-left"]) == 60
    assert {*drawn} == {FAKE_INSTRUCTIONS["go-left"], *BASE}, "what is imported is called by its instruction"


def test_it_is_neither_a_demonstration_nor_what_was_corrected(data: DataDirectory, tmp_path: Path) -> None:
    """Floors and bounds on what a policy learns from count what robots and people did on its own tasks."""
    found = {}
    for share, base in ((0.0, ()), (0.25, BASE)):
        mixed, (ledger, store) = recipe(OWN, share), data.buffer.open_reader()
        config = learning.dataset_config(mixed, mixed.make_policy(mixed.spec, 0), 0, base)
        with ReplayDataset(ledger, store, mixed.spec, config) as dataset:
            while dataset.refresh():
                pass
            counts = [DemonstrationCount(dataset, ledger, wanted, False, ManualClock()).complete for wanted in (2, 3)]
            found[share] = dataset.eligible_steps, dataset.finished("demonstration"), counts
        ledger.close()
        store.close()
    assert found[0.25] == found[0.0] == (found[0.0][0], 2, [True, False])


def test_it_is_trained_on_and_without_any_that_is_said(data: DataDirectory, tmp_path: Path) -> None:
    with learning.open_offline_trainer(recipe(OWN, 0.25), data, DataDirectory(tmp_path / "run"), 0, 3) as trainer:
        while not trainer.finished:
            trainer.step()
    everything = recipe((*OWN, *BASE), 0.25)
    with (
        pytest.raises(ConfigError, match="vla-fleet buffer import-lerobot"),
        learning.open_offline_trainer(everything, data, DataDirectory(tmp_path / "none"), 0, 3),
    ):
        pass
