"""LWD: what a critic learns, when the policy minds it, and updates that go on bit for bit."""

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
from cloud_learner.algorithms.lwd import Lwd
from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import HUMAN, POLICY
from cloud_learner.buffer.sampling.target import Moment, StepRuns
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner, LearnerState
from policies.conformance.data import example_batch, example_observation
from policies.flow.policy import FlowPolicy
from policies.flow.shared.config import SharedConfig
from policies.flow.shared.policy import SharedFlowPolicy
from policies.interface.capabilities import GOOD
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.flow.shared.test_shared_policy import ARM
from tests.policies.tokens.test_policy import REACHER, REACHING
from wire.errors import ConfigError, InvalidDataError

torch = pytest.importorskip("torch")

SUCCESS, FAILURE, UNJUDGED = (OUTCOMES.index(name) for name in ("success", "failure", "unjudged"))
TRAINING = TrainingConfig(batch=8, learning_rate=3e-3)
IMAGES = 16
N_STEP, GAMMA = 3, 0.9
STATES_ONLY = msgspec.structs.replace(SPEC, cameras=())
STATES_NET = msgspec.structs.replace(NET, cameras=())
ALL_OWN = {"actor": np.full(IMAGES, POLICY, np.uint8)}
NORMS = ("gradient_norm_of_critic", "gradient_norm_of_reference")


def drawn(seed: int, images: int = IMAGES, **changes: object) -> dict[str, object]:
    """A batch as a dataset gives it with `n_step`: half of the episodes failed, most steps the policy's own."""
    rng = np.random.default_rng(seed)
    grouped = example_batch(SPEC, 4, seed, images=images, steps=1)
    each = ("state", "actions", "mask", "ahead", "frame_age", "later_state", "later_index")
    return (
        grouped
        | {name: grouped[name][:, 0] for name in each}
        | {
            "task": rng.integers(0, 2, images),
            "tick": np.arange(images),
            "outcome": rng.choice([SUCCESS, FAILURE], images).astype(np.int8),
            "online": np.ones(images, bool),
            "actor": rng.choice([POLICY, POLICY, HUMAN], images).astype(np.uint8),
            "ticks_to_end": rng.integers(0, 12, images),
            "next_state": rng.normal(0, 0.5, (images, 2)).astype(np.float32),
            "next_images": {name: frames[::-1].copy() for name, frames in grouped["images"].items()},
            "next_ticks": rng.integers(1, N_STEP + 1, images),
            "taken_over": np.zeros(images, bool),
            "imitable": grouped["mask"][:, 0],
            **changes,
        }
    )


def learner(seed: int = 0, training: TrainingConfig = TRAINING, net: object = NET, **settings: object) -> Learner:
    given = {"n_step": N_STEP, "gamma": GAMMA, "critic_width": 16, "warmup": 2, "matched": 6, **settings}
    return Learner(FlowPolicy(SPEC, net, seed=0), Lwd(**given), training, seed)


def run(subject: Learner, first: int, count: int, **changes: object) -> list[dict[str, float]]:
    return [subject.step(Batches(drawn(n, **changes))) for n in range(first, first + count)]


