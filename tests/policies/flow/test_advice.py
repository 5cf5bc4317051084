"""What a flow policy is told of what it imitates: how often, what it acts by, and that others are as they were."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from policies.common.weights import trainable_state_dict
from policies.conformance.check import example_batch, example_observation
from policies.flow.config import AttentionPoolerConfig, Transformer
from policies.flow.networks.fast import Conditioning
from policies.flow.networks.network import ADVANTAGE_DROPPED
from policies.flow.networks.sampling import sample
from policies.flow.policy import FlowPolicy
from policies.interface.capabilities import BAD, GOOD, UNKNOWN
from tests.cloud_learner.training.test_learner import NET, SPEC
from wire.errors import WeightsError

TOKENS = {"transformer": Transformer(16, 1, 2), "pooler": AttentionPoolerConfig(queries=2, width=8, inner=8, heads=2)}
ADVISED = msgspec.structs.replace(NET, advantage=True)


def told_in_loss(given: np.ndarray | None) -> torch.Tensor:
    """int64[200, 2]: what the network was told of a batch in which that is said of the advantage."""
    policy, seen = FlowPolicy(SPEC, ADVISED), []
    policy.module.fast.register_forward_pre_hook(lambda fast, inputs: seen.append(inputs[0].advantage))
    batch = example_batch(SPEC, 4, images=200)
    torch.manual_seed(0)
    policy.loss(batch if given is None else batch | {"advantage": given})
    (told,) = seen
    return told


def test_the_advantage_is_hidden_in_three_of_ten_samples_and_as_it_is_in_the_others() -> None:
    given = np.random.default_rng(0).choice([BAD, GOOD], (200, 2))
    told = told_in_loss(given)
    hidden = told == UNKNOWN
    assert ADVANTAGE_DROPPED == 0.3 and hidden.float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert torch.equal(told[~hidden], torch.from_numpy(given)[~hidden])
    assert (told_in_loss(np.full((200, 2), UNKNOWN)) == UNKNOWN).all()
    assert set(told_in_loss(None).unique().tolist()) == {UNKNOWN, GOOD}, "what nobody judged is good"


def slow_sample(policy: FlowPolicy, given: Conditioning, noise: torch.Tensor, weight: float) -> torch.Tensor:
    """Euler steps down UNKNOWN + weight (GOOD - UNKNOWN), by the network as it is trained."""
    config, actions = policy.config, noise[:, None]
    for step in range(config.euler_steps):
        time = torch.full((len(noise), 1, 1), step / config.euler_steps)
        outputs = [
            policy.module.fast(
                given._replace(state=given.state[:, None], advantage=torch.full((len(noise), 1), told)), actions, time
            )
            for told in (UNKNOWN, GOOD)
        ]
        output = outputs[0] + weight * (outputs[1] - outputs[0])
        velocity = output if config.predict == "velocity" else (output - actions) / (1 - time)
        actions = actions + velocity / config.euler_steps
    return actions[:, 0].clamp(-1, 1)


@pytest.mark.parametrize("tokens", [TOKENS, {}], ids=["transformer", "mlp"])
@pytest.mark.parametrize("predict", ["velocity", "action"])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
@torch.no_grad()
def test_it_acts_as_told_good_and_a_weight_goes_on_from_what_it_does_untold(
    tokens: dict[str, object], predict: str, weight: float
) -> None:
    config = msgspec.structs.replace(ADVISED, **tokens, predict=predict, guidance=weight)
    policy = FlowPolicy(SPEC, config, seed=1)
    torch.manual_seed(0)
    for parameter in policy.module.parameters():
        parameter.copy_(0.3 * torch.randn_like(parameter))
    given = Conditioning(torch.randn(3, policy.module.latent_width), torch.randn(3, 2))
    noise = torch.randn(3, 8)
    found = sample(policy.module.fast, config, given, noise)
    torch.testing.assert_close(found, slow_sample(policy, given, noise, weight), atol=1e-4, rtol=1e-4)
    plain = sample(policy.module.fast, msgspec.structs.replace(config, guidance=1.0), given, noise)
    assert torch.equal(found, plain) == (weight == 1.0)


def acting(policy: FlowPolicy) -> np.ndarray:
    observation = example_observation(SPEC)
    return policy.act(observation, policy.think(observation), 0, seed=7).actions


def test_a_policy_made_without_has_nothing_of_it_and_says_so() -> None:
    plain, advised = FlowPolicy(SPEC, NET, seed=2), FlowPolicy(SPEC, ADVISED, seed=2)
    assert (plain.advised, advised.advised) == (False, True)
    mine, theirs = (trainable_state_dict(policy.module) for policy in (plain, advised))
    assert theirs.keys() - mine.keys() == {"fast.advantage.weight"} and mine.keys() < theirs.keys()
    robot = FlowPolicy(SPEC, NET, seed=3)
    robot.load(plain.save(), 1)
    assert np.array_equal(acting(robot), acting(plain))
    for one, other in ((plain, advised), (advised, plain)):
        with pytest.raises(WeightsError, match="made by a network with advantage"):
            one.load(other.save(), 2)


def test_what_is_learned_of_bad_actions_does_not_show_in_what_it_does() -> None:
    policy = FlowPolicy(SPEC, ADVISED, seed=2)
    before = acting(policy)

    def after(told: int) -> np.ndarray:
        changed = FlowPolicy(SPEC, ADVISED, seed=2)
        with torch.no_grad():
            changed.module.fast.advantage.weight[told] += 1.0
        return acting(changed)

    assert np.array_equal(after(BAD), before) and np.array_equal(after(UNKNOWN), before)
    assert not np.array_equal(after(GOOD), before)
