"""The flow policy: contract, loss, and that it learns."""

import msgspec
import numpy as np
import pytest
import torch

from policies.common.weights import read_header
from policies.conformance.check import example_batch, example_observation
from policies.conformance.data import randomize_zero_init
from policies.flow.config import FlowConfig
from policies.flow.factory import pixels_network, state_network
from policies.flow.networks.fast import Conditioning
from policies.flow.networks.network import FlowNetwork
from policies.flow.networks.sampling import sample
from policies.flow.policy import FlowPolicy
from tests.samples import states_only
from wire.errors import ConfigError, InvalidDataError, PolicyError, SpecMismatchError, WeightsError
from wire.types import Frame, Prefix


def random_loss(policy, batch):
    torch.manual_seed(0)
    return policy.loss(batch)


def flat(batch):
    return batch | {name: batch[name][:, 0] for name in ("state", "actions", "mask")}


def test_latent_and_chunk_carry_their_times(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    observation = example_observation(seeing)
    latent = policy.think(observation)
    assert latent.data.dtype == np.float32
    assert latent.data.shape == (2 * seeing_net.points + seeing_net.word_width,)
    assert latent.observed_ns == observation.images["front"].time_ns
    chunk = policy.act(observation, latent, 11)
    assert (chunk.first_tick, chunk.step_ns, chunk.observed_ns) == (11, 50_000_000, observation.time_ns)


def test_a_chunk_is_made_again_from_its_seed_to_the_last_bit(seeing, seeing_net):
    net = msgspec.structs.replace(seeing_net, prefix=True, max_offset=2)
    robot, later = FlowPolicy(seeing, net, seed=1), FlowPolicy(seeing, net, seed=2)
    randomize_zero_init(robot)
    weights = robot.save()
    for policy in (robot, later):
        policy.load(weights, 3)
    observation = example_observation(seeing)
    latent = robot.think(observation)
    decided = np.zeros((3, 2), np.float32)
    seeds = set()
    for prefix in (None, None, Prefix(decided, 2), Prefix(decided, 1, guided=True)):
        chunk = robot.act(observation, latent, 11, prefix)
        again = later.act(observation, latent, 11, prefix, chunk.seed)
        assert again.actions.tobytes() == chunk.actions.tobytes() and again.seed == chunk.seed
        assert not np.array_equal(later.act(observation, latent, 11, prefix, chunk.seed + 1).actions, chunk.actions)
        seeds.add(chunk.seed)
    assert len(seeds) == 4 and 0 not in seeds
    assert np.isnan(chunk.log_prob)


def test_without_a_camera_the_latent_is_words_only(blind, blind_net):
    policy = FlowPolicy(blind, blind_net)
    observation = example_observation(blind)
    latent = policy.think(observation)
    assert latent.observed_ns == observation.time_ns
    moved = msgspec.structs.replace(observation, state=observation.state + 1)
    assert np.array_equal(policy.think(moved).data, latent.data)
    other = msgspec.structs.replace(observation, task="close the drawer")
    assert not np.array_equal(policy.think(other).data, latent.data)


def test_images_and_words_change_the_latent(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    observation = example_observation(seeing)
    latent = policy.think(observation)
    image = 255 - observation.images["front"].image
    other = msgspec.structs.replace(observation, images={"front": Frame(5, image)})
    assert not np.allclose(policy.think(other).data, latent.data)


def test_two_robots_with_unlike_limits_get_actions_within_them(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    with torch.no_grad():
        policy.module.fast.head[-1].bias.fill_(50.0)
    observation = example_observation(seeing)
    chunk = policy.act(observation, policy.think(observation), 0)
    assert (chunk.actions == np.float32([2, 10])).all()


def test_a_camera_that_the_network_does_not_look_through_may_be_missing(seeing):
    policy = FlowPolicy(seeing, state_network(seeing, horizon=4))
    observation = msgspec.structs.replace(example_observation(seeing), images={})
    assert policy.act(observation, policy.think(observation), 0).actions.shape == (4, 2)


def test_read_only_arrays_are_fine(seeing, seeing_net, recwarn):
    policy = FlowPolicy(seeing, seeing_net)
    observation = example_observation(seeing)
    observation.state.flags.writeable = False
    observation.images["front"].image.flags.writeable = False
    policy.act(observation, policy.think(observation), 0)
    assert not recwarn.list


def test_observations_that_do_not_fit_are_refused(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    observation = example_observation(seeing)
    latent = policy.think(observation)
    with pytest.raises(InvalidDataError, match="front"):
        policy.think(msgspec.structs.replace(observation, images={}))
    with pytest.raises(InvalidDataError, match="not finite in \\['y'\\]"):
        policy.act(msgspec.structs.replace(observation, state=np.float32([0, np.nan])), latent, 0)
    with pytest.raises(PolicyError, match="think\\(\\) gives \\[40\\]"):
        policy.act(observation, msgspec.structs.replace(latent, data=latent.data[:3]), 0)


def test_latent_of_another_version_is_refused(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    observation = example_observation(seeing)
    latent = policy.think(observation)
    policy.load(policy.save(), 4)
    with pytest.raises(PolicyError, match="version 0, this policy is version 4"):
        policy.act(observation, latent, 0)


def test_a_network_that_gives_nan_is_stopped(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    with torch.no_grad():
        policy.module.fast.head[-1].bias.fill_(float("nan"))
    observation = example_observation(seeing)
    with pytest.raises(PolicyError, match="not finite; roll back"):
        policy.act(observation, policy.think(observation), 0)


def test_building_a_policy_leaves_the_global_random_stream_alone(blind, blind_net):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    FlowPolicy(blind, blind_net, seed=9)
    assert torch.equal(torch.rand(1), expected)


# --- weights -------------------------------------------------------------------------------------------------------


def test_load_copies_into_the_network_that_is_there(blind, blind_net):
    policy, other = FlowPolicy(blind, blind_net, 0), FlowPolicy(blind, blind_net, 1)
    module = policy.module
    assert policy.save() != other.save()
    policy.load(other.save(), 1)
    assert policy.module is module
    assert policy.save() == other.save()


def test_statistics_travel_with_the_weights(blind, blind_net):
    policy, other = FlowPolicy(blind, blind_net), FlowPolicy(blind, blind_net)
    other.set_normalization(states_only(np.random.default_rng(0).normal(3, 2, (50, 2))))
    policy.load(other.save(), 1)
    assert torch.equal(policy.module.normalizer.mean, other.module.normalizer.mean)
    assert policy.module.normalizer.mean[0] > 2


def test_a_file_describes_its_network(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    copy = FlowPolicy(seeing, msgspec.convert(read_header(policy.save()).config, FlowConfig))
    copy.load(policy.save(), 6)
    assert (copy.config, copy.version, copy.save()) == (seeing_net, 6, policy.save())


def test_weights_of_another_robot_or_network_are_refused_and_the_old_stay(seeing, seeing_net, blind, blind_net):
    policy = FlowPolicy(seeing, seeing_net)
    good = policy.save()
    with pytest.raises(SpecMismatchError, match="'embodiment' differs"):
        policy.load(FlowPolicy(blind, blind_net).save(), 1)
    wider = msgspec.structs.replace(seeing_net, width=64)
    with pytest.raises(WeightsError, match="network with width 64, this policy has 32"):
        policy.load(FlowPolicy(seeing, wider).save(), 1)
    assert policy.version == 0
    assert policy.save() == good


def test_configurations_that_cannot_work_are_refused(seeing, blind, seeing_net, blind_net):
    with pytest.raises(ConfigError, match="state_dim 3"):
        FlowPolicy(blind, msgspec.structs.replace(blind_net, state_dim=3))
    with pytest.raises(ConfigError, match="camera 'front' at 16x16"):
        FlowPolicy(blind, seeing_net)
    with pytest.raises(ConfigError, match="has no camera"):
        pixels_network(blind)


def test_presets_fit_their_robots(seeing, blind):
    assert pixels_network(seeing).cameras[0].name == "front"
    assert state_network(seeing).cameras == ()
    assert FlowPolicy(blind, state_network(blind)).horizon == 16


# --- loss ----------------------------------------------------------------------------------------------------------


def test_one_step_behind_each_image_is_the_flat_batch(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    batch = example_batch(seeing, 4, steps=1)
    assert random_loss(policy, batch).item() == random_loss(policy, flat(batch)).item()


def test_grouped_steps_equal_flat_steps_with_the_image_repeated(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    grouped = example_batch(seeing, 4, images=3, steps=2)
    repeated = {n: grouped[n].reshape(-1, *grouped[n].shape[2:]) for n in ("state", "actions", "mask")}
    repeated["images"] = {"front": grouped["images"]["front"].repeat(2, 0)}
    repeated["instructions"] = [text for text in grouped["instructions"] for _ in range(2)]
    # noise is drawn in the same order for [3, 2, n] as for [6, 1, n]
    assert random_loss(policy, grouped).item() == pytest.approx(random_loss(policy, repeated).item(), rel=1e-5)


def test_masked_steps_get_no_gradient_whatever_they_hold(seeing, seeing_net):
    policy = FlowPolicy(seeing, seeing_net)
    gradients = []
    for filler in (0.0, 7.0, np.nan):
        batch = example_batch(seeing, 4)
        batch["mask"][:, :, 2:] = False
        batch["mask"][1] = False
        batch["actions"][~batch["mask"]] = filler
        policy.module.zero_grad()
        random_loss(policy, batch).backward()
        gradients.append([p.grad.clone() for p in policy.module.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    last = policy.module.fast.head[-1].bias.grad.view(4, 2)
    assert last[:2].abs().min() > 0
    assert torch.equal(last[2:], torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("state", np.zeros((4, 2, 3), np.float32), "state has shape"),
        ("actions", np.zeros((4, 2, 5, 2), np.float32), "actions has shape"),
        ("mask", np.zeros((4, 2, 4), bool), "nothing to imitate"),
        ("images", {}, "no images of camera 'front'"),
        ("instructions", ["open"], "1 instructions for 4"),
    ],
)
def test_batches_that_do_not_fit_are_named(seeing, seeing_net, name, value, says):
    with pytest.raises(InvalidDataError, match=says):
        FlowPolicy(seeing, seeing_net).loss(example_batch(seeing, 4) | {name: value})


@pytest.mark.parametrize("predict", ["velocity", "action"])
def test_sampling_integrates_what_the_network_says(blind_net, predict):
    """A network that always answers a: as an action it is where the flow ends, as a velocity it leads to e + a."""
    net = FlowNetwork(msgspec.structs.replace(blind_net, predict=predict))
    target = torch.linspace(-0.4, 0.4, 8)
    with torch.no_grad():
        net.fast.head[-1].weight.zero_()
        net.fast.head[-1].bias.copy_(target)
    latent, state = torch.zeros(1, net.slow.width), torch.zeros(1, 2)
    noise = torch.full((1, 8), 0.1)
    sampled = sample(net.fast, net.config, Conditioning(latent, state), noise)[0]
    assert torch.allclose(sampled, target if predict == "action" else target + 0.1, atol=1e-6)


@pytest.mark.parametrize("predict", ["velocity", "action"])
@pytest.mark.slow
def test_the_loss_goes_down_and_the_policy_imitates(blind, blind_net, predict):
    """The expert moves towards the point its instruction names: states and words both matter."""
    goals = {"go left": np.float32([-0.8, 0.1]), "go right": np.float32([0.8, -0.2])}
    middle, half = np.float32([0, 5]), np.float32([2, 5])

    def expert(state, text):
        step = np.clip(goals[text] - state, -1, 1)[..., None, :]
        return np.repeat(step * half + middle, 4, axis=-2).astype(np.float32)

    policy = FlowPolicy(blind, msgspec.structs.replace(blind_net, predict=predict), seed=0)
    rng = np.random.default_rng(0)
    policy.set_normalization(states_only(rng.uniform(-1, 1, (500, 2))))
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    torch.manual_seed(0)
    losses = []
    for _ in range(400):
        texts = [*goals] * 32
        state = rng.uniform(-1, 1, (64, 2)).astype(np.float32)
        actions = np.stack([expert(s, t) for s, t in zip(state, texts, strict=True)])
        batch = {"state": state, "actions": actions, "mask": np.ones((64, 4), bool), "instructions": texts}
        loss = policy.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-20:]) < 0.4 * np.mean(losses[:20])
    errors = []
    for text in goals:
        for seed in range(8):
            observation = example_observation(blind, seed, text)
            chunk = policy.act(observation, policy.think(observation), 0)
            errors.append(np.abs((chunk.actions - expert(observation.state, text)) / half).mean())
    assert np.mean(errors) < 0.15
