"""What a chunk is worth, against slow references."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from cloud_learner.algorithms.critics.chunk_critic import (  # noqa: E402
    ChunkCritic,
    cautious_level,
    quantile,
    td_targets,
)
from cloud_learner.algorithms.critics.return_distribution import BINS  # noqa: E402

CENTRES = [-0.1 + 1.2 * i / (BINS - 1) for i in range(BINS)]


def some_shares() -> torch.Tensor:
    """Sharp and broad distributions, one on two bins, and an even one."""
    torch.manual_seed(0)
    shares = (torch.randn(6, BINS) * torch.tensor([0.0, 0.3, 1.0, 3.0, 10.0, 1.0])[:, None]).softmax(-1)
    shares[5] = 0.0
    shares[5, 30], shares[5, 120] = 0.25, 0.75
    return shares


def test_a_quantile_is_the_first_bin_up_to_which_so_much_lies() -> None:
    shares, levels = some_shares(), [0.1, 0.5, 0.6, 0.9, 0.75, 0.2]
    found = quantile(shares, torch.tensor(CENTRES), torch.tensor(levels))
    for row, level, one in zip(shares.double().tolist(), levels, found.tolist(), strict=True):
        total, i = row[0], 0
        while total < level:
            i += 1
            total += row[i]
        assert one == pytest.approx(CENTRES[i], abs=1e-6)
    assert quantile(shares[5:], torch.tensor(CENTRES), torch.tensor([0.3])).item() == pytest.approx(CENTRES[120])
    assert quantile(shares[:1], torch.tensor(CENTRES), torch.tensor([1.0])).item() == pytest.approx(1.1)


def test_the_level_falls_with_the_entropy() -> None:
    shares = some_shares()
    found = cautious_level(shares, 0.9)
    for row, one in zip(shares.double().tolist(), found.tolist(), strict=True):
        entropy = -sum(share * math.log(share) for share in row if share > 0) / math.log(BINS)
        assert one == pytest.approx(0.9 - 0.3 * entropy, abs=1e-4)
    assert found[0].item() == pytest.approx(0.6) and 0.85 < found[5].item() < 0.9
    assert cautious_level(shares[:1], 0.1).item() == 0.0


def test_targets_are_what_a_loop_over_chunks_says() -> None:
    n, gamma = 4, 0.9
    cases = [
        # ticks to the end, succeeded, next ticks, what comes
        (0, True, 1, 0.7),
        (0, False, 1, 0.7),
        (2, True, 3, 0.7),
        (3, True, 4, 0.7),
        (3, False, 4, 0.7),
        (4, True, 4, 0.7),
        (60, False, 4, 0.3),
        (60, True, 2, 0.5),
    ]
    ticks, succeeded, later, comes = (torch.tensor(column) for column in zip(*cases, strict=True))
    expected = []
    for left, success, next_ticks, what_comes in cases:
        total = 0.0
        for tick in range(n):
            if tick == left and success:
                total += gamma**tick
        expected.append(total if left < n else gamma**next_ticks * what_comes)
    assert td_targets(ticks, succeeded, later, comes, n, gamma).tolist() == pytest.approx(expected)


def test_what_comes_is_the_cautious_quantile_of_v() -> None:
    torch.manual_seed(0)
    critic = ChunkCritic(3, 2, 8)
    features = torch.randn(5, 3)
    shares = critic.value(features).softmax(-1)
    expected = quantile(shares, torch.tensor(CENTRES), cautious_level(shares, 0.9))
    torch.testing.assert_close(critic.what_comes(features, 0.9), expected)


def test_the_two_q_differ_and_read_features_and_actions() -> None:
    torch.manual_seed(0)
    critic = ChunkCritic(3, 2, 8)
    features, actions = torch.randn(5, 3), torch.randn(5, 2)
    q = critic.q(features, actions)
    assert q.shape == (2, 5) and not torch.allclose(q[0], q[1])
    for changed in (critic.q(features + 1, actions), critic.q(features, actions + 1)):
        assert bool((changed != q).all())


def test_v_learns_the_distribution_over_what_was_done_and_its_quantile_is_the_better_of_it() -> None:
    torch.manual_seed(0)
    critic = ChunkCritic(1, 1, 16)
    optimizer = torch.optim.Adam(critic.value.parameters(), 1e-2)
    features, worth = torch.zeros(8, 1), torch.tensor([0.1] * 6 + [0.9] * 2)
    for _ in range(150):
        optimizer.zero_grad()
        critic.value.loss(features, worth).backward()
        optimizer.step()
    low, high = (critic.what_comes(features[:1], level).item() for level in (0.5, 0.9))
    assert (low, high) == (pytest.approx(0.1, abs=0.02), pytest.approx(0.9, abs=0.02))
