"""The transformer as the fast path: the small network's contract, tokens, advantages, and that it learns."""

import msgspec
import numpy as np
import pytest
import torch

from policies.common.runtime import Runtime
from policies.common.weights import trainable_state_dict
from policies.conformance.check import check_policy, example_batch, example_observation
from policies.flow.config import AttentionPoolerConfig, Transformer
from policies.flow.networks.fast import Conditioning
from policies.flow.networks.network import FlowNetwork
from policies.flow.policy import FlowPolicy
from policies.interface.capabilities import BAD, GOOD, UNKNOWN
from policies.interface.trainable import FinetuneConfig, Lora
from tests.policies.flow.test_offsets import chunk
from tests.policies.flow.test_strategies import jumps, train
from tests.samples import states_only
from wire.errors import ConfigError, InvalidDataError, PolicyError

MIDDLE, HALF = np.float32([0, 5]), np.float32([2, 5])
TOKENS = {"transformer": Transformer(32, 2, 2), "pooler": AttentionPoolerConfig(queries=4, width=16, inner=16, heads=2)}


def act(policy, observations):
    """float32[n, H, da]: a chunk for each observation."""
    return np.stack([policy.act(seen, policy.think(seen), 0).actions for seen in observations])


@pytest.fixture
def net(seeing_net):
    return msgspec.structs.replace(seeing_net, **TOKENS)


