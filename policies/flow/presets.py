"""The networks of the two recipes. Both take the same options, see `FlowConfig`."""

from __future__ import annotations

from policies.flow.config import Conv, Eye, FlowConfig
from wire.errors import ConfigError
from wire.types import RobotSpec


def pixels_network(
    spec: RobotSpec, horizon: int = 16, max_offset: int = 0, prefix: bool = False, residual: bool = False
) -> FlowConfig:
    """Small cameras, an instruction and proprioception. Raises `ConfigError` for a robot without a camera."""
    if not spec.cameras:
        raise ConfigError(
            f"robot '{spec.embodiment}' has no camera; use the `state` recipe or a robot with a camera for `pixels`."
        )
    return FlowConfig(
        state_dim=spec.state_dim,
        action_dim=spec.action_dim,
        horizon=horizon,
        eyes=tuple(Eye(camera.name, camera.height, camera.width) for camera in spec.cameras),
        # a wide, coarse first look: a third of the training time of the default pyramid
        stem=(Conv(48, 8, 4), Conv(48, 3, 1)),
        # closed loop after equal training, one seed: 0.89 success against 0.75 with "velocity"; from the whole state
        # it is the other way round, 0.53 against 0.92
        predict="action",
        # offline on the same corrections, after 3,000 steps: 0.97 success with it, 0.35 to 0.48 without
        ahead=(16, 32, 48),
        euler_steps=4,
        max_offset=max_offset,
        prefix=prefix,
        residual=residual,
    )


def state_network(
    spec: RobotSpec, horizon: int = 16, max_offset: int = 0, prefix: bool = False, residual: bool = False
) -> FlowConfig:
    """The whole state as numbers and an instruction; cameras, if there are any, are not looked at."""
    return FlowConfig(
        state_dim=spec.state_dim,
        action_dim=spec.action_dim,
        horizon=horizon,
        max_offset=max_offset,
        prefix=prefix,
        residual=residual,
    )
