"""Small robots and networks that train in milliseconds."""

from __future__ import annotations

import pytest
import torch

from policies.flow.config import CameraEncoderConfig, Conv, FlowConfig
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seeing() -> RobotSpec:
    """Two state numbers, two actions with unlike limits, one 16x16 camera."""
    return RobotSpec(
        embodiment="seeing",
        state=(Dimension("x", "m", -1.0, 1.0), Dimension("y", "m", -1.0, 1.0)),
        action=(Dimension("dx", "cm", -2.0, 2.0, CommandType.delta), Dimension("grip", "1", 0.0, 10.0)),
        cameras=(CameraSpec("front", 16, 16, 20.0),),
        control_hz=20.0,
    )


@pytest.fixture
def blind(seeing) -> RobotSpec:
    return RobotSpec("blind", seeing.state, seeing.action, (), 20.0)


@pytest.fixture
def seeing_net() -> FlowConfig:
    return FlowConfig(
        state_dim=2,
        action_dim=2,
        horizon=4,
        cameras=(CameraEncoderConfig("front", 16, 16),),
        stem=(Conv(8, 4, 2), Conv(8, 3, 1)),
        points=4,
        width=32,
        layers=2,
    )


@pytest.fixture
def blind_net() -> FlowConfig:
    return FlowConfig(state_dim=2, action_dim=2, horizon=4, width=64, layers=2)
