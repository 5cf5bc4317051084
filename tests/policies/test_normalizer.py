import numpy as np
import pytest
import torch

from policies.normalizer import LIMIT, MIN_STD, Normalizer
from wire.errors import InvalidData


def test_data_becomes_zero_mean_unit_deviation():
    states = np.random.default_rng(0).normal([5, -3], [2, 0.5], (1000, 2))
    normalizer = Normalizer(2)
    normalizer.fit(states)
    out = normalizer(torch.tensor(states, dtype=torch.float32))
    assert torch.allclose(out.mean(0), torch.zeros(2), atol=1e-4)
    assert torch.allclose(out.std(0), torch.ones(2), atol=1e-2)


def test_a_dimension_that_never_moved_does_not_blow_up():
    normalizer = Normalizer(1)
    normalizer.fit(np.ones((10, 1)))
    assert normalizer.std.item() == pytest.approx(MIN_STD)
    assert normalizer(torch.tensor([[1.0 + MIN_STD]])).item() == pytest.approx(1, rel=1e-4)
    assert normalizer(torch.tensor([[1e6]])).item() == LIMIT
    assert normalizer(torch.tensor([[-1e6]])).item() == -LIMIT


def test_statistics_are_buffers():
    assert set(Normalizer(3).state_dict()) == {"mean", "std"}
    assert not list(Normalizer(3).parameters())


@pytest.mark.parametrize("states", [np.zeros((0, 2)), np.zeros((4, 3)), np.zeros(2), np.array([[np.nan, 0.0]])])
def test_bad_statistics_are_refused(states):
    with pytest.raises(InvalidData, match="state statistics"):
        Normalizer(2).fit(states)
