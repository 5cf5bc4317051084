"""pi_RL: what its losses are, of which samples, what is made of late ones, and updates that go on bit for bit."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cloud_learner.algorithms.critics.critic_updates import select_rows
from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.interface import POLICY as POLICY_NETWORK
from cloud_learner.algorithms.pi_rl import ExploredChunks, PiRl, clipped_losses, effective_share
from cloud_learner.buffer.control import HUMAN, POLICY
from cloud_learner.buffer.sampling.target import Moment, StepRuns
from cloud_learner.training.learner import Learner
from policies.conformance.data import example_observation
from policies.flow.networks.exploration import random_step
from policies.flow.policy import FlowPolicy
from policies.interface.policy import Batch
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.algorithms.test_lwd import (
    ALL_OWN,
    FAILURE,
    GAMMA,
    IMAGES,
    N_STEP,
    STATES_NET,
    STATES_ONLY,
    SUCCESS,
    TRAINING,
    UNJUDGED,
    drawn,
    imitating,
    peoples,
    same,
    step_of,
    weights_of,
)
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.tokens.test_policy import REACHER, REACHING
from wire.errors import ConfigError

torch = pytest.importorskip("torch")

EXPLORING = {kind: msgspec.structs.replace(NET, explore=kind) for kind in ("sde", "noise")}


def learner(seed: int = 0, kind: str = "sde", **settings: object) -> Learner:
    given = {"n_step": N_STEP, "gamma": GAMMA, "critic_width": 16, "warmup": 2, **settings}
    return Learner(FlowPolicy(SPEC, EXPLORING[kind], seed=0), PiRl(**given), TRAINING, seed)


def explored(seed: int, kind: str = "sde", images: int = IMAGES, **changes: object) -> Batch:
    """As `drawn`, where all that the policy did was chunks of another policy's."""
    batch, robot = drawn(seed, images, **changes), FlowPolicy(SPEC, EXPLORING[kind], seed=9)
    generator, steps = torch.Generator().manual_seed(seed), robot.config.euler_steps
    first = torch.randint(steps if kind == "sde" else 1, (images, 1, 1), generator=generator)
    with torch.no_grad():
        given = robot.conditioning(batch)
        points = [torch.randn(images, 1, 8, generator=generator)]
        for number in range(robot.trace_points - 1):
            time = (first + number) / steps
            v = robot.velocity(given, points[-1], time)
            mean, std = random_step(robot.config, robot.module.noise_head, given, points[-1], v, time)
            points.append(mean + std * torch.randn(mean.shape, generator=generator))
        traces = {
            "step": first[:, 0, 0].numpy().astype(np.int16),
            "points": torch.cat(points, 1).numpy(),
            "state": batch["state"],
            "age": np.zeros(images, np.float32),
        }
        batch |= {"traces": traces, "lag": np.zeros(images, np.int32)}
        traces["log_prob"] = robot.trace_log_probability(batch).numpy()
    return batch | {name: one for name, one in changes.items() if name == "lag"}


def run(subject: Learner, first: int, count: int, kind: str = "sde", **changes: object) -> list[dict[str, float]]:
    return [subject.step(Batches(explored(n, kind, **changes))) for n in range(first, first + count)]


def alike(one: Learner, other: Learner) -> bool:
    return same(weights_of(one, POLICY_NETWORK), weights_of(other, POLICY_NETWORK))


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("random_steps", [1, 5])
def test_the_loss_is_what_a_loop_over_its_cases_says(random_steps: int) -> None:
    rng = np.random.default_rng(0)
    now, proximal, behaviour, advantages = rng.normal(0, 1.2, (4, 400))
    now[:4], proximal[:4], behaviour[:4] = (500, -500, 0, 0), (0, 0, 500, -500), (0, 0, 0, 0)
    expected = []
    for new, near, old, gain in zip(now, proximal, behaviour, advantages, strict=True):
        ratio, weight = (
            math.exp(min(20, max(-20, (new - near) / random_steps))),
            min(2.0, math.exp(min(20, near - old))),
        )
        cut = min(1.2, max(0.8, ratio))
        worth = min(ratio * gain, cut * gain)
        if gain < 0:
            worth = max(worth, 3.0 * gain)
        expected.append(-weight * worth)
    given = [torch.tensor(one, requires_grad=True) for one in (now, proximal, behaviour, advantages)]
    found = clipped_losses(*given, 0.2, 3.0, random_steps)
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-9)
    found.sum().backward()
    assert given[0].grad.isfinite().all()
    changes = (now - proximal) / random_steps
    ratios = np.exp(changes)
    still = ((advantages > 0) & (ratios > 1.2)) | ((advantages < 0) & ((ratios < 0.8) | (ratios > 3)))
    still |= np.abs(changes) > 20
    np.testing.assert_array_equal(given[0].grad.numpy() == 0, still)


