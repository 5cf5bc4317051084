"""The token policy: that it conforms, learns, keeps its tokeniser wherever its weights go, and treats masks as said."""

import copy

import msgspec
import numpy as np
import pytest
import torch

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from policies.common.batches import hold_masked
from policies.common.runtime import Runtime
from policies.common.weights import pack, unpack
from policies.conformance.check import check_policy, example_observation
from policies.flow.config import CameraEncoderConfig, Conv
from policies.interface.policy import NormalizationData
from policies.interface.registry import defaults, make_policy, parse_policy
from policies.interface.trainable import FinetuneConfig, Lora
from policies.tokens.config import FastConfig, ResidualVQConfig, TokensConfig
from policies.tokens.network import TokenNetwork
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.training.batches import Batches
from wire.errors import ConfigError, InvalidDataError, PolicyError, SpecMismatchError, WeightsError
from wire.types import CameraSpec, CommandType, Dimension, Observation, Prefix, RobotSpec

H = 8
REACHER = RobotSpec(
    "reacher",
    tuple(Dimension(name, "m", -1.0, 1.0) for name in ("x", "y", "goal_x", "goal_y")),
    tuple(Dimension(name, "dm/step", -1.0, 1.0, CommandType.delta) for name in ("dx", "dy")),
    (),
    20.0,
)
SEEING = RobotSpec(
    "seeing",
    (Dimension("x", "m", -1.0, 1.0), Dimension("y", "m", -1.0, 1.0)),
    (Dimension("dx", "cm", -2.0, 2.0, CommandType.delta), Dimension("grip", "1", 0.0, 10.0)),
    (CameraSpec("front", 16, 16, 20.0),),
    20.0,
)
REACHING = TokensConfig(
    state_dim=4,
    action_dim=2,
    horizon=H,
    fast=FastConfig(vocabulary=128, scale=5.0),
    residual_vq=ResidualVQConfig(tokens=6, codes=32, group=2),
    max_tokens=16,
    width=48,
    layers=1,
    heads=2,
    latent_tokens=1,
)


def held(actions, mask):
    return hold_masked(torch.from_numpy(actions), torch.from_numpy(mask)).numpy()


def expert(state):
    """float32[n, H, 2]: from float32[n, 4] straight to the goal, at most a decimetre a step."""
    place, goal = state[:, :2].astype(np.float64), state[:, 2:]
    actions = []
    for _ in range(H):
        actions.append(np.clip(10 * (goal - place), -1, 1))
        place = place + actions[-1] / 10
    return np.stack(actions, 1).astype(np.float32)


def draw(count, seed):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 4)).astype(np.float32)


def batch_of(state):
    return {
        "state": state,
        "actions": expert(state),
        "mask": np.ones((len(state), H), np.float32),
        "instructions": ["reach"] * len(state),
        "frame_age": np.zeros(len(state), np.float32),
    }


