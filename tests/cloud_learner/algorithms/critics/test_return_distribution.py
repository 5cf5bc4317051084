"""The value's bins and losses against slow references, and which advantages are among the best."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cloud_learner.algorithms.recap import empirical_returns

torch = pytest.importorskip("torch")

from cloud_learner.algorithms.critics.return_distribution import (  # noqa: E402
    BINS,
    LEAST_KNOWN,
    AdvantageWindow,
    ReturnDistribution,
    two_hot,
)

CENTRES = [-1.0 + i / (BINS - 1) for i in range(BINS)]


def slow_two_hot(value: float, low: float = -1.0, high: float = 0.0) -> list[float]:
    """Each bin's weight falls off linearly to nothing at its neighbours."""
    value, gap = min(high, max(low, value)), (high - low) / (BINS - 1)
    return [max(0.0, 1.0 - abs(value - low - i * gap) / gap) for i in range(BINS)]


@pytest.mark.parametrize(("low", "high"), [(-1.0, 0.0), (-0.1, 1.1)])
def test_weights_lie_on_the_two_bins_beside_a_return_and_their_mean_is_the_return(low: float, high: float) -> None:
    returns = low + (high - low) * torch.tensor([0.0, 0.0025, 0.5, 0.50124, 0.9999, 1.0])
    found, centres = two_hot(returns, low, high), ReturnDistribution(1, 1, low, high).centres
    np.testing.assert_allclose(found.numpy(), [slow_two_hot(one, low, high) for one in returns.tolist()], atol=1e-4)
    np.testing.assert_allclose((found * centres).sum(-1).numpy(), returns.numpy(), atol=1e-6)
    beyond, borders = (
        two_hot(torch.tensor([low - 2, high + 2]), low, high),
        two_hot(torch.tensor([low, high]), low, high),
    )
    assert torch.equal(beyond, borders)
    assert two_hot(torch.zeros(2, 3)).shape == (2, 3, BINS)


def test_value_and_loss_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    value = ReturnDistribution(3, 8)
    features, returns = torch.randn(4, 3), torch.tensor([-1.0, -0.7512, -0.2, 0.0])
    losses, means = [], []
    for logits, wanted in zip(value(features).tolist(), returns.tolist(), strict=True):
        total = sum(math.exp(one) for one in logits)
        shares = [math.exp(one) / total for one in logits]
        means.append(sum(share * centre for share, centre in zip(shares, CENTRES, strict=True)))
        weights = slow_two_hot(wanted)
        losses.append(-sum(w * math.log(share) for w, share in zip(weights, shares, strict=True)))
    assert value.loss(features, returns).item() == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert value.expectation(features).tolist() == pytest.approx(means, rel=1e-4)


def test_the_value_learns_the_mean_of_what_came() -> None:
    torch.manual_seed(0)
    value = ReturnDistribution(1, 16)
    optimizer = torch.optim.Adam(value.parameters(), 1e-2)
    features = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    for _ in range(150):
        optimizer.zero_grad()
        value.loss(features, torch.tensor([-1.0, -0.5, -0.1, -0.1])).backward()
        optimizer.step()
    assert value.expectation(features[1:3]).tolist() == pytest.approx([-0.75, -0.1], abs=0.03)


def test_a_return_is_minus_the_share_of_the_longest_time_and_a_failure_has_the_worst() -> None:
    ticks, succeeded = np.array([0, 50, 100, 150, 0, 99]), np.array([True] * 4 + [False] * 2)
    assert empirical_returns(ticks, succeeded, 100).tolist() == [0, -0.5, -1, -1, -1, -1]


def filled(size: int, tasks: list[int], advantages: list[float]) -> AdvantageWindow:
    window = AdvantageWindow(size)
    for begin in range(0, len(tasks), 7):
        part = slice(begin, begin + 7)
        window.note(torch.tensor(tasks[part]), torch.tensor(advantages[part]))
    return window


def test_the_stated_share_of_each_tasks_newest_advantages_exceeds_its_threshold() -> None:
    rng = np.random.default_rng(0)
    tasks = rng.integers(0, 2, 1000).tolist()
    advantages = [float(np.float32(one)) for one in rng.normal(np.array(tasks) * 5.0)]
    window = filled(300, tasks, advantages)
    first, second, first_too = window.thresholds(torch.tensor([0, 1, 0]), 0.3).tolist()
    assert first == first_too
    for task, threshold in ((0, first), (1, second)):
        newest = [one for of, one in zip(tasks[-300:], advantages[-300:], strict=True) if of == task]
        assert sum(one > threshold for one in newest) / len(newest) == pytest.approx(0.3, abs=1 / len(newest))


def test_there_is_no_threshold_before_enough_is_known_of_a_task() -> None:
    window = filled(100, [0] * LEAST_KNOWN + [1] * (LEAST_KNOWN - 1), [0.5] * (2 * LEAST_KNOWN - 1))
    assert window.thresholds(torch.tensor([0, 1, 2]), 0.3).isnan().tolist() == [False, True, True]


def test_more_than_a_window_at_once_leaves_the_newest() -> None:
    window = AdvantageWindow(40)
    window.note(torch.zeros(100, dtype=torch.long), torch.arange(100.0))
    assert sorted(window.advantages.tolist()) == list(range(60, 100))
