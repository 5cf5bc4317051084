"""One checkpoint for several strategies: the age of what the slow path saw, and committed prefixes."""

import msgspec
import numpy as np
import pytest
import torch

from policies.conformance.check import check_policy, example_batch, example_observation
from policies.flow.config import AttentionPoolerConfig, Transformer
from policies.flow.factory import pixels_network, state_network
from policies.flow.networks.fast import AGE_MARGIN
from policies.flow.policy import FlowPolicy
from wire.errors import ConfigError, InvalidDataError, PolicyError, SpecMismatchError, WeightsError
from wire.types import Frame, PolicyCapabilities, Prefix

MIDDLE, HALF = np.float32([0, 5]), np.float32([2, 5])


@pytest.fixture
def aged(seeing_net):
    return msgspec.structs.replace(seeing_net, max_offset=6)


@pytest.fixture
def full(aged):
    return msgspec.structs.replace(aged, prefix=True, residual=True)


def older(latent, ticks, spec):
    return msgspec.structs.replace(latent, observed_ns=latent.observed_ns - round(ticks * spec.period_ns))


def chunk(policy, latent, prefix=None, seed=0):
    """The actions for one noise, whatever was drawn before."""
    return policy.act(example_observation(policy.spec), latent, 0, prefix, seed + 1).actions


# --- age -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_option_conforms(seeing, aged, full):
    for config in (aged, full):
        checks = check_policy(lambda config=config: FlowPolicy(seeing, config, seed=3))
        assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


def test_without_options_there_is_nothing_to_train_for_them(seeing, seeing_net, full):
    plain = set(FlowPolicy(seeing, seeing_net).module.state_dict())
    more = set(FlowPolicy(seeing, full).module.state_dict())
    assert {name.split(".")[0] for name in more - plain} == {"fast", "residual"}
    assert {name for name in more - plain if name.startswith("fast")} == {"fast.age.weight", "fast.committed.weight"}
    assert plain < more


def test_the_latent_is_as_old_as_the_oldest_frame_it_saw(seeing, seeing_net):
    two = msgspec.structs.replace(
        seeing, cameras=(*seeing.cameras, msgspec.structs.replace(seeing.cameras[0], name="w"))
    )
    cameras = (*seeing_net.cameras, msgspec.structs.replace(seeing_net.cameras[0], name="w"))
    policy = FlowPolicy(two, msgspec.structs.replace(seeing_net, cameras=cameras))
    observation = example_observation(two)
    images = {name: Frame(time, observation.images[name].image) for name, time in (("front", 700), ("w", 400))}
    assert policy.think(msgspec.structs.replace(observation, images=images)).observed_ns == 400


def test_the_age_is_counted_in_ticks_and_ends_where_training_did(seeing, aged):
    policy = FlowPolicy(seeing, aged)
    latent = policy.think(example_observation(seeing))
    at = {ticks: chunk(policy, older(latent, ticks, seeing)) for ticks in (0, 1, 3, 6, 6 + AGE_MARGIN, 60)}
    assert len({actions.tobytes() for actions in at.values()}) == 5
    assert np.array_equal(at[60], at[6 + AGE_MARGIN])
    # a latent from later than the state is no younger than new
    assert np.array_equal(chunk(policy, older(latent, -3, seeing)), chunk(policy, older(latent, -9, seeing)))


def test_training_and_acting_read_the_age_alike(seeing, aged):
    policy = FlowPolicy(seeing, aged)
    embedded = [policy.module.fast.embed_age(torch.tensor([[age]])) for age in (0.0, 2.5, 10.0, 99.0)]
    assert embedded[0].shape == (1, 9)
    assert embedded[1][0, 0].item() == pytest.approx(0.25)
    assert torch.equal(embedded[2], embedded[3])
    batch = example_batch(seeing, 4)
    losses = set()
    for age in (0.0, 4.0):
        torch.manual_seed(0)
        losses.add(policy.loss(batch | {"frame_age": np.full((4, 2), age, np.float32)}).item())
    assert len(losses) == 2


def test_one_age_for_all_steps_behind_an_image(seeing, aged):
    policy = FlowPolicy(seeing, aged)
    batch = example_batch(seeing, 4)
    ages = np.float32([0, 1, 2, 3])
    losses = set()
    for given in (ages, ages[:, None].repeat(2, 1)):
        torch.manual_seed(0)
        losses.add(policy.loss(batch | {"frame_age": given}).item())
    assert len(losses) == 1


def test_the_fast_path_is_told_how_the_robot_moved_since_the_look(seeing, aged):
    policy = FlowPolicy(seeing, msgspec.structs.replace(aged, ego_motion=True))
    still = example_observation(seeing)
    moved = msgspec.structs.replace(still, state=still.state + 0.5)
    chunks = []
    for seen in (still, moved):
        latent = policy.think(seen)
        assert len(latent.data) == policy.module.slow.width + seeing.state_dim
        again = FlowPolicy(seeing, policy.config)
        again.load(policy.save(), 1)
        chunks.append(again.act(still, again.think(seen), 0).actions)
    assert not np.array_equal(*chunks)
    told = FlowPolicy(seeing, aged)
    assert np.array_equal(told.think(still).data, told.think(moved).data), "without it no state is looked at"
    told.load(told.save(), 1)


