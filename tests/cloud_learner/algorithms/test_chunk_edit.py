"""Chunk editing: what the editor learns and from when on, and that all else is imitated as without."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cloud_learner.algorithms.chunk_edit import ChunkEdit, follow_flow
from cloud_learner.algorithms.interface import POLICY as POLICY_NETWORK
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from policies.flow.policy import FlowPolicy
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.algorithms.test_lwd import (
    GAMMA,
    N_STEP,
    STATES_NET,
    STATES_ONLY,
    TRAINING,
    drawn,
    either_way,
    means,
    run,
    weights_of,
)
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.tokens.test_policy import REACHER, REACHING
from wire.errors import ConfigError

torch = pytest.importorskip("torch")

EDITED = msgspec.structs.replace(NET, editor=16)


def learner(training: TrainingConfig = TRAINING, **settings: object) -> Learner:
    given = {"n_step": N_STEP, "gamma": GAMMA, "critic_width": 16, "warmup": 2, "edited": 6, **settings}
    return Learner(FlowPolicy(SPEC, EDITED, seed=0), ChunkEdit(**given), training, 0)


def editors(subject: Learner) -> dict[str, torch.Tensor]:
    return {name: one for name, one in weights_of(subject, POLICY_NETWORK).items() if "/editor." in name}


def others(subject: Learner) -> dict[str, torch.Tensor]:
    return {name: one for name, one in weights_of(subject, POLICY_NETWORK).items() if "/editor." not in name}


def test_the_editor_learns_once_the_critic_has_and_nothing_else_minds_it() -> None:
    unclipped = replace(TRAINING, gradient_clip=1e9)
    subject, never = learner(unclipped), learner(unclipped, warmup=10**6)
    begun = editors(subject)
    assert len(begun) == 6
    for n in range(2):
        for one in (subject, never):
            run(one, n, 1)
        assert all(torch.equal(one, begun[name]) for name, one in editors(subject).items())
    first, plain = run(subject, 2, 1)[0], run(never, 2, 1)[0]
    assert first.keys() - plain.keys() == {"edit_loss", "edit_size", "edit_gain"}
    assert first["loss"] == plain["loss"] and first["edit_size"] == first["edit_gain"] == 0, "nothing is edited yet"
    assert any(not torch.equal(one, begun[name]) for name, one in editors(subject).items())
    assert all(torch.equal(one, others(never)[name]) for name, one in others(subject).items())
    assert run(subject, 3, 1)[0]["edit_size"] > 0


def test_a_chunk_is_what_the_policy_samples() -> None:
    policy = FlowPolicy(SPEC, NET, seed=0)
    batch = drawn(0)
    with torch.no_grad():
        given = policy.conditioning(batch)
        noise = torch.randn(len(batch["tick"]), 1, policy.horizon * SPEC.action_dim)
        found = follow_flow(lambda x, t: policy.velocity(given, x, t), noise, policy.config.euler_steps)
        from policies.flow.networks.sampling import sample

        flat = given._replace(state=given.state[:, 0], age=None if given.age is None else given.age.reshape(-1, 1))
        wanted = sample(policy.module.fast, policy.config, flat, noise[:, 0])
    torch.testing.assert_close(found[:, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_chunks_are_moved_to_what_succeeded_and_imitation_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    policy = FlowPolicy(STATES_ONLY, msgspec.structs.replace(STATES_NET, editor=32), seed=0)
    config = ChunkEdit(n_step=2, warmup=150, critic_width=32, penalty=0.02)
    subject = Learner(policy, config, replace(TRAINING, batch=64))
    for _ in range(600):
        found = subject.step(Batches(either_way(rng)))
    assert found["edit_gain"] > 0.05
    edited = means(policy, subject.average)
    with torch.no_grad():
        for parameter in subject.average.editor.layers[-1].parameters():
            parameter.zero_()
    plain = means(policy, subject.average)
    assert 0.3 < np.mean(plain > 0) < 0.7
    assert np.mean(edited - plain) > 0.1


# --- what may go wrong ------------------------------------------------------------------------------------------------


def test_a_critic_that_has_diverged_edits_nothing(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    run(subject, 0, 2)
    with torch.no_grad():
        subject.algorithm.critic.members[0][-1].bias += 50.0
    before = editors(subject)
    with caplog.at_level(logging.WARNING):
        found = run(subject, 2, 1)[0]
    assert "edit_loss" not in found and "cannot be" in caplog.text
    assert all(torch.equal(one, before[name]) for name, one in editors(subject).items())


def test_policies_that_do_not_fit_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'chunk-edit' needs a policy with an editor.*was made without"):
        ChunkEdit(n_step=4).make(FlowPolicy(SPEC, NET))
    with pytest.raises(ConfigError, match=r"'chunk-edit' needs a policy that makes actions by a flow"):
        ChunkEdit().make(TokenPolicy(REACHER, REACHING))
    with pytest.raises(ConfigError, match="n_step"):
        ChunkEdit(n_step=100).make(FlowPolicy(SPEC, EDITED))


@pytest.mark.parametrize(("field", "value"), [("penalty", 0), ("edited", 0), ("flow_steps", 0), ("gamma", 2)])
def test_settings_that_it_cannot_work_with_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        ChunkEdit(**{field: value})
