"""Tiny checkpoints of lerobot, written by lerobot's own `save_pretrained`: random weights, real files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from wire.types import CameraSpec, CommandType, Dimension, RobotSpec


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def robot() -> RobotSpec:
    """Three state numbers, two actions with unlike limits, one 64x64 camera."""
    return RobotSpec(
        embodiment="robot",
        state=tuple(Dimension(name, "m", -1.0, 1.0) for name in "xyz"),
        action=(Dimension("dx", "cm", -2.0, 2.0, CommandType.delta), Dimension("grip", "1", 0.0, 10.0)),
        cameras=(CameraSpec("front", 64, 64, 20.0),),
        control_hz=20.0,
    )


class TinyResNet(nn.Module):
    """As much of torchvision's ResNet as lerobot looks at: children by name, the last two for classification."""

    def __init__(self, weights=None, norm_layer=nn.BatchNorm2d, replace_stride_with_dilation=None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 4, 3)
        self.bn1 = norm_layer(16)
        self.relu = nn.ReLU()
        self.layer4 = nn.Sequential(nn.Conv2d(16, 32, 5, 4, 2), norm_layer(32), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 1)


@pytest.fixture(scope="session")
def tiny_backbone():
    """Known to lerobot as `resnet_tiny`: the smallest of torchvision has 11 million parameters."""
    import torchvision

    torchvision.models.resnet_tiny = TinyResNet
    yield
    del torchvision.models.resnet_tiny


def features(robot: RobotSpec) -> tuple[dict, dict]:
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {"observation.state": PolicyFeature(FeatureType.STATE, (robot.state_dim,))}
    for camera in robot.cameras:
        shape = (3, camera.height, camera.width)
        inputs[f"observation.images.{camera.name}"] = PolicyFeature(FeatureType.VISUAL, shape)
    return inputs, {"action": PolicyFeature(FeatureType.ACTION, (robot.action_dim,))}


def save(robot: RobotSpec, config, directory: Path) -> Path:
    """A checkpoint of random weights with statistics of its own."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = get_policy_class(config.type)(config)
        for parameter in policy.parameters():
            # trained ones have no zeros; some begin with them and hide what they stand before
            parameter.data += 0.02 * torch.randn_like(parameter)
    policy.save_pretrained(directory)
    low, high = torch.tensor(robot.action_low()), torch.tensor(robot.action_high())
    statistics = {
        "observation.state": _statistics(torch.full((robot.state_dim,), -0.9), torch.full((robot.state_dim,), 1.1)),
        "action": _statistics(low * 0.9, high * 0.8),
    }
    for camera in robot.cameras:
        channels = _statistics(torch.zeros(3, 1, 1), torch.full((3, 1, 1), 0.9))
        statistics[f"observation.images.{camera.name}"] = channels
    for processor in make_pre_post_processors(config, dataset_stats=statistics):
        processor.save_pretrained(directory)
    return directory


def _statistics(low: torch.Tensor, high: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 4}


@pytest.fixture(scope="session")
def tiny_act(robot, tiny_backbone):
    """Configuration of an ACT with a chunk of 8."""
    from lerobot.policies.act.configuration_act import ACTConfig

    inputs, outputs = features(robot)
    return ACTConfig(
        input_features=inputs,
        output_features=outputs,
        device="cpu",
        chunk_size=8,
        n_action_steps=8,
        vision_backbone="resnet_tiny",
        pretrained_backbone_weights=None,
        dim_model=32,
        n_heads=4,
        dim_feedforward=64,
        n_encoder_layers=1,
        n_decoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=8,
        push_to_hub=False,
    )


@pytest.fixture(scope="session")
def act_dir(robot, tiny_act, tmp_path_factory) -> Path:
    return save(robot, tiny_act, tmp_path_factory.mktemp("act"))


@pytest.fixture(scope="session")
def diffusion_dir(robot, tiny_backbone, tmp_path_factory) -> Path:
    """Diffusion over 8 ticks, from two observations, in three denoising steps."""
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    inputs, outputs = features(robot)
    config = DiffusionConfig(
        input_features=inputs,
        output_features=outputs,
        device="cpu",
        n_obs_steps=2,
        horizon=8,
        n_action_steps=7,
        vision_backbone="resnet_tiny",
        down_dims=(16, 32),
        n_groups=4,
        diffusion_step_embed_dim=16,
        spatial_softmax_num_keypoints=8,
        num_train_timesteps=10,
        num_inference_steps=3,
        crop_shape=None,
        push_to_hub=False,
    )
    return save(robot, config, tmp_path_factory.mktemp("diffusion"))


@pytest.fixture(scope="module")
def act_checkpoint(act_dir):
    from policies.lerobot.checkpoint import LeRobotCheckpoint

    return LeRobotCheckpoint.open(str(act_dir))


@pytest.fixture(scope="module")
def diffusion_checkpoint(diffusion_dir):
    from policies.lerobot.checkpoint import LeRobotCheckpoint

    return LeRobotCheckpoint.open(str(diffusion_dir))


@pytest.fixture
def act(robot, act_checkpoint):
    from policies.lerobot.policy import LeRobotPolicy

    return LeRobotPolicy(robot, act_checkpoint)


@pytest.fixture
def diffusion(robot, diffusion_checkpoint):
    from policies.lerobot.policy import LeRobotPolicy

    return LeRobotPolicy(robot, diffusion_checkpoint)