def test_the_state_of_the_look_must_be_in_the_batch(seeing, aged):
    policy = FlowPolicy(seeing, msgspec.structs.replace(aged, ego_motion=True))
    batch = example_batch(seeing, 4)
    losses = set()
    for seen in (batch["seen_state"], batch["seen_state"] + 1):
        torch.manual_seed(0)
        losses.add(policy.loss(batch | {"seen_state": seen}).item())
    assert len(losses) == 2
    with pytest.raises(InvalidDataError, match="seen_state has shape"):
        policy.loss(batch | {"seen_state": batch["state"]})
    del batch["seen_state"]
    with pytest.raises(InvalidDataError, match="lacks \\['seen_state'\\]"):
        policy.loss(batch)
    for change in ({"max_offset": 0}, {"transformer": Transformer(), "pooler": AttentionPoolerConfig()}):
        with pytest.raises(ConfigError, match="ego_motion needs max_offset"):
            FlowPolicy(seeing, msgspec.structs.replace(aged, ego_motion=True, prefix=False, **change))


@pytest.mark.parametrize("given", [np.zeros(3, np.float32), np.zeros((4, 3), np.float32)])
def test_ages_that_do_not_fit_are_named(seeing, aged, given):
    with pytest.raises(InvalidDataError, match="frame_age has shape"):
        FlowPolicy(seeing, aged).loss(example_batch(seeing, 4) | {"frame_age": given})
    with pytest.raises(InvalidDataError, match="lacks \\['frame_age'\\]"):
        batch = example_batch(seeing, 4)
        del batch["frame_age"]
        FlowPolicy(seeing, aged).loss(batch)


# --- prefix --------------------------------------------------------------------------------------------------------


