"""Chunks by random steps: what their probability is, at the robot and at the learner, and who leaves none."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from policies.conformance.data import example_batch, example_observation
from policies.flow.config import FlowConfig
from policies.flow.networks.exploration import LEAST_NOISE, MOST_NOISE, log_density, random_step
from policies.flow.policy import FlowPolicy
from policies.flow.shared.config import SharedConfig
from policies.interface.capabilities import Explores
from policies.interface.policy import Batch
from tests.cloud_learner.training.test_learner import NET, SPEC
from wire.errors import ConfigError
from wire.types import ActionChunk, Prefix

EXPLORING = {kind: msgspec.structs.replace(NET, explore=kind) for kind in ("sde", "noise")}


def willing(config: FlowConfig, seed: int = 0) -> FlowPolicy:
    """A policy whose learned noise, if it has any, is not everywhere the same."""
    policy = FlowPolicy(SPEC, config, seed)
    if policy.module.noise_head is not None:
        torch.nn.init.normal_(policy.module.noise_head.layers[-1].weight)
    return policy


def acted(policy: FlowPolicy, seed: int = 7, prefix: Prefix | None = None) -> ActionChunk:
    observation = example_observation(SPEC, seed, "go")
    latent = policy.think(observation)
    late = msgspec.structs.replace(observation, time_ns=latent.observed_ns + 2 * SPEC.period_ns)
    return policy.act(late, latent, 0, prefix, seed=seed)


def batch_of(chunks: dict[int, ActionChunk]) -> Batch:
    """A flat batch of what the robot saw for chunks, by seed; its states are others than those foretold."""
    seen = [example_observation(SPEC, seed, "go") for seed in chunks]
    batch, traces = example_batch(SPEC, NET.horizon, 1, len(chunks), 1), [one.trace for one in chunks.values()]
    names = ("state", "actions", "mask", "frame_age")
    return (
        batch
        | {name: batch[name][:, 0] for name in names}
        | {
            "images": {"front": np.stack([one.images["front"].image for one in seen])},
            "seen_state": np.stack([one.state for one in seen]),
            "instructions": ["go"] * len(seen),
            "traces": {
                "step": np.array([one.step for one in traces]),
                "points": np.stack([one.points for one in traces]),
                "state": np.stack([one.state for one in traces]),
                "age": np.array([one.age_ticks for one in traces], np.float32),
            },
        }
    )


@pytest.mark.parametrize("kind", EXPLORING)
@pytest.mark.parametrize("changes", [{}, {"predict": "action", "advantage": True, "max_offset": 3, "ego_motion": True}])
def test_a_trace_is_as_probable_at_the_learner_as_it_was_at_the_robot(kind: str, changes: dict[str, object]) -> None:
    robot = willing(msgspec.structs.replace(EXPLORING[kind], **changes))
    learner = FlowPolicy(SPEC, robot.config, seed=3)
    learner.load(robot.save(), 1)
    chunks = {seed: acted(robot, seed) for seed in range(1, 13)}
    found = learner.trace_log_probability(batch_of(chunks))
    said = torch.tensor([one.log_prob for one in chunks.values()])
    torch.testing.assert_close(found.detach(), said, rtol=1e-5, atol=2e-4)
    assert len({one.log_prob for one in chunks.values()}) == 12
    steps = {one.trace.step for one in chunks.values()}
    assert steps == {0} if kind == "noise" else len(steps) > 2
    assert {one.trace.points.shape for one in chunks.values()} == {(robot.trace_points, 8)}
    assert {one.trace.age_ticks for one in chunks.values()} == {2.0}
    other = FlowPolicy(SPEC, robot.config, seed=3)
    theirs = other.trace_log_probability(batch_of(chunks), learner.module)
    assert torch.equal(theirs, found) and not torch.allclose(other.trace_log_probability(batch_of(chunks)), found)


@pytest.mark.parametrize("kind", EXPLORING)
def test_what_is_learned_of_it_reaches_all_that_makes_actions(kind: str) -> None:
    policy = willing(EXPLORING[kind])
    policy.trace_log_probability(batch_of({seed: acted(policy, seed) for seed in range(1, 9)})).sum().backward()
    learned = {name for name, one in policy.module.named_parameters() if one.grad is not None and bool(one.grad.any())}
    assert {
        name for name, _ in policy.module.named_parameters() if not name.startswith("slow.embed")
    } - learned == set()


@pytest.mark.parametrize("step", range(5))
def test_a_random_step_is_that_of_the_paper(step: int) -> None:
    """There flow time runs from noise at 1 to actions at 0, and the velocity is that of noise."""
    rng = np.random.default_rng(step)
    x, v = rng.normal(size=(2, 8))
    t, dt = 1 - step / 5, 1 / 5
    velocity = -v
    clean, noise = x - velocity * t, x + velocity * (1 - t)
    sigma = 0.5 * math.sqrt(t / (1 - (t if step else 1 - dt)))
    expected = clean * (1 - (t - dt)) + noise * (t - dt - sigma**2 * dt / (2 * t))
    time = torch.full((1, 1), step / 5, dtype=torch.float64)
    mean, std = random_step(EXPLORING["sde"], None, None, torch.tensor(x)[None], torch.tensor(v)[None], time)
    np.testing.assert_allclose(mean[0], expected)
    np.testing.assert_allclose(std[0], np.full(8, sigma * math.sqrt(dt)))


def test_the_density_is_that_of_normal_distributions() -> None:
    x, mean, std = torch.randn(3, 5), torch.randn(3, 5), torch.rand(3, 5) + 0.1
    expected = torch.distributions.Normal(mean, std).log_prob(x).sum(-1)
    torch.testing.assert_close(log_density(x, mean, std), expected)


@pytest.mark.parametrize("kind", EXPLORING)
def test_a_trace_is_the_way_to_its_chunk_and_its_probability_that_of_the_steps(kind: str) -> None:
    policy = willing(EXPLORING[kind])
    chunk = acted(policy)
    trace, steps = chunk.trace, policy.config.euler_steps
    observation = example_observation(SPEC, 7, "go")
    given = policy._given(observation, policy.think(observation))
    total, last = 0.0, trace.step + len(trace.points) - 1
    with torch.no_grad():

        def velocity(x: torch.Tensor, step: int) -> torch.Tensor:
            time = torch.full((1, 1, 1), step / steps)
            return policy.velocity(given._replace(state=given.state[:, None]), x[:, None], time)[:, 0]

        for number, (before, after) in enumerate(zip(trace.points[:-1], trace.points[1:], strict=True)):
            x, step = torch.from_numpy(before)[None], trace.step + number
            time = torch.full((1, 1), step / steps)
            mean, std = random_step(policy.config, policy.module.noise_head, given, x, velocity(x, step), time)
            total += torch.distributions.Normal(mean, std).log_prob(torch.from_numpy(after)).sum().item()
        x = torch.from_numpy(trace.points[-1])[None]
        for step in range(last, steps):
            x = x + velocity(x, step) / steps
    assert chunk.log_prob == pytest.approx(total, abs=1e-3)
    np.testing.assert_allclose(chunk.actions.reshape(-1), x[0].clamp(-1, 1), atol=1e-5)
    assert kind == "sde" or last == steps


def test_learned_noise_stays_within_its_bounds() -> None:
    policy, seen = willing(EXPLORING["noise"]), example_observation(SPEC, 1, "go")
    given = policy._given(seen, policy.think(seen))
    with torch.no_grad():
        policy.module.noise_head.layers[-1].bias[:4] = 50.0
        policy.module.noise_head.layers[-1].bias[4:] = -50.0
        found = policy.module.noise_head(given, torch.full((1, 1), 0.4))
    torch.testing.assert_close(found[0], torch.tensor([MOST_NOISE] * 4 + [LEAST_NOISE] * 4))


@pytest.mark.parametrize("kind", EXPLORING)
def test_the_same_seed_gives_the_same_trace_and_another_one_another(kind: str) -> None:
    policy = willing(EXPLORING[kind])
    first, again, other = acted(policy), acted(policy), acted(policy, seed=8)
    for one in ("actions",):
        np.testing.assert_array_equal(getattr(first, one), getattr(again, one))
    np.testing.assert_array_equal(first.trace.points, again.trace.points)
    assert first.log_prob == again.log_prob != other.log_prob and np.isfinite(first.log_prob)


def test_who_does_not_explore_leaves_no_trace_and_is_what_it_was() -> None:
    plain, exploring = FlowPolicy(SPEC, NET), FlowPolicy(SPEC, EXPLORING["sde"])
    assert isinstance(exploring, Explores) and (plain.explores, exploring.explores) == ("", "sde")
    assert (plain.trace_points, exploring.trace_points) == (0, 2)
    assert acted(plain).trace is None and math.isnan(acted(plain).log_prob)
    assert not np.array_equal(acted(exploring).actions, acted(plain).actions)
    exploring.stop_exploring()
    measured = acted(exploring)
    assert measured.trace is None and math.isnan(measured.log_prob)
    np.testing.assert_array_equal(measured.actions, acted(plain).actions)


def test_a_chunk_that_begins_with_what_is_committed_leaves_none() -> None:
    config = msgspec.structs.replace(EXPLORING["sde"], max_offset=3, prefix=True)
    policy, actions = FlowPolicy(SPEC, config), np.zeros((2, 2), np.float32)
    assert acted(policy, prefix=Prefix(actions, committed=2)).trace is None
    assert acted(policy, prefix=Prefix(actions, committed=0, guided=True)).trace is None
    assert acted(policy, prefix=Prefix(actions, committed=0)).trace is not None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="explore goes without guidance"):
        msgspec.structs.replace(EXPLORING["sde"], advantage=True, guidance=1.5).require()
    with pytest.raises(ConfigError, match="explore_noise"):
        msgspec.structs.replace(EXPLORING["sde"], explore_noise=0.0).require()
    with pytest.raises(ConfigError, match="it has no `explore`"):
        SharedConfig(state_dim=6, action_dim=5, horizon=8, capacity=2, explore="sde").require()
