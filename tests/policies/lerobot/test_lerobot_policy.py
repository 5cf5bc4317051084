"""ACT, Diffusion and any other lerobot policy behind the fleet's interface."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
import torch

from policies.conformance.check import check_policy, example_batch, example_observation
from policies.lerobot.batch_adapter import ObservationHistory
from policies.lerobot.checkpoint import LeRobotCheckpoint
from tests.extras import needs
from tests.policies.lerobot.lerobot_side import PICTURE, STATE, as_lerobot
from wire.codec import decode, encode
from wire.errors import InvalidDataError, PolicyError
from wire.messages.local import ThinkReply
from wire.types import Frame, Prefix, RobotSpec

pytestmark = [pytest.mark.slow, needs("lerobot")]


def setup_module() -> None:
    global LeRobotPolicy, PARTITIONS, WholePartition
    # lerobot itself: 16 s, in the process that runs these tests alone
    from policies.lerobot.partitions.vision import WholePartition
    from policies.lerobot.policy import PARTITIONS, LeRobotPolicy


def later(observation, ticks: int, robot: RobotSpec, **changes):
    by = ticks * robot.period_ns
    images = {name: Frame(frame.time_ns + by, frame.image) for name, frame in observation.images.items()}
    return msgspec.structs.replace(observation, time_ns=observation.time_ns + by, images=images, **changes)


# --- as lerobot itself ------------------------------------------------------------------------------------------------


def test_act_is_lerobots_own_chunk(robot, act, act_checkpoint):
    observation = example_observation(robot)
    before, after = act_checkpoint.processors()
    expected = after(act_checkpoint.policy().predict_action_chunk(before(as_lerobot(observation))))[0].numpy()
    chunk = act.act(observation, act.think(observation), 0)
    assert np.array_equal(chunk.actions, np.clip(expected, robot.action_low(), robot.action_high()))
    assert act.horizon == 8 and act.history == 0 and act.pretrained


def test_diffusion_is_lerobots_own_chunk_after_two_observations(robot, diffusion, diffusion_checkpoint):
    first = example_observation(robot, 1)
    second = later(example_observation(robot, 2), 1, robot)
    network, (before, after) = diffusion_checkpoint.policy(), diffusion_checkpoint.processors()
    for observation in (first, second):
        chunk = diffusion.act(observation, diffusion.think(observation), 0)
        noise = torch.randn(1, 8, 2, generator=torch.Generator().manual_seed(chunk.seed))
        prepared = before(as_lerobot(observation))
        with torch.random.fork_rng():
            torch.manual_seed(chunk.seed)
            network._queues["action"].clear()
            network.select_action({name: prepared[name] for name in (PICTURE, STATE)}, noise=noise)
        rest = [network._queues["action"].popleft() for _ in range(len(network._queues["action"]))]
        expected = after(torch.stack(rest)[:, 0]).numpy()
        assert np.allclose(chunk.actions[1:], np.clip(expected, robot.action_low(), robot.action_high()), atol=1e-4)
    assert diffusion.history == 1


@pytest.mark.parametrize(("kind", "steps"), [("act", 1), ("diffusion", 1), ("diffusion", 2)])
def test_divided_and_whole_give_the_same_bits(robot, act_dir, diffusion_dir, kind, steps):
    place = str(act_dir if kind == "act" else diffusion_dir)
    checkpoint = LeRobotCheckpoint.open(place, {"n_obs_steps": steps})
    network, (before, _) = checkpoint.policy(seed=5), checkpoint.processors()
    batch = before(as_lerobot(example_observation(robot)))
    felt = {STATE: batch[STATE]}
    chunks = []
    for partition in (PARTITIONS[kind](), WholePartition()):
        shape = PARTITIONS[kind]().noise_shape(network)
        with torch.no_grad(), torch.random.fork_rng():
            thought, state = partition.think(network, {PICTURE: batch[PICTURE], **felt}), dict(felt)
            if steps > 1:
                thought = [torch.stack([t] * steps, 1) for t in thought]
                state[STATE] = torch.stack([felt[STATE]] * steps, 1)
            torch.manual_seed(3)
            noise = None if shape is None else torch.randn(shape)
            if isinstance(partition, WholePartition):
                torch.manual_seed(3)  # lerobot draws the same noise itself
            chunks.append(partition.act(network, thought, state, noise, None))
    assert chunks[0].shape == (1, PARTITIONS[kind]().horizon(network), 2)
    if steps == 1:
        assert torch.equal(*chunks)
    # the pictures of two ticks are encoded one by one instead of together, which rounds otherwise
    assert torch.allclose(*chunks, atol=1e-4)


@pytest.mark.parametrize(("kind", "apart"), [("act", False), ("diffusion", False), ("diffusion", True)])
def test_two_cameras(robot, act_checkpoint, diffusion_checkpoint, kind, apart):
    from lerobot.policies.factory import get_policy_class

    config = copy.deepcopy((act_checkpoint if kind == "act" else diffusion_checkpoint).config)
    config.input_features["observation.images.wrist"] = config.input_features[PICTURE]
    config.n_obs_steps, config.use_separate_rgb_encoder_per_camera = 1, apart
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = get_policy_class(kind)(config).eval()
        seen = {name: torch.rand(1, 3, 64, 64) for name in (PICTURE, "observation.images.wrist")}
    felt = {STATE: torch.rand(1, 3, generator=torch.Generator().manual_seed(1))}
    chunks = []
    for partition in (PARTITIONS[kind](), WholePartition()):
        with torch.no_grad(), torch.random.fork_rng():
            thought = partition.think(network, seen | felt)
            torch.manual_seed(3)
            chunks.append(partition.act(network, thought, dict(felt), None, None))
    assert torch.allclose(*chunks, atol=1e-4)
    if kind == "act" or apart:
        assert torch.equal(*chunks)


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_loss_is_lerobots_own_as_a_mean_over_kept_actions(robot, act, diffusion, kind):
    policy = act if kind == "act" else diffusion
    batch = example_batch(robot, policy.horizon, images=4, steps=1)
    kept = np.ones((4, 1, policy.horizon), bool)
    kept[:2, :, 3:] = False
    for mask in (np.ones_like(kept), kept):
        batch["mask"] = mask
        with torch.random.fork_rng():
            torch.manual_seed(1)
            ours = policy.loss(batch)
            prepared = policy._partition.arrange(
                policy.module, policy._preprocess(policy._adapter.training_batch(batch))
            )
            torch.manual_seed(1)
            theirs, parts = policy.module.forward(prepared)
        pad = prepared["action_is_pad"]
        share = pad.numel() / (~pad).sum()
        expected = theirs * share
        if kind == "act":
            expected = parts["l1_loss"] * share + policy.module.config.kl_weight * parts["kld_loss"]
        assert torch.allclose(ours, expected, rtol=1e-5)


def test_diffusion_learns_the_window_where_the_chunk_will_be(robot, diffusion):
    batch = example_batch(robot, 7, images=2, steps=1)
    batch["mask"][0, 0, 4:] = False
    flat = diffusion._preprocess(diffusion._adapter.training_batch(batch))
    arranged = diffusion._partition.arrange(diffusion.module, flat)
    assert torch.equal(arranged["action"][:, 1:], flat["action"])
    assert torch.equal(arranged["action"][:, 0], flat["action"][:, 0]), "the tick before repeats the first action"
    assert arranged["action_is_pad"].tolist() == [[False] * 5 + [True] * 3, [False] * 8]
    assert torch.equal(flat["action"][0, 4:], flat["action"][0, 3].expand(3, 2)), "masked ones repeat the last"


def test_history_of_a_batch_is_what_the_network_sees(robot, diffusion):
    batch = example_batch(robot, 7, images=2, steps=3)
    alone = diffusion._adapter.training_batch(batch)
    assert torch.equal(alone[STATE][:, 0], alone[STATE][:, 1]) and alone[STATE].shape == (6, 2, 3)
    assert torch.equal(alone[PICTURE][:, 0], alone[PICTURE][:, 1]) and alone[PICTURE].shape == (6, 2, 3, 64, 64)
    batch["past_state"] = batch["state"][:, :, None] - 0.5
    batch["past_images"] = {"front": 255 - batch["images"]["front"][:, None]}
    found = diffusion._adapter.training_batch(batch)
    assert torch.allclose(found[STATE][:, 0], alone[STATE][:, 1] - 0.5)
    assert torch.allclose(found[PICTURE][:, 0], 1 - alone[PICTURE][:, 1], atol=1e-6)
    assert torch.equal(found[STATE][:, 1], alone[STATE][:, 1])
    batch["past_state"] = batch["past_state"][..., :2]
    with pytest.raises(InvalidDataError, match="past_state has shape"):
        diffusion.loss(batch)


# --- the fleet's promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_conformance(robot, act_checkpoint, diffusion_checkpoint, kind):
    checkpoint = act_checkpoint if kind == "act" else diffusion_checkpoint
    failed = [c for c in check_policy(lambda: LeRobotPolicy(robot, checkpoint)) if not c.passed]
    assert not failed, failed


def test_a_latent_crosses_processes_exactly(robot, act, act_checkpoint):
    observation = example_observation(robot)
    latent = act.think(observation)
    sent = decode(encode(ThinkReply(1, latent, ()))).latent
    other = LeRobotPolicy(robot, act_checkpoint)
    assert np.array_equal(other.act(observation, sent, 0).actions, act.act(observation, latent, 0).actions)


def test_latents_that_are_not_its_own(robot, act, diffusion):
    observation = example_observation(robot)
    latent = diffusion.think(observation)
    with pytest.raises(PolicyError, match=r"a latent of a 'diffusion' policy.*this is a 'act' policy"):
        act.act(observation, latent, 0)
    good = act.think(observation)
    for data in (good.data[: len(good.data) // 2].copy(), np.zeros(100, np.uint8), np.zeros(100, np.float32)):
        with pytest.raises(PolicyError, match="latent"):
            act.act(observation, msgspec.structs.replace(good, data=data), 0)


def test_no_prefix_steers_a_policy_that_cannot_be(robot, act):
    observation = example_observation(robot)
    latent = act.think(observation)
    decided = np.zeros((2, 2), np.float32)
    for guided, message in ((True, "cannot be guided"), (False, "not trained with committed prefixes")):
        with pytest.raises(PolicyError, match=message):
            act.act(observation, latent, 0, Prefix(decided, 1, guided))
    assert act.act(observation, latent, 0, Prefix(decided, 0)).actions.shape == (8, 2)


def test_numbers_that_are_not_finite_are_an_error(robot, act):
    observation = example_observation(robot)
    latent = act.think(observation)
    with torch.no_grad():
        act.module.model.action_head.bias.fill_(float("nan"))
    with pytest.raises(PolicyError, match="not finite"):
        act.act(observation, latent, 0)


def test_states_of_the_ticks_before_are_interpolated():
    memory = ObservationHistory(3, period_ns=10)
    memory.add(100, "open", [torch.tensor([[0.0]])])
    assert memory.interpolated()[0].flatten().tolist() == [0, 0, 0]
    memory.add(140, "open", [torch.tensor([[4.0]])])
    assert memory.interpolated()[0].flatten().tolist() == [2, 3, 4]
    assert memory.nearest()[0].flatten().tolist() == [4, 4, 4]
    memory.add(150, "open", [torch.tensor([[5.0]])])
    assert memory.nearest()[0].flatten().tolist() == [4, 4, 5]
    memory.add(150, "open", [torch.tensor([[7.0]])])
    assert memory.interpolated()[0].flatten().tolist() == [2 + 1, 4, 7], "the same moment again replaces it"
    for time_ns, task in ((120, "open"), (130, "close"), (130 + 2_000_000_000, "close")):
        memory.add(time_ns, task, [torch.tensor([[9.0]])])
        assert memory.interpolated()[0].flatten().tolist() == [9, 9, 9]


def test_a_policy_of_two_observations_forgets_when_time_goes_back(robot, diffusion_checkpoint):
    def chunk(policy, observation):
        policy._seeds.manual_seed(0)
        return policy.act(observation, policy.think(observation), 0).actions

    first, second = example_observation(robot, 1), example_observation(robot, 2)
    policy, fresh = (LeRobotPolicy(robot, diffusion_checkpoint) for _ in range(2))
    begun = chunk(fresh, second)
    chunk(policy, later(first, 1, robot))
    assert np.array_equal(chunk(policy, second), begun), "time went back"
    assert not np.array_equal(chunk(policy, later(second, 1, robot, state=first.state)), begun)
    chunk(policy, later(first, 2, robot))
    assert np.array_equal(chunk(policy, later(second, 3, robot, task="other")), begun), "another instruction"
    policy.load(policy.save(), 1)
    assert np.array_equal(chunk(policy, later(second, 4, robot, task="other")), begun), "other weights"
    assert not np.array_equal(chunk(policy, later(first, 5, robot, task="other")), begun)


def test_one_policy_thinks_for_two_robots(robot, diffusion_checkpoint):
    thinking, hers, alone = (LeRobotPolicy(robot, diffusion_checkpoint) for _ in range(3))
    for tick in range(4):
        mine = later(example_observation(robot, 10 + tick), tick, robot)
        other = later(example_observation(robot, 20 + tick), tick, robot)
        thinking.think(other)  # at the very same time, as clocks of two hosts may have it
        latent = thinking.think(mine)
        thinking.think(later(other, -1, robot))
        own = alone.think(mine)
        assert np.array_equal(latent.data, own.data), "a latent is of its own moment"
        sent = decode(encode(ThinkReply(0, latent, (0,)))).latent
        chunk = hers.act(mine, sent, tick).actions
        assert np.array_equal(chunk, alone.act(mine, own, tick).actions)
    features = hers._latent_history.nearest()[0]
    assert features.shape[1] == 2 and not torch.equal(features[:, 0], features[:, 1]), "the tick before is remembered"
    before = later(example_observation(robot, 12), 2, robot)
    assert torch.equal(features[:, 0], alone._tensors(alone.think(before))[0])
