"""ThriftyDAgger: what a chance is learned from, and that people's part is imitated as without it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.thrifty_dagger import ThriftyDagger
from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import HUMAN, POLICY
from cloud_learner.training.learner import Learner
from policies.conformance.data import example_observation
from policies.flow.networks.outlook import MEMBERS
from policies.flow.policy import FlowPolicy
from tests.cloud_learner.algorithms.test_lwd import (
    FAILURE,
    N_STEP,
    STATES_NET,
    STATES_ONLY,
    SUCCESS,
    TRAINING,
    drawn,
    either_way,
    peoples,
    run,
)
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from wire.errors import ConfigError

torch = pytest.importorskip("torch")

FORETELLING = msgspec.structs.replace(NET, outlook=16)
UNJUDGED = OUTCOMES.index("unjudged")


def learner(**settings: object) -> Learner:
    return Learner(FlowPolicy(SPEC, FORETELLING, seed=0), ThriftyDagger(**{"n_step": N_STEP, **settings}), TRAINING, 0)


def test_a_chance_is_what_a_loop_over_the_batch_says() -> None:
    subject = learner()
    run(subject, 0, 3)
    batch = drawn(9, images=40)
    batch["outcome"][:4], batch["ticks_to_end"][:4] = UNJUDGED, 0
    batch["next_ticks"][30:] = 0
    batch["actor"][20:32], batch["taken_over"][20:26] = POLICY, True
    average = subject.average
    known, chances = subject.algorithm.chances(SimpleNamespace(average=lambda name: average), batch)
    expected, rows = [], []
    for i in range(40):
        left, outcome = int(batch["ticks_to_end"][i]), batch["outcome"][i]
        if batch["actor"][i] != POLICY:
            continue
        if batch["taken_over"][i]:
            expected.append(0.0)
        elif 0 <= left < N_STEP:
            if outcome not in (SUCCESS, FAILURE):
                continue
            expected.append(float(outcome == SUCCESS))
        elif batch["next_ticks"][i] == 0:
            continue
        else:
            images = {name: frames[i : i + 1] for name, frames in batch["next_images"].items()}
            state = batch["next_state"][i : i + 1]
            one = {
                "images": images,
                "instructions": batch["instructions"][i : i + 1],
                "state": state,
                "seen_state": state,
                "actions": batch["actions"][i : i + 1],
                "mask": batch["mask"][i : i + 1],
                "ahead": batch["ahead"][i : i + 1],
                "frame_age": batch["frame_age"][i : i + 1],
            }
            with torch.no_grad():
                expected.append(subject.policy.foretell(one, average).sigmoid().mean().item())
        rows.append(i)
    assert np.flatnonzero(known).tolist() == rows and len(rows) > 15
    torch.testing.assert_close(chances, torch.tensor(expected))
    assert len({round(one, 6) for one in expected}) > 5


def test_people_are_imitated_as_without_it_and_what_foretells_learns_beside_that() -> None:
    unclipped = replace(TRAINING, gradient_clip=1e9)
    subject = Learner(FlowPolicy(SPEC, FORETELLING, seed=0), ThriftyDagger(n_step=N_STEP, own_chance=1.0), unclipped, 0)
    plain = Learner(FlowPolicy(SPEC, NET, seed=0), HGDagger(), unclipped, 0)
    plain.policy.module.load_state_dict(subject.policy.module.state_dict(), strict=False)
    plain.networks["policy"].average.load_state_dict(subject.average.state_dict(), strict=False)
    begun = {name: one.clone() for name, one in subject.policy.module.named_parameters()}
    for n in range(3):
        batch = drawn(n)
        found, alone = subject.step(Batches(batch)), plain.step(Batches(peoples(batch)))
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    moved = dict(subject.policy.module.named_parameters())
    outlook = [name for name in begun if name.startswith("outlook.")]
    assert len(outlook) == 6 * MEMBERS and all(not torch.equal(moved[name], begun[name]) for name in outlook)
    for name, one in plain.policy.module.named_parameters():
        torch.testing.assert_close(moved[name], one)


def test_what_has_a_better_chance_is_imitated_as_if_a_person_had_done_it() -> None:
    subject, none = learner(own_chance=0.5), learner(own_chance=1.0)
    batch = drawn(4)
    average = subject.average
    known, chances = subject.algorithm.chances(SimpleNamespace(average=lambda name: average), batch)
    better = np.flatnonzero(known)[chances.numpy() > 0.5]
    assert 0 < len(better) < (batch["actor"] == POLICY).sum()
    as_people = {**batch, "actor": batch["actor"].copy(), "imitable": batch["imitable"].copy()}
    as_people["actor"][better], as_people["imitable"][better] = HUMAN, batch["mask"][better]
    found, without = subject.step(Batches(batch)), none.step(Batches(batch))
    plain = Learner(FlowPolicy(SPEC, FORETELLING, seed=0), HGDagger(), TRAINING, 0)
    assert found["imitated_share"] == pytest.approx(len(better) / len(batch["actor"]))
    assert without["imitated_share"] == 0 and found["loss"] != without["loss"]
    assert found["loss"] == pytest.approx(plain.step(Batches(peoples(as_people)))["loss"], rel=1e-5)


@pytest.mark.slow
def test_it_foretells_where_it_succeeds_and_robots_hear_of_it() -> None:
    """Whoever is on the right succeeds by himself."""
    rng = np.random.default_rng(0)
    config = msgspec.structs.replace(STATES_NET, outlook=16)
    policy = FlowPolicy(STATES_ONLY, config, seed=0)
    subject = Learner(policy, ThriftyDagger(n_step=2), replace(TRAINING, batch=64))
    for _ in range(300):
        batch = either_way(rng)
        state = rng.uniform(-1, 1, (64, 2)).astype(np.float32)
        outcome = np.where(state[:, 0] > 0, SUCCESS, FAILURE).astype(np.int8)
        actor = rng.choice([POLICY, HUMAN], 64).astype(np.uint8)
        found = subject.step(Batches(batch | {"state": state, "next_state": state, "outcome": outcome, "actor": actor}))
    assert found["outlook_loss"] < 0.3
    policy.load(subject.weights(), 1)

    def outlook(x: float) -> float:
        observation = example_observation(STATES_ONLY, 0, "go")
        observation = msgspec.structs.replace(observation, state=np.array([x, 0.0], np.float32))
        return policy.act(observation, policy.think(observation), 0, seed=1).outlook

    assert outlook(0.8) > 0.8 and outlook(-0.8) < 0.2


def test_policies_that_do_not_fit_are_refused_and_others_say_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'thrifty-dagger' needs a policy that says how likely .* made without"):
        ThriftyDagger().make(FlowPolicy(SPEC, NET))
    policy, observation = FlowPolicy(SPEC, NET), example_observation(SPEC, 0, "go")
    assert np.isnan(policy.act(observation, policy.think(observation), 0).outlook)


@pytest.mark.parametrize(
    ("field", "value"), [("n_step", 0), ("own_weight", 0), ("own_chance", 0), ("recovery_weight", -1)]
)
def test_settings_that_it_cannot_work_with_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        ThriftyDagger(**{field: value})
