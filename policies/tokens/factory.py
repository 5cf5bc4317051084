"""`--policy tokens:fast` and `tokens:residual_vq`: the token policy by name. Imports no torch until one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.flow.config import Conv, NetworkOptions, camera_encoders
from policies.interface.registry import PolicyDefaults, read_options
from policies.tokens.config import FastConfig, ResidualVQConfig, TokensConfig
from wire.errors import ConfigError, suggest
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.interface.policy import LearnedPolicy

TOKENIZERS = ("fast", "residual_vq")
"""the tokenisers; the first when none is named"""
_DEFAULT = TokensConfig(state_dim=1, action_dim=1)


class TokensOptions(NetworkOptions, frozen=True):
    """What may be configured; see `TokensConfig` for what is not explained here."""

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


def absolute(tokenizer: str) -> str:
    """The name of a tokeniser, never a path."""
    return tokenizer


def make(tokenizer: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> LearnedPolicy:
    """The policy. Raises `ConfigError` for a tokeniser or an option that cannot be used."""
    from policies.tokens.policy import TokenPolicy

    options, network = _read(tokenizer, config, spec)
    return TokenPolicy(spec, network, seed, options.runtime, options.training)


def defaults(tokenizer: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What it needs of its job. Raises `ConfigError` as `make` does, without making it."""
    _, network = _read(tokenizer, config, spec)
    network.require()
    return PolicyDefaults(horizon=network.horizon, learning_rate=1e-3)


def _read(tokenizer: str, config: dict[str, Any], spec: RobotSpec) -> tuple[TokensOptions, TokensConfig]:
    """What is configured, and the network that it makes."""
    what = f"policy 'tokens:{tokenizer}'"
    options = read_options(config, TokensOptions, f"the configuration of {what}")
    if tokenizer not in ("", *TOKENIZERS):
        raise ConfigError(
            f"{what}: no such tokeniser.{suggest(tokenizer, TOKENIZERS)} There are {', '.join(TOKENIZERS)}."
        )
    chosen: Any = tokenizer or TOKENIZERS[0]
    fields = set(TokensOptions.__struct_fields__) - {"cameras", "runtime", "training"}
    return options, TokensConfig(
        state_dim=spec.state_dim,
        action_dim=spec.action_dim,
        cameras=camera_encoders(spec, options.cameras, what),
        tokenizer=chosen,
        **{name: getattr(options, name) for name in fields},
    )
