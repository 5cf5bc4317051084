import numpy as np
import pytest
import torch

from policies.common.normalizer import MIN_STD, Normalizer
from policies.common.residual_policy import STATE_LIMIT as LIMIT
from wire.errors import InvalidDataError, PolicyError


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
    with pytest.raises(InvalidDataError, match="state statistics"):
        Normalizer(2).fit(states)


def online(dimensions=2):
    return Normalizer(dimensions, online=True)


def test_online_statistics_are_those_of_all_states_together():
    rng = np.random.default_rng(0)
    states = rng.normal([1000.0, -2.0], [0.5, 3.0], (5000, 2))
    followed, whole = online(), online()
    for part in np.array_split(states, [7, 8, 500, 3000]):
        followed.update(torch.from_numpy(part))
    whole.fit(states)
    assert followed.count == 5000
    assert torch.allclose(followed.mean, whole.mean, rtol=1e-6)
    assert torch.allclose(followed.std, whole.std, rtol=1e-5)


def test_what_was_known_is_forgotten_after_the_window(monkeypatch):
    monkeypatch.setattr("policies.common.normalizer.WINDOW", 1000)
    rng, followed = np.random.default_rng(0), online(1)
    followed.fit(rng.normal(0, 1, (100_000, 1)))
    assert followed.count == 1000
    assert followed.std.item() == pytest.approx(1, abs=0.02)
    for _ in range(200):
        followed.update(torch.from_numpy(rng.normal(10, 3, (100, 1))))
    assert followed.mean.item() == pytest.approx(10, abs=0.5)
    assert followed.std.item() == pytest.approx(3, abs=0.3)


def test_older_weights_fit_where_statistics_do_not_follow():
    assert set(Normalizer(2).state_dict()) == {"mean", "std"}
    assert set(online().state_dict()) == {"mean", "std", "count", "mean64", "spread"}
    with pytest.raises(PolicyError, match="online"):
        Normalizer(2).update(torch.zeros(3, 2))


@pytest.mark.parametrize("states", [torch.zeros(4, 3), torch.tensor(1.0), torch.full((2, 2), float("nan"))])
def test_an_update_that_cannot_be_taken_changes_nothing(states):
    followed = online()
    followed.fit(np.random.default_rng(0).normal(size=(10, 2)))
    before = {n: t.clone() for n, t in followed.state_dict().items()}
    with pytest.raises(InvalidDataError):
        followed.update(states)
    followed.update(torch.zeros(0, 2))
    assert all(torch.equal(t, before[n]) for n, t in followed.state_dict().items())
