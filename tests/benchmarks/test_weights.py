"""What `benchmarks.weights` measures is what its table says."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
import torch

from benchmarks.common.weights_file import random_weights
from benchmarks.weights.sizes import sizes
from benchmarks.weights.training import quantization_changes
from cloud_learner.training.config import ActionCheckConfig
from cloud_learner.training.publishing.action_check import ActionCheck, HeldSource
from tests.cloud_learner.training.publishing.test_action_check import observations, policy
from wire.weights.delta import WeightsLayout


def versions(count: int, change: float) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    values = draw.standard_normal((200, 300)).astype(np.float32)
    found = []
    for _ in range(count):
        found.append(np.frombuffer(bytearray(safetensors.numpy.save({"layer": values})), np.uint8))
        values = values + change * draw.standard_normal(values.shape).astype(np.float32)
    return found


def test_a_walk_of_small_steps_is_small_as_ours_and_large_as_a_sparse_one() -> None:
    row = sizes("walk", versions(6, 0.05), 60_000)
    assert row["whole, fp32 (MB)"] == pytest.approx(0.24, rel=0.01)
    assert row["1 /"] > 20
    assert 0.9 < 1 / row["1 /, on average"] / (1 / row["1 /"] + 1 / 400) < 1.1, "every four-hundredth goes whole"
    assert row["sparse bf16 delta (MB)"] > 0.3 * row["whole, fp32 (MB)"], "nearly every value changes"
    assert row["our delta (MB)"] < row["lossless delta (MB)"] < row["whole, fp32 (MB)"]
    assert 10 < row["values changed (%)"] < 60
    assert row["left for the next (% of an update)"] < 60


def test_where_hardly_anything_changes_all_are_small() -> None:
    before = versions(1, 0.0)[0]
    after = before.copy()
    floats = after[WeightsLayout.of(after).data_offset :].view("<f4")
    floats[::1000] += 1.0
    row = sizes("sparse", [before, after], 60_000)
    assert row["our delta (MB)"] < 0.001
    assert row["sparse bf16 delta (MB)"] == pytest.approx(60 * 6 / 1e6)


def test_what_quantisation_changes_of_actions_grows_with_the_step() -> None:
    source = HeldSource(lambda count, draw: list(range(8)), observations)
    check = ActionCheck(policy(), source, ActionCheckConfig())
    check.choose()
    assert check.ready
    found = []
    for size in (0.0, 0.01, 0.1):
        module = policy().module
        files = []
        for seed in range(3):
            dice = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for values in module.parameters():
                    values += size * torch.randn(values.shape, generator=dice)
            files.append(policy().save(module))
        changes = quantization_changes(check, files)
        assert len(changes) == 2
        found.append(max(changes))
    assert found[0] == 0 < found[1] < found[2]


def test_a_file_that_cannot_be_compressed_is_a_weights_file() -> None:
    data = random_weights(10_000, 0)
    assert WeightsLayout.of(np.frombuffer(data, np.uint8)).header.tensors["bytes"].shape == (10_000,)
    assert data == random_weights(10_000, 0) != random_weights(10_000)