@pytest.fixture
def full(net):
    return msgspec.structs.replace(net, max_offset=6, prefix=True, residual=True, advantage=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_offset": 6},
        {"max_offset": 6, "prefix": True, "residual": True, "ahead": (2, 4)},
        {"advantage": True, "guidance": 1.5, "predict": "action"},
        {"pooler": AttentionPoolerConfig(4, 16, 16, 2, layers=1)},
        {"transformer": None},
        {"transformer": None, "pooler": None, "advantage": True, "guidance": 2.0},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.slow
def test_every_option_conforms(seeing, net, options):
    config = msgspec.structs.replace(net, **options)
    checks = check_policy(lambda: FlowPolicy(seeing, config, seed=3))
    assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


@pytest.mark.parametrize("runtime", [Runtime(dtype="bfloat16"), Runtime(int8=True)], ids=["bfloat16", "int8"])
def test_what_acts_faster_acts_almost_alike_and_is_brought_up_to_date(seeing, full, runtime):
    wide = msgspec.structs.replace(full, transformer=Transformer(64, 2, 2), pooler=AttentionPoolerConfig(4, 64, 64, 2))
    plain, quick = FlowPolicy(seeing, wide), FlowPolicy(seeing, wide, runtime=runtime)
    assert plain.save() == quick.save()
    observation = example_observation(seeing)
    for weights, version in ((None, 0), (FlowPolicy(seeing, wide, seed=1).save(), 1)):
        if weights is not None:
            plain.load(weights, version)
            quick.load(weights, version)
        ours, theirs = chunk(plain, plain.think(observation)), chunk(quick, quick.think(observation))
        difference = np.abs((ours - theirs) / HALF).max()
        assert 0 < difference < 0.05
    other = chunk(FlowPolicy(seeing, wide), msgspec.structs.replace(plain.think(observation), version=0))
    assert np.abs((other - theirs) / HALF).max() > 0.05


def test_one_step_is_the_same_in_training_and_in_sampling(seeing, full):
    """What is prepared once gives what the whole network gives, for every step and row."""
    net = FlowNetwork(full)
    torch.manual_seed(0)
    b, steps = 3, full.euler_steps
    latent, state, noisy = torch.randn(b, net.slow.width), torch.randn(b, 2), torch.randn(b, 8)
    age, advantage = torch.tensor([[0.0], [2.0], [7.0]]), torch.tensor([UNKNOWN, BAD, GOOD])
    committed = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    prepared = net.fast.prepare(Conditioning(latent, state, age, committed, advantage), steps)
    for step in range(steps):
        time = torch.full((b, 1, 1), step / steps)
        given = Conditioning(latent, state[:, None], age[:, None], committed[:, None], advantage[:, None])
        whole = net.fast(given, noisy[:, None], time)
        assert torch.allclose(net.fast.step(prepared, step, noisy), whole[:, 0], atol=1e-5)


def test_committed_actions_are_at_time_one_whatever_time_it_is(seeing, full):
    net = FlowNetwork(full)
    torch.manual_seed(0)
    latent, state, noisy = torch.randn(1, net.slow.width), torch.randn(1, 1, 2), torch.randn(1, 1, 8)
    committed = torch.ones(1, 1, 4)
    given = Conditioning(latent, state, None, committed)
    early, late = (net.fast(given, noisy, torch.full((1, 1, 1), t)) for t in (0.1, 0.9))
    assert torch.equal(early, late)
    free = [net.fast(Conditioning(latent, state), noisy, torch.full((1, 1, 1), t)) for t in (0.1, 0.9)]
    assert not torch.allclose(*free)


def test_no_word_and_no_camera_still_make_a_latent(blind, blind_net):
    policy = FlowPolicy(blind, msgspec.structs.replace(blind_net, **TOKENS))
    latents = [policy.think(example_observation(blind, task=task)).data for task in ("", "go left")]
    assert np.isfinite(latents).all() and not np.allclose(*latents)


# --- advantages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [TOKENS, {}], ids=["transformer", "mlp"])
@pytest.mark.slow
def test_a_policy_told_which_actions_were_good_does_those(blind, blind_net, tokens):
    """Half of the samples go up and are good, half go down and are not."""
    config = msgspec.structs.replace(blind_net, **tokens, advantage=True)
    rng = np.random.default_rng(0)

    def batches():
        good = rng.random(64) < 0.5
        side = np.where(good, 0.6, -0.6)[:, None, None]
        return {
            "state": rng.uniform(-1, 1, (64, 2)).astype(np.float32),
            "actions": (side * HALF + MIDDLE).repeat(4, 1).astype(np.float32),
            "mask": np.ones((64, 4), bool),
            "advantage": np.where(good, GOOD, BAD),
            "instructions": ["go"] * 64,
        }

    policy = train(FlowPolicy(blind, config), batches, steps=120)
    observations = [example_observation(blind, seed, "go") for seed in range(8)]

    def means(policy):
        return np.array([((actions - MIDDLE) / HALF).mean() for actions in act(policy, observations)])

    assert means(policy).min() > 0.1
    unguided = FlowPolicy(blind, msgspec.structs.replace(config, guidance=0.0))
    unguided.module.load_state_dict(policy.module.state_dict())
    assert means(unguided).min() < 0  # not told, it does either


def test_advantages_that_do_not_fit_are_named(seeing, full):
    policy, batch = FlowPolicy(seeing, full), example_batch(seeing, 4)
    for given, says in ((np.full((4, 2), 3), "advantage must be in 0..2"), (np.zeros(3, int), "advantage has shape")):
        with pytest.raises(InvalidDataError, match=says):
            policy.loss(batch | {"advantage": given})
    losses = []
    for given in (
        {},
        {"advantage": np.full(4, GOOD)},
        {"advantage": np.full((4, 2), GOOD)},
        {"advantage": np.zeros(4)},
    ):
        torch.manual_seed(0)
        losses.append(policy.loss(batch | given).item())
    assert losses[0] == losses[1] == losses[2] != losses[3]


# --- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predict", ["velocity", "action"])
@pytest.mark.slow
def test_the_transformer_learns_to_imitate(blind, blind_net, predict):
    goals = {"go left": np.float32([-0.8, 0.1]), "go right": np.float32([0.8, -0.2])}

    def expert(state, text):
        step = np.clip(goals[text] - state, -1, 1)
        return np.tile(step * HALF + MIDDLE, (4, 1)).astype(np.float32)

    rng = np.random.default_rng(0)

    def batches():
        texts, state = [*goals] * 32, rng.uniform(-1, 1, (64, 2)).astype(np.float32)
        return {
            "state": state,
            "actions": np.stack([expert(s, t) for s, t in zip(state, texts, strict=True)]),
            "mask": np.ones((64, 4), bool),
            "instructions": texts,
        }

    def error():
        found = []
        for text in goals:
            observations = [example_observation(blind, seed, text) for seed in range(8)]
            wanted = [expert(observation.state, text) for observation in observations]
            found.append(np.abs((act(policy, observations) - wanted) / HALF).mean())
        return np.mean(found)

    policy = FlowPolicy(blind, msgspec.structs.replace(blind_net, predict=predict, **TOKENS))
    policy.set_normalization(states_only(np.random.default_rng(0).uniform(-1, 1, (500, 2))))
    before = error()
    train(policy, batches, 80)
    assert error() < 0.6 * before


@pytest.mark.slow
def test_it_finds_a_thing_in_the_picture(seeing, net):
    """A bright patch; the actions say where it is."""
    rng = np.random.default_rng(0)

    def pictures(count):
        places = rng.integers(0, 12, (count, 2))
        images = rng.integers(0, 60, (count, 16, 16, 3)).astype(np.uint8)
        for image, (x, y) in zip(images, places, strict=True):
            image[y : y + 4, x : x + 4] = 255
        wanted = ((places / 5.5 - 1) * HALF + MIDDLE)[:, None].repeat(4, 1).astype(np.float32)
        return images, wanted

    def batches():
        images, wanted = pictures(32)
        return {
            "images": {"front": images},
            "state": rng.uniform(-1, 1, (32, 2)).astype(np.float32),
            "actions": wanted,
            "mask": np.ones((32, 4), bool),
            "instructions": ["there"] * 32,
        }

    wide = msgspec.structs.replace(net, predict="action", pooler=AttentionPoolerConfig(4, 32, 32, 2))
    policy = train(FlowPolicy(seeing, wide), batches, steps=120, rate=2e-3)
    images, wanted = pictures(16)
    seen = [example_observation(seeing, seed, "there") for seed in range(16)]
    seen = [
        msgspec.structs.replace(o, images={"front": msgspec.structs.replace(o.images["front"], image=image)})
        for o, image in zip(seen, images, strict=True)
    ]
    error = np.abs((act(policy, seen) - wanted) / HALF).mean()
    assert error < 0.2  # somewhere in the middle would be 0.5


@pytest.mark.slow
def test_a_trained_prefix_goes_on_across_the_seam(blind, blind_net):
    config = msgspec.structs.replace(blind_net, **TOKENS, max_offset=3, prefix=True)
    rng = np.random.default_rng(0)

    def batches():
        side = rng.choice([-0.7, 0.7], (64, 1, 1))
        return {
            "state": rng.uniform(-1, 1, (64, 2)).astype(np.float32),
            "actions": (side * HALF + MIDDLE).repeat(4, 1).astype(np.float32),
            "mask": np.ones((64, 4), bool),
            "frame_age": np.zeros(64, np.float32),
            "instructions": ["go"] * 64,
        }

    policy = train(FlowPolicy(blind, config), batches, steps=120)
    (free, _), (trained, side), (guided, _) = (jumps(policy, kind) for kind in (None, False, True))
    assert free > 0.5
    assert trained < 0.5 * free and side > 0.75
    assert guided < free


# --- what is trained, what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_alone_travel(seeing, net):
    """On a base that both sides have: random weights of a seed that is the same for all of them."""
    make = lambda seed=0: FlowPolicy(seeing, net, seed, training=FinetuneConfig(lora=Lora(rank=2)))  # noqa: E731
    policy, robot = make(), make(4321)
    robot._seeds.manual_seed(0)
    names = trainable_state_dict(policy.module)
    assert all("lora" in name or name.startswith("normalizer") for name in names)
    assert len(policy.save()) < 0.4 * len(FlowPolicy(seeing, net).save())
    train(policy, lambda: example_batch(seeing, 4), steps=3)
    robot.load(policy.save(), 1)
    latent = robot.think(example_observation(seeing))
    mine = msgspec.structs.replace(latent, version=0)
    assert np.array_equal(chunk(policy, mine), chunk(robot, latent))
    assert not np.array_equal(chunk(make(), mine), chunk(robot, latent))
    base = robot.module.slow.words.weight
    assert not base.requires_grad
    robot.load(policy.save(), 2)
    assert robot.module.slow.words.weight is base  # what is frozen is not copied
    other = make()
    with torch.no_grad():
        other.module.slow.words.weight += 1
    with pytest.raises(PolicyError, match="base"):
        other.load(policy.save(), 1)


def test_first_weights_are_those_of_the_seed_unless_something_is_frozen(seeing, net):
    make = lambda seed, **training: FlowPolicy(seeing, net, seed, training=FinetuneConfig(**training))  # noqa: E731
    torch.manual_seed(4321)
    assert torch.equal(make(4321).module.slow.words.weight, FlowNetwork(net).slow.words.weight)
    for training in ({"freeze": ("slow.*",)}, {"train": ("fast.*",)}, {"lora": Lora(rank=2)}):
        first, second = (make(seed, **training).module.state_dict() for seed in (0, 4321))
        differ = {name for name, tensor in first.items() if not torch.equal(tensor, second[name])}
        assert differ == {name for name in first if "lora_A" in name}


def test_a_corrector_with_adapters_is_exported_with_them(seeing, full):
    policy = FlowPolicy(seeing, full, training=FinetuneConfig(lora=Lora(rank=2, targets=("residual.*",))))
    before = policy.corrector
    train(policy, lambda: example_batch(seeing, 4), steps=3)
    after = policy.corrector
    assert len(after.weights) == 3
    assert not any(np.array_equal(old, new) for old, new in zip(before.weights, after.weights, strict=True))
    rng = np.random.default_rng(0)
    inputs = rng.normal(0, 1, (5, policy.module.residual.layers[0].in_features)).astype(np.float32)
    x = inputs
    for layer, (weight, bias) in enumerate(zip(after.weights, after.biases, strict=True)):
        x = x @ weight.T + bias
        x = x / (1 + np.exp(-x)) if layer < 2 else x
    with torch.no_grad():
        np.testing.assert_allclose(policy.module.residual.layers(torch.from_numpy(inputs)), x, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pooler": None}, "need `pooler`"),
        ({"transformer": Transformer(30, 2, 4)}, "heads divide its width"),
        ({"transformer": Transformer(32, 0, 2)}, r"transformer\.layers 0: Expected `int` >= 1"),
        ({"pooler": AttentionPoolerConfig(0, 16, 16, 2)}, r"pooler\.queries 0: Expected `int` >= 1"),
        ({"pooler": AttentionPoolerConfig(4, 16, 16, 3)}, "heads divide `inner`"),
        ({"guidance": 2.0}, "guidance 2.0 needs `advantage`"),
        ({"guidance": -1.0, "advantage": True}, "guidance -1.0: Expected"),
    ],
)
def test_sizes_that_cannot_work_are_refused(seeing, net, change, says):
    with pytest.raises(ConfigError, match=says):
        FlowPolicy(seeing, msgspec.structs.replace(net, **change))


def test_data_of_another_robot_is_refused(seeing, net):
    policy, batch = FlowPolicy(seeing, net), example_batch(seeing, 4)
    policy.loss(batch | {"spec_hash": seeing.hash})
    for given in ("0123", [seeing.hash, "0123"]):
        with pytest.raises(
            InvalidDataError, match=f"spec_hash 0123, but this policy is for robot 'seeing' with {seeing.hash}"
        ):
            policy.loss(batch | {"spec_hash": given})
