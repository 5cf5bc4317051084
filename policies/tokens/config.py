"""How tokenisers are fitted, and what decides the token policy's network. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from policies.flow.config import Conv, SlowPathConfig
from wire.errors import ConfigError


class FastConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How FAST tokens are fitted; see `policies.tokens.fast`."""

    scale: float = 10.0
    """integers per unit of a coefficient, where 2 units are the range; the paper's 10. Searched with `error_goal`"""
    dead_zone: float = 0.5
    """coefficients below so many integers become 0; 0.5 is plain rounding. Searched with `error_goal`"""
    vocabulary: int = 1024
    """the most tokens, single integers and carries among them; the paper's 1024"""
    error_goal: float | None = None
    """a mean absolute error, as a share of the range: `fit` takes the scale and dead zone that meet it with the least
    to say"""

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"FAST tokeniser: scale {self.scale} must be finite and above 0.")
        if not 0.5 <= self.dead_zone < 1:
            raise ConfigError(f"FAST tokeniser: dead_zone {self.dead_zone} must be at least 0.5 and below 1.")
        if not 8 <= self.vocabulary <= 1 << 20:
            raise ConfigError(f"FAST tokeniser: vocabulary {self.vocabulary} must be 8 to {1 << 20}.")
        _require_goal(self.error_goal)

    def max_bytes(self, action_dim: int) -> int:
        """No tokeniser of this configuration is larger."""
        return 20 * self.vocabulary + 64 * action_dim + 1024


class ResidualVQConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a residual quantiser is fitted; see `policies.tokens.residual_vq`."""

    tokens: int = 32
    """stages, the most with `error_goal`; each gives one token"""
    codes: int = 256
    """K, entries of each stage's codebook"""
    group: int = 4
    """components that one stage corrects"""
    frequencies: int = 16
    """of the cosines along time, the lowest so many are kept"""
    components: int = 256
    """principal components, at most"""
    error_goal: float | None = None
    """a mean absolute error, as a share of the range: `fit` adds stages until chunks it was not fitted on meet it"""
    seed: int = 0
    """of the first codes of k-means"""

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        fields = {n: getattr(self, n) for n in ("tokens", "group", "frequencies", "components")}
        if bad := [name for name, value in fields.items() if value < 1]:
            raise ConfigError(f"residual VQ: {bad[0]} {fields[bad[0]]} must be 1 or more.")
        if not 2 <= self.codes <= 1 << 16:
            raise ConfigError(f"residual VQ: codes {self.codes} must be 2 to {1 << 16}.")
        _require_goal(self.error_goal)

    def max_bytes(self, horizon: int, action_dim: int) -> int:
        """No tokeniser of this configuration is larger."""
        kept = min(self.frequencies, horizon) * action_dim
        components = min(self.components, kept)
        group = min(self.group, components)
        return (
            2 * (components * kept + self.tokens * self.codes * group)
            + 4 * (kept + 2 * action_dim + self.tokens * group)
            + 4096
        )


def _require_goal(error_goal: float | None) -> None:
    if error_goal is not None and not 0 < error_goal < 1:
        raise ConfigError(f"action tokeniser: error_goal {error_goal} is a share of the range, above 0 and below 1.")


class TokensConfig(SlowPathConfig, frozen=True, kw_only=True):
    """Everything that decides the token policy's network and how it is sampled. The slow path is the flow policy's."""

    stem: tuple[Conv, ...] = (Conv(48, 8, 4), Conv(48, 3, 1))
    tokenizer: Literal["fast", "residual_vq"] = "fast"
    fast: FastConfig = FastConfig(vocabulary=512)
    residual_vq: ResidualVQConfig = ResidualVQConfig(tokens=16)
    max_tokens: int = 48
    """a chunk's tokens after these are left out, which costs its highest frequencies; for `fast` alone"""
    width: int = 128
    """of the decoder, as the next three"""
    layers: int = 2
    heads: int = 4
    latent_tokens: int = 4
    """the latent is looked at as so many tokens"""
    temperature: float = 0.0
    """0: the likeliest token each time; above: drawn from softmax(logits / temperature)"""

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work, whatever the robot."""
        super().require()
        if self.cameras and not self.stem:
            raise ConfigError("token policy: cameras need at least one convolution in `stem`.")
        self.fast.require()
        self.residual_vq.require()
        least = min(self.max_tokens, self.width, self.layers, self.heads, self.latent_tokens)
        if least < 1 or self.width % self.heads:
            raise ConfigError(
                "token policy: max_tokens, width, layers, heads and latent_tokens are 1 or more and heads divide the "
                f"width, not {self.max_tokens}, {self.width}, {self.layers}, {self.heads} and {self.latent_tokens}."
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"token policy: temperature {self.temperature} must be 0 or more, and finite.")

    @property
    def action_vocabulary(self) -> int:
        """Action tokens there is room for; the network has one more, which begins and ends a chunk."""
        if self.tokenizer == "fast":
            return self.fast.vocabulary
        return self.residual_vq.tokens * self.residual_vq.codes

    @property
    def longest(self) -> int:
        """Tokens of a chunk, at most."""
        return self.max_tokens if self.tokenizer == "fast" else self.residual_vq.tokens

    @property
    def tokenizer_bytes(self) -> int:
        """No tokeniser of this configuration is larger, the one before any data included."""
        before = FastConfig(vocabulary=8).max_bytes(self.action_dim)
        if self.tokenizer == "fast":
            return max(before, self.fast.max_bytes(self.action_dim))
        return max(before, self.residual_vq.max_bytes(self.horizon, self.action_dim))
