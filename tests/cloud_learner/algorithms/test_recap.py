"""RECAP: what is drawn, what counts as good, and updates that go on bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.recap import Recap
from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import HUMAN, POLICY, RECOVERY, SCRIPT
from cloud_learner.buffer.sampling.target import Moment, StepRuns
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner, LearnerState
from policies.conformance.data import example_batch
from policies.flow.policy import FlowPolicy
from policies.interface.capabilities import BAD, GOOD, UNKNOWN
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.tokens.test_policy import REACHER, REACHING
from wire.errors import ConfigError, InvalidDataError

torch = pytest.importorskip("torch")

ADVISED = msgspec.structs.replace(NET, advantage=True)
SUCCESS, FAILURE, UNJUDGED = (OUTCOMES.index(name) for name in ("success", "failure", "unjudged"))
TRAINING = TrainingConfig(batch=4, ticks_per_frame=2, learning_rate=3e-3)
IMAGES = 8


def drawn(seed: int, images: int = IMAGES, **changes: object) -> dict[str, object]:
    """A batch of two steps behind each image, half of the episodes failed, most steps the policy's own."""
    rng = np.random.default_rng(seed)
    batch = example_batch(SPEC, 4, seed, images=images)
    return batch | {
        "task": rng.integers(0, 2, images),
        "outcome": rng.choice([SUCCESS, FAILURE], images).astype(np.int8),
        "online": np.ones(images, bool),
        "actor": rng.choice([POLICY, POLICY, HUMAN], (images, 2)).astype(np.uint8),
        "ticks_to_end": rng.integers(0, 100, (images, 2)),
        **changes,
    }


def learner(seed: int = 0, training: TrainingConfig = TRAINING, **settings: object) -> Learner:
    config = Recap(horizon_ticks=100, window=256, value_width=16, **settings)
    return Learner(FlowPolicy(SPEC, ADVISED, seed=0), config, training, seed)


def run(subject: Learner, first: int, count: int, **changes: object) -> list[dict[str, float]]:
    return [subject.step(Batches(drawn(n, **changes))) for n in range(first, first + count)]


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_the_policys_own_steps_are_drawn_once_their_episode_is_judged_and_peoples_always() -> None:
    def weights(actor: int, outcome: int, demonstration: bool = False, **settings: float) -> float:
        one = np.ones(1, np.int8)
        runs = StepRuns(actor * one.view(np.uint8), one, one * demonstration > 0, outcome * one, one * np.nan, one)
        return Recap(**settings).needs().target.weights(runs, Moment(1))[0]

    own = [weights(POLICY, outcome) for outcome in (-1, SUCCESS, FAILURE, OUTCOMES.index("aborted"), UNJUDGED)]
    assert own == [0, 0.5, 0.5, 0, 0]
    assert weights(POLICY, SUCCESS, own_weight=0.25) == 0.25
    assert Recap(online_share=0.3).needs().target.mix.online == 0.3
    assert [weights(who, outcome) for who in (HUMAN, SCRIPT) for outcome in (-1, FAILURE)] == [1, 1, 1, 1]
    assert weights(POLICY, UNJUDGED, demonstration=True) == 1
    assert weights(HUMAN | RECOVERY, -1, recovery_weight=0.5) == 0.5
    assert weights(HUMAN, OUTCOMES.index("discarded")) == 0


# --- what is good -----------------------------------------------------------------------------------------------------


def with_window(subject: Learner, advantages: np.ndarray, task: int) -> None:
    noted = torch.from_numpy(advantages.astype(np.float32))
    subject.algorithm.critic.window.note(torch.full(noted.shape, task), noted)