def test_without_a_proximal_policy_it_is_ppo() -> None:
    now, behaviour, advantages = torch.randn(3, 50)
    ratio = (now - behaviour).exp()
    expected = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = torch.where((advantages < 0) & (ratio > 3), -3 * advantages, expected)
    torch.testing.assert_close(clipped_losses(now, behaviour, behaviour, advantages, 0.2, 3.0), expected)


def test_the_effective_share_of_samples() -> None:
    weights = np.random.default_rng(0).random(40) + 0.01
    expected = sum(weights) ** 2 / (40 * sum(one * one for one in weights))
    assert effective_share(torch.tensor(weights).log()) == pytest.approx(expected)
    assert effective_share(torch.full((8,), -900.0)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([900.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_the_policys_own_steps_are_drawn_with_their_traces_until_they_are_too_old() -> None:
    needs = PiRl(n_step=5, own_weight=0.25, max_lag=8).needs()
    assert needs.traces and needs.n_step == 5
    one = np.ones(1, np.int8)

    def weight(actor: int, newest: int, needs: object = needs, outcome: int = SUCCESS) -> float:
        runs = StepRuns(actor * one.view(np.uint8), one, one < 0, outcome * one, one * np.nan, one)
        return needs.target.weights(runs, Moment(newest))[0]

    assert [weight(POLICY, newest) for newest in (1, 9, 10)] == [0.25, 0.25, 0]
    assert [weight(HUMAN, newest) for newest in (1, 10)] == [1, 1]
    assert weight(POLICY, 1, outcome=UNJUDGED) == 0
    assert weight(POLICY, 10**6, PiRl(own_weight=0.25, max_lag=0).needs()) == 0.25


# --- who learns what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPLORING)
@pytest.mark.parametrize("decoupled", [True, False])
def test_what_is_learned_of_a_chunk_is_what_a_loop_over_the_batch_says(kind: str, decoupled: bool) -> None:
    subject = learner(kind=kind, decoupled=decoupled)
    run(subject, 0, 3, kind)
    algorithm, step, batch = subject.algorithm, step_of(subject), explored(7, kind)
    features = algorithm.features(step, batch)
    steps, metrics = algorithm.read_outcomes(batch)
    with torch.no_grad():
        usable, chunks = algorithm.judge(step, batch, features, steps)
    rows = algorithm._explored(batch, steps, metrics) & usable
    found = algorithm._weigh(step, batch, rows, chunks.targets[torch.from_numpy(rows[usable])], features)
    expected = np.flatnonzero((batch["actor"] == POLICY) & usable)
    assert np.flatnonzero(rows).tolist() == expected.tolist() and len(expected) > 5
    critic, average, beyond = step.average("critic"), step.average(POLICY_NETWORK), []
    for number, i in enumerate(expected.tolist()):
        one = select_rows(batch, np.array([i]))
        with torch.no_grad():
            now = subject.policy.trace_log_probability(one).item()
            near = subject.policy.trace_log_probability(one, average).item()
            value = critic.value.expectation(subject.policy.features(one, average)[0]).item()
        assert found.now[number].item() == pytest.approx(now, abs=1e-3)
        assert found.behaviour[number].item() == batch["traces"]["log_prob"][i]
        wanted = near if decoupled else found.behaviour[number].item()
        assert found.proximal[number].item() == pytest.approx(wanted, abs=1e-3)
        beyond.append(chunks.targets[int(usable[:i].sum())].item() - value)
    normal = (np.array(beyond) - np.mean(beyond)) / max(np.std(beyond), 0.05)
    np.testing.assert_allclose(found.advantages, normal, atol=1e-4)


def test_the_policy_goes_down_its_loss_and_so_much_of_imitation_as_far_as_the_samples_allow() -> None:
    went_down = []
    step = SimpleNamespace(descend=lambda network, loss, rate=1.0: went_down.append((network, loss().item(), rate)))
    taught, log = peoples(drawn(0)), torch.tensor([0.0, -1.0, -2.0])
    for scaled in (True, False):
        subject = learner(imitation_weight=0.25, scaled=scaled)
        batch = select_rows(explored(1), np.arange(3))
        with torch.no_grad():
            now = subject.policy.trace_log_probability(batch)
        advantages = torch.tensor([1.0, -1.0, 0.5])
        found = ExploredChunks(batch, now - log, now, now, advantages)
        worth = math.sqrt(effective_share(log)) if scaled else 1.0
        surrogate = clipped_losses(now, now, now - log, advantages, 0.2, 3.0).mean().item()
        assert 0.5 < worth <= 1 and (worth < 1) == scaled
        for people, asked in ((taught, found), (taught, None), (None, found)):
            metrics: dict[str, float] = {}
            torch.manual_seed(3)
            subject.algorithm._improve(step, people, asked, metrics)
            network, loss, rate = went_down[-1]
            assert network == POLICY_NETWORK and (metrics["loss"] > 0) == (people is not None)
            if asked is None:
                assert (loss, rate) == (pytest.approx(metrics["loss"]), 1.0)
            elif people is None:
                assert (loss, rate) == (pytest.approx(surrogate, abs=1e-5), pytest.approx(worth))
            else:
                assert loss == pytest.approx(worth * surrogate + 0.25 * metrics["loss"], abs=1e-5) and rate == 1.0
    assert len(went_down) == 6


def test_a_rate_is_of_one_step_alone() -> None:
    first, second = learner(), learner()
    for subject, rate in ((first, 1.0), (second, 0.5)):
        before = weights_of(subject, POLICY_NETWORK)
        network = subject.networks[POLICY_NETWORK]
        for one in (rate, 1.0):
            network.begin()
            sum((weight**2).sum() for weight in subject.policy.module.parameters()).backward()
            network.step(0, one)
            moved = weights_of(subject, POLICY_NETWORK)
            name = next(name for name in moved if name.endswith("head.3.weight"))
            far = (moved[name] - before[name]).abs().mean().item()
            before = moved
            # Adam's steps are as long as the rate while gradients stay what they are
            assert far == pytest.approx(TRAINING.rate(0) * one, rel=0.05)


def test_then_it_learns_of_what_the_policy_did_and_before_it_imitates() -> None:
    subject = learner(warmup=3)
    run(subject, 0, 2)
    plain = imitating(subject)
    before = run(subject, 2, 1)[0]
    assert plain.step(Batches(peoples(drawn(2))))["loss"] == before["loss"] and alike(plain, subject)
    assert "surrogate" not in before and before["traced_share"] == 1
    after = run(subject, 3, 1)[0]
    plain.step(Batches(peoples(drawn(3))))
    assert not alike(plain, subject)
    assert {"surrogate", "effective_share", "clipped_share", "behind"} <= after.keys()
    alone = run(subject, 4, 1, **ALL_OWN)[0]
    assert alone["loss"] == 0 and "surrogate" in alone


def test_what_is_too_old_is_not_learned_from() -> None:
    subject, other = learner(max_lag=5), learner(max_lag=0)
    for one in (subject, other):
        run(one, 0, 3)
    late = {"lag": np.full(IMAGES, 6, np.int32)}
    assert "surrogate" not in run(subject, 3, 1, **late)[0]
    found = run(other, 3, 1, **late)[0]
    assert "surrogate" in found and found["behind"] == 6
    assert run(subject, 4, 1, lag=np.full(IMAGES, 5, np.int32))[0]["behind"] == 5


# --- what may go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"step": np.full(IMAGES, -1, np.int16)}, {"log_prob": np.full(IMAGES, np.nan)}])
def test_without_traces_it_imitates_and_says_so_once(
    wrong: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    subject = learner()
    run(subject, 0, 2)
    plain = imitating(subject)
    subject.algorithm.notices.counts["own"], subject.algorithm.notices.counts["traced"] = 10**6, 0
    with caplog.at_level(logging.WARNING):
        for n in range(3, 6):
            batch = explored(n)
            batch["traces"] |= wrong
            metrics = subject.step(Batches(batch))
            assert metrics["traced_share"] == 0 and "surrogate" not in metrics
            plain.step(Batches(peoples(batch)))
    assert alike(plain, subject)
    assert len(caplog.records) == 1 and "says how probable it was" in caplog.text


@pytest.mark.parametrize("outcome", [FAILURE, SUCCESS, UNJUDGED])
def test_where_all_ends_alike_that_is_said_once(outcome: int, caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    plain = Learner(FlowPolicy(SPEC, NET, seed=0), HGDagger(), TRAINING)
    ended = {"outcome": np.full(IMAGES, outcome, np.int8)}
    with caplog.at_level(logging.WARNING):
        for n in range(4):
            if n == 2:
                for name in ("drawn", "own", "own_succeeded"):
                    subject.algorithm.notices.counts[name] += 10**6 * (name != "own_succeeded" or outcome == SUCCESS)
                if outcome == UNJUDGED:
                    subject.algorithm.notices.counts["own"] = 0
            found = run(subject, n, 1, **ended)[0]
            plain.step(Batches(peoples(drawn(n))))
    said = {
        FAILURE: "and nothing else is learned until one does",
        SUCCESS: "only by how soon",
        UNJUDGED: "somebody judges",
    }
    assert len(caplog.records) == 1 and said[outcome] in caplog.text
    assert ("surrogate" in found) == (outcome == SUCCESS)
    assert alike(plain, subject) == (outcome != SUCCESS)


def test_policies_that_do_not_fit_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm 'pi-rl' needs a policy that makes actions by a flow.*TokenPolicy"
    ):
        PiRl().make(TokenPolicy(REACHER, REACHING))
    with pytest.raises(
        ConfigError, match=r"'pi-rl' needs a policy that makes chunks by random steps.*\"explore\": \"sde\""
    ):
        PiRl(n_step=4).make(FlowPolicy(SPEC, NET))
    assert PiRl.policy_options == {"explore": "sde"}
    with pytest.raises(ConfigError, match="'pi-rl' trains on one rank"):
        PiRl().require_ranks(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip", 0), ("dual_clip", 1), ("imitation_weight", 0), ("max_lag", -1), ("n_step", 0), ("level", 0)],
)
def test_settings_that_it_cannot_work_with_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        PiRl(**{field: value})


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPLORING)
def test_a_restored_run_goes_on_bit_for_bit(kind: str) -> None:
    first = learner(kind=kind)
    run(first, 0, 4, kind)
    state = first.state()
    expected = run(first, 4, 3, kind)
    assert "surrogate" in expected[-1]
    second = learner(seed=5, kind=kind)
    run(second, 90, 2, kind)
    second.restore(state)
    assert run(second, 4, 3, kind) == expected and same(first.state().tensors, second.state().tensors)


def rollouts(actor: FlowPolicy, seed: int, count: int, lag: int) -> Batch:
    """Chunks of `actor`, of which those that go right succeed."""
    observation = msgspec.structs.replace(example_observation(STATES_ONLY, 0, "go"), state=np.zeros(2, np.float32))
    latent = actor.think(observation)
    chunks = [actor.act(observation, latent, 0, seed=seed * count + n + 1) for n in range(count)]
    actions = np.stack([one.actions for one in chunks])
    state = np.zeros((count, 2), np.float32)
    return {
        "images": {},
        "next_images": {},
        "instructions": ["go"] * count,
        "state": state,
        "next_state": state,
        "actions": actions,
        "mask": np.ones((count, 4), np.float32),
        "imitable": np.zeros((count, 4), np.float32),
        "outcome": np.where(actions.mean((1, 2)) > 0.2, SUCCESS, FAILURE).astype(np.int8),
        "online": np.ones(count, bool),
        "actor": np.full(count, POLICY, np.uint8),
        "ticks_to_end": np.ones(count, np.int64),
        "next_ticks": np.full(count, 2),
        "taken_over": np.zeros(count, bool),
        "lag": np.full(count, lag, np.int32),
        "traces": {
            "step": np.array([one.trace.step for one in chunks]),
            "points": np.stack([one.trace.points for one in chunks]),
            "state": state,
            "age": np.zeros(count, np.float32),
            "log_prob": np.array([one.log_prob for one in chunks], np.float32),
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPLORING)
def test_the_policy_does_more_of_what_succeeded(kind: str) -> None:
    config = msgspec.structs.replace(STATES_NET, explore=kind)
    policy, actor = FlowPolicy(STATES_ONLY, config, seed=0), FlowPolicy(STATES_ONLY, config, seed=1)
    subject = Learner(policy, PiRl(n_step=2, warmup=30, critic_width=32), replace(TRAINING, batch=64), 0)
    successes = []
    for version in range(30):
        actor.load(subject.weights(), version + 1)
        batch = rollouts(actor, version, 64, 0)
        successes.append((batch["outcome"] == SUCCESS).mean())
        for _ in range(10):
            subject.step(Batches(batch))
    assert np.mean(successes[:3]) < 0.4 and np.mean(successes[-3:]) > 0.7
