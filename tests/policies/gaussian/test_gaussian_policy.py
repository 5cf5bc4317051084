"""The Gaussian policy: that it conforms, how probable it says chunks are, what it is refused, and who it is by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from policies.common.noise import seeded
from policies.conformance.check import check_policy
from policies.conformance.data import example_batch, example_observation
from policies.flow.factory import pixels_network
from policies.flow.policy import FlowPolicy
from policies.gaussian.config import GaussianConfig
from policies.gaussian.network import (
    BORDER,
    LEAST_DEVIATION,
    MOST_DEVIATION,
    SUREST,
    ChunkDistribution,
    GaussianNetwork,
)
from policies.gaussian.policy import GaussianPolicy
from policies.interface.capabilities import Advised, Chunks, Draws, Encodes, Flows, Imitates, Scores
from policies.interface.registry import defaults, make_policy, parse_policy
from tests.cloud_learner.training.test_learner import NET, SPEC
from wire.errors import ConfigError, PolicyError
from wire.types import Prefix, RobotSpec

SEEING = GaussianConfig(
    state_dim=2, action_dim=2, horizon=4, cameras=NET.cameras, stem=NET.stem, points=4, width=32, layers=2
)
LATE = msgspec.structs.replace(SEEING, max_offset=6, ahead=(2, 4), ego_motion=True)
BLIND = msgspec.structs.replace(SEEING, cameras=())


@pytest.mark.slow
@pytest.mark.parametrize("config", [LATE, BLIND], ids=["seeing", "blind"])
def test_it_conforms(config: GaussianConfig, blind: RobotSpec, seeing: RobotSpec) -> None:
    spec = seeing if config.cameras else blind
    checks = check_policy(lambda: GaussianPolicy(spec, config, seed=3))
    assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


# --- how probable chunks are ------------------------------------------------------------------------------------------


def some_distribution(*shape: int) -> ChunkDistribution:
    torch.manual_seed(0)
    return ChunkDistribution(torch.randn(shape), torch.rand(shape) * 2 - 2.5)


def reference(found: ChunkDistribution) -> TransformedDistribution:
    return TransformedDistribution(Normal(found.mean.double(), found.log_deviation.double().exp()), [TanhTransform()])


def test_a_density_is_that_of_a_squashed_normal() -> None:
    found = some_distribution(5, 7)
    actions, density = found.draw(torch.randn(5, 7))
    wanted = reference(found).log_prob(actions.double()).float()
    torch.testing.assert_close(density, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.log_density(actions), wanted, rtol=1e-4, atol=1e-4)
    assert actions.abs().max() < BORDER


def test_densities_sum_to_one() -> None:
    found = ChunkDistribution(torch.tensor([-0.7, 0.0, 0.4]), torch.tensor([-1.0, -0.5, -2.0]))
    grid = torch.linspace(-BORDER, BORDER, 20_001)[:, None].expand(-1, 3)
    total = torch.trapezoid(found.log_density(grid).exp(), grid, dim=0)
    torch.testing.assert_close(total, torch.ones(3), atol=2e-3, rtol=0)


def test_a_draw_moves_with_the_mean_and_the_deviation() -> None:
    mean, log_deviation = torch.tensor([0.3], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    (action,), _ = ChunkDistribution(mean, log_deviation).draw(torch.tensor([0.5]))
    by_mean, by_deviation = torch.autograd.grad(action, [mean, log_deviation])
    slope = 1 - np.tanh(0.3 + 0.5 * np.exp(-1.0)) ** 2
    assert by_mean.item() == pytest.approx(slope, rel=1e-5)
    assert by_deviation.item() == pytest.approx(slope * 0.5 * np.exp(-1.0), rel=1e-5)


def test_full_speed_can_be_imitated_and_drawn() -> None:
    far = ChunkDistribution(torch.tensor([0.0, 30.0, -30.0]), torch.full((3,), -1.0))
    edge = torch.tensor([1.0, 1.0, -1.0])
    assert torch.isfinite(far.log_density(edge)).all()
    torch.testing.assert_close(far.log_density(edge), far.log_density(edge * BORDER))
    actions, density = far.draw(torch.zeros(3))
    assert actions[1:].tolist() == [1.0, -1.0] and torch.isfinite(density).all()


def test_a_loss_is_never_below_nothing() -> None:
    raw = torch.tensor(BORDER).atanh()
    surest = ChunkDistribution(raw[None], torch.tensor([LEAST_DEVIATION]).log())
    grid = torch.linspace(-1, 1, 2001)
    assert surest.log_density(grid[:, None]).max().item() == pytest.approx(SUREST, abs=1e-3)
    others = ChunkDistribution(torch.randn(2001) * 3, torch.full((2001,), LEAST_DEVIATION).log())
    assert others.log_density(grid).max().item() <= SUREST + 1e-3


def test_a_network_is_never_surer_than_it_may_be() -> None:
    network = GaussianNetwork(BLIND)
    with torch.no_grad():
        network.fast[-1].bias[8:] = torch.tensor([-1e4, 1e4] * 4)
        network.fast[-1].weight[8:] = 0
    deviation = network.distribution(torch.randn(3, network.feature_width)).log_deviation.exp()
    bounds = torch.tensor([LEAST_DEVIATION, MOST_DEVIATION] * 4).expand(3, 8)
    torch.testing.assert_close(deviation, bounds)


def in_batch(config: GaussianConfig = SEEING) -> tuple[GaussianPolicy, dict[str, object]]:
    """A policy, and a batch with actions that the mask does not keep."""
    cm = [msgspec.structs.replace(one, low=-2.0, high=4.0) for one in SPEC.action]
    policy = GaussianPolicy(msgspec.structs.replace(SPEC, action=tuple(cm)), config)
    batch = example_batch(policy.spec, 4, images=3, steps=2, ticks_ahead=policy.ticks_ahead)
    batch["mask"][0, 1, 2:] = batch["mask"][2, 0, 1:] = False
    return policy, batch


def test_what_is_imitated_is_what_becomes_probable() -> None:
    policy, batch = in_batch()
    found = policy.module.distribution(policy.features(batch))
    actions = torch.from_numpy((batch["actions"] - 1.0) / 3.0).clamp(-BORDER, BORDER)
    densities = reference(found).log_prob(actions.flatten(2).double()).unflatten(-1, (4, 2))
    total, count = 0.0, 0
    for image in range(3):
        for step in range(2):
            kept = [densities[image, step, i].sum() for i in range(4) if batch["mask"][image, step, i]]
            whole = sum(kept).item()
            assert policy.log_probability(batch)[image, step].item() == pytest.approx(whole, rel=1e-3)
            mean = SUREST - whole / (2 * len(kept))
            assert policy.sample_losses(batch)[image, step].item() == pytest.approx(mean, rel=1e-3)
            total, count = total - whole, count + 2 * len(kept)
    assert policy.loss(batch).item() == pytest.approx(SUREST + total / count, rel=1e-3)
    assert policy.module.image_losses.shape == (3,)


def test_another_network_of_its_kind_can_be_asked() -> None:
    policy, batch = in_batch(LATE)
    other = GaussianPolicy(policy.spec, LATE, seed=1)
    noise = torch.randn(3, 2, 8)
    assert torch.equal(policy.sample_losses(batch, other.module), other.sample_losses(batch))
    features = policy.features(batch, other.module)
    assert torch.equal(features, other.features(batch)) and features.shape[-1] == policy.feature_width
    theirs, own = policy.draw(features, noise, other.module), other.draw(features, noise)
    assert torch.equal(theirs[0], own[0]) and torch.equal(theirs[1], own[1])
    assert not torch.equal(policy.draw(features, noise)[0], own[0])


def test_the_actions_that_are_judged_are_normalised_and_go_on_behind_the_last_one_kept() -> None:
    policy, batch = in_batch()
    expected = (batch["actions"] - 1.0) / 3.0
    expected[0, 1, 2:], expected[2, 0, 1:] = expected[0, 1, 1], expected[2, 0, 0]
    assert policy.chunk_shape == (4, 2)
    np.testing.assert_allclose(policy.chunk_actions(batch).numpy().reshape(expected.shape), expected, atol=1e-6)


# --- on a robot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LATE, SEEING], ids=["late", "at once"])
def test_a_robot_does_what_a_learner_would_draw(config: GaussianConfig) -> None:
    policy, _ = in_batch(config)
    observation = example_observation(policy.spec)
    latent = policy.think(observation)
    late = msgspec.structs.replace(observation, time_ns=latent.observed_ns + 3 * policy.spec.period_ns)
    chunk = policy.act(late, latent, 0, seed=5)
    one = example_batch(policy.spec, 4, images=1, steps=1, ticks_ahead=policy.ticks_ahead) | {
        "images": {"front": observation.images["front"].image[None]},
        "state": observation.state[None, None],
        "seen_state": observation.state[None],
        "frame_age": np.full((1, 1), 3.0, np.float32),
        "instructions": [observation.task],
    }
    with torch.no_grad():
        actions, _ = policy.draw(policy.features(one), torch.randn(1, 8, generator=seeded(5)))
    np.testing.assert_allclose(chunk.actions.reshape(1, 1, 8), 3.0 * actions.numpy() + 1.0, atol=1e-4)
    assert chunk.seed == 5


def test_it_differs_from_chunk_to_chunk_and_says_by_what() -> None:
    policy, _ = in_batch()
    observation = example_observation(policy.spec)
    latent = policy.think(observation)
    first, second = policy.act(observation, latent, 0), policy.act(observation, latent, 8)
    assert not np.array_equal(first.actions, second.actions) and first.seed != second.seed != 0
    np.testing.assert_array_equal(policy.act(observation, latent, 8, seed=first.seed).actions, first.actions)


@pytest.mark.parametrize("guided", [False, True])
def test_a_prefix_is_refused_with_the_way_out(guided: bool) -> None:
    policy, _ = in_batch()
    observation = example_observation(policy.spec)
    with pytest.raises(PolicyError, match="cannot begin one with what is committed; ask without"):
        policy.act(observation, policy.think(observation), 0, Prefix(np.zeros((2, 2), np.float32), 1, guided))


# --- by name ----------------------------------------------------------------------------------------------------------


def test_it_offers_what_soft_actor_critic_asks_for_and_no_flow() -> None:
    policy, _ = in_batch()
    for capability in (Imitates, Scores, Encodes, Chunks, Draws):
        assert isinstance(policy, capability), capability
    for capability in (Flows, Advised):
        assert not isinstance(policy, capability), capability
    assert not isinstance(FlowPolicy(SPEC, NET), Draws)


def test_it_sees_by_what_the_flow_policy_of_that_size_does() -> None:
    made = make_policy(parse_policy("gaussian:pixels", '{"max_offset": 6, "width": 64}'), SPEC, 0)
    like = pixels_network(SPEC, max_offset=6)
    for name in ("cameras", "stem", "points", "ahead", "ego_motion", "max_offset", "horizon"):
        assert getattr(made.config, name) == getattr(like, name), name
    assert made.ticks_ahead == (16, 32, 48) and made.config.width == 64
    assert not make_policy(parse_policy("gaussian:state"), SPEC, 0).config.cameras
    assert defaults(parse_policy("gaussian:state", '{"horizon": 8}'), SPEC).horizon == 8


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("gaussian:smal", "", "no size 'smal'"),
        ("gaussian:state", '{"widht": 3}', "its configuration does not fit.*widht.*width"),
        ("gaussian:state", '{"width": 0}', "width"),
        ("gaussian:pixels", '{"cameras": ["back"]}', "no camera"),
    ],
)
def test_what_it_cannot_be_is_said_without_making_it(name: str, config: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        defaults(parse_policy(name, config), SPEC)


def test_ego_motion_without_age_is_refused() -> None:
    with pytest.raises(ConfigError, match="ego_motion needs max_offset"):
        GaussianPolicy(SPEC, msgspec.structs.replace(SEEING, ego_motion=True))
