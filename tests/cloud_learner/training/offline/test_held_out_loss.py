"""The loss on held-out episodes: the same for the same weights, of episodes that nothing is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.buffer.sampling.segment_index import on_side
from cloud_learner.training.offline import held_out_loss
from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from fleet.launch.learning import open_held_out_loss, open_offline_trainer
from wire.errors import InvalidDataError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    root = tmp_path_factory.mktemp("data")
    InProcessFleet(root, fake(), robots=0).close()
    return DataDirectory(root)


def recipe(validation: float = 0.25) -> Recipe:
    plain = fake()
    return replace(plain, training=replace(plain.training, batch=8, learning_rate=1e-3), validation=validation)


def test_weights_that_learned_them_have_less_and_the_same_have_the_same(data: DataDirectory, tmp_path: Path) -> None:
    measured = open_held_out_loss(recipe(), data, 0)
    # on all episodes, those among them
    with open_offline_trainer(recipe(0.0), data, DataDirectory(tmp_path), 0, 60) as trainer:
        first = trainer.weights()
        while not trainer.finished:
            trainer.step()
        last = trainer.weights()
    before, after = measured.of(first), measured.of(last)
    assert after < before
    again = open_held_out_loss(recipe(), data, 0)
    assert (again.of(last), again.of(first), again.of(last)) == (after, before, after)


def test_its_episodes_are_held_out_whole_and_the_others_are_trained_on(data: DataDirectory) -> None:
    seen = {}
    with data.open_buffer() as (ledger, _):
        ids = {row.id for row in ledger.episodes()}
    for held_out in (False, True):
        seen[held_out] = {one for one in ids if on_side(one, 0.25, held_out)}
    assert seen[True] and seen[False] and not seen[True] & seen[False]


def test_where_nothing_is_held_out_it_says_how_to(data: DataDirectory) -> None:
    with pytest.raises(InvalidDataError, match=r"held out: hold out more with --set validation=SHARE"):
        open_held_out_loss(recipe(1e-9), data, 0)
    assert held_out_loss.BATCHES >= 8