def weights_of(subject: Learner, network: str) -> dict[str, torch.Tensor]:
    return {n: one.clone() for n, one in subject.state().tensors.items() if n.startswith(f"{network}/module/")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def step_of(subject: Learner) -> SimpleNamespace:
    return SimpleNamespace(average=lambda name: subject.networks[name].average)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_everybodys_steps_are_drawn_with_what_came_after_and_the_policys_once_they_are_judged() -> None:
    needs = Lwd(n_step=5, gamma=0.9, own_weight=0.25, online_share=0.3).needs()
    assert (needs.n_step, needs.gamma, needs.target.mix.online) == (5, 0.9, 0.3)
    one = np.ones(1, np.int8)

    def weight(actor: int, outcome: int) -> float:
        runs = StepRuns(actor * one.view(np.uint8), one, one < 0, outcome * one, one * np.nan, one)
        return needs.target.weights(runs, Moment(1))[0]

    assert [weight(POLICY, outcome) for outcome in (-1, SUCCESS, FAILURE, UNJUDGED)] == [0, 0.25, 0.25, 0]
    assert [weight(HUMAN, outcome) for outcome in (-1, FAILURE)] == [1, 1]


# --- the critic -------------------------------------------------------------------------------------------------------


def test_the_critic_learns_of_a_chunk_what_a_loop_over_the_batch_says() -> None:
    subject = learner(level=0.8, taken_over_worth=0.125)
    run(subject, 0, 4)
    batch = drawn(9, images=40)
    batch["outcome"][:6] = (-1, -1, -1, UNJUDGED, UNJUDGED, UNJUDGED)
    batch["ticks_to_end"][:6] = (-1, -1, -1, 0, 2, 8)
    batch["next_ticks"][:6] = (3, 1, 0, 1, 3, 3)
    batch["next_ticks"][30:] = 0
    batch["actor"][26:32], batch["taken_over"][26:32] = (POLICY, HUMAN, POLICY) * 2, True
    batch["mask"][7, 1:] = 0
    step, policy = step_of(subject), subject.policy
    with torch.no_grad():
        algorithm = subject.algorithm
        usable, found = algorithm.judge(step, batch, algorithm.features(step, batch), read_outcomes(batch, (40, 1)))
    reference, critic = step.average("reference"), step.average("critic")
    expected, rows = [], []
    for i in range(40):
        left, known = int(batch["ticks_to_end"][i]), batch["outcome"][i] in (SUCCESS, FAILURE)
        one = select_rows(batch, np.array([i]))
        later = one | {"state": one["next_state"], "images": one["next_images"]}
        actions = batch["actions"][i].copy()
        if i == 7:
            actions[1:] = actions[0]
        if batch["taken_over"][i] and batch["actor"][i] == POLICY:
            target = 0.125
        elif 0 <= left < N_STEP:
            if not known:
                continue
            target = GAMMA**left if batch["outcome"][i] == SUCCESS else 0.0
        elif batch["next_ticks"][i] == 0:
            continue
        else:
            with torch.no_grad():
                comes = algorithm.critic.what_comes(policy.features(later, reference)[0], 0.8).item()
            target = GAMMA ** int(batch["next_ticks"][i]) * comes
        with torch.no_grad():
            features = policy.features(one, reference)[0]
            chunk = torch.from_numpy(actions[:N_STEP].reshape(1, -1))
            lowest = min(member(torch.cat([features, chunk], -1)) for member in critic.members)
        expected.append((target, lowest.item()))
        rows.append(i)
    assert np.flatnonzero(usable).tolist() == rows and 10 < len(rows) < 38
    torch.testing.assert_close(found.targets, torch.tensor([one for one, _ in expected]))
    torch.testing.assert_close(algorithm.lowest(step, found), torch.tensor([one for _, one in expected]))


def test_its_gradients_reach_neither_policy_nor_reference() -> None:
    plain, other = learner(critic_rate=1.0, warmup=99), learner(critic_rate=3.0, warmup=99)
    for subject in (plain, other):
        run(subject, 0, 3)
    assert not same(weights_of(plain, "critic"), weights_of(other, "critic"))
    assert plain.weights() == other.weights()


# --- who learns what --------------------------------------------------------------------------------------------------


def imitating(subject: Learner) -> Learner:
    """An HG-DAgger run that goes on from the policy as it is."""
    plain = Learner(FlowPolicy(SPEC, NET, seed=0), HGDagger(), TRAINING)
    policys = {name: one for name, one in subject.state().tensors.items() if name.startswith("policy/")}
    plain.restore(LearnerState(policys, subject.state().meta))
    return plain


def peoples(batch: dict[str, object]) -> dict[str, object]:
    return select_rows(batch, np.flatnonzero(batch["actor"] == HUMAN))


def test_until_the_critic_has_learned_the_policy_imitates_people_and_the_reference_is_a_copy() -> None:
    subject = learner(warmup=50)
    run(subject, 0, 3)
    plain = imitating(subject)
    own_reference = weights_of(subject, POLICY_NETWORK)
    found = run(subject, 3, 1)[0]
    assert plain.step(Batches(peoples(drawn(3))))["loss"] == found["loss"]
    assert plain.weights() == subject.weights()
    assert {n.split("/", 2)[2]: one for n, one in weights_of(subject, "reference").items()}.keys() == {
        n.split("/", 2)[2] for n in own_reference
    }
    assert all(
        torch.equal(one, own_reference[name.replace("reference/", "policy/")])
        for name, one in weights_of(subject, "reference").items()
    )
    assert "matching_loss" not in found and "reference_loss" not in found


def test_steps_that_say_nothing_of_the_policys_own_do_not_warm_the_critic_up() -> None:
    subject = learner()
    run(subject, 0, 5, actor=np.full(IMAGES, HUMAN, np.uint8))
    assert int(subject.algorithm.critic.learned) == 0
    run(subject, 5, 5)
    assert int(subject.algorithm.critic.learned) == 5


def test_then_the_policy_follows_the_critic_and_the_reference_people_alone() -> None:
    mild, keen = learner(temperature=1.0), learner(temperature=0.01)
    for subject in (mild, keen):
        run(subject, 0, 2)
    assert mild.weights() == keen.weights()
    start = {n.replace("policy/", "reference/"): one for n, one in weights_of(mild, POLICY_NETWORK).items()}
    found = [run(subject, 2, 3)[0] for subject in (mild, keen)]
    assert mild.weights() != keen.weights()
    assert same(weights_of(mild, "reference"), weights_of(keen, "reference"))
    assert not same(weights_of(mild, "reference"), start), "it learns"
    assert 0 < found[0]["pull"] < found[1]["pull"] <= 1.0 + 1e-6
    assert found[0]["reference_loss"] > 0 and found[0]["matching_loss"] > 0


def test_the_policy_goes_down_what_the_critic_asks_and_so_much_of_imitation() -> None:
    subject = learner(imitation_weight=0.25)
    went_down = []
    step = SimpleNamespace(descend=lambda network, loss: went_down.append((network, loss().item())))
    matching = lambda: torch.tensor(2.0)  # noqa: E731
    for taught, asked in ((peoples(drawn(0)), matching), (peoples(drawn(0)), None), (None, matching)):
        metrics: dict[str, float] = {}
        torch.manual_seed(3)
        subject.algorithm._improve(step, taught, asked, metrics)
        wanted = 0.0 if asked is None else 2.0 + 0.25 * metrics["loss"]
        assert went_down[-1] == (POLICY_NETWORK, pytest.approx(wanted or metrics["loss"]))
        assert (metrics["loss"] > 0) == (taught is not None) and metrics.get("matching_loss") == (asked and 2.0)
    assert len(went_down) == 3


def test_so_many_steps_are_matched_and_a_policy_that_is_told_is_told_good() -> None:
    subject = learner(net=msgspec.structs.replace(NET, advantage=True), matched=5)
    run(subject, 0, 2)
    asked, plain = [], subject.policy.conditioning
    subject.policy.conditioning = lambda batch, module=None: asked.append(batch) or plain(batch, module)
    assert "matching_loss" in run(subject, 2, 1)[0]
    told = [batch["advantage"] for batch in asked if "advantage" in batch]
    assert len(told) == 3 and all(one.tolist() == [GOOD] * 5 for one in told)
    assert len({tuple(batch["tick"]) for batch in asked if "advantage" in batch}) == 1, "the same steps"


def test_the_pull_is_towards_what_q_says_and_never_out_of_range() -> None:
    subject = learner(temperature=0.5, largest_pull=100.0)
    run(subject, 0, 4)
    step, features = step_of(subject), torch.randn(5, 1, subject.policy.feature_width)
    end = torch.randn(5, 1, 8)
    found = subject.algorithm.pull(step, features, end)
    critic = step.average("critic")
    inside = end.clamp(-1, 1)

    def mean_q(actions: torch.Tensor) -> torch.Tensor:
        return critic.q(features, actions[..., : 2 * N_STEP]).mean(0).sum()

    gradient = torch.autograd.functional.jacobian(mean_q, inside)
    outside = 0
    for sample in range(5):
        for number in range(8):
            x, slope = end[sample, 0, number].item(), gradient[sample, 0, number].item()
            beyond = abs(x) >= 1 and slope * x > 0
            outside += beyond
            assert found[sample, 0, number].item() == pytest.approx(0.0 if beyond else -slope / 0.5, abs=1e-6)
    assert outside and not found[..., 2 * N_STEP :].any() and found.any()


def test_the_pull_is_bounded() -> None:
    subject = learner(temperature=1e-6, largest_pull=0.5)
    run(subject, 0, 4)
    found = subject.algorithm.pull(
        step_of(subject), torch.randn(5, 1, subject.policy.feature_width), torch.zeros(5, 1, 8)
    )
    torch.testing.assert_close(found.square().mean(-1).sqrt(), torch.full((5, 1), 0.5))


def either_way(rng: np.random.Generator) -> dict[str, object]:
    """A batch in which everybody goes either way, and those who went right succeeded."""
    way = rng.choice([-0.6, 0.6], 64).astype(np.float32)
    actions = np.broadcast_to(way[:, None, None], (64, 4, 2)) + rng.normal(0, 0.05, (64, 4, 2))
    state = rng.normal(0, 0.1, (64, 2)).astype(np.float32)
    return {
        "images": {},
        "next_images": {},
        "instructions": ["go"] * 64,
        "state": state,
        "next_state": state,
        "actions": actions.astype(np.float32),
        "mask": np.ones((64, 4), np.float32),
        "outcome": np.where(way > 0, SUCCESS, FAILURE).astype(np.int8),
        "online": np.ones(64, bool),
        "actor": rng.choice([POLICY, HUMAN], 64).astype(np.uint8),
        "ticks_to_end": np.ones(64, np.int64),
        "next_ticks": np.full(64, 2),
        "taken_over": np.zeros(64, bool),
        "imitable": np.ones((64, 4), np.float32),
    }


def means(policy: FlowPolicy, module: torch.nn.Module) -> np.ndarray:
    """float[199]: the mean of what is done by `module`, of several samples."""
    actor = FlowPolicy(STATES_ONLY, policy.config, seed=1)
    actor.load(policy.save(module), 1)
    observation = example_observation(STATES_ONLY, 0, "go")
    observation = msgspec.structs.replace(observation, state=np.zeros(2, np.float32))
    latent = actor.think(observation)
    return np.array([actor.act(observation, latent, 0, seed=n).actions.mean() for n in range(1, 200)])


@pytest.mark.slow
def test_the_policy_does_more_of_what_succeeded() -> None:
    rng = np.random.default_rng(0)
    policy = FlowPolicy(STATES_ONLY, STATES_NET, seed=0)
    config = Lwd(n_step=2, warmup=150, matched=32, critic_width=32, temperature=0.1)
    subject = Learner(policy, config, replace(TRAINING, batch=64))
    for _ in range(600):
        subject.step(Batches(either_way(rng)))
    # of eight seeds 0.48 to 0.54 and 0.84 to 0.94
    assert 0.3 < np.mean(means(policy, subject.networks["reference"].average) > 0) < 0.7
    assert np.mean(means(policy, subject.average) > 0) > 0.7


# --- what may go wrong ------------------------------------------------------------------------------------------------


def test_a_critic_that_has_diverged_moves_nothing_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    run(subject, 0, 4)
    with torch.no_grad():
        subject.algorithm.critic.members[0][-1].bias += 50.0
    plain = imitating(subject)
    with caplog.at_level(logging.WARNING):
        found = run(subject, 4, 2)
    for n in (4, 5):
        plain.step(Batches(peoples(drawn(n))))
    assert plain.weights() == subject.weights()
    assert all("matching_loss" not in one for one in found)
    assert len(caplog.records) == 1 and "instead of 0 to 1" in caplog.text and "algorithm.critic_rate" in caplog.text


def test_a_critic_that_could_not_learn_moves_nothing_and_the_policy_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    run(subject, 0, 4)
    critic, plain = weights_of(subject, "critic"), imitating(subject)
    batch = drawn(4)
    batch["actions"][np.flatnonzero(batch["actor"] == POLICY)[0], 0] = np.nan
    with caplog.at_level(logging.WARNING):
        subject.step(Batches(batch))
        subject.step(Batches(batch))
    for _ in range(2):
        plain.step(Batches(peoples(batch)))
    assert plain.weights() == subject.weights() and same(weights_of(subject, "critic"), critic)
    assert len(caplog.records) == 1 and "what a chunk led to is no number" in caplog.text


def test_a_slope_without_bounds_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    run(subject, 0, 4)
    with torch.no_grad():
        subject.networks["critic"].average.members[0][0].weight.fill_(float("inf"))
    batch = drawn(4) | {"next_ticks": np.zeros(IMAGES, np.int64), "ticks_to_end": np.full(IMAGES, 9)}
    with caplog.at_level(logging.WARNING):
        found = subject.step(Batches(batch))
    assert found.keys() == {"own_share", "loss", "reference_loss", "gradient_norm", *NORMS} and found["loss"] > 0
    assert len(caplog.records) == 1 and "no gradient" in caplog.text


def test_a_person_s_step_that_is_no_number_is_refused_as_by_others() -> None:
    subject = learner()
    run(subject, 0, 4)
    before = weights_of(subject, POLICY_NETWORK)
    batch = drawn(4)
    batch["actions"][np.flatnonzero(batch["actor"] == HUMAN)[0], 0] = np.nan
    with pytest.raises(InvalidDataError, match="was not applied: the loss is nan"):
        subject.step(Batches(batch))
    assert same(weights_of(subject, POLICY_NETWORK), before)


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
        run(subject, 0, 3, **changes)
    for n in range(3):
        plain.step(Batches(drawn(n, **changes)))
    assert plain.weights() == subject.weights() and same(weights_of(subject, "critic"), critic)
    assert len(caplog.records) == 1 and "until somebody judges" in caplog.text


@pytest.mark.parametrize(
    ("outcome", "said"), [(FAILURE, "what it did counts as worth nothing until one does"), (SUCCESS, "how soon")]
)
def test_where_all_ends_alike_that_is_said_once(outcome: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    subject = learner()
    with caplog.at_level(logging.WARNING):
        run(subject, 0, 2, **ALL_OWN, outcome=np.full(IMAGES, outcome, np.int8))
        for name in ("own", "own_succeeded") if outcome == SUCCESS else ("own",):
            subject.algorithm.notices.counts[name] += 10**6
        run(subject, 2, 2, **ALL_OWN, outcome=np.full(IMAGES, outcome, np.int8))
    assert len(caplog.records) == 1 and said in caplog.text


def test_a_batch_without_people_moves_the_policy_by_the_critic_alone() -> None:
    subject = learner()
    assert run(subject, 0, 1, **ALL_OWN)[0]["loss"] == 0.0
    first = subject.weights()
    run(subject, 1, 3)
    before = weights_of(subject, POLICY_NETWORK)
    found = run(subject, 4, 1, **ALL_OWN)[0]
    assert found["matching_loss"] > 0 and "reference_loss" not in found and first != subject.weights()
    assert not same(weights_of(subject, POLICY_NETWORK), before)


# --- a run ------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes() -> None:
    first, second, third = learner(0), learner(0), learner(1)
    assert run(first, 0, 6) == run(second, 0, 6) != run(third, 0, 6)
    assert first.weights() == second.weights() != third.weights()


@pytest.mark.parametrize("warmup", [2, 8])
def test_a_restored_run_goes_on_bit_for_bit(warmup: int) -> None:
    """Also one that was saved before the policy minds the critic."""
    first = learner(warmup=warmup)
    run(first, 0, 6)
    state = first.state()
    assert int(state.tensors["critic/module/learned"]) == 6
    expected = run(first, 6, 6)
    assert "matching_loss" in expected[-1]
    second = learner(seed=5, warmup=warmup)
    run(second, 90, 3)
    second.restore(state)
    assert run(second, 6, 6) == expected
    theirs = second.state().tensors
    assert [name for name, one in first.state().tensors.items() if not torch.equal(theirs[name], one)] == []


def test_statistics_that_come_later_are_the_references_too() -> None:
    subject = learner()
    subject.policy.module.normalizer.fit(np.random.default_rng(0).normal(2, 1, (20, 2)).astype(np.float32))
    run(subject, 0, 5)
    mean = subject.policy.module.normalizer.mean
    assert mean.abs().min() > 1
    for network in (subject.algorithm.reference, subject.networks["reference"].average, subject.average):
        assert torch.equal(network.normalizer.mean, mean)


def test_what_is_frozen_is_there_once() -> None:
    policy = FlowPolicy(SPEC, NET, seed=0)
    policy.module.slow.requires_grad_(False)
    subject = Learner(policy, Lwd(n_step=N_STEP, warmup=1, matched=4, critic_width=16), TRAINING)
    run(subject, 0, 4)
    pairs = zip(subject.algorithm.reference.slow.parameters(), policy.module.slow.parameters(), strict=True)
    assert all(one is other for one, other in pairs)


# --- who can be trained by it -----------------------------------------------------------------------------------------


def test_policies_that_do_not_fit_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"algorithm 'lwd' needs a policy that makes actions by a flow.*TokenPolicy"):
        Lwd().make(TokenPolicy(REACHER, REACHING))
    with pytest.raises(ConfigError, match=r"'lwd' judges 8 ticks .* have 4: set algorithm.n_step to 4 or less"):
        Lwd().make(FlowPolicy(SPEC, NET))
    shared = SharedConfig(state_dim=6, action_dim=5, horizon=8, capacity=2)
    with pytest.raises(ConfigError, match=r"robots of one shape.*--algorithm hg-dagger"):
        Lwd().make(SharedFlowPolicy(ARM, shared))


def test_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="'lwd' trains on one rank"):
        Lwd().require_ranks(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_step", 0),
        ("gamma", 1.5),
        ("level", 0),
        ("temperature", 0),
        ("warmup", -1),
        ("imitation_weight", 0),
        ("matched", 0),
        ("recovery_weight", float("inf")),
        ("online_share", 1.5),
    ],
)
def test_settings_that_it_cannot_work_with_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Lwd(**{field: value})
