"""Soft actor-critic's losses, against slow references."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from cloud_learner.algorithms.critics.soft_actor import HOTTEST, Temperature, actor_loss, even_halves  # noqa: E402


def test_the_policy_goes_down_what_a_loop_over_chunks_says() -> None:
    torch.manual_seed(0)
    q, density = torch.randn(3, 4), torch.randn(4, 5)
    total = 0.0
    for chunk in range(4):
        mean_q = sum(q[critic, chunk].item() for critic in range(3)) / 3
        per_number = sum(density[chunk, number].item() for number in range(5)) / 5
        total += (0.2 * per_number - mean_q) / 4
    assert actor_loss(q, density, 0.2).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("entropy", "rises"), [(-2.0, True), (-0.5, False)])
def test_the_temperature_rises_while_the_policy_is_too_sure(entropy: float, rises: bool) -> None:
    subject = Temperature(0.25)
    loss = subject.loss(entropy, -1.0)
    assert loss.item() == pytest.approx(0.25 * (entropy + 1.0), rel=1e-5)
    loss.backward()
    assert (subject.logarithm.grad.item() < 0) == rises
    assert subject.value.item() == pytest.approx(0.25)


def test_the_temperature_is_bounded_and_can_fall_again() -> None:
    subject = Temperature(0.25)
    with torch.no_grad():
        subject.logarithm.fill_(5.0)
    subject.bound()
    assert subject.value.item() == HOTTEST
    subject.loss(1.0, -1.0).backward()
    assert subject.logarithm.grad.item() > 0
    subject = Temperature(0.25)
    subject.bound()
    assert subject.value.item() == pytest.approx(0.25)


@pytest.mark.parametrize("own", [0, 1, 3, 5, 9, 10])
def test_either_kind_counts_half_of_a_batch(own: int) -> None:
    kinds = torch.tensor([i < own for i in range(10)])
    found = even_halves(kinds).tolist()
    for one, weight in zip(kinds.tolist(), found, strict=True):
        share = (own if one else 10 - own) / 10
        assert weight == pytest.approx(1.0 if own in (0, 10) else min(0.5 / share, 4.0))
    if own in (3, 5):
        assert sum(found[:own]) == pytest.approx(sum(found[own:])) and math.fsum(found) == pytest.approx(10)