def test_advice_is_what_a_loop_over_the_steps_says() -> None:
    subject = learner(positive_share=0.4)
    known = {task: np.random.default_rng(task).normal(0.2 - task, 0.3, 60) for task in (0, 1)}
    for task, advantages in known.items():
        with_window(subject, advantages, task)
    batch = drawn(3, images=40)
    batch["outcome"][:4], batch["ticks_to_end"][:4], batch["online"][4:8] = -1, -1, False
    algorithm = subject.algorithm
    with torch.no_grad():
        judged = algorithm.judge(batch)
        values = algorithm.critic.value.expectation(subject.policy.features(batch)).numpy()
    expected, counted = [], {GOOD: 0, BAD: 0, UNKNOWN: 0}
    for i in range(40):
        for k in range(2):
            time_left = min(1.0, batch["ticks_to_end"][i, k] / 100)
            value_was = -time_left if batch["outcome"][i] == SUCCESS else -1.0
            advantage = value_was - values[i, k]
            threshold = np.quantile(known[batch["task"][i]], 0.6)
            if batch["actor"][i, k] != POLICY or not batch["online"][i]:
                advice = GOOD
            elif batch["outcome"][i] == -1:
                advice = UNKNOWN
            else:
                advice = GOOD if advantage > threshold and batch["outcome"][i] == SUCCESS else BAD
                counted[advice] += 1
            expected.append(advice)
    assert judged.advice.tolist() == expected
    assert counted[GOOD] > 3 and counted[BAD] > 3 and UNKNOWN in expected


def test_about_the_stated_share_of_what_the_policy_did_is_good_once_enough_is_known() -> None:
    subject = learner(positive_share=0.3)
    mine = {"actor": np.full((IMAGES, 2), POLICY, np.uint8), "outcome": np.full(IMAGES, SUCCESS, np.int8)}
    shares = [one["good_share"] for one in run(subject, 0, 60, **mine)]
    assert shares[0] == 0, "not known whether good before advantages are"
    assert np.mean(shares[20:]) == pytest.approx(0.3, abs=0.08)


def test_where_everything_fails_nothing_of_the_policys_own_is_good_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = learner()
    failed = {"outcome": np.full(IMAGES, FAILURE, np.int8), "actor": np.full((IMAGES, 2), POLICY, np.uint8)}
    with caplog.at_level(logging.WARNING):
        found = run(subject, 0, 10, **failed)
        subject.algorithm.notices.counts["own"] = 10**6
        run(subject, 10, 2, **failed)
    assert {one["good_share"] for one in found} == {0.0} and all("value_loss" in one for one in found)
    assert [one.message for one in caplog.records] == [
        "algorithm 'recap': no step of the policy's own drawn so far is of an episode that succeeded: all of them "
        "count as bad until one does."
    ]


def test_where_nothing_is_judged_people_are_imitated_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    nobody_said = {"outcome": np.full(IMAGES, UNJUDGED, np.int8), "actor": np.full((IMAGES, 2), HUMAN, np.uint8)}
    before = subject.state().tensors
    with caplog.at_level(logging.WARNING):
        subject.algorithm.notices.counts["drawn"] = 10**6
        found = run(subject, 0, 2, **nobody_said)
    assert found[0].keys() == {"loss", "own_share", "gradient_norm"}
    after = subject.state().tensors
    assert all(torch.equal(after[name], one) for name, one in before.items() if name.startswith("value/module"))
    assert len(caplog.records) == 1 and "until somebody judges" in caplog.text


def test_a_success_that_takes_longer_than_the_horizon_is_said(caplog: pytest.LogCaptureFixture) -> None:
    late = {"outcome": np.full(IMAGES, SUCCESS, np.int8), "ticks_to_end": np.full((IMAGES, 2), 100)}
    with caplog.at_level(logging.WARNING):
        run(learner(), 0, 2, **late)
    assert len(caplog.records) == 1 and "algorithm.horizon_ticks" in caplog.text


def test_the_policy_is_told_and_a_batch_without_an_axis_for_steps_is_too() -> None:
    subject, told = learner(), []

    def loss(batch: dict[str, np.ndarray]) -> torch.Tensor:
        told.append(batch["advantage"])
        return FlowPolicy.loss(subject.policy, batch)

    subject.policy.loss = loss
    batch = drawn(0)
    flat = {n: batch[n][:, 0] for n in ("state", "actions", "mask", "actor", "ticks_to_end", "frame_age")}
    with_window(subject, np.full(60, -1.0), 0)
    with_window(subject, np.full(60, -1.0), 1)
    subject.step(Batches(batch))
    subject.step(Batches(batch | flat))
    assert [one.shape for one in told] == [(IMAGES, 2), (IMAGES,)]
    own = batch["actor"] == POLICY
    succeeded = np.broadcast_to(batch["outcome"][:, None] == SUCCESS, own.shape)
    assert np.array_equal(told[0] == GOOD, ~own | succeeded) and (told[0] != UNKNOWN).all()


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_restored_run_goes_on_bit_for_bit() -> None:
    first = learner()
    run(first, 0, 8)
    state = first.state()
    assert "value/module/window.advantages" in state.tensors
    expected = run(first, 8, 8)
    assert any(0 < one["good_share"] < 1 for one in expected), "thresholds matter"
    second = learner(seed=5)
    run(second, 90, 3)
    second.restore(state)
    assert run(second, 8, 8) == expected
    assert second.weights() == first.weights()
    theirs = second.state().tensors
    assert all(torch.equal(theirs[name], one) for name, one in first.state().tensors.items())


