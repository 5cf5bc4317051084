"""Adjoint matching against its definition, and where it takes a flow whose optimum is known."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cloud_learner.algorithms.adjoint_matching import (  # noqa: E402
    Velocity,
    lean_adjoints,
    matching_loss,
    sample_paths,
)


def gaussian(mean: float, spread: float) -> Velocity:
    """The velocity of the flow from a standard normal distribution to N(mean, spread^2) in each number."""

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        variance = t**2 * spread**2 + (1 - t) ** 2
        end = mean + t * spread**2 / variance * (x - t * mean)
        return (end - x) / (1 - t)

    return velocity


def wavy() -> Velocity:
    """Some network, whose Jacobian changes from place to place."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double().requires_grad_(False)
    return lambda x, t: net(torch.cat([x, t], -1))


# --- the path ---------------------------------------------------------------------------------------------------------


def test_a_path_to_a_certain_end_has_the_flows_spread_at_each_time_and_forgets_its_noise() -> None:
    torch.manual_seed(0)
    noise = torch.randn(20_000, 1)
    points, end = sample_paths(gaussian(0.8, 0.0), noise, 5)
    assert points.shape == (5, 20_000, 1) and torch.equal(points[0], noise)
    for i in range(5):
        assert points[i].mean().item() == pytest.approx(0.8 * i / 5, abs=0.02)
        assert points[i].std().item() == pytest.approx(1 - i / 5, rel=0.02)
    between = torch.corrcoef(points[:, :, 0])[0]
    assert between[1:].abs().max().item() < 0.03
    torch.testing.assert_close(end, torch.full_like(end, 0.8), atol=1e-5, rtol=0)


def test_paths_end_as_the_flow_does() -> None:
    torch.manual_seed(0)
    _, end = sample_paths(gaussian(-0.3, 0.5), torch.randn(20_000, 1), 100)
    assert end.mean().item() == pytest.approx(-0.3, abs=0.02) and end.std().item() == pytest.approx(0.5, rel=0.05)


def test_with_many_steps_a_path_is_that_of_the_papers_equation() -> None:
    """The covariance between flow times 0.5 and 1 of dx = (2 v - x / t) dt + s dB, whose ends are N(0, 0.5^2)."""
    torch.manual_seed(0)
    points, end = sample_paths(gaussian(0.0, 0.5), torch.randn(20_000, 1), 100)
    covariance = (points[50] * end).mean().item()
    assert covariance == pytest.approx(0.5 * 0.5**2, rel=0.1)


# --- the adjoint ------------------------------------------------------------------------------------------------------


