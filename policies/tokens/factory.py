"""`--policy tokens:fast` and `tokens:residual_vq`: the token policy by name. Imports no torch until one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from policies.common.runtime import Runtime
from policies.flow.config import CameraEncoderConfig, Conv
from policies.interface.options import read_options
from policies.interface.registry import PolicyDefaults
from policies.interface.trainable import FinetuneConfig
from policies.tokens.config import FastConfig, ResidualVQConfig, TokensConfig
from wire.errors import ConfigError, suggest
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.interface.policy import LearnedPolicy

PLACES = ("fast", "residual_vq")
"""the tokenisers; the first when none is named"""
_DEFAULT = TokensConfig(1, 1)


class TokensOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be configured; see `TokensConfig` for what is not explained here."""

    horizon: int = _DEFAULT.horizon
    cameras: tuple[str, ...] | None = None
    """names of those that are looked through; None: all that the robot has"""
    stem: tuple[Conv, ...] = _DEFAULT.stem
    points: int = _DEFAULT.points
    fast: FastConfig = _DEFAULT.fast
    residual_vq: ResidualVQConfig = _DEFAULT.residual_vq
    max_tokens: int = _DEFAULT.max_tokens
    width: int = _DEFAULT.width
    layers: int = _DEFAULT.layers
    heads: int = _DEFAULT.heads
    latent_tokens: int = _DEFAULT.latent_tokens
    temperature: float = _DEFAULT.temperature
    max_offset: int = _DEFAULT.max_offset
    online_statistics: bool = _DEFAULT.online_statistics
    runtime: Runtime = Runtime()
    training: FinetuneConfig = FinetuneConfig()


def absolute(place: str) -> str:
    """A place is the name of a tokeniser, never a path."""
    return place


def make(place: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> LearnedPolicy:
    """The policy. Raises `ConfigError` for a place or an option that cannot be used."""
    from policies.tokens.policy import TokenPolicy

    options = _options(place, config)
    return TokenPolicy(spec, _network(place, options, spec), seed, options.runtime, options.training)


def defaults(place: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What it needs of its job. Raises `ConfigError` as `make` does, without making it."""
    network = _network(place, _options(place, config), spec)
    network.require()
    return PolicyDefaults(horizon=network.horizon, learning_rate=1e-3)


def _options(place: str, config: dict[str, Any]) -> TokensOptions:
    return read_options(config, TokensOptions, f"the configuration of policy 'tokens:{place}'")


def _network(place: str, options: TokensOptions, spec: RobotSpec) -> TokensConfig:
    if place not in ("", *PLACES):
        raise ConfigError(
            f"policy 'tokens:{place}': no such tokeniser.{suggest(place, PLACES)} There are {', '.join(PLACES)}."
        )
    cameras = {camera.name: camera for camera in spec.cameras}
    names = tuple(cameras) if options.cameras is None else options.cameras
    if missing := [name for name in names if name not in cameras]:
        raise ConfigError(
            f"policy 'tokens:{place}': no camera '{missing[0]}'{suggest(missing[0], cameras)}; robot "
            f"'{spec.embodiment}' has {', '.join(cameras) or 'none'}."
        )
    cameras = tuple(CameraEncoderConfig(name, cameras[name].height, cameras[name].width) for name in names)
    chosen = msgspec.structs.asdict(options)
    for field in ("cameras", "runtime", "training"):
        del chosen[field]
    chosen["tokenizer"] = place or PLACES[0]
    return TokensConfig(state_dim=spec.state_dim, action_dim=spec.action_dim, cameras=cameras, **chosen)
