"""The sizes of the flow policy, and how they are asked for."""

import subprocess
import sys

import msgspec
import pytest
import torch

from policies.conformance.check import check_policy, example_batch, example_observation
from policies.flow import factory
from policies.flow.config import FlowConfig
from policies.flow.factory import SIZES, network, pixels_network, state_network
from policies.flow.networks.backbone import Vlm
from policies.flow.networks.network import FlowNetwork
from policies.flow.networks.transformer import FastTransformer
from policies.flow.policy import FlowPolicy
from policies.interface.registry import defaults, make_policy, parse_policy
from wire.errors import ConfigError
from wire.types import CameraSpec, Dimension, RobotSpec


@pytest.fixture
def arms():
    """Two arms with grippers and a camera."""
    joints = tuple(Dimension(f"j{i}", "rad", -1.0, 1.0) for i in range(14))
    return RobotSpec("arms", joints, joints, (CameraSpec("front", 96, 96, 20.0),), 20.0)


def millions(module):
    return sum(parameter.numel() for parameter in module.parameters()) / 1e6


@pytest.mark.parametrize(
    ("size", "least", "most"),
    [("pixels", 0.2, 1), ("state", 0.2, 1), ("small", 0.2, 1), ("medium", 45, 55)],
)
def test_sizes_have_the_parameters_they_say(arms, size, least, most):
    with torch.device("meta"):
        module = FlowNetwork(network(size, arms, max_offset=8, prefix=True, residual=True))
    assert least < millions(module) < most


def test_the_large_one_has_a_fast_path_of_300_million(arms):
    """Its slow path is a backbone, which is counted by itself."""
    vlm = Vlm("0" * 64, layers=16)
    config = network("large", arms, max_offset=8, prefix=True, vlm=vlm)
    assert config.stem == () and config.pooler.layers == 0
    with torch.device("meta"):
        assert 290 < millions(FastTransformer(config)) < 340


def test_the_recipes_networks_are_what_they_were(seeing):
    """Their weights are on disks already."""
    for preset in (pixels_network, state_network):
        config = preset(seeing)
        assert config.transformer is config.pooler is config.vlm is None
        assert not config.advantage and not config.online_statistics
    names = set(FlowNetwork(pixels_network(seeing, max_offset=4, prefix=True, residual=True)).state_dict())
    assert {name.split(".")[0] for name in names} == {"fast", "normalizer", "future_state_head", "residual", "slow"}
    assert {"slow.words.weight", "slow.encoders.0.stem.0.weight", "slow.encoders.0.points.bias"} < names
    assert {"fast.latent.bias", "fast.noisy.weight", "fast.head.1.weight", "fast.age.weight"} < names


@pytest.mark.parametrize("size", ["small", "pixels", "state"])
@pytest.mark.slow
def test_sizes_conform(seeing, blind, size):
    for spec in (seeing, blind):
        if size == "pixels" and not spec.cameras:
            continue
        told = {"horizon": 6, "max_offset": 4, "prefix": True, "residual": True}
        checks = check_policy(lambda spec=spec, told=told: factory.make(size, told, spec, 3))
        assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


def test_the_choice_decides_the_network(seeing):
    told = (
        '{"advantage": true, "guidance": 1.5, "predict": "velocity", "euler_steps": 3, "horizon": 8, "max_offset": 2}'
    )
    choice = parse_policy("flow:small", told)
    policy = make_policy(choice, seeing, 0)
    config = policy.config
    assert (config.advantage, config.guidance, config.predict, config.euler_steps) == (True, 1.5, "velocity", 3)
    assert defaults(choice, seeing).horizon == policy.horizon == 8
    observation = example_observation(seeing)
    assert policy.act(observation, policy.think(observation), 0).actions.shape == (8, 2)
    assert make_policy(parse_policy("flow:small", '{"cameras": []}'), seeing, 0).config.cameras == ()
    frozen = make_policy(parse_policy("flow:small", '{"training": {"freeze": ["slow.*"]}}'), seeing, 0)
    assert not any(parameter.requires_grad for parameter in frozen.module.slow.parameters())


@pytest.mark.parametrize(
    ("size", "told", "says"),
    [
        ("smal", {}, "no size 'smal'. Did you mean 'small'"),
        ("", {}, "Say flow:SIZE, with one of pixels, state, small, medium, large"),
        ("small", {"horizont": 3}, "unknown field `horizont`.* Did you mean 'horizon'"),
        ("small", {"horizon": "x"}, "`\\$.horizon`"),
        ("small", {"predict": "noise"}, "`\\$.predict`. Known: action, velocity"),
        ("small", {"runtime": {"dtype": "float16"}}, "`\\$.runtime.dtype`. Known: bfloat16, float32"),
        ("small", {"training": {"lora": {"rnk": 8}}}, "`rnk` - at `\\$.training.lora`. Did you mean 'rank'"),
        ("small", {"horizon": 0}, "horizon"),
        ("small", {"cameras": ["wrist"]}, "no camera \\['wrist'\\]; it has \\['front'\\]"),
        ("small", {"guidance": 3.0}, "needs `advantage`"),
        ("small", {"vlm": "/nowhere"}, "/nowhere: no such directory"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(seeing, size, told, says):
    for ask in (lambda: factory.defaults(size, told, seeing), lambda: factory.make(size, told, seeing, 0)):
        with pytest.raises(ConfigError, match=says):
            ask()


def test_all_sizes_have_defaults_and_asking_loads_no_torch(seeing):
    assert all(factory.defaults(size, {}, seeing).horizon == 16 for size in SIZES)
    code = (
        "import sys; from policies.flow import factory; from hal.drivers.fake import FakeRobot; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_statistics_go_on_learning_when_asked_to(blind, blind_net):
    batch = example_batch(blind, 4)
    batch["state"] = batch["state"] + 3
    for online in (False, True):
        policy = FlowPolicy(blind, msgspec.structs.replace(blind_net, online_statistics=online))
        before = policy.module.normalizer.mean.clone()
        with torch.no_grad():
            policy.loss(batch)
        assert torch.equal(policy.module.normalizer.mean, before)
        policy.loss(batch)
        assert torch.equal(policy.module.normalizer.mean, before) != online


def test_a_configuration_from_before_these_options_is_read():
    assert msgspec.convert({"state_dim": 2, "action_dim": 3}, FlowConfig) == FlowConfig(state_dim=2, action_dim=3)
