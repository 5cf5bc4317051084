"""Residual vector quantisation of action chunks: a fixed number of tokens, each correcting what is left.

Residual quantisers as in SoundStream (Zeghidour et al. 2021, arXiv 2107.03312, algorithm 1), on a basis that is linear:
cosines along time, then principal components across all dimensions and frequencies. A quantiser there sees the whole
vector; here each sees only the `group` components with the largest error left, wherever they are. A codebook for a
hundred components at once gains next to nothing per stage (10 bits spread over 100 numbers), while one for a few of
them divides their error by several, and choosing the largest each time is what reverse water-filling asks for (Cover
and Thomas, Elements of Information Theory, section 10.3.3). It is also fitted in seconds, and always to the same.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from scipy.fft import dct, idct

from policies.interface.registry import require_ranges
from policies.tokens.config import ResidualVQConfig
from policies.tokens.tokenizer import ActionTokenizer, Scaling, known_tokens, require_chunks, spread
from wire.errors import ConfigError, InvalidDataError, WeightsError
from wire.untrusted import read_safetensors_header

_KEY = "vla_fleet_tokenizer"
_FITTED = 8192
"""chunks that are looked at, spread over all"""
_CHECKED = 0.2
"""of these, the share that stages are chosen and counted by, and not fitted on"""
_MOST_STEPS = 1 << 16
"""of a chunk"""
_ROUNDS = 10
"""of k-means"""
_LEAST_VARIANCE = 1e-9
"""components below are rounding errors"""


class ResidualVQ(ActionTokenizer):
    """Token `s * K + c` is code c of stage s."""

    def __init__(
        self,
        scaling: Scaling,
        horizon: int,
        mean: np.ndarray,
        basis: np.ndarray,
        picked: np.ndarray,
        codebooks: np.ndarray,
    ) -> None:
        """mean: float32[F * da], of the kept coefficients; basis: float16[components, F * da], orthonormal rows;
        picked: int32[stages, group], the components that each stage corrects; codebooks: float16[stages, K, group].
        Use `fit` to learn them."""
        self.scaling, self.horizon = scaling, horizon
        # always in one memory order: sums in another differ in their last bits, and tokens with them
        self._mean, self._basis = np.ascontiguousarray(mean), np.ascontiguousarray(basis)
        self._picked, self._codebooks = np.ascontiguousarray(picked), np.ascontiguousarray(codebooks)
        # half precision is how they travel, and enough: 0.05 % of what is corrected
        self._rows: np.ndarray = self._basis.astype(np.float32)
        self._codes: np.ndarray = self._codebooks.astype(np.float32)
        self._norms = np.square(self._codes).sum(2)
        self.length = len(picked)
        self.vocabulary = codebooks.shape[0] * codebooks.shape[1]

    @classmethod
    def fit(
        cls, chunks: np.ndarray, config: ResidualVQConfig | None = None, least_span: np.ndarray | float = 1e-6
    ) -> ResidualVQ:
        """Learn ranges, basis and codebooks of float[m, H, da]; `least_span` [da] or one number: see `Scaling.fit`.

        Raises `InvalidDataError` for chunks that are not such, `ConfigError` for a configuration that cannot work and
        when `config.tokens` stages do not meet the error goal.
        """
        config = config or ResidualVQConfig()
        require_ranges(config, "residual VQ")
        chunks = require_chunks(chunks)
        chunks = chunks[spread(len(chunks), _FITTED)]
        scaling = Scaling.fit(chunks, least_span)
        normalized = scaling.normalize(chunks)
        kept = _kept(normalized, config.frequencies)
        fitted, checked = _split(len(chunks))
        mean = kept[fitted].mean(0).astype(np.float32)
        basis = _principal(kept[fitted] - mean, config.components).astype(np.float16)
        left = ((kept - mean) @ basis.T.astype(np.float64)).astype(np.float32)
        whole = left.copy()
        group, rng = min(config.group, len(basis)), np.random.default_rng(config.seed)
        picked, codebooks = [], []
        for _ in range(config.tokens):
            worst = np.sort(np.argsort(-np.square(left[checked]).mean(0), kind="stable")[:group])
            codes = _k_means(left[fitted][:, worst], config.codes, rng).astype(np.float16)
            picked.append(worst)
            codebooks.append(codes)
            told = codes.astype(np.float32)
            left[:, worst] -= told[_nearest(left[:, worst], told, np.square(told).sum(1))]
            if config.error_goal is not None:
                told_so_far = mean + (whole - left)[checked] @ basis.astype(np.float32)
                decoded = _actions(told_so_far, *chunks.shape[1:])
                error = float(np.abs(decoded - normalized[checked]).mean()) / 2
                if error <= config.error_goal:
                    break
        else:
            if config.error_goal is not None:
                raise ConfigError(
                    f"residual VQ: {config.tokens} tokens leave an error of {error:.4f} of the range, above error_goal "
                    f"{config.error_goal:g}; allow more tokens, codes or frequencies, or a larger error."
                )
        return cls(scaling, chunks.shape[1], mean, basis, np.array(picked, np.int32), np.stack(codebooks))

    # --- ActionTokenizer ---------------------------------------------------------------------------------------

    def encode_batch(self, chunks: np.ndarray) -> list[list[int]]:
        """See `ActionTokenizer`."""
        chunks = require_chunks(chunks, self.horizon, len(self.scaling.low))
        frequencies = len(self._mean) // len(self.scaling.low)
        left = (_kept(self.scaling.normalize(chunks), frequencies) - self._mean).astype(np.float32) @ self._rows.T
        tokens = np.zeros((len(chunks), len(self._picked)), np.int64)
        for stage, (picked, codes) in enumerate(zip(self._picked, self._codes, strict=True)):
            chosen = _nearest(left[:, picked], codes, self._norms[stage])
            left[:, picked] -= codes[chosen]
            tokens[:, stage] = stage * len(codes) + chosen
        return tokens.tolist()

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """See `ActionTokenizer`: a stage without a token corrects nothing, the last of several counts."""
        size = self._codes.shape[1]
        chosen = {token // size: token % size for token in known_tokens(tokens, self.vocabulary)}
        summed = np.zeros(len(self._rows), np.float32)
        for stage, code in chosen.items():
            summed[self._picked[stage]] += self._codes[stage, code]
        kept = (self._mean + summed @ self._rows)[None]
        return self.scaling.restore(_actions(kept, self.horizon, len(self.scaling.low))[0])

    def allowed(self, position: int) -> tuple[int, int]:
        """Each stage has its own codes."""
        size = self._codes.shape[1]
        stage = min(position, len(self._picked) - 1)
        return stage * size, (stage + 1) * size

    def to_bytes(self) -> bytes:
        """safetensors."""
        tensors = {
            "low": self.scaling.low,
            "high": self.scaling.high,
            "mean": self._mean,
            "basis": self._basis,
            "picked": self._picked,
            "codebooks": self._codebooks,
        }
        plain = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        return safetensors.numpy.save(plain, metadata={_KEY: f"residual_vq {self.horizon}"})

    @classmethod
    def from_bytes(cls, data: bytes) -> ResidualVQ:
        """What `to_bytes` gave. Raises `InvalidDataError` for anything else."""
        what = "residual VQ"
        try:
            header = read_safetensors_header(io.BytesIO(data), len(data), what)
            kind, horizon = header.metadata[_KEY].split()
            tensors = safetensors.numpy.load(data)
            low, high, mean = tensors["low"], tensors["high"], tensors["mean"]
            basis, picked, codebooks = tensors["basis"], tensors["picked"], tensors["codebooks"]
            steps = int(horizon)
        except (safetensors.SafetensorError, WeightsError) as error:
            raise InvalidDataError(f"{what}: it cannot be read: {error}. Save it again with `to_bytes`.") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidDataError(
                f"{what}: a file that is no action tokeniser ({error}); use what `to_bytes` gave."
            ) from error
        kinds = [tensor.dtype.str[1:] for tensor in (low, high, mean, basis, picked, codebooks)]
        ranks = [tensor.ndim for tensor in (low, high, mean, basis, picked, codebooks)]
        sound = (
            kind == "residual_vq"
            and kinds == ["f4", "f4", "f4", "f2", "i4", "f2"]
            and ranks == [1, 1, 1, 2, 2, 3]
            and 0 < low.size == high.size
            and mean.size > 0
            and mean.size % low.size == 0
            and mean.size // low.size <= steps <= _MOST_STEPS
            and basis.shape[1] == mean.size
            and codebooks.size > 0
            and codebooks.shape[::2] == picked.shape
            and bool((picked >= 0).all() and (picked < len(basis)).all())
            and all(bool(np.isfinite(tensor).all()) for tensor in (low, high, mean, basis, codebooks))
            and bool((low < high).all())
        )
        if not sound:
            raise InvalidDataError(f"{what}: values that `fit` never gives; it was changed after it was saved.")
        return cls(Scaling(low, high), steps, mean, basis, picked, codebooks)


def _kept(normalized: np.ndarray, frequencies: int) -> np.ndarray:
    """float64[m, F * da]: the lowest cosines of [m, H, da]."""
    return dct(normalized, axis=1, norm="ortho")[:, :frequencies].reshape(len(normalized), -1)


def _actions(kept: np.ndarray, horizon: int, action_dim: int) -> np.ndarray:
    """[m, H, da], normalised, of [m, F * da]: the inverse of `_kept` if no frequency is missing."""
    return idct(kept.reshape(len(kept), -1, action_dim), n=horizon, axis=1, norm="ortho")


def _split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit on and rows to check with. Neighbouring chunks overlap, so whole stretches are held back."""
    stretches = np.linspace(0, 40, count, endpoint=False).astype(int)
    held = stretches % round(1 / _CHECKED) == 2
    everything = np.arange(count)
    return (everything[~held], everything[held]) if held.any() else (everything, everything)