def trained(config, steps, seed=0):
    policy = TokenPolicy(REACHER, config, seed)
    states = draw(1500, 1)
    policy.set_normalization(NormalizationData(states, expert(states)))
    optimizer = torch.optim.AdamW(policy.module.parameters(), 3e-3, weight_decay=1e-4)
    losses = []
    for step in range(steps):
        loss = policy.loss(batch_of(draw(96, 100 + step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return policy, losses


def left_over(policy, episodes=30, thoughts=8):
    """Mean distance to the goal after `thoughts` chunks of which half is executed, metres; a step is at most 0.1."""
    distances = []
    for state in draw(episodes, 7):
        for _ in range(thoughts):
            observation = Observation(0, state, {}, "reach")
            for action in policy.act(observation, policy.think(observation), 0).actions[: H // 2]:
                state = state.copy()
                state[:2] = np.clip(state[:2] + action / 10, -1, 1)
        distances.append(float(np.linalg.norm(state[:2] - state[2:])))
    return float(np.mean(distances))


@pytest.fixture(scope="module")
def reaching():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = trained(REACHING, 350)
    torch.set_num_threads(before)
    return made


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (REACHER, msgspec.structs.replace(REACHING, max_offset=3)),
        (REACHER, msgspec.structs.replace(REACHING, tokenizer="residual_vq", temperature=0.5)),
        (
            SEEING,
            TokensConfig(
                state_dim=2,
                action_dim=2,
                horizon=4,
                cameras=(CameraEncoderConfig("front", 16, 16),),
                stem=(Conv(8, 4, 2), Conv(8, 3, 1)),
                points=4,
            ),
        ),
    ],
)
@pytest.mark.slow
def test_it_conforms_before_it_saw_any_data(spec, config):
    checks = check_policy(lambda: TokenPolicy(spec, config, seed=3))
    assert len(checks) >= 13
    assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


@pytest.mark.parametrize(
    "training", [FinetuneConfig(freeze=("slow.*",)), FinetuneConfig(lora=Lora(rank=2))], ids=["part", "lora"]
)
@pytest.mark.slow
def test_what_was_trained_on_a_random_base_reaches_robots_of_other_seeds(training):
    config = msgspec.structs.replace(REACHING, temperature=0.5)
    policy, robot = (TokenPolicy(REACHER, config, seed, training=training) for seed in (0, 4321))
    optimizer = torch.optim.Adam([p for p in policy.module.parameters() if p.requires_grad], 1e-2)
    policy.loss(batch_of(draw(16, 0))).backward()
    optimizer.step()
    robot.load(policy.save(), 1)
    robot._seeds.manual_seed(0)
    observation = example_observation(REACHER)
    mine, its = (one.act(observation, one.think(observation), 0).actions for one in (policy, robot))
    assert np.array_equal(mine, its)


def test_first_weights_are_those_of_the_seed_where_nothing_is_frozen():
    torch.manual_seed(4321)
    expected = TokenNetwork(REACHING).state_dict()
    found = TokenPolicy(REACHER, REACHING, 4321).module.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items() if name != "packed")


@pytest.mark.slow
def test_it_conforms_with_a_fitted_tokeniser(reaching):
    weights = reaching[0].save()

    def make():
        policy = TokenPolicy(REACHER, REACHING, 3)
        policy.load(weights, 1)
        return policy

    assert [f"{c.name}: {c.detail}" for c in check_policy(make) if not c.passed] == []


@pytest.mark.slow
def test_it_learns_to_reach(reaching):
    policy, losses = reaching
    assert np.mean(losses[-20:]) < 0.7 * losses[0]
    untrained = TokenPolicy(REACHER, REACHING)
    untrained.set_normalization(NormalizationData(draw(500, 1), expert(draw(500, 1))))
    assert left_over(policy) < 0.6 * left_over(untrained)


@pytest.mark.slow
def test_the_tokeniser_goes_where_the_weights_go(reaching):
    policy, _ = reaching
    robot = TokenPolicy(REACHER, REACHING, 5)
    observation = example_observation(REACHER, 2)
    assert robot.tokenizer.to_bytes() != policy.tokenizer.to_bytes()
    robot.load(policy.save(), 4)
    assert robot.tokenizer.to_bytes() == policy.tokenizer.to_bytes()
    expected = policy.act(observation, policy.think(observation), 0).actions
    assert np.array_equal(robot.act(observation, robot.think(observation), 0).actions, expected)


@pytest.mark.parametrize("kind", ["fast", "residual_vq"])
def test_the_tokeniser_is_in_the_learners_checkpoint_and_in_its_average(kind):
    config = msgspec.structs.replace(REACHING, tokenizer=kind)
    policy = TokenPolicy(REACHER, config)
    policy.set_normalization(NormalizationData(draw(300, 1), expert(draw(300, 1))))
    learner = Learner(policy, HGDagger(), TrainingConfig(batch=8))
    learner.step(Batches(batch_of(draw(8, 2))))
    other = TokenPolicy(REACHER, config, 9)
    restored = Learner(other, HGDagger(), TrainingConfig(batch=8))
    assert other.tokenizer.to_bytes() != policy.tokenizer.to_bytes()
    restored.restore(learner.state())
    assert other.tokenizer.to_bytes() == policy.tokenizer.to_bytes()
    assert learner.step(Batches(batch_of(draw(8, 3)))) == restored.step(Batches(batch_of(draw(8, 3))))
    assert learner.weights() == restored.weights()


def test_what_is_masked_is_the_last_kept_action_again():
    actions = np.arange(2 * 5 * 1, dtype=np.float32).reshape(2, 5, 1)
    mask = np.array([[1, 1, 0, 0, 0], [0, 1, 0, 1, 0]], bool)
    assert held(actions, mask)[..., 0].tolist() == [[0, 1, 1, 1, 1], [6, 6, 6, 8, 8]]
    assert held(actions, np.zeros((2, 5), bool)).tolist() == np.zeros((2, 5, 1)).tolist()


@pytest.mark.slow
def test_a_chunk_counts_by_the_share_that_is_kept(reaching):
    policy = reaching[0]
    batch = batch_of(draw(2, 11))
    half = batch | {"mask": batch["mask"].copy()}
    half["mask"][1, H // 2 :] = 0
    filled = batch | {"actions": held(batch["actions"], half["mask"].astype(bool))}
    alone, other = (
        {k: v[i : i + 1] if isinstance(v, np.ndarray) else v[:1] for k, v in filled.items()} for i in (0, 1)
    )
    first, second = policy.loss(alone).item(), policy.loss(other).item()
    counts = [min(len(t) + 1, REACHING.longest) for t in policy.tokenizer.encode_batch(filled["actions"])]
    expected = (counts[0] * first + 0.5 * counts[1] * second) / (counts[0] + 0.5 * counts[1])
    assert policy.loss(half).item() == pytest.approx(expected, rel=1e-4)
    assert policy.image_losses == pytest.approx([first, second], rel=1e-4)
    # nothing of it kept: as if it were not there, whatever its numbers are
    half["mask"][1] = 0
    half["actions"] = half["actions"].copy()
    half["actions"][1] = np.nan
    assert policy.loss(half).item() == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
def test_said_token_by_token_is_what_is_said_at_once(reaching):
    policy = reaching[0]
    decoder = policy.module.decoder
    state = torch.from_numpy(draw(3, 12))
    with torch.no_grad():
        latent = policy.module.slow([], policy._instruction_ids(["reach"] * 3))
        memory = decoder.context(latent, policy.module.normalizer(state), None)
        told = torch.randint(0, 100, (3, REACHING.longest), generator=torch.Generator().manual_seed(0))
        whole, cache = decoder(told, memory), decoder.cache(memory)
        for place in range(REACHING.longest):
            logits, cache = decoder.step(told[:, place], torch.tensor(place), memory, cache)
            assert torch.allclose(logits, whole[:, place], atol=1e-4)


def test_with_a_temperature_it_draws():
    policy = TokenPolicy(REACHER, msgspec.structs.replace(REACHING, temperature=1.0))
    observation = example_observation(REACHER)
    latent = policy.think(observation)
    drawn = [policy.act(observation, latent, 0) for _ in range(3)]
    assert not np.array_equal(drawn[0].actions, drawn[1].actions)
    again = TokenPolicy(REACHER, policy.config)
    assert np.array_equal(again.act(observation, latent, 0).actions, drawn[0].actions)
    assert np.array_equal(again.act(observation, latent, 0, seed=drawn[2].seed).actions, drawn[2].actions)
    likeliest = TokenPolicy(REACHER, REACHING)
    assert likeliest.act(observation, latent, 0).seed == 0


@pytest.mark.slow
def test_it_acts_in_bfloat16_too(reaching):
    half = TokenPolicy(REACHER, REACHING, runtime=Runtime(dtype="bfloat16"))
    half.load(reaching[0].save(), 1)
    assert half.module.decoder.head.weight.dtype == torch.float32
    assert left_over(half, episodes=10) < 0.25


@pytest.mark.slow
def test_a_committed_prefix_is_refused(reaching):
    policy = reaching[0]
    observation = example_observation(REACHER)
    latent = policy.think(observation)
    for prefix in (Prefix(np.zeros((2, 2), np.float32), 1), Prefix(np.zeros((2, 2), np.float32), 0, guided=True)):
        with pytest.raises(PolicyError, match="cannot begin one with what is committed"):
            policy.act(observation, latent, 0, prefix)
    nothing = policy.act(observation, latent, 0, Prefix(np.zeros((2, 2), np.float32), 0)).actions
    assert np.array_equal(nothing, policy.act(observation, latent, 0).actions)
    assert not policy.trained.prefix_trained


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay():
    policy = TokenPolicy(REACHER, REACHING)
    good, version = policy.save(), policy.version
    header, tensors = unpack(good)
    broken = copy.copy(tensors)
    broken["packed"] = tensors["packed"].clone()
    broken["packed"][20:40] = 0
    smaller = TokenPolicy(REACHER, msgspec.structs.replace(REACHING, width=32)).save()
    foreign = TokenPolicy(SEEING, TokensConfig(state_dim=2, action_dim=2, horizon=4)).save()
    for bad, error, words in (
        (pack(broken, header), WeightsError, "FAST tokeniser"),
        (smaller, WeightsError, "width 32"),
        (foreign, SpecMismatchError, "reacher"),
        (pack(tensors, msgspec.structs.replace(header, network="flow")), WeightsError, "'flow' network"),
    ):
        with pytest.raises(error, match=words):
            policy.load(bad, 8)
        assert (policy.save(), policy.version) == (good, version)


def test_without_a_whole_chunk_it_keeps_its_first_tokeniser():
    policy = TokenPolicy(REACHER, REACHING)
    before = policy.tokenizer.to_bytes()
    policy.set_normalization(NormalizationData(draw(50, 1), np.zeros((0, H, 2), np.float32)))
    assert policy.tokenizer.to_bytes() == before
    assert np.isfinite(policy.loss(batch_of(draw(4, 2))).item())
    with pytest.raises(InvalidDataError, match="not finite"):
        policy.loss(batch_of(draw(4, 2)) | {"actions": np.full((4, H, 2), np.nan, np.float32)})


def test_it_is_made_by_name():
    policy = make_policy(parse_policy("tokens:residual_vq", '{"width": 32, "heads": 2, "horizon": 6}'), SEEING, 0)
    assert (policy.horizon, policy.config.tokenizer, policy.config.cameras[0].name) == (6, "residual_vq", "front")
    assert make_policy(parse_policy("tokens", '{"cameras": []}'), SEEING, 0).config.cameras == ()
    assert defaults(parse_policy("tokens:fast", '{"horizon": 12}'), SEEING).horizon == 12
    for text, config, words in (
        ("tokens:fats", "", "Did you mean 'fast'"),
        ("tokens", '{"widht": 3}', "widht"),
        ("tokens", '{"cameras": ["frnt"]}', "Did you mean 'front'"),
        ("tokens", '{"heads": 7}', "heads divide"),
        ("tokens", '{"temperature": -1.0}', "temperature"),
    ):
        with pytest.raises(ConfigError, match=words):
            defaults(parse_policy(text, config), SEEING)