def test_batches_that_make_one_step_are_all_judged() -> None:
    subject = learner(training=replace(TRAINING, accumulate=3))
    subject.step(Batches(*(drawn(n) for n in range(3))))
    own = sum(int((drawn(n)["actor"] == POLICY).sum()) for n in range(3))
    assert int(subject.algorithm.critic.window.noted) == own


def test_a_loss_that_is_not_finite_leaves_what_is_remembered() -> None:
    subject = learner()
    run(subject, 0, 2)
    before = subject.state().tensors
    batch = drawn(2)
    batch["actions"][0, 0, 0, 0] = np.nan
    with pytest.raises(InvalidDataError, match="gradient step 2 was not applied"):
        subject.step(Batches(batch))
    after = subject.state().tensors
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_the_value_learns_what_came_of_judged_episodes_and_moves_nothing_else() -> None:
    subject, seen = learner(), []
    value = subject.algorithm.critic.value
    plain = value.loss
    value.loss = lambda *given: seen.append(given) or plain(*given)
    batch = drawn(3)
    batch["outcome"][:3], batch["ticks_to_end"][:3] = -1, -1
    subject.step(Batches(batch))
    ((features, returns),) = seen
    succeeded = (batch["outcome"][3:] == SUCCESS)[:, None]
    expected = np.where(succeeded, -np.minimum(batch["ticks_to_end"][3:] / 100, 1), -1).ravel()
    np.testing.assert_allclose(returns.numpy(), expected, rtol=1e-6)
    assert features.shape == (len(expected), subject.policy.feature_width) and not features.requires_grad


def test_the_policy_learns_what_it_would_of_the_same_advice_without_a_value() -> None:
    subject = learner()
    run(subject, 0, 14)
    plain = Learner(FlowPolicy(SPEC, ADVISED, seed=0), HGDagger(), TRAINING)
    policys = {name: one for name, one in subject.state().tensors.items() if name.startswith("policy/")}
    plain.restore(LearnerState(policys, subject.state().meta))
    batch = drawn(14)
    with torch.no_grad():
        advice = subject.algorithm.judge(batch).advice.numpy().reshape(IMAGES, 2)
    assert set(advice.ravel().tolist()) == {BAD, GOOD}
    plain.step(Batches(batch | {"advantage": advice}))
    run(subject, 14, 1)
    assert subject.weights() == plain.weights()


# --- who can be trained by it -----------------------------------------------------------------------------------------


def test_policies_that_cannot_be_told_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"algorithm 'recap' needs a policy that has features.*TokenPolicy does not"):
        Recap().make(TokenPolicy(REACHER, REACHING))
    with pytest.raises(ConfigError, match=r"this FlowPolicy was made without: say \"advantage\": true"):
        Recap().make(FlowPolicy(SPEC, NET))


def test_ranks_are_refused_for_what_is_good_is_not_shared() -> None:
    with pytest.raises(ConfigError, match="'recap' trains on one rank"):
        Learner(FlowPolicy(SPEC, ADVISED), Recap(), TRAINING, group=SimpleNamespace(world=2, rank=0))
    HGDagger().require_ranks(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("horizon_ticks", 0),
        ("window", 0),
        ("own_weight", 0),
        ("recovery_weight", -1),
        ("positive_share", 1.0),
        ("online_share", 0),
    ],
)
def test_settings_that_it_cannot_work_with_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Recap(**{field: value})
