"""One network for robots of several shapes: what each keeps of its own, and what they share."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
import torch

from policies.common.weights import pack, read_header, unpack
from policies.conformance.check import CHECKS, check_policy, example_batch, example_observation
from policies.flow.config import CameraEncoderConfig, Conv
from policies.flow.shared.config import SharedConfig
from policies.flow.shared.policy import SharedFlowPolicy
from policies.interface.policy import NormalizationData
from policies.interface.registry import make_policy, parse_policy
from wire.errors import ConfigError, InvalidDataError, PolicyError, SpecMismatchError, WeightsError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec
from wire.weights.manifest import _Metadata


def robot(name, state, action, cameras=()):
    return RobotSpec(
        name,
        tuple(Dimension(one, "m", -1.0, 1.0) for one in state),
        tuple(Dimension(one, "cm", -2.0, 2.0, CommandType.delta) for one in action),
        cameras,
        20.0,
    )


ARM = robot("arm", ("hand_x", "hand_y", "goal_x"), ("move_x", "grip"), (CameraSpec("front", 16, 16, 20.0),))
BASE = robot("base", ("odometry", "goal_x"), ("drive", "turn", "grip"))
LONG_ARM = robot("long arm", ("hand_x", "hand_y", "elbow"), ("move_x",), (CameraSpec("front", 32, 24, 20.0),))
NET = SharedConfig(state_dim=6, action_dim=5, capacity=3, horizon=4, width=32, layers=2)
SEEING = msgspec.structs.replace(
    NET, cameras=(CameraEncoderConfig("front", 16, 16),), stem=(Conv(8, 4, 2),), points=4, ahead=(2, 4)
)


def batch_of(spec, policy, seed=0):
    batch = example_batch(spec, policy.horizon, seed, ticks_ahead=policy.ticks_ahead)
    return {**batch, "spec_hash": spec.hash}


def loss_of(policy, batch):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return policy.loss(batch)


def joined(config=NET, ready=True):
    policy = SharedFlowPolicy(ARM, config, 1)
    for spec in (BASE, LONG_ARM):
        policy.add_embodiment(spec, ready=ready)
    return policy


@pytest.mark.slow
def test_each_view_conforms():
    delayed = msgspec.structs.replace(SEEING, max_offset=3, prefix=True, ego_motion=True)
    for spec, config in ((ARM, SEEING), (BASE, NET), (ARM, delayed)):
        others = [one for one in (ARM, BASE) if one is not spec]

        def make(spec=spec, config=config, others=others):
            policy = SharedFlowPolicy(spec, config, 3)
            policy.add_embodiment(others[0])
            return policy

        checks = check_policy(make)
        assert len(checks) == len(CHECKS)
        assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


def test_equal_names_share_columns_and_rows_are_in_the_order_of_joining():
    arm, base, long_arm = joined().embodiments.rows
    assert (arm.state, arm.action) == ((0, 1, 2), (0, 1))
    assert (base.state, base.action) == ((3, 2), (2, 3, 1))
    assert (long_arm.state, long_arm.action) == ((0, 1, 4), (0,))
    other_unit = msgspec.structs.replace(ARM, state=(Dimension("hand_x", "mm", -1.0, 1.0), *ARM.state[1:]))
    policy = SharedFlowPolicy(ARM, NET)
    policy.add_embodiment(other_unit)
    assert policy.embodiments.rows[1].state == (3, 1, 2)


def test_who_finds_no_room_is_told_what_is_missing():
    policy = joined()
    assert policy.embodiments.refusal(LONG_ARM) == ""
    assert "all 3 rows are taken. Start one with a larger `capacity`" in policy.embodiments.refusal(
        robot("x", ("a",), ("b",))
    )
    policy = SharedFlowPolicy(ARM, NET)
    many = robot("many", [f"j{i}" for i in range(4)], ("move_x",))
    assert "4 of its state dimensions are new, 3 columns are free. Start one with a larger `state_dim`" in (
        policy.embodiments.refusal(many)
    )
    with pytest.raises(ConfigError, match="finds no room"):
        policy.add_embodiment(many)
    with pytest.raises(ConfigError, match="finds no room"):
        SharedFlowPolicy(many, msgspec.structs.replace(NET, state_dim=3))
    with pytest.raises(ConfigError, match="has no `advantage`"):
        SharedFlowPolicy(ARM, msgspec.structs.replace(NET, advantage=True))


def test_weights_go_to_every_robot_and_each_acts_by_its_own_row():
    trained = joined(SEEING)
    for number, spec in enumerate((ARM, BASE, LONG_ARM)):
        states = np.random.default_rng(number).normal(number, 1 + number, (64, spec.state_dim)).astype(np.float32)
        trained.set_normalization(NormalizationData(states, np.zeros((0, 4, spec.action_dim), np.float32), spec))
        optimizer = torch.optim.SGD(trained.module.parameters(), 0.1)
        loss_of(trained, batch_of(spec, trained)).backward()
        optimizer.step()
    weights = trained.save()
    header = read_header(weights)
    assert [one.spec for one in header.embodiments.rows] == [ARM, BASE, LONG_ARM]
    assert msgspec.json.decode(msgspec.json.encode(header), type=_Metadata).spec_hash == "", "any robot may fetch it"
    chunks = {}
    for spec in (ARM, BASE, LONG_ARM):
        view = SharedFlowPolicy(spec, SEEING, 9)
        view.load(weights, 4)
        observation = example_observation(spec)
        chunk = view.act(observation, view.think(observation), 0, seed=2)
        assert chunk.actions.shape == (4, spec.action_dim) and chunk.version == 4
        chunks[spec.embodiment] = chunk.actions
        assert view.save() == weights
        assert float(loss_of(view, batch_of(BASE, view))) == float(loss_of(trained, batch_of(BASE, trained)))
    assert not np.array_equal(chunks["arm"][:, 0], chunks["long arm"][:, 0])


def test_a_robot_without_a_row_has_no_version_yet():
    policy = SharedFlowPolicy(ARM, NET)
    view = SharedFlowPolicy(BASE, NET, 5)
    before = view.save()
    text = "no version for this robot yet: version 3 can drive 'arm', and has not learned from robot 'base'"
    with pytest.raises(SpecMismatchError, match=text):
        view.load(policy.save(), 3)
    assert view.version == 0 and view.save() == before
    average = copy.deepcopy(policy.module)
    policy.add_embodiment(BASE, [average], ready=False)
    with pytest.raises(SpecMismatchError, match=text):
        view.load(policy.save(average), 3)
    policy.mark_ready(BASE.hash, [average])
    view.load(policy.save(average), 3)
    assert view.version == 3
    policy.clear_embodiments()
    with pytest.raises(SpecMismatchError, match="version 4 can drive no robot"):
        view.load(policy.save(), 4)
    with pytest.raises(PolicyError, match="has not joined the shared network, which knows none yet"):
        policy.loss(batch_of(ARM, policy))


def test_who_joins_begins_as_its_nearest_and_changes_nobody_elses_actions():
    policy = SharedFlowPolicy(ARM, NET, 1)
    policy.add_embodiment(BASE)
    observation = example_observation(ARM)
    average = copy.deepcopy(policy.module)
    before, shapes = policy.act(observation, policy.think(observation), 0, seed=3).actions, policy.module.state_dict()
    policy.add_embodiment(LONG_ARM, [average])
    after = policy.act(observation, policy.think(observation), 0, seed=3).actions
    assert np.array_equal(before, after)
    for network in (policy.module, average):
        assert torch.equal(network.fast.last.weight[2], network.fast.last.weight[0]), "the arm's, not the base's"
        assert torch.equal(network.fast.embodiment.weight[2], network.fast.embodiment.weight[0])
    assert {n: t.shape for n, t in policy.module.state_dict().items()} == {n: t.shape for n, t in shapes.items()}


def test_a_dimension_in_another_unit_begins_as_that_of_the_same_name():
    policy = SharedFlowPolicy(ARM, NET, 1)
    slow = msgspec.structs.replace(
        LONG_ARM,
        state=(Dimension("hand_x", "mm", -1.0, 1.0), *LONG_ARM.state[1:]),
        action=(Dimension("move_x", "inch", -1.0, 1.0, CommandType.delta),),
    )
    policy.add_embodiment(slow)
    (_, own), fast = policy.embodiments.rows, policy.module.fast
    assert (own.state, own.action) == ((3, 1, 4), (2,))
    assert torch.equal(fast.state.weight[:, 3], fast.state.weight[:, 0])
    assert not torch.equal(fast.state.weight[:, 4], fast.state.weight[:, 0])
    heads, noisy = fast.last.weight.unflatten(1, (4, 5)), fast.noisy.weight.unflatten(1, (4, 5))
    assert torch.equal(heads[1, :, 2], heads[0, :, 0]) and torch.equal(noisy[:, :, 2], noisy[:, :, 0])
    assert torch.equal(heads[1, :, 3], heads[0, :, 3])


def test_a_batch_trains_the_row_of_its_robot_and_not_the_others():
    policy = joined(SEEING)
    loss_of(policy, batch_of(BASE, policy)).backward()
    for table in (policy.module.fast.last.weight, policy.module.fast.embodiment.weight):
        assert [bool(row.any()) for row in table.grad] == [False, True, False]
    columns = policy.module.fast.state.weight.grad.any(0)
    assert columns.tolist() == [False, False, True, True, False, False]
    heads = policy.module.fast.last.weight.grad[1].view(4, 5, -1).any(-1)
    assert heads.tolist() == [[False, True, True, True, False]] * 4
    mixed = batch_of(BASE, policy) | {"spec_hash": np.array([BASE.hash, ARM.hash])}
    with pytest.raises(InvalidDataError, match="one at a time"):
        policy.loss(mixed)


def test_the_flow_of_columns_that_are_not_the_robots_is_nothing():
    policy = joined(NET)
    given = policy.conditioning(batch_of(BASE, policy))
    velocity = policy.velocity(given, torch.randn(4, 2, 20), torch.full((4, 2, 1), 0.5))
    assert velocity.view(4, 2, 4, 5).flatten(0, 2).any(0).tolist() == [False, True, True, True, False]
    assert policy.sample_losses(batch_of(BASE, policy)).shape == (4, 2)
    actions = policy.chunk_actions(batch_of(BASE, policy)).view(4, 2, *policy.chunk_shape)
    assert actions.flatten(0, 2).any(0).tolist() == [False, True, True, True, False]


def test_pictures_of_another_size_are_brought_to_the_slots():
    policy = joined(SEEING)
    assert loss_of(policy, batch_of(LONG_ARM, policy)).isfinite()
    view = SharedFlowPolicy(LONG_ARM, SEEING)
    observation = example_observation(LONG_ARM)
    dark = {"front": msgspec.structs.replace(observation.images["front"], image=np.zeros((32, 24, 3), np.uint8))}
    seen = view.think(observation).data
    assert not np.array_equal(seen, view.think(msgspec.structs.replace(observation, images=dark)).data)
    blind = SharedFlowPolicy(BASE, SEEING)
    assert not blind.think(example_observation(BASE)).data[:8].any(), "no camera of that name: nothing is seen"


def test_a_table_that_was_changed_is_refused():
    policy = joined()
    header, tensors = unpack(policy.save())
    table = header.embodiments
    view = SharedFlowPolicy(ARM, NET)
    moved = msgspec.structs.replace(table.rows[1], state=(0, 1))
    for changed in (
        msgspec.structs.replace(table, rows=(table.rows[0], moved)),
        msgspec.structs.replace(table, capacity=4),
        msgspec.structs.replace(table, rows=()),
    ):
        with pytest.raises((WeightsError, SpecMismatchError)):
            view.load(pack(tensors, msgspec.structs.replace(header, embodiments=changed)), 2)
    with pytest.raises(WeightsError, match="without the table of its robots"):
        alone = msgspec.structs.replace(header, embodiments=msgspec.UNSET, spec_hash=header.spec.hash)
        view.load(pack(tensors, alone), 2)


def test_it_is_a_kind_of_policy():
    told = '{"capacity": 2, "state_dim": 6, "action_dim": 5, "horizon": 4}'
    policy = make_policy(parse_policy("shared:state", told), ARM, 0)
    assert isinstance(policy, SharedFlowPolicy) and policy.config.capacity == 2
    cameras = '{"cameras": [{"name": "front", "height": 16, "width": 16}], "max_offset": 2}'
    seeing = make_policy(parse_policy("shared:pixels", cameras), BASE, 0)
    assert seeing.config.ego_motion and seeing.ticks_ahead
    for text, config, match in (
        ("shared:stat", "", "no size 'stat'. Did you mean 'state'"),
        ("shared:pixels", "", "needs its cameras"),
        ("shared:state", '{"wide": 3}', "its configuration does not fit"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_policy(parse_policy(text, config), ARM, 0)
