"""The baseline without compression: every number of every step a token of its own."""

from __future__ import annotations

import msgspec
import numpy as np

from policies.tokens.tokenizer import ActionTokenizer, Scaling, require_chunks

BINS = 256


class Bins(ActionTokenizer):
    """Uniform bins between the 1 % and the 99 % quantile, as OpenVLA (arXiv 2406.09246, section 3.2) has them."""

    vocabulary = BINS

    def __init__(self, scaling: Scaling, horizon: int) -> None:
        self.scaling, self.horizon = scaling, horizon
        self.length = horizon * len(scaling.low)

    @classmethod
    def fit(cls, chunks: np.ndarray) -> Bins:
        """Ranges of float[m, H, da]."""
        chunks = require_chunks(chunks)
        return cls(Scaling.fit(chunks), chunks.shape[1])

    def encode_batch(self, chunks: np.ndarray) -> list[list[int]]:
        """The bin of each number; what is outside the range is in the first or the last."""
        share = (self.scaling.normalize(chunks) + 1) / 2
        return np.clip(np.floor(share * BINS), 0, BINS - 1).astype(int).reshape(len(chunks), -1).tolist()

    def decode(self, tokens) -> np.ndarray:
        """The middle of each bin."""
        share = (np.array(tokens, float).reshape(self.horizon, -1) + 0.5) / BINS
        return self.scaling.restore(2 * share - 1)

    def to_bytes(self) -> bytes:
        return msgspec.json.encode([self.scaling.low.tolist(), self.scaling.high.tolist()])
