"""What algorithms ask of a policy: that the parts make the whole, and the flow that is told is the one that acts."""

import msgspec
import numpy as np
import pytest
import torch

from policies.conformance.data import example_batch, example_observation
from policies.flow.policy import FlowPolicy
from policies.interface.capabilities import Advised, Encodes, Flows, Imitates, Scores, require
from policies.interface.policy import NormalizationData
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.tokens.test_policy import REACHER, REACHING, batch_of, draw
from wire.errors import ConfigError


def seeded(call):
    torch.manual_seed(3)
    return call()


def test_the_samples_losses_are_what_the_loss_is_the_mean_of():
    policy, batch = FlowPolicy(SPEC, NET), example_batch(SPEC, 4, images=3, steps=2)
    batch["mask"][0, 1, 2:] = 0
    losses = seeded(lambda: policy.sample_losses(batch))
    kept = torch.from_numpy(batch["mask"]).sum(-1)
    assert losses.shape == (3, 2) and losses.requires_grad
    mean = (losses * kept).sum() / kept.sum()
    assert mean.item() == pytest.approx(seeded(lambda: policy.loss(batch)).item(), rel=1e-5)


@pytest.mark.parametrize("predict", ["velocity", "action"])
def test_the_velocity_is_that_of_the_flow_that_acts(predict):
    policy = FlowPolicy(SPEC, msgspec.structs.replace(NET, predict=predict))
    observation = example_observation(SPEC)
    chunk = policy.act(observation, policy.think(observation), 0, seed=5)
    batch = example_batch(SPEC, 4, images=1, steps=1)
    batch |= {
        "images": {"front": observation.images["front"].image[None]},
        "state": observation.state[None, None],
        "instructions": [observation.task],
    }
    from policies.common.noise import seeded as generator

    actions = torch.randn(1, 1, 8, generator=generator(5))
    given, steps = policy.conditioning(batch), NET.euler_steps
    for step in range(steps):
        velocity = policy.velocity(given, actions, torch.full((1, 1, 1), step / steps))
        actions = actions + velocity / steps
    low, high = SPEC.action_low(), SPEC.action_high()
    found = actions.clamp(-1, 1).detach().numpy().reshape(4, 2) * (high - low) / 2 + (high + low) / 2
    assert np.abs(found - chunk.actions).max() < 1e-4


def test_the_actions_that_flow_are_normalised_and_go_on_behind_the_last_one_kept():
    cm = [msgspec.structs.replace(one, low=-2.0, high=4.0) for one in SPEC.action]
    policy = FlowPolicy(msgspec.structs.replace(SPEC, action=tuple(cm)), NET)
    batch = example_batch(policy.spec, 4, images=3, steps=2)
    batch["mask"][0, 1, 2:] = 0
    expected = (batch["actions"] - 1.0) / 3.0
    expected[0, 1, 2:] = expected[0, 1, 1]
    found = policy.chunk_actions(batch)
    assert policy.chunk_shape == (4, 2) and found.shape == (3, 2, 8)
    np.testing.assert_allclose(found.numpy().reshape(expected.shape), expected, atol=1e-6)


def test_a_reference_imitates_by_its_own_weights():
    policy, other, batch = FlowPolicy(SPEC, NET, 0), FlowPolicy(SPEC, NET, 1), example_batch(SPEC, 4)
    theirs = seeded(lambda: policy.sample_losses(batch, other.module))
    assert torch.equal(theirs, seeded(lambda: other.sample_losses(batch)))
    theirs.mean().backward()
    assert all(one.grad is None for one in policy.module.parameters())
    assert any(one.grad is not None for one in other.module.parameters())


def test_a_reference_is_asked_by_its_own_weights():
    policy, other, batch = FlowPolicy(SPEC, NET, 0), FlowPolicy(SPEC, NET, 1), example_batch(SPEC, 4)
    own, theirs = policy.features(batch), policy.features(batch, other.module)
    assert own.shape == (*batch["state"].shape[:2], policy.feature_width)
    assert not torch.allclose(own, theirs) and torch.equal(theirs, other.features(batch))
    own.sum().backward()
    assert any(one.grad is not None for one in policy.module.slow.parameters())


def test_tokens_score_what_the_policy_would_do_above_what_it_would_not():
    policy, batch = TokenPolicy(REACHER, REACHING), batch_of(draw(64, 0))
    policy.set_normalization(NormalizationData(batch["state"], batch["actions"]))
    optimizer = torch.optim.AdamW(policy.module.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        policy.loss(batch).backward()
        optimizer.step()
    right = policy.log_probability(batch)
    wrong = policy.log_probability(batch | {"actions": batch["actions"][::-1].copy()})
    assert right.shape == (64, 1) and right.requires_grad and bool((right < 0).all())
    assert right.mean().item() > wrong.mean().item() + 1


def test_who_offers_what_and_what_is_said_of_who_does_not():
    flow, tokens = FlowPolicy(SPEC, NET), TokenPolicy(REACHER, REACHING)
    every = (Imitates, Flows, Scores, Encodes, Advised)
    offered = [[isinstance(policy, one) for one in every] for policy in (flow, tokens)]
    assert offered == [[True, True, False, True, True], [False, False, True, False, False]]
    require(flow, Flows, "algorithm 'x'")
    with pytest.raises(ConfigError, match=r"algorithm 'x' needs a policy that makes actions by a flow.*TokenPolicy"):
        require(tokens, Flows, "algorithm 'x'")
