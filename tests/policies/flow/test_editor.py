"""The editor of chunks: at first it changes nothing, what is decided stays, and it travels with the weights."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from policies.conformance.check import example_batch, example_observation
from policies.flow.networks.editor import LARGEST_GAIN, LARGEST_SHIFT
from policies.flow.networks.fast import Conditioning
from policies.flow.policy import FlowPolicy
from policies.flow.shared.config import SharedConfig
from policies.interface.capabilities import Edits
from tests.cloud_learner.training.test_learner import NET, SPEC
from wire.errors import ConfigError, WeightsError
from wire.types import Prefix

EDITED = msgspec.structs.replace(NET, editor=16)


def willing(seed: int = 0, config: object = EDITED) -> FlowPolicy:
    """A policy whose editor has an opinion."""
    policy = FlowPolicy(SPEC, config, seed)
    with torch.no_grad():
        policy.module.editor.layers[-1].bias.fill_(20.0)
    return policy


def acted(policy: FlowPolicy, prefix: Prefix | None = None) -> np.ndarray:
    observation = example_observation(SPEC, 0, "go")
    return policy.act(observation, policy.think(observation), 0, prefix, seed=7).actions


def test_an_editor_that_has_learned_nothing_changes_nothing() -> None:
    plain, edited = FlowPolicy(SPEC, NET), FlowPolicy(SPEC, EDITED)
    assert isinstance(edited, Edits) and (plain.edits, edited.edits) == (False, True)
    edited.module.load_state_dict(plain.module.state_dict(), strict=False)
    np.testing.assert_array_equal(acted(plain), acted(edited))


def test_an_edit_is_bounded_and_within_the_limits() -> None:
    policy = willing()
    given = Conditioning(torch.randn(3, policy.module.latent_width), torch.randn(3, 2, SPEC.state_dim))
    chunk = torch.rand(3, 2, policy.horizon * SPEC.action_dim) * 2 - 1
    found = policy.edit(given, chunk)
    torch.testing.assert_close(found, (chunk * (1 + LARGEST_GAIN) + LARGEST_SHIFT).clamp(-1, 1))
    low, high = SPEC.action_low(), SPEC.action_high()
    assert ((acted(policy) >= low) & (acted(policy) <= high)).all()


def test_what_is_committed_stays() -> None:
    config = msgspec.structs.replace(EDITED, max_offset=3, prefix=True)
    policy, middle = willing(config=config), (SPEC.action_low() + SPEC.action_high()) / 2
    prefix = Prefix(np.tile(middle, (2, 1)).astype(np.float32), committed=2)
    found = acted(policy, prefix)
    np.testing.assert_allclose(found[:2], prefix.actions, atol=1e-6)
    with torch.no_grad():
        policy.module.editor.layers[-1].bias[SPEC.action_dim :].fill_(-20.0)
    policy.load(policy.save(), 1)
    other = acted(policy, prefix)[2:]
    assert (other <= found[2:]).all() and (other < found[2:]).any(), "the rest is edited"


def test_imitation_moves_no_editor_and_it_travels_with_the_weights() -> None:
    policy, other = willing(), FlowPolicy(SPEC, EDITED, seed=1)
    policy.loss(example_batch(SPEC, 4)).backward()
    assert all(one.grad is None for one in policy.module.editor.parameters())
    other.load(policy.save(), 3)
    policy.load(policy.save(), 3)
    np.testing.assert_array_equal(acted(policy), acted(other))
    with pytest.raises(WeightsError, match="editor None, this policy has 16"):
        other.load(FlowPolicy(SPEC, NET).save(), 1)


def test_a_policy_for_several_robots_has_none() -> None:
    with pytest.raises(ConfigError, match="has no `editor`"):
        SharedConfig(state_dim=4, action_dim=2, editor=8).require()


def test_it_strays_from_what_it_says_only_while_it_explores() -> None:
    plain, noisy = FlowPolicy(SPEC, EDITED), FlowPolicy(SPEC, msgspec.structs.replace(EDITED, editor_noise=0.5))
    noisy.module.load_state_dict(plain.module.state_dict())
    strayed = acted(noisy)
    assert not np.array_equal(strayed, acted(plain)) and np.array_equal(strayed, acted(noisy)), "by the seed alone"
    noisy.stop_exploring()
    np.testing.assert_array_equal(acted(noisy), acted(plain))