def test_committed_actions_are_real_ones_and_leave_something_to_learn(seeing, full):
    net = FlowPolicy(seeing, full).module
    torch.manual_seed(0)
    runs = torch.tensor([4, 4, 4, 3, 2, 1, 0]).repeat(300, 1)
    mask = torch.arange(4) < runs[..., None]
    known = net._draw_committed(mask)
    assert not (known & ~mask).any()
    counts = known.sum(-1)
    assert (counts < runs.clamp_min(1)).all()
    whole = counts[:, :3].flatten()
    assert (whole > 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    shares = [(whole == n).float().mean().item() for n in (1, 2, 3)]
    assert shares == pytest.approx([1 / 6] * 3, abs=0.05)
    assert all(known[..., i].any() or i == 3 for i in range(4))


def test_no_more_are_committed_than_the_largest_delay(seeing, full):
    net = FlowPolicy(seeing, msgspec.structs.replace(full, max_offset=2)).module
    known = net._draw_committed(torch.ones(200, 3, 4, dtype=torch.bool))
    assert known.sum(-1).max() == 2


@pytest.mark.parametrize("swap", [0.0, 1.0])
def test_committed_actions_reach_the_network_clean(seeing, full, monkeypatch, swap):
    """With a swap they are those of another sample, unless that one has no real action there."""
    policy = FlowPolicy(seeing, msgspec.structs.replace(full, prefix_swap=swap))
    seen = {}
    fast = policy.module.fast

    def spy(given, noisy, time):
        if given.committed is not None:
            seen.update(noisy=noisy, committed=given.committed)
        return type(fast).forward(fast, given, noisy, time)

    monkeypatch.setattr(fast, "forward", spy)
    batch = example_batch(seeing, 4, images=8)
    torch.manual_seed(0)
    batch["mask"][3, :, 1:] = False
    policy.loss(batch)
    clean = torch.from_numpy((batch["actions"] - MIDDLE) / HALF)
    noisy, known = seen["noisy"].view(8, 2, 4, 2), seen["committed"].bool()
    assert 0 < known.sum() < known.numel()
    told = clean.clone()
    if swap:
        told = clean.roll(1, 0)
        beyond = known[4].sum(-1) > 1
        assert beyond.any()
        told[4, beyond] = clean[4, beyond]
    assert torch.equal(noisy[known], told[known])
    known[3] = True  # masked actions enter as noise too
    assert not torch.isclose(noisy[~known], clean[~known]).any()


@pytest.mark.parametrize("predict", ["velocity", "action"])
@pytest.mark.parametrize("committed", [1, 2, 4])
def test_committed_actions_come_back_and_change_the_rest(seeing, full, predict, committed):
    policy = FlowPolicy(seeing, msgspec.structs.replace(full, predict=predict))
    latent = policy.think(example_observation(seeing))
    actions = np.float32([[-2, 0], [2, 10], [0.3, 3], [1, 1]])
    got = chunk(policy, latent, Prefix(actions, committed))
    assert np.array_equal(got[:committed], actions[:committed])
    free = chunk(policy, latent)
    other = chunk(policy, latent, Prefix(-actions + 2 * MIDDLE, committed))
    for rest in (free, other):
        assert committed == 4 or not np.isclose(got[committed:], rest[committed:], atol=1e-6).all()


def test_nothing_committed_is_no_prefix(seeing, full, seeing_net):
    for config in (full, seeing_net):
        policy = FlowPolicy(seeing, config)
        latent = policy.think(example_observation(seeing))
        assert np.array_equal(chunk(policy, latent, Prefix(np.ones((3, 2), np.float32), 0)), chunk(policy, latent))
        none = Prefix(np.zeros((0, 2), np.float32), 0, guided=True)
        assert np.allclose(chunk(policy, latent, none), chunk(policy, latent), atol=1e-5)


def test_a_prefix_beyond_the_limits_is_brought_back_to_them(seeing, full):
    policy = FlowPolicy(seeing, full)
    latent = policy.think(example_observation(seeing))
    for guided in (False, True):
        got = chunk(policy, latent, Prefix(np.float32([[9, -9]]), 1, guided))
        assert got[0].tolist() == [2, 0]
        assert np.isfinite(got).all()


@pytest.mark.parametrize(
    ("actions", "committed", "says"),
    [
        (np.zeros((5, 2)), 1, r"shape \[5, 2\]; this policy's chunks are \[4, 2\]"),
        (np.zeros((2, 3)), 1, r"shape \[2, 3\]"),
        (np.zeros(2), 1, r"shape \[2\]"),
        (np.zeros((2, 2)), 3, "2 actions with 3 committed"),
        (np.zeros((2, 2)), -1, "-1 committed"),
        (np.full((2, 2), np.nan), 1, "not finite"),
    ],
)
def test_prefixes_that_do_not_fit_are_refused(seeing, full, actions, committed, says):
    policy = FlowPolicy(seeing, full)
    latent = policy.think(example_observation(seeing))
    for guided in (False, True):
        with pytest.raises(PolicyError, match=says):
            chunk(policy, latent, Prefix(actions.astype(np.float32), committed, guided))


def test_a_network_that_knows_no_prefix_says_so(seeing, aged):
    policy = FlowPolicy(seeing, aged)
    latent = policy.think(example_observation(seeing))
    with pytest.raises(PolicyError, match="not trained with committed prefixes; ask with `guided`"):
        chunk(policy, latent, Prefix(np.zeros((1, 2), np.float32), 1))


# --- what weights fit ----------------------------------------------------------------------------------------------


def test_a_policy_says_what_it_was_trained_for(seeing, seeing_net, full):
    for config, trained in ((seeing_net, PolicyCapabilities()), (full, PolicyCapabilities(6, True, True, True))):
        policy = FlowPolicy(seeing, config)
        assert policy.trained == trained
        assert policy.max_offset == trained.trained_max_delay


def test_weights_for_another_delay_camera_or_rate_are_refused_naming_both(seeing, aged):
    policy = FlowPolicy(seeing, aged)
    longer = FlowPolicy(seeing, msgspec.structs.replace(aged, max_offset=8))
    with pytest.raises(WeightsError, match="network with max_offset 8, this policy has 6"):
        policy.load(longer.save(), 1)
    slower = FlowPolicy(msgspec.structs.replace(seeing, control_hz=10.0), aged)
    with pytest.raises(SpecMismatchError, match=r"'control_hz' differs: 10\.0 against 20\.0"):
        policy.load(slower.save(), 1)
    lens = msgspec.structs.replace(seeing, cameras=(msgspec.structs.replace(seeing.cameras[0], name="wrist"),))
    cameras = (msgspec.structs.replace(aged.cameras[0], name="wrist"),)
    other = FlowPolicy(lens, msgspec.structs.replace(aged, cameras=cameras))
    with pytest.raises(SpecMismatchError, match=r"'cameras' differs: \['wrist'\] against \['front'\]"):
        policy.load(other.save(), 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefix_swap": 1.5}, "prefix_swap 1.5"),
        ({"max_offset": -1}, "max_offset -1"),
        ({"max_offset": 0}, "prefix needs max_offset"),
        ({"horizon": 1}, "and 1"),
    ],
)
def test_options_that_cannot_work_are_refused(seeing, full, change, says):
    with pytest.raises(ConfigError, match=says):
        FlowPolicy(seeing, msgspec.structs.replace(full, **change))


def test_presets_take_the_options(seeing):
    for preset in (pixels_network, state_network):
        config = preset(seeing, horizon=8, max_offset=5, prefix=True, residual=True)
        assert config.trained == PolicyCapabilities(5, True, True, True)
        assert config.horizon == 8
        assert preset(seeing).trained == PolicyCapabilities()