def test_adjoints_are_what_a_loop_over_samples_and_jacobians_says() -> None:
    velocity, steps = wavy(), 4
    points, at_end = torch.randn(steps, 5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    found, velocities = lean_adjoints(velocity, points, at_end)
    for sample in range(5):
        b = at_end[sample]
        for i in reversed(range(steps)):
            t, later, x = i / steps, (i + 1) / steps, points[i, sample]

            def heading(x: torch.Tensor, t: float = t) -> torch.Tensor:
                return x + (1 - t) * velocity(x, torch.tensor([t], dtype=torch.float64))

            share = ((1 - later) / (1 - t)) ** 2
            b = share * b + (1 - share) * torch.autograd.functional.jacobian(heading, x).T @ b
            torch.testing.assert_close(found[i, sample], b)
            torch.testing.assert_close(velocities[i, sample], velocity(x, torch.tensor([t], dtype=torch.float64)))


def test_with_many_steps_an_adjoint_is_that_of_the_papers_recursion() -> None:
    """Euler steps of g back along the path, by the vector-Jacobian product of 2 u - x / (t + h)."""
    velocity, steps = wavy(), 500
    h = 1 / steps
    line = torch.linspace(0, 1, steps + 1, dtype=torch.float64)[:-1, None, None]
    points = (1 - line) * torch.randn(1, 2, 3, dtype=torch.float64) + line * torch.tensor([[[0.3, -0.2, 0.5]]])
    at_end = torch.randn(2, 3, dtype=torch.float64)
    found, _ = lean_adjoints(velocity, points, at_end)
    g = at_end
    for i in reversed(range(steps)):
        t = i * h

        def drift(x: torch.Tensor, t: float = t) -> torch.Tensor:
            return 2 * velocity(x, torch.full((2, 1), t, dtype=torch.float64)) - x / (t + h)

        g = g + h * torch.autograd.functional.vjp(drift, points[i], g)[1]
        if t >= 0.2:
            torch.testing.assert_close(t * found[i], g, rtol=0.03, atol=0.01)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_what_its_definition_says() -> None:
    velocity, steps = wavy(), 4
    points, adjoints, reference = (torch.randn(steps, 5, 3, dtype=torch.float64) for _ in range(3))
    h, parts = 1 / steps, []
    for i in range(steps):
        t = i * h
        sigma = math.sqrt(2 * (1 - t + h) / (t + h))
        for sample in range(5):
            v = velocity(points[i, sample], torch.tensor([t], dtype=torch.float64))
            # sigma g / 2 is what the velocity should differ by, which is -(1 - t) b
            g = 2 * (1 - t) * adjoints[i, sample] / sigma**2
            parts.append((2 * (v - reference[i, sample]) / sigma + sigma * g).square().mean())
    found = matching_loss(velocity, points, adjoints, reference)
    torch.testing.assert_close(found, torch.stack(parts).mean())


@pytest.mark.parametrize(("steps", "left"), [(200, 1e-3), (5, 0.15)])
def test_it_is_nothing_where_the_policy_is_the_reference_times_what_its_actions_are_worth(
    steps: int, left: float
) -> None:
    """Q = 0.6 x and T = 0.5 move N(0.2, 0.4^2) by 0.4^2 * 0.6 / 0.5; with few steps most of the way is asked for."""
    torch.manual_seed(0)
    reference, moved, away = (gaussian(0.2 + way * 0.4**2 * 0.6 / 0.5, 0.4) for way in (0, 1, -1))
    points, end = sample_paths(moved, torch.randn(400, 2), steps)
    adjoints, velocities = lean_adjoints(reference, points, torch.full_like(end, -0.6 / 0.5))
    there, still, wrong = (matching_loss(one, points, adjoints, velocities).item() for one in (moved, reference, away))
    assert there < left * still
    assert wrong > 2 * still


def test_one_of_two_ways_becomes_as_much_likelier_as_it_is_worth_more() -> None:
    """A reference that goes left or right equally often, and a Q that prefers right by 2 T: e^2 to 1, 0.88."""
    torch.manual_seed(0)
    apart, spread, steps = 0.5, 0.1, 5

    def reference(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        variance = t**2 * spread**2 + (1 - t) ** 2
        right = torch.sigmoid(2 * t * apart * x / variance)
        gain = t * spread**2 / variance
        ends = [way * apart + gain * (x - t * way * apart) for way in (1, -1)]
        return (right * ends[0] + (1 - right) * ends[1] - x) / (1 - t)

    turned = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    nn.init.zeros_(turned[-1].weight)
    nn.init.zeros_(turned[-1].bias)

    def policy(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return reference(x, t) + turned(torch.cat([x, t], -1))

    def share_right() -> float:
        x = torch.randn(4000, 1)
        with torch.no_grad():
            for i in range(steps):
                x = x + policy(x, torch.full_like(x, i / steps)) / steps
        return (x > 0).float().mean().item()

    assert share_right() == pytest.approx(0.5, abs=0.05)
    optimizer = torch.optim.Adam(turned.parameters(), 5e-3)
    for _ in range(150):
        points, end = sample_paths(policy, torch.randn(256, 1), steps)
        adjoints, velocities = lean_adjoints(reference, points, torch.full_like(end, -2.0))
        optimizer.zero_grad()
        matching_loss(policy, points, adjoints, velocities).backward()
        optimizer.step()
    assert 0.75 < share_right() < 0.95
