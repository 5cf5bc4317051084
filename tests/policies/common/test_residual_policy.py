"""The corrector of single actions: the same in torch and numpy, within limits, quick, and it learns."""

import msgspec
import numpy as np
import pytest
import torch

from policies.common.residual_policy import correct
from policies.conformance.check import example_batch, example_observation
from policies.flow.policy import FlowPolicy
from tests.samples import states_only
from wire.errors import ConfigError, InvalidDataError


@pytest.fixture
def net(seeing_net):
    return msgspec.structs.replace(seeing_net, residual=True, residual_width=16)


def loud(policy):
    """A corrector whose answers are far from 0."""
    with torch.no_grad():
        policy.module.residual.layers[-1].weight.mul_(20)
    policy.set_normalization(states_only(np.random.default_rng(0).normal(0.3, 0.4, (100, policy.spec.state_dim))))
    return policy


def in_torch(policy, state, latent, action, index, age):
    net, tensor = policy.module, torch.from_numpy
    low, high = policy.spec.action_low(), policy.spec.action_high()
    middle, half = (high + low) / 2, (high - low) / 2
    with torch.no_grad():
        felt = net.normalizer(tensor(state))
        out = net.residual(
            felt, tensor(latent), tensor((action - middle) / half), torch.tensor([index]), torch.tensor([age])
        )
    return np.clip(action + out.numpy() * half, low, high)


@pytest.mark.parametrize("far", [1, 1000])
def test_numpy_and_torch_agree(seeing, net, far):
    policy = loud(FlowPolicy(seeing, net))
    low, high = seeing.action_low(), seeing.action_high()
    rng = np.random.default_rng(1)
    changed = 0
    for index in range(20):
        observation = example_observation(seeing, index)
        state, latent = observation.state * far, policy.think(observation).data * far
        action = rng.uniform(low, high).astype(np.float32)
        got = correct(policy.corrector, state, latent, action, low, high, index, 1.5 * index)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, in_torch(policy, state, latent, action, index, 1.5 * index), atol=1e-5)
        changed += not np.allclose(got, action, atol=1e-2)
    assert changed > 10


def test_corrections_end_at_the_limits_and_leave_the_inputs_alone(seeing, net):
    policy = FlowPolicy(seeing, net)
    with torch.no_grad():
        policy.module.residual.layers[-1].bias.fill_(100.0)
    low, high = seeing.action_low(), seeing.action_high()
    action, state, latent = np.float32([1, 1]), np.float32([9, -9]), np.ones(40, np.float32)
    assert np.array_equal(correct(policy.corrector, state, latent, action, low, high, 0, 0.0), high)
    assert action.tolist() == [1, 1]
    assert state.tolist() == [9, -9]


def test_the_export_is_a_copy_with_the_weights_version(seeing, net):
    policy, other = FlowPolicy(seeing, net, 0), loud(FlowPolicy(seeing, net, 1))
    before = policy.corrector
    kept = before.weights[0].copy()
    policy.load(other.save(), 4)
    with torch.no_grad():
        policy.module.residual.layers[0].weight.zero_()
    assert (before.version, policy.corrector.version) == (0, 4)
    assert np.array_equal(before.weights[0], kept)
    assert np.array_equal(policy.corrector.mean, other.module.normalizer.mean.numpy())
    assert FlowPolicy(seeing, msgspec.structs.replace(net, residual=False)).corrector is None


def test_without_later_states_only_the_rest_learns(seeing, net):
    policy = FlowPolicy(seeing, net)
    batch = example_batch(seeing, 4)
    del batch["later_state"], batch["later_index"]
    policy.loss(batch).backward()
    assert all(p.grad is None for p in policy.module.residual.parameters())
    assert policy.module.fast.head[-1].bias.grad.abs().sum() > 0


def test_only_the_corrector_learns_from_its_loss(seeing, net):
    gradients = []
    for far in (0, 3):
        policy = FlowPolicy(seeing, net)
        batch = example_batch(seeing, 4)
        batch["later_state"] = batch["later_state"] + np.float32(far)
        torch.manual_seed(0)
        policy.loss(batch).backward()
        gradients.append({n: p.grad.clone() for n, p in policy.module.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]) != name.startswith("residual."), name


def test_masked_actions_teach_the_corrector_nothing(seeing, net):
    policy = FlowPolicy(seeing, net)
    batch = example_batch(seeing, 4)
    batch["mask"][:, :, 1:] = False
    batch["actions"][:, :, 1:] = np.nan
    batch["later_index"][:] = 2
    policy.loss(batch).backward()
    assert all(not p.grad.any() for p in policy.module.residual.parameters())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("later_index", np.full((4, 2), 4), r"later_index must be in 0\.\.3"),
        ("later_index", np.full((4, 2), -1), "later_index must be in"),
        ("later_index", np.zeros((4, 3), int), "later_index has shape"),
        ("later_state", np.zeros((4, 2, 3), np.float32), "later_state has shape"),
    ],
)
def test_later_states_that_do_not_fit_are_named(seeing, net, name, value, says):
    with pytest.raises(InvalidDataError, match=says):
        FlowPolicy(seeing, net).loss(example_batch(seeing, 4) | {name: value})


def test_a_later_state_without_its_index_is_named(seeing, net):
    batch = example_batch(seeing, 4)
    del batch["later_index"]
    with pytest.raises(InvalidDataError, match="lacks \\['later_index'\\]"):
        FlowPolicy(seeing, net).loss(batch)


def test_a_corrector_without_hidden_units_is_refused(seeing, net):
    with pytest.raises(ConfigError, match="residual_width 0"):
        FlowPolicy(seeing, msgspec.structs.replace(net, residual_width=0))


@pytest.mark.slow
def test_it_learns_what_the_chunk_could_not_know(blind, blind_net):
    """The right action follows a goal that shows only in the later state."""
    policy = FlowPolicy(blind, msgspec.structs.replace(blind_net, residual=True, residual_width=32))
    rng = np.random.default_rng(0)
    middle, half = np.float32([0, 5]), np.float32([2, 5])
    policy.set_normalization(states_only(rng.uniform(-1, 1, (500, 2))))
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    torch.manual_seed(0)
    for _ in range(150):
        state, later = rng.uniform(-0.8, 0.8, (2, 64, 2)).astype(np.float32)
        index = rng.integers(0, 4, 64)
        actions = np.repeat((state * half + middle)[:, None], 4, 1)
        actions[np.arange(64), index] = later * half + middle
        batch = {"state": state, "actions": actions, "mask": np.ones((64, 4), bool), "instructions": ["go"] * 64}
        loss = policy.loss(batch | {"later_state": later, "later_index": index})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    before, after = [], []
    low, high, corrector = blind.action_low(), blind.action_high(), policy.corrector
    for seed in range(20):
        observation = example_observation(blind, seed, "go")
        later = rng.uniform(-0.8, 0.8, 2).astype(np.float32)
        latent = policy.think(observation)
        action = policy.act(observation, latent, 0).actions[seed % 4]
        right = later * half + middle
        better = correct(corrector, later, latent.data, action, low, high, seed % 4, float(seed % 4))
        before.append(np.abs((action - right) / half).mean())
        after.append(np.abs((better - right) / half).mean())
    assert np.mean(after) < 0.4 * np.mean(before)
