"""What the options are for, learned on toys: ages foretell, prefixes go on without a jump."""

import msgspec
import numpy as np
import pytest
import torch

from policies.conformance.check import example_observation
from policies.flow.networks.sampling import guidance, soft_mask
from policies.flow.policy import FlowPolicy
from wire.types import Latent, Prefix

MIDDLE, HALF = np.float32([0, 5]), np.float32([2, 5])


def train(policy, batches, steps=160, rate=5e-3):
    optimizer = torch.optim.Adam(policy.module.parameters(), rate)
    torch.manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        loss = policy.loss(batches())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


@pytest.mark.slow
def test_the_age_tells_where_a_moving_goal_is_by_now(blind, blind_net):
    """The words name a goal that moves steadily since they were read."""
    starts = {"left": -0.7, "right": -0.1}

    def expert(text, age):
        return np.full((4, 2), starts[text] + 0.1 * age, np.float32) * HALF + MIDDLE

    errors = {}
    for name, offset in (("aged", 8), ("plain", 0)):
        rng = np.random.default_rng(0)

        def batches(rng=rng):
            texts, ages = [*starts] * 32, rng.integers(0, 9, 64).astype(np.float32)
            return {
                "state": rng.uniform(-1, 1, (64, 2)).astype(np.float32),
                "actions": np.stack([expert(text, age) for text, age in zip(texts, ages, strict=True)]),
                "mask": np.ones((64, 4), bool),
                "frame_age": ages,
                "instructions": texts,
            }

        config = msgspec.structs.replace(blind_net, max_offset=offset, predict="action")
        policy = train(FlowPolicy(blind, config), batches)
        found = []
        for seed in range(10):
            for text in starts:
                observation = example_observation(blind, seed, text)
                latent, age = policy.think(observation), seed % 9
                older = msgspec.structs.replace(latent, observed_ns=observation.time_ns - age * blind.period_ns)
                chunk = policy.act(observation, older, 0)
                found.append(np.abs((chunk.actions - expert(text, age)) / HALF).mean())
        errors[name] = np.mean(found)
    assert errors["aged"] < 0.8 * errors["plain"]


@pytest.fixture(scope="module")
def two_minds():
    """A policy that imitates two experts of one state: one goes up all the time, the other down."""
    from tests.policies.conftest import blind, blind_net, seeing

    spec = blind.__wrapped__(seeing.__wrapped__())
    config = msgspec.structs.replace(blind_net.__wrapped__(), max_offset=3, prefix=True)
    rng = np.random.default_rng(0)

    def batches():
        side = rng.choice([-0.7, 0.7], (128, 1, 1))
        return {
            "state": rng.uniform(-1, 1, (128, 2)).astype(np.float32),
            "actions": (side * HALF + MIDDLE).repeat(4, 1).astype(np.float32),
            "mask": np.ones((128, 4), bool),
            "frame_age": np.zeros(128, np.float32),
            "instructions": ["go"] * 128,
        }

    return train(FlowPolicy(spec, config), batches)


def jumps(policy, guided, shown=2):
    """(mean jump at the seam behind two committed actions, share of the rest on the side of the prefix)"""
    found, sides = [], []
    for seed in range(40):
        observation = example_observation(policy.spec, seed, "go")
        side = 0.7 if seed % 2 else -0.7
        known = np.tile(side * HALF + MIDDLE, (shown, 1)).astype(np.float32)
        prefix = None if guided is None else Prefix(known, 2, guided)
        chunk = policy.act(observation, policy.think(observation), 0, prefix)
        rest = (chunk.actions[2:] - MIDDLE) / HALF
        found.append(np.abs(rest[0] - side).mean())
        sides.append((np.sign(rest) == np.sign(side)).mean())
    return np.mean(found), np.mean(sides)


@pytest.mark.slow
def test_a_trained_prefix_goes_on_across_the_seam(two_minds):
    (free, _), (trained, side) = jumps(two_minds, None), jumps(two_minds, False)
    assert trained < 0.8 * free
    assert side > 0.6


@pytest.mark.slow
def test_guidance_makes_the_jump_smaller(two_minds):
    (free, _), (guided, _), (longer, side) = jumps(two_minds, None), jumps(two_minds, True), jumps(two_minds, True, 4)
    assert guided < 0.8 * free
    assert longer < 0.8 * free
    assert side > 0.6


def test_the_soft_mask_falls_from_the_committed_to_the_end_of_the_prefix():
    weights = soft_mask(8, 6, 2).numpy()
    lefts = np.array([4, 3, 2, 1]) / 5
    expected = [1, 1, *(lefts * np.expm1(lefts) / (np.e - 1)), 0, 0]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert soft_mask(3, 3, 3).tolist() == [1, 1, 1]
    assert soft_mask(3, 0, 0).tolist() == [0, 0, 0]


def test_guidance_follows_the_paper_and_is_bounded():
    # (t^2 + (1 - t)^2) / (t (1 - t)) at 1/2 and 3/4
    assert guidance(0.5) == pytest.approx(2)
    assert guidance(0.75) == pytest.approx(10 / 3)
    assert guidance(0.0) == guidance(1e-6) == guidance(0.999999) == 5.0


@pytest.mark.parametrize("predict", ["velocity", "action"])
def test_one_guided_step_is_the_equation(blind, blind_net, predict):
    """A linear network, so that its Jacobian is known."""
    config = msgspec.structs.replace(blind_net, predict=predict, euler_steps=1)
    policy = FlowPolicy(blind, config)
    torch.manual_seed(0)
    matrix = 0.1 * torch.randn(8, 8)
    with torch.no_grad():
        for part in (policy.module.fast.latent, policy.module.fast.state, policy.module.fast.time):
            part.weight.zero_()
        policy.module.fast.latent.bias.zero_()
        policy.module.fast.noisy.weight.zero_()
        policy.module.fast.noisy.weight[:8] = torch.eye(8)
    policy.module.fast.head = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False))
    with torch.no_grad():
        policy.module.fast.head[0].weight.copy_(torch.cat([matrix, torch.zeros(8, 56)], 1))
    wanted = np.float32([[0.2, -0.1], [0.1, 0.3], [0.0, 0.2]])
    observation = example_observation(blind)
    latent = Latent(np.zeros(32, np.float32), observation.time_ns, 0)
    with torch.inference_mode():
        got = policy.act(observation, latent, 0, Prefix(wanted * HALF + MIDDLE, 1, guided=True), seed=7).actions
    noise = torch.randn(1, 8, generator=torch.Generator().manual_seed(7))[0]
    weights = soft_mask(4, 3, 1).repeat_interleave(2)
    jacobian = matrix if predict == "action" else matrix + torch.eye(8)
    clean = jacobian @ noise
    target = torch.cat([torch.from_numpy(wanted).flatten(), torch.zeros(2)])
    velocity = clean - noise if predict == "action" else matrix @ noise
    expected = (noise + velocity + 5.0 * jacobian.T @ ((target - clean) * weights)).clamp(-1, 1).view(4, 2).numpy()
    expected[0] = wanted[0]
    np.testing.assert_allclose((got - MIDDLE) / HALF, expected, atol=1e-5)
    assert all(p.grad is None for p in policy.module.parameters())
