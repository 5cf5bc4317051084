"""The sizes of the flow policy: the two of the recipes, and three with a transformer. All take the same options.

Needs no torch, so that a process which only starts others can read a size.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from policies.flow.config import AttentionPoolerConfig, CameraEncoderConfig, Conv, FlowConfig, Transformer, Vlm
from wire.errors import ConfigError, suggest
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
        cameras=tuple(CameraEncoderConfig(camera.name, camera.height, camera.width) for camera in spec.cameras),
        # patches of 4 pixels, then a quarter of their places: 19 ms a gradient step of 64 pictures on one thread in
        # float32, where Conv(48, 8, 4), Conv(48, 3, 1) takes 51, and as good
        stem=(Conv(32, 4, 4), Conv(64, 3, 2)),
        # closed loop after equal training, one seed: 0.89 success against 0.75 with "velocity"; from the whole state
        # it is the other way round, 0.53 against 0.92
        predict="action",
        # offline on the same corrections, after 3,000 steps: 0.97 success with it, 0.35 to 0.48 without
        ahead=(16, 32, 48),
        euler_steps=4,
        max_offset=max_offset,
        ego_motion=max_offset > 0,
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


def small_network(
    spec: RobotSpec, horizon: int = 16, max_offset: int = 0, prefix: bool = False, residual: bool = False
) -> FlowConfig:
    """About 0.7 M parameters, for a CPU; sees through the robot's cameras if it has any."""
    return _sized(
        spec,
        horizon,
        max_offset,
        prefix,
        residual,
        Transformer(width=96, layers=3, heads=4),
        AttentionPoolerConfig(queries=8, width=64, inner=64, heads=4),
        (Conv(48, 8, 4), Conv(48, 3, 1)),
    )


def medium_network(
    spec: RobotSpec, horizon: int = 16, max_offset: int = 0, prefix: bool = False, residual: bool = False
) -> FlowConfig:
    """About 50 M parameters, for a graphics card; a vision transformer over patches as the slow path."""
    return _sized(
        spec,
        horizon,
        max_offset,
        prefix,
        residual,
        Transformer(width=512, layers=8, heads=8),
        AttentionPoolerConfig(queries=16, width=256, inner=512, heads=8, layers=4),
        (Conv(128, 4, 4), Conv(256, 2, 2)),
    )


def large_network(
    spec: RobotSpec, horizon: int = 16, max_offset: int = 0, prefix: bool = False, residual: bool = False
) -> FlowConfig:
    """A fast path of about 300 M parameters, for a vision-language backbone as the slow one: give it with `vlm`."""
    return _sized(
        spec,
        horizon,
        max_offset,
        prefix,
        residual,
        Transformer(width=1024, layers=19, heads=16),
        AttentionPoolerConfig(queries=32, width=512, inner=1024, heads=16),
        (Conv(128, 4, 4), Conv(256, 2, 2), Conv(256, 2, 2)),
    )


SIZES: dict[str, Callable[..., FlowConfig]] = {
    "pixels": pixels_network,
    "state": state_network,
    "small": small_network,
    "medium": medium_network,
    "large": large_network,
}
"""by name; each takes the robot's spec, horizon, max_offset, prefix and residual"""


def network(
    size: str,
    spec: RobotSpec,
    horizon: int = 16,
    max_offset: int = 0,
    prefix: bool = False,
    residual: bool = False,
    cameras: tuple[str, ...] | None = None,
    vlm: Vlm | None = None,
) -> FlowConfig:
    """The network of one size, through the named cameras (None: all) and with a backbone as the slow path if given.

    Raises `ConfigError` for a size or a camera that is not there.
    """
    if size not in SIZES:
        raise ConfigError(f"flow policy: no size '{size}'.{suggest(size, SIZES)} Known: {', '.join(SIZES)}.")
    seen = spec
    if cameras is not None:
        if missing := [name for name in cameras if name not in {camera.name for camera in spec.cameras}]:
            raise ConfigError(
                f"flow policy: robot '{spec.embodiment}' has no camera {missing}; it has "
                f"{[camera.name for camera in spec.cameras]}."
            )
        seen = msgspec.structs.replace(spec, cameras=tuple(c for c in spec.cameras if c.name in cameras))
    config = SIZES[size](seen, horizon, max_offset, prefix, residual)
    if vlm is None:
        return config
    if config.pooler is None:
        raise ConfigError(
            f"flow policy: size '{size}' has no latent tokens for a backbone; use small, medium or large."
        )
    # its own layers have mixed words and pictures already
    return msgspec.structs.replace(config, vlm=vlm, stem=(), pooler=msgspec.structs.replace(config.pooler, layers=0))


def _sized(
    spec: RobotSpec,
    horizon: int,
    max_offset: int,
    prefix: bool,
    residual: bool,
    transformer: Transformer,
    pooler: AttentionPoolerConfig,
    stem: tuple[Conv, ...],
) -> FlowConfig:
    sees = bool(spec.cameras)
    base = (pixels_network if sees else state_network)(spec, horizon, max_offset, prefix, residual)
    return msgspec.structs.replace(
        base, transformer=transformer, pooler=pooler, stem=stem, euler_steps=4, ego_motion=False
    )
