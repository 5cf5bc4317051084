"""How tokenisers are fitted, and what decides the token policy's network. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from policies.flow.config import Conv, Positive, SlowPathConfig
from wire.errors import ConfigError

Goal: TypeAlias = Annotated[float, Meta(gt=0, lt=1)]
"""a mean absolute error, as a share of the range"""


class FastConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How FAST tokens are fitted; see `policies.tokens.fast`."""

    scale: Annotated[float, Meta(gt=0, le=1e9)] = 10.0
    """integers per unit of a coefficient, where 2 units are the range; the paper's 10. Searched with `error_goal`"""
    dead_zone: Annotated[float, Meta(ge=0.5, lt=1)] = 0.5
    """coefficients below so many integers become 0; 0.5 is plain rounding. Searched with `error_goal`"""
    vocabulary: Annotated[int, Meta(ge=8, le=1 << 20)] = 1024
    """the most tokens, single integers and carries among them; the paper's 1024"""
    error_goal: Goal | None = None
    """a mean absolute error, as a share of the range: `fit` takes the scale and dead zone that meet it with the least
    to say"""

    def max_bytes(self, action_dim: int) -> int:
        """No tokeniser of this configuration is larger."""
        return 20 * self.vocabulary + 64 * action_dim + 1024


class ResidualVQConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a residual quantiser is fitted; see `policies.tokens.residual_vq`."""

    tokens: Positive = 32
    """stages, the most with `error_goal`; each gives one token"""
    codes: Annotated[int, Meta(ge=2, le=1 << 16)] = 256
    """K, entries of each stage's codebook"""
    group: Positive = 4
    """components that one stage corrects"""
    frequencies: Positive = 16
    """of the cosines along time, the lowest so many are kept"""
    components: Positive = 256
    """principal components, at most"""
    error_goal: Goal | None = None
    """a mean absolute error, as a share of the range: `fit` adds stages until chunks it was not fitted on meet it"""
    seed: int = 0
    """of the first codes of k-means"""

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


class TokensConfig(SlowPathConfig, frozen=True, kw_only=True):
    """Everything that decides the token policy's network and how it is sampled. The slow path is the flow policy's."""

    stem: tuple[Conv, ...] = (Conv(48, 8, 4), Conv(48, 3, 1))
    tokenizer: Literal["fast", "residual_vq"] = "fast"
    fast: FastConfig = FastConfig(vocabulary=512)
    residual_vq: ResidualVQConfig = ResidualVQConfig(tokens=16)
    max_tokens: Positive = 48
    """a chunk's tokens after these are left out, which costs its highest frequencies; for `fast` alone"""
    width: Positive = 128
    """of the decoder, as the next three"""
    layers: Positive = 2
    heads: Positive = 4
    latent_tokens: Positive = 4
    """the latent is looked at as so many tokens"""
    temperature: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """0: the likeliest token each time; above: drawn from softmax(logits / temperature)"""

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work, whatever the robot."""
        super().require()
        if self.cameras and not self.stem:
            raise ConfigError("token policy: cameras need at least one convolution in `stem`.")
        if self.width % self.heads:
            raise ConfigError(f"token policy: heads divide the width, not {self.heads} and {self.width}.")

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
