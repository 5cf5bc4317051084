"""The benchmark of shared observations: that its arms learn from the same data, and from as much of it as they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import packing
from benchmarks.packing import APART, FEWER, MAX_OFFSET, PACKED, arms
from cloud_learner.buffer.location import BufferLocation
from fleet.config.recipe import Recipe
from tests.cloud_learner.training.batches import Batches

torch = pytest.importorskip("torch")

SIZE = replace(packing.QUICK, images=4, offsets=(4,), timed_steps=2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, BufferLocation]:
    return packing.demonstrated(tmp_path_factory.mktemp("packing"), SIZE, 0)


@pytest.mark.slow
def test_packed_and_one_at_a_time_have_as_many_samples_with_their_own_offsets(
    demonstrations: tuple[Recipe, BufferLocation],
) -> None:
    recipe, place = demonstrations
    steps = {}
    for arm in arms(8, 6):
        learner, feed = packing._begin(recipe, place, arm, 0)
        with feed:
            batch = feed.next()
            age = np.asarray(batch["frame_age"])
            steps[arm.name] = age.size
            assert batch["images"]["corner2"].shape[0] == arm.images  # type: ignore[index]
            assert age.shape == ((8, 6) if arm.name == PACKED else (arm.images,))
            assert age.min() >= 0 and np.ptp(age) > MAX_OFFSET / 2
            before = learner.weights()
            assert np.isfinite(learner.step(Batches(batch))["loss"])
            assert learner.weights() != before
            assert learner.policy.max_offset == MAX_OFFSET
    assert steps == {PACKED: 48, APART: 48, FEWER: 8}


def test_arms_are_timed_and_trained(
    demonstrations: tuple[Recipe, BufferLocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, place = demonstrations
    times = packing._time(recipe, place, arms(4, 4), 3)
    assert times.keys() == {PACKED, APART, FEWER}
    assert all(seconds > 0 for seconds in times.values())
    looked_at = []

    def success(recipe: Recipe, weights: bytes, episodes: int, first_seed: int) -> dict[str, float]:
        assert (recipe.chunking.strategy, recipe.delay, episodes) == ("future_state", "6", 1)
        looked_at.append(weights)
        return {"a": 0.0, "b": float(len(looked_at))}

    monkeypatch.setattr(packing, "success", success)
    monkeypatch.setattr(packing, "demonstrated", lambda root, size, seed: demonstrations)
    assert packing.train(SIZE, 0, arms(4, 4)[0], (2, 2)) == [0.5, 0.5]
    assert packing.train(SIZE, 0, arms(4, 4)[0], (2, 5)) == [1.0, 1.5]
    # the same steps, the same weights
    assert looked_at[0] == looked_at[1] != looked_at[2]


def test_the_table_of_speeds_compares_at_equal_samples() -> None:
    times = {8: {PACKED: 0.1, APART: 0.5, FEWER: 0.08}}
    (row,) = packing._speeds(replace(SIZE, images=32), times)
    assert row["k"] == 8
    assert row["samples/s, packed over one at a time"] == pytest.approx(5.0)
    assert row["packed over that"] == pytest.approx(1.25)