def _principal(centred: np.ndarray, most: int) -> np.ndarray:
    """float64[components, n]: orthonormal directions of float64[m, n], those with the largest variance."""
    variances, directions = np.linalg.eigh(centred.T @ centred / len(centred))
    count = min(most, max(1, int((variances > _LEAST_VARIANCE).sum())))
    return directions[:, ::-1][:, :count].T


def _k_means(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """float32[count, d] codes of float32[m, d]: Lloyd's algorithm from random rows."""
    codes: np.ndarray = rows[rng.choice(len(rows), count, replace=len(rows) < count)]
    for _ in range(_ROUNDS):
        chosen = _nearest(rows, codes, np.square(codes).sum(1))
        members = np.bincount(chosen, minlength=count)
        sums = np.stack([np.bincount(chosen, column, count) for column in rows.T], 1)
        codes = (sums / np.maximum(members, 1)[:, None]).astype(np.float32)
        empty = members == 0
        codes[empty] = rows[rng.choice(len(rows), int(empty.sum()))]
    return codes


def _nearest(rows: np.ndarray, codes: np.ndarray, norms: Any) -> np.ndarray:
    """int64[m]: the code with the least |row - code|^2, of which |row|^2 does not matter."""
    return np.argmin(norms - 2 * (rows @ codes.T), axis=1)
