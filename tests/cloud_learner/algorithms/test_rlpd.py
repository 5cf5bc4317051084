"""RLPD: what the critics learn, when the policy minds them, how sure it stays, and updates that go on bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cloud_learner.algorithms.critics.critic_updates import select_rows
from cloud_learner.algorithms.critics.judged import read_outcomes
from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.interface import POLICY as POLICY_NETWORK
from cloud_learner.algorithms.rlpd import Rlpd
from cloud_learner.buffer.control import HUMAN, POLICY
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner, LearnerState
from policies.conformance.data import example_observation
from policies.flow.policy import FlowPolicy
from policies.gaussian.policy import GaussianPolicy
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.algorithms.test_lwd import (
    ALL_OWN,
    FAILURE,
    GAMMA,
    IMAGES,
    N_STEP,
    STATES_ONLY,
    SUCCESS,
    TRAINING,
    UNJUDGED,
    drawn,
    either_way,
    peoples,
    same,
    weights_of,
)
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.gaussian.test_gaussian_policy import BLIND, SEEING
from tests.policies.tokens.test_policy import REACHER, REACHING
from wire.errors import ConfigError

torch = pytest.importorskip("torch")


def learner(seed: int = 0, training: TrainingConfig = TRAINING, **settings: object) -> Learner:
    given = {"n_step": N_STEP, "gamma": GAMMA, "critic_width": 16, "warmup": 4, "critics": 3, **settings}
    return Learner(GaussianPolicy(SPEC, SEEING, seed=0), Rlpd(**given), training, seed)


def run(subject: Learner, first: int, count: int, **changes: object) -> list[dict[str, float]]:
    """So many updates, each of two batches."""
    return [
        subject.step(Batches(drawn(2 * n, **changes), drawn(2 * n + 1, **changes))) for n in range(first, first + count)
    ]


def imitating(subject: Learner) -> Learner:
    """An HG-DAgger run that goes on from the policy as it is."""
    plain = Learner(GaussianPolicy(SPEC, SEEING, seed=0), HGDagger(), TRAINING)
    policys = {name: one for name, one in subject.state().tensors.items() if name.startswith("policy/")}
    plain.restore(LearnerState(policys, subject.state().meta))
    return plain


def step_of(subject: Learner, seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(average=lambda name: subject.networks[name].average, rng=np.random.default_rng(seed))


# --- the critics ------------------------------------------------------------------------------------------------------


def test_the_critics_learn_of_a_chunk_what_a_loop_over_the_batch_says() -> None:
    subject = learner(subset=2, taken_over_worth=0.125)
    run(subject, 0, 4)
    for member in subject.networks["critic"].average.members:
        member[-1].bias.fill_(0.5)  # within what can come
    batch = drawn(9, images=40)
    batch["outcome"][:3], batch["ticks_to_end"][:3] = (-1, -1, UNJUDGED), (-1, -1, 0)
    batch["next_ticks"][30:] = 0
    batch["actor"][26:32], batch["taken_over"][26:32] = (POLICY, HUMAN, POLICY) * 2, True
    algorithm, policy, step = subject.algorithm, subject.policy, step_of(subject)
    with torch.no_grad():
        usable, found = algorithm.judge(step, batch, algorithm.features(step, batch), read_outcomes(batch, (40, 1)))
    # the same random numbers, in the order in which they are drawn
    rng, rows = np.random.default_rng(0), np.flatnonzero(usable)
    noise = torch.from_numpy(rng.standard_normal((len(rows), 8), np.float32))
    chosen, average = rng.permutation(3)[:2], step.average("critic")
    assert 10 < len(rows) < 38 and found.own.tolist() == (batch["actor"][rows] == POLICY).tolist()
    asked = 0
    for n, i in enumerate(rows):
        left = int(batch["ticks_to_end"][i])
        one = select_rows(batch, np.array([i]))
        if batch["taken_over"][i] and batch["actor"][i] == POLICY:
            target = 0.125
        elif 0 <= left < N_STEP:
            target = GAMMA**left if batch["outcome"][i] == SUCCESS else 0.0
        else:
            later = one | {"state": one["next_state"], "images": one["next_images"]}
            with torch.no_grad():
                features = policy.features(later, step.average(POLICY_NETWORK))[0]
                actions, _ = policy.draw(features, noise[n : n + 1], step.average(POLICY_NETWORK))
                known = torch.cat([features, actions[:, : 2 * N_STEP]], -1)
                said = [average.members[k](known).item() for k in chosen]
            asked += 0 < min(said) < 1
            target = GAMMA ** int(batch["next_ticks"][i]) * min(max(min(said), 0.0), 1.0)
        assert found.targets[n].item() == pytest.approx(target, abs=1e-5)
    assert asked > 5


def test_each_critic_learns_and_the_policys_chunks_count_as_much_as_all_others() -> None:
    subject = learner()
    batch = drawn(3)
    algorithm, step = subject.algorithm, step_of(subject)
    with torch.no_grad():
        _, chunks = algorithm.judge(step, batch, algorithm.features(step, batch), read_outcomes(batch, (IMAGES, 1)))
        q = algorithm.critic.q(chunks.features, chunks.actions)
    own = [i for i, mine in enumerate(chunks.own.tolist()) if mine]
    others = [i for i in range(len(chunks.own)) if i not in own]
    assert len(own) != len(others)
    total = 0.0
    for critic in range(3):
        for half in (own, others):
            total += sum((q[critic, i] - chunks.targets[i]).item() ** 2 for i in half) / len(half) / 2
    assert algorithm.critic_loss(step, chunks)(q).item() == pytest.approx(total, rel=1e-4)
    assert q.shape[0] == 3 and not torch.equal(q[0], q[1])


def test_their_gradients_do_not_reach_the_policy_nor_its_the_critics() -> None:
    plain, other = learner(critic_rate=1.0, warmup=99), learner(critic_rate=3.0, warmup=99)
    for subject in (plain, other):
        run(subject, 0, 3)
    assert not same(weights_of(plain, "critic"), weights_of(other, "critic")) and plain.weights() == other.weights()
    cold, warm = learner(warmup=99), learner(warmup=0)
    for subject in (cold, warm):
        run(subject, 0, 1)
    assert same(weights_of(cold, "critic"), weights_of(warm, "critic")) and cold.weights() != warm.weights()


def test_they_take_several_steps_for_one_of_the_policy() -> None:
    subject = learner(critic_updates=3)
    source = Batches(drawn(0), drawn(1), drawn(2))
    subject.step(source)
    assert source.drawn == 3 and int(subject.algorithm.critic.learned) == 3
    state = subject.state().tensors
    assert state["critic/optimizer/step/members.0.0.weight"].item() == 3
    assert state["policy/optimizer/step/fast.0.weight"].item() == 1


# --- the policy -------------------------------------------------------------------------------------------------------


def test_until_the_critics_have_learned_the_policy_imitates_people() -> None:
    subject = learner(warmup=50)
    run(subject, 0, 2)
    plain = imitating(subject)
    found = run(subject, 2, 1)[0]
    assert plain.step(Batches(peoples(drawn(5))))["loss"] == found["loss"]
    assert plain.weights() == subject.weights()
    assert not {"actor_loss", "entropy", "temperature"} & found.keys()


def test_then_it_goes_down_what_it_is_told_and_so_much_of_imitation() -> None:
    subject = learner(imitation_weight=0.25, warmup=0)
    run(subject, 0, 2)
    algorithm, batch = subject.algorithm, drawn(5)
    went_down = []
    step = step_of(subject)
    step.descend = lambda network, loss: went_down.append((network, loss().item())) or went_down[-1][1]
    step.draw = lambda: batch
    metrics = algorithm.update(step)
    said = dict(went_down)
    assert [name for name, _ in went_down] == ["critic", "critic", POLICY_NETWORK, "temperature"]
    assert said[POLICY_NETWORK] == pytest.approx(metrics["actor_loss"] + 0.25 * metrics["loss"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(subject.policy.loss(peoples(batch)).item(), rel=1e-5)
    temperature = algorithm.temperature.value.item()
    wanted = -temperature * metrics["entropy"] - metrics["policy_q"]
    assert metrics["actor_loss"] == pytest.approx(wanted, rel=1e-4)
    assert said["temperature"] == pytest.approx(temperature * (metrics["entropy"] + 1.5), rel=1e-4)


def test_what_it_sees_by_is_learned_by_imitation_alone() -> None:
    mild, keen = learner(temperature=0.001, warmup=0), learner(temperature=1.0, warmup=0)
    for subject in (mild, keen):
        run(subject, 0, 3, **ALL_OWN)
    slow = [{n: one for n, one in weights_of(one, POLICY_NETWORK).items() if "/slow." in n} for one in (mild, keen)]
    assert same(*slow) and slow[0] and mild.weights() != keen.weights()


def test_a_batch_without_people_moves_the_policy_by_the_critics_alone() -> None:
    subject = learner(warmup=2)
    assert run(subject, 0, 1, **ALL_OWN)[0]["loss"] == 0.0
    before = weights_of(subject, POLICY_NETWORK)
    found = run(subject, 1, 1, **ALL_OWN)[0]
    assert found["loss"] == 0.0 and np.isfinite(found["actor_loss"])
    assert not same(weights_of(subject, POLICY_NETWORK), before)


@pytest.mark.parametrize(("wanted", "rises"), [(0.5, True), (-3.0, False)])
def test_the_temperature_follows_how_sure_the_policy_is(wanted: float, rises: bool) -> None:
    subject = learner(entropy=wanted, temperature=0.1, warmup=0)
    found = [one["temperature"] for one in run(subject, 0, 4)]
    assert found == sorted(found, reverse=not rises) and (found[-1] > 0.1) == rises


@pytest.mark.slow
def test_the_policy_does_what_succeeded_and_stays_as_unsure_as_is_asked() -> None:
    rng = np.random.default_rng(0)
    policy = GaussianPolicy(STATES_ONLY, BLIND, seed=0)
    config = Rlpd(n_step=2, warmup=200, critic_width=32, critics=3, imitation_weight=0.02, entropy=-0.5)
    subject = Learner(policy, config, replace(TRAINING, batch=64, ema_decay=0.9))
    for n in range(500):
        found = subject.step(Batches(either_way(rng), either_way(rng)))
        if n == 90:
            # one normal for two ways: it goes in between
            assert abs(ways(policy, subject).mean()) < 0.25
    assert found["policy_q"] > 0.7 and found["entropy"] == pytest.approx(-0.5, abs=0.5)
    done = ways(policy, subject)
    assert done.mean() > 0.4 and (done > 0).mean() > 0.95


def ways(policy: GaussianPolicy, subject: Learner) -> np.ndarray:
    """float[99]: the mean of the two ticks that are judged, of several chunks."""
    actor = GaussianPolicy(STATES_ONLY, policy.config, seed=1)
    actor.load(policy.save(subject.average), 1)
    observation = msgspec.structs.replace(example_observation(STATES_ONLY, 0, "go"), state=np.zeros(2, np.float32))
    latent = actor.think(observation)
    return np.array([actor.act(observation, latent, 0, seed=n).actions[:2].mean() for n in range(1, 100)])


# --- what may go wrong ------------------------------------------------------------------------------------------------


def test_critics_that_have_diverged_move_nothing_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    run(subject, 0, 4)
    with torch.no_grad():
        subject.algorithm.critic.members[1][-1].bias += 50.0
    plain = imitating(subject)
    with caplog.at_level(logging.WARNING):
        found = run(subject, 4, 2)
    for n in (9, 11):
        plain.step(Batches(peoples(drawn(n))))
    assert plain.weights() == subject.weights()
    assert all("actor_loss" not in one for one in found)
    assert len(caplog.records) == 1 and "instead of 0 to 1" in caplog.text and "algorithm.critic_rate" in caplog.text


def test_critics_that_could_not_learn_move_nothing_and_the_policy_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    run(subject, 0, 4)
    critic, plain, batch = weights_of(subject, "critic"), imitating(subject), drawn(4)
    batch["actions"][np.flatnonzero(batch["actor"] == POLICY)[0], 0] = np.nan
    with caplog.at_level(logging.WARNING):
        subject.step(Batches(batch))
    plain.step(Batches(peoples(batch)))
    assert plain.weights() == subject.weights() and same(weights_of(subject, "critic"), critic)
    assert len(caplog.records) == 1 and "what a chunk led to is no number" in caplog.text


def test_where_nothing_is_judged_it_is_hg_dagger_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    changes = {
        "outcome": np.full(IMAGES, UNJUDGED, np.int8),
        "actor": np.full(IMAGES, HUMAN, np.uint8),
        "ticks_to_end": np.zeros(IMAGES, np.int64),
    }
    plain, critic = imitating(subject), weights_of(subject, "critic")
    with caplog.at_level(logging.WARNING):
        subject.algorithm.notices.counts["drawn"] = 10**6
        run(subject, 0, 2, **changes)
    for n in range(2):
        plain.step(Batches(drawn(2 * n + 1, **changes)))
    assert plain.weights() == subject.weights() and same(weights_of(subject, "critic"), critic)
    assert len(caplog.records) == 1 and "until somebody judges" in caplog.text


@pytest.mark.parametrize(
    ("outcome", "said"), [(FAILURE, "what it did counts as worth nothing until one does"), (SUCCESS, "how soon")]
)
def test_where_all_ends_alike_that_is_said_once(outcome: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    changes = ALL_OWN | {"outcome": np.full(IMAGES, outcome, np.int8)}
    with caplog.at_level(logging.WARNING):
        for name in ("own", "own_succeeded") if outcome == SUCCESS else ("own",):
            subject.algorithm.notices.counts[name] += 10**6
        run(subject, 0, 2, **changes)
    assert len(caplog.records) == 1 and said in caplog.text


# --- a run ------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_and_a_restored_run_goes_on_bit_for_bit() -> None:
    first, second, third = learner(0), learner(0), learner(1)
    assert run(first, 0, 4) == run(second, 0, 4) != run(third, 0, 4)
    assert first.weights() == second.weights() != third.weights()
    state, expected = first.state(), run(first, 4, 4)
    assert int(state.tensors["critic/module/learned"]) == 8 and "actor_loss" in expected[-1]
    third.restore(state)
    assert run(third, 4, 4) == expected
    theirs = third.state().tensors
    assert [name for name, one in first.state().tensors.items() if not torch.equal(theirs[name], one)] == []


# --- who can be trained by it -----------------------------------------------------------------------------------------


def test_policies_that_do_not_fit_are_refused_with_the_way_out() -> None:
    said = r"algorithm 'rlpd' needs a policy that draws its actions from a distribution.*{}.*--policy"
    for policy in (FlowPolicy(SPEC, NET), TokenPolicy(REACHER, REACHING)):
        with pytest.raises(ConfigError, match=said.format(type(policy).__name__)):
            Rlpd().make(policy)
    with pytest.raises(ConfigError, match=r"'rlpd' judges 8 ticks .* have 4: set algorithm.n_step to 4 or less"):
        Rlpd().make(GaussianPolicy(SPEC, SEEING))
    with pytest.raises(ConfigError, match="'rlpd' trains on one rank"):
        Rlpd().require_ranks(2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"critics": 0}, "critics"),
        ({"critics": 2, "subset": 3}, "subset is 3; there are 2"),
        ({"critic_updates": 0}, "critic_updates"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 2.0}, "temperature"),
        ({"imitation_weight": -1.0}, "imitation_weight"),
        ({"entropy": float("nan")}, "entropy"),
        ({"gamma": 1.5}, "gamma"),
    ],
)
def test_settings_that_it_cannot_work_with_are_named(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rlpd(**settings)
