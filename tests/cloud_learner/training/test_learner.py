"""The learner: it learns, is deterministic, refuses NaN, and goes on after a restore as if nothing had happened."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.config import LossPrecision, TrainingConfig
from cloud_learner.training.learner import Learner
from policies.common.normalizer import Normalizer
from policies.common.weights import Header, base_sha256, load_published, pack_module, unpack
from policies.conformance.check import example_batch, example_observation
from policies.flow.config import CameraEncoderConfig, Conv, FlowConfig
from policies.flow.policy import FlowPolicy
from policies.interface.trainable import FinetuneConfig, Lora, apply_finetuning
from tests.cloud_learner.training.batches import Batches
from tests.samples import states_only
from wire.errors import ConfigError, InvalidDataError, PolicyError
from wire.types import CameraSpec, Dimension, RobotSpec

SPEC = RobotSpec(
    "small",
    (Dimension("x", "m", -1.0, 1.0), Dimension("y", "m", -1.0, 1.0)),
    (Dimension("dx", "cm", -1.0, 1.0), Dimension("dy", "cm", -1.0, 1.0)),
    (CameraSpec("front", 16, 16, 20.0),),
    20.0,
)
NET = FlowConfig(
    state_dim=2,
    action_dim=2,
    horizon=4,
    cameras=(CameraEncoderConfig("front", 16, 16),),
    stem=(Conv(8, 4, 2),),
    points=4,
    width=32,
    layers=2,
)
CONFIG = HGDagger(draws=2)
TRAINING = TrainingConfig(batch=4, ticks_per_frame=2, shift_px=2, learning_rate=3e-3, warmup_steps=5)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learner(seed=0, training=TRAINING, net=NET):
    return Learner(FlowPolicy(SPEC, net, seed=0), CONFIG, training, seed)


def run(learner, first, count):
    return [learner.step(Batches(example_batch(SPEC, 4, seed)))["loss"] for seed in range(first, first + count)]


def snapshot(learner):
    return {name: tensor.clone() for name, tensor in learner.state().tensors.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


@pytest.mark.slow
def test_it_learns_a_batch_by_heart_and_the_average_follows():
    subject = learner(training=dataclasses.replace(TRAINING, shift_px=0, ema_decay=0.9, learning_rate=1e-2))
    batch = example_batch(SPEC, 4, images=2, steps=1)
    batch["actions"][:] = batch["actions"][:, :, :1]
    losses = [subject.step(Batches(batch))["loss"] for _ in range(400)]
    assert np.mean(losses[-20:]) < 0.3 * np.mean(losses[:5])
    robot = FlowPolicy(SPEC, NET, seed=5)
    robot.load(subject.weights(), 1)
    for i in range(2):
        observation = example_observation(SPEC, 1 + i, batch["instructions"][i])
        actions = robot.act(observation, robot.think(observation), 0).actions
        assert np.abs(actions - batch["actions"][i, 0]).mean() < 0.2


def test_same_seed_same_bytes_another_seed_others():
    first, second, third = learner(0), learner(0), learner(1)
    assert run(first, 0, 5) == run(second, 0, 5) != run(third, 0, 5)
    assert first.weights() == second.weights() != third.weights()


def test_the_global_random_stream_does_not_matter_and_is_not_moved():
    first, second = learner(), learner()
    run(first, 0, 3)
    torch.manual_seed(77)
    expected = torch.rand(1)
    torch.manual_seed(77)
    run(second, 0, 3)
    assert torch.equal(torch.rand(1), expected)
    assert first.weights() == second.weights()


def test_restore_goes_on_bit_for_bit():
    first = learner()
    run(first, 0, 4)
    state = first.state()
    expected = run(first, 4, 4)
    second = learner(seed=9)
    run(second, 50, 2)
    second.restore(state)
    assert second.gradient_steps == 4
    assert run(second, 4, 4) == expected
    assert second.weights() == first.weights()
    assert_same(snapshot(first), snapshot(second))


def test_a_state_is_a_copy():
    subject = learner()
    run(subject, 0, 1)
    state = subject.state()
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    run(subject, 1, 1)
    assert_same(before, state.tensors)


def test_a_fresh_learner_can_be_saved_and_restored():
    first, second = learner(), learner(seed=4)
    run(second, 0, 2)
    second.restore(first.state())
    assert run(first, 0, 2) == run(second, 0, 2)


def test_statistics_fitted_before_reach_the_robots():
    policy = FlowPolicy(SPEC, NET)
    policy.set_normalization(states_only(np.random.default_rng(0).normal(2, 1, (20, 2))))
    robot = FlowPolicy(SPEC, NET)
    robot.load(Learner(policy, CONFIG, TRAINING).weights(), 1)
    assert torch.equal(robot.module.normalizer.mean, policy.module.normalizer.mean)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(value):
    subject = learner()
    run(subject, 0, 2)
    before = snapshot(subject)
    batch = example_batch(SPEC, 4)
    batch["actions"][0, 0, 0, 0] = value
    with pytest.raises(InvalidDataError, match="gradient step 2 was not applied"):
        subject.step(Batches(batch))
    assert subject.gradient_steps == 2
    assert_same(before, snapshot(subject))
    assert np.isfinite(run(subject, 2, 1)).all()


def test_a_state_of_another_network_is_refused_and_nothing_changes():
    subject = learner()
    before = snapshot(subject)
    blind = FlowPolicy(
        RobotSpec("small", SPEC.state, SPEC.action, (), 20.0),
        FlowConfig(state_dim=2, action_dim=2, horizon=4, width=32, layers=2),
    )
    with pytest.raises(PolicyError, match=r"another network: 'policy/module/slow\.encoders"):
        subject.restore(Learner(blind, CONFIG, TRAINING).state())
    with pytest.raises(PolicyError, match=r"also has 'policy/module/slow\.encoders"):
        Learner(blind, CONFIG, TRAINING).restore(
            dataclasses.replace(
                subject.state(), tensors=subject.state().tensors | Learner(blind, CONFIG, TRAINING).state().tensors
            )
        )
    assert_same(before, snapshot(subject))


def test_the_average_decays_as_configured():
    subject = learner(training=dataclasses.replace(TRAINING, ema_decay=0.5))
    start = snapshot(subject)["policy/average/fast.head.1.weight"]
    run(subject, 0, 1)
    now = snapshot(subject)
    moved = now["policy/module/fast.head.1.weight"]
    assert torch.allclose(now["policy/average/fast.head.1.weight"], torch.lerp(start, moved, 1 - 2 / 11), atol=1e-7)
    assert TRAINING.decay(10**6) == TRAINING.ema_decay


def drawn(pull, decay=1.0):
    return dataclasses.replace(TRAINING, reference_pull=pull, reference_decay=decay)


def distance(one, other):
    pairs = zip(one.policy.module.parameters(), other.policy.module.parameters(), strict=True)
    return float(sum((mine - theirs).detach().square().sum() for mine, theirs in pairs)) ** 0.5


def test_weights_are_drawn_back_to_those_the_training_began_with():
    began, free, drawn_back, held = learner(), learner(), learner(training=drawn(20.0)), learner(training=drawn(1e9))
    for one in (free, drawn_back, held):
        run(one, 1, 25)
    assert distance(held, began) < 1e-6
    assert 0.02 * distance(free, began) < distance(drawn_back, began) < 0.7 * distance(free, began)


def test_one_step_goes_back_by_the_rate_times_the_pull():
    free, drawn_back = learner(), learner(training=drawn(100.0))
    began = [one.detach().clone() for one in free.policy.module.parameters()]
    for one in (free, drawn_back):
        run(one, 1, 1)
    back = TRAINING.rate(0) * 100.0
    pairs = zip(began, free.policy.module.parameters(), drawn_back.policy.module.parameters(), strict=True)
    for first, far, near in pairs:
        torch.testing.assert_close(near.detach(), far.detach() + back * (first - far.detach()))


def test_a_reference_that_follows_lets_weights_go_further():
    began, fixed, following = learner(), learner(training=drawn(20.0)), learner(training=drawn(20.0, 0.5))
    for one in (fixed, following):
        run(one, 1, 25)
    assert distance(following, began) > 1.5 * distance(fixed, began)


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_what_weights_are_drawn_to_goes_on_bit_for_bit_and_may_come_later(decay):
    whole, first, second = (learner(training=drawn(20.0, decay)) for _ in range(3))
    run(whole, 1, 10)
    run(first, 1, 5)
    second.restore(first.state())
    run(second, 6, 5)
    assert_same(snapshot(whole), snapshot(second))
    free = learner()
    run(free, 1, 5)
    free.restore(first.state())
    later = learner(training=drawn(1e9, decay))
    later.restore(free.state())
    run(later, 6, 3)
    assert distance(later, first) < 1e-6, "what it had when it began to be drawn back"


@pytest.mark.parametrize("wrong", [{"reference_pull": -1.0}, {"reference_decay": 1.1}, {"reference_decay": -0.1}])
def test_a_pull_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(TRAINING, **wrong)


def test_bfloat16_trains_float32_weights():
    subject = learner(training=dataclasses.replace(TRAINING, precision=LossPrecision.bfloat16))
    assert np.isfinite(run(subject, 0, 3)).all()
    assert all(t.dtype == torch.float32 for t in snapshot(subject).values())


# --- a frozen base -------------------------------------------------------------------------------------------------


class Plain:
    """A policy that is nothing but a module: all that a learner asks for."""

    ticks_ahead, max_offset, history = (), 0, 0

    def __init__(self, training, seed=0):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = nn.Sequential(nn.Linear(2, 256), nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 2))
        self.module.register_buffer("seen", torch.zeros(()))
        apply_finetuning(self.module, training)

    def loss(self, batch):
        self.module.train()
        for seen in (buffer for name, buffer in self.module.named_buffers() if name == "seen"):
            seen += 1
        state = torch.from_numpy(batch["state"])
        return (self.module(state) - torch.from_numpy(batch["actions"][..., 0, :])).square().mean()

    def save(self, module=None):
        header = Header("plain", {}, SPEC, SPEC.hash)
        return pack_module(self.module if module is None else module, header)


LORA = FinetuneConfig(lora=Lora(rank=2, targets=("0", "1")))
HEAD = FinetuneConfig(train=("3.*",))


@pytest.mark.parametrize("training", [LORA, HEAD])
@pytest.mark.slow
def test_what_is_frozen_is_there_once_and_never_in_a_checkpoint(training, tmp_path):
    subject = Learner(Plain(training), CONFIG, TRAINING)
    base = {n: p.clone() for n, p in subject.policy.module.named_parameters() if not p.requires_grad}
    shared = {p.data_ptr() for p in subject.policy.module.parameters()} & {
        p.data_ptr() for p in subject.average.parameters()
    }
    assert len(shared) == len(base) > 0
    run(subject, 0, 3)
    assert all(torch.equal(p, base[n]) for n, p in subject.policy.module.named_parameters() if n in base)
    state = subject.state()
    assert not [n for n in state.tensors if n.split("/", 2)[2] in base]
    assert {"policy/module/seen", "policy/average/seen"} <= state.tensors.keys()
    path = checkpoint.save(tmp_path, state, {})
    whole = sum(p.numel() * p.element_size() for p in base.values())
    assert sum(file.stat().st_size for file in path.iterdir()) < whole / 4


@pytest.mark.parametrize("training", [LORA, HEAD, FinetuneConfig()])
@pytest.mark.slow
def test_a_frozen_base_goes_on_bit_for_bit_too_and_reaches_robots(training, tmp_path):
    first = Learner(Plain(training), CONFIG, TRAINING)
    run(first, 0, 4)
    checkpoint.save(tmp_path, first.state(), {})
    expected = run(first, 4, 4)
    second = Learner(Plain(training), CONFIG, TRAINING, seed=9)
    run(second, 50, 2)
    second.restore(checkpoint.load_newest(tmp_path).state)
    assert run(second, 4, 4) == expected
    assert second.weights() == first.weights()
    assert_same(snapshot(first), snapshot(second))
    robot = Plain(training)
    header, tensors = unpack(first.weights())
    load_published(robot.module, header, tensors)
    assert all(torch.equal(t, first.average.state_dict()[name]) for name, t in robot.module.state_dict().items())


def test_a_checkpoint_on_top_of_another_base_is_refused_and_nothing_changes():
    subject = Learner(Plain(LORA), CONFIG, TRAINING)
    before = snapshot(subject)
    with pytest.raises(PolicyError, match=r"--policy and --policy-config .*`training` options") as error:
        subject.restore(Learner(Plain(LORA, seed=1), CONFIG, TRAINING).state())
    assert base_sha256(subject.policy.module)[:12] in str(error.value)
    older = subject.state()
    del older.meta["base"]
    with pytest.raises(PolicyError, match="on top of nothing frozen"):
        subject.restore(older)
    assert_same(before, snapshot(subject))


def test_a_checkpoint_of_adapters_with_another_scale_is_refused_and_nothing_changes():
    lora = LORA.lora
    subject = Learner(Plain(FinetuneConfig(lora=msgspec.structs.replace(lora, alpha=4 * lora.alpha))), CONFIG, TRAINING)
    before = snapshot(subject)
    with pytest.raises(PolicyError, match=r"another alpha / rank.*`training` options"):
        subject.restore(Learner(Plain(LORA), CONFIG, TRAINING).state())
    assert_same(before, snapshot(subject))


class Following(Plain):
    """A linear policy on states that are normalised by statistics which follow the data."""

    def __init__(self):
        self.module = nn.Sequential(Normalizer(2, online=True), nn.Linear(2, 2))
        nn.init.zeros_(self.module[1].weight)

    def loss(self, batch):
        self.module[0].update(torch.from_numpy(batch["state"]))
        return super().loss(batch)


@pytest.mark.slow
def test_statistics_that_follow_shifting_data_travel_with_the_weights():
    subject = Learner(Following(), HGDagger(), TrainingConfig(learning_rate=0.03, warmup_steps=5, ema_decay=0.9))
    rng = np.random.default_rng(0)
    for step in range(400):
        centre = np.array([100.0, -5.0]) * step / 400
        state = rng.normal(centre, [20.0, 0.1], (32, 2)).astype(np.float32)
        wanted = (state - centre) / [20.0, 0.1]
        subject.step(Batches({"state": state, "actions": wanted[:, None].astype(np.float32)}))
    robot = Following()
    load_published(robot.module, *unpack(subject.weights()))
    with torch.inference_mode():
        state = torch.tensor([[80.0, -4.5], [120.0, -5.5]])
        assert torch.equal(robot.module(state), subject.average(state))
    statistics, own = robot.module[0], subject.policy.module[0]
    assert statistics.count == own.count == 400 * 32
    assert torch.equal(statistics.mean, own.mean) and torch.equal(statistics.std, own.std)
    assert statistics.mean.numpy() == pytest.approx([50, -2.5], rel=0.05)
    again = Learner(Following(), HGDagger(), TRAINING, seed=3)
    again.restore(subject.state())
    assert again.weights() == subject.weights()


def test_nothing_to_train_is_said():
    policy = Plain(FinetuneConfig())
    policy.module.requires_grad_(False)
    with pytest.raises(PolicyError, match="every parameter"):
        Learner(policy, CONFIG, TRAINING)
