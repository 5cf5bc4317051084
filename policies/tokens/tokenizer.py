"""Action chunks as tokens: what every tokeniser does, how well it does it, and how it travels.

Shapes: m chunks of H actions of da numbers, in the robot's own units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wire.errors import InvalidDataError

QUANTILES = (0.01, 0.99)
"""of each dimension, over all actions that were fitted on: its range"""
LIMIT = 3.0
"""normalised actions are clipped to ±LIMIT, one whole range beyond either end of it"""


class ActionTokenizer(ABC):
    """Chunks to tokens and back. Made by the `fit` of its class, or by `from_bytes`; it never changes afterwards."""

    scaling: Scaling
    horizon: int
    """H"""
    vocabulary: int
    """tokens are 0 to vocabulary - 1"""
    length: int | None
    """tokens of every chunk; None when that depends on the chunk"""

    def encode(self, chunk: np.ndarray) -> list[int]:
        """Tokens of float[H, da]; low frequencies or coarse stages first, so that a beginning is a coarse chunk.

        What the range is exceeded by, more than once over, is clipped. Raises `InvalidDataError` for another shape and
        for values that are not finite.
        """
        return self.encode_batch(np.asarray(chunk)[None])[0]

    @abstractmethod
    def encode_batch(self, chunks: np.ndarray) -> list[list[int]]:
        """Tokens of each of float[m, H, da]."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """float32[H, da], finite, for any tokens in any number and order; those outside the vocabulary say nothing."""

    def allowed(self, position: int) -> tuple[int, int]:
        """The first token that may stand at `position` of a chunk, and the one after the last that may."""
        return 0, self.vocabulary

    @abstractmethod
    def to_bytes(self) -> bytes:
        """What `from_bytes` reads: JSON or safetensors, never a pickle."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Each dimension's range, which becomes [-1, 1]."""

    low: np.ndarray
    """float32[da]"""
    high: np.ndarray
    """float32[da], above low"""

    @classmethod
    def fit(cls, chunks: np.ndarray, least_span: np.ndarray | float = 1e-6) -> Scaling:
        """From the 1 % to the 99 % quantile of each dimension (FAST, arXiv 2501.09747, section V.B).

        A dimension that moved less than `least_span` gets that much range around where it was: the jitter of a joint
        that rests is not worth tokens.
        """
        low, high = np.quantile(chunks.reshape(-1, chunks.shape[-1]), QUANTILES, axis=0)
        missing = np.maximum(np.asarray(least_span, np.float64) - (high - low), 0) / 2
        return cls((low - missing).astype(np.float32), (high + missing).astype(np.float32))

    @property
    def span(self) -> np.ndarray:
        """float32[da], in the robot's units"""
        return self.high - self.low

    def normalize(self, chunks: np.ndarray) -> np.ndarray:
        """float64[..., da] in ±LIMIT"""
        middle, half = (self.high + self.low) / 2, self.span / 2
        return np.clip((np.asarray(chunks, np.float64) - middle) / half, -LIMIT, LIMIT)

    def restore(self, normalized: np.ndarray) -> np.ndarray:
        """float32[..., da]: the inverse of `normalize`."""
        middle, half = (self.high + self.low) / 2, self.span / 2
        return (np.clip(normalized, -LIMIT, LIMIT) * half + middle).astype(np.float32)


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """How a tokeniser does on chunks. Errors are shares of each dimension's range (`Scaling`)."""

    chunks: int
    tokens_mean: float
    tokens_p99: float
    tokens_max: int
    mean_abs: float
    """mean of |decoded - original| over everything"""
    rms: float
    p99: float
    """99 % of all numbers are closer than this"""
    largest: float
    worst_dimension: float
    """the largest mean absolute error of one dimension"""


def report(tokenizer: ActionTokenizer, chunks: np.ndarray) -> TokenizerReport:
    """Tokens and errors of float[m, H, da], which should not be those that were fitted on."""
    chunks = require_chunks(chunks, tokenizer.horizon, len(tokenizer.scaling.low))
    tokens = tokenizer.encode_batch(chunks)
    decoded = np.stack([tokenizer.decode(one) for one in tokens])
    errors = np.abs(decoded.astype(np.float64) - chunks) / tokenizer.scaling.span
    counts = np.array([len(one) for one in tokens])
    return TokenizerReport(
        chunks=len(chunks),
        tokens_mean=float(counts.mean()),
        tokens_p99=float(np.quantile(counts, 0.99)),
        tokens_max=int(counts.max()),
        mean_abs=float(errors.mean()),
        rms=float(np.sqrt(np.square(errors).mean())),
        p99=float(np.quantile(errors, 0.99)),
        largest=float(errors.max()),
        worst_dimension=float(errors.mean((0, 1)).max()),
    )


def require_chunks(chunks: np.ndarray, horizon: int | None = None, action_dim: int | None = None) -> np.ndarray:
    """`chunks` as array. Raises `InvalidDataError` unless it is finite [m, H, da] with m > 0 and this H and da."""
    chunks = np.asarray(chunks)
    if chunks.ndim != 3 or not chunks.size or chunks.dtype.kind not in "fiu":
        raise InvalidDataError(
            f"action tokeniser: chunks are {chunks.dtype}{list(chunks.shape)}, expected numbers [m, H, da] with m > 0."
        )
    for name, mine, theirs in (("actions", horizon, chunks.shape[1]), ("dimensions", action_dim, chunks.shape[2])):
        if mine not in (None, theirs):
            raise InvalidDataError(f"action tokeniser: chunks of {theirs} {name}; it was fitted on chunks of {mine}.")
    if not np.isfinite(chunks).all():
        rows = int((~np.isfinite(chunks).all((1, 2))).sum())
        raise InvalidDataError(f"action tokeniser: {rows} of {len(chunks)} chunks are not finite.")
    return chunks


def spread(count: int, most: int) -> np.ndarray:
    """int64: at most so many of `count` rows, spread over all."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def known_tokens(tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Those of `tokens` that are in the vocabulary."""
    return [int(token) for token in tokens if 0 <= token < vocabulary]
