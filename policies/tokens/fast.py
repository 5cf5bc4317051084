"""FAST action tokens: quantiles, cosines, rounding, byte pairs.

Pertsch et al. 2025, arXiv 2501.09747, section V: each dimension's 1 % to 99 % range becomes [-1, 1]; a DCT-II in time
leaves most of a smooth chunk in few low frequencies; scaled and rounded coefficients, low frequencies first and across
the dimensions within each, are a string of small integers; byte-pair encoding makes its common pieces one token each.

What differs from the paper: zeros at a string's end are left out (decoding fills them in), an integer beyond those seen
while fitting is written with carries instead of failing, small coefficients may be dropped (`dead_zone`), and both that
and the scale can be searched for an error that is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from scipy.fft import dct, idct

from policies.flow.config import NotNegative
from policies.interface.registry import require_ranges
from policies.tokens.config import FastConfig
from policies.tokens.tokenizer import LIMIT, ActionTokenizer, Scaling, known_tokens, require_chunks, spread
from wire.errors import ConfigError, InvalidDataError

_FIRST_CHARACTER = 0x4E00
"""symbols become characters from here on, where 20,000 ordinary ones follow each other"""
_MAX_SYMBOLS = 4096
_DOWN, _UP = 0, 1
"""the carries: the integer that follows is lower, or higher, by one more than the alphabet's end"""
_FITTED = 16_384
"""chunks that are looked at, spread over all"""
_SEARCHED = 1024
"""of these, for the search of the scale"""
_DEAD_ZONES = (0.5, 0.6, 0.7, 0.8)
"""that the search tries"""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of `to_bytes`."""

    kind: Literal["fast"]
    horizon: Annotated[int, Meta(ge=1, le=1 << 16)]
    low: list[float]
    high: list[float]
    scale: Annotated[float, Meta(gt=0)]
    dead_zone: Annotated[float, Meta(ge=0.5, lt=1)]
    least: Annotated[int, Meta(le=0)]
    """the alphabet's lowest integer"""
    most: NotNegative
    """and its highest"""
    merges: list[tuple[int, int]]


class FastTokenizer(ActionTokenizer):
    """Any token may stand anywhere."""

    length = None

    def __init__(
        self,
        scaling: Scaling,
        horizon: int,
        scale: float,
        dead_zone: float,
        least: int,
        most: int,
        merges: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`merges` are pairs of earlier tokens, in the order in which they were learnt; use `fit` to learn them."""
        self.scaling, self.horizon, self.scale, self.dead_zone = scaling, horizon, scale, dead_zone
        self.least, self.most, self.merges = least, most, tuple(merges)
        symbols = most - least + 3
        self.vocabulary = symbols + len(self.merges)
        self._pieces: list[tuple[int, ...]] = [(symbol,) for symbol in range(symbols)]
        for left, right in self.merges:
            self._pieces.append(self._pieces[left] + self._pieces[right])
        self._model = _byte_pairs(self._pieces, self.merges)

    @classmethod
    def unfitted(cls, low: np.ndarray, high: np.ndarray, horizon: int, config: FastConfig) -> FastTokenizer:
        """Before any data: the range is from `low` to `high`, float[da], and every integer is a token of its own."""
        scaling = Scaling(np.asarray(low, np.float32), np.asarray(high, np.float32))
        # of a chunk at one end of the range; what is beyond is written with carries
        most = min(math.ceil(config.scale * math.sqrt(horizon)), (config.vocabulary - 3) // 2)
        return cls(scaling, horizon, config.scale, config.dead_zone, -most, most)

    @classmethod
    def fit(
        cls, chunks: np.ndarray, config: FastConfig | None = None, least_span: np.ndarray | float = 1e-6
    ) -> FastTokenizer:
        """Learn ranges, scale and byte pairs of float[m, H, da]; `least_span` [da] or one number: see `Scaling.fit`.

        Raises `InvalidDataError` for chunks that are not such, `ConfigError` for a configuration that cannot work and
        for an error goal that no scale meets.
        """
        config = config or FastConfig()
        require_ranges(config, "FAST tokeniser")
        chunks = require_chunks(chunks)
        chunks = chunks[spread(len(chunks), _FITTED)]
        scaling = Scaling.fit(chunks, least_span)
        spectrum = dct(scaling.normalize(chunks), axis=1, norm="ortho")
        scale, dead_zone = config.scale, config.dead_zone
        if config.error_goal is not None:
            some = spread(len(chunks), _SEARCHED)
            scale, dead_zone = _search(spectrum[some], scaling.normalize(chunks[some]), config.error_goal)
        integers = _rounded(spectrum, scale, dead_zone)
        # single integers may fill half the vocabulary; the rarest ends are written with carries
        room = (min(config.vocabulary // 2, _MAX_SYMBOLS) - 3) // 2
        least, most = max(int(integers.min()), -room), min(int(integers.max()), room)
        bare = cls(scaling, chunks.shape[1], scale, dead_zone, min(least, 0), max(most, 0))
        merges = _learn(bare._strings(integers), len(bare._pieces), config.vocabulary)
        return cls(scaling, bare.horizon, scale, dead_zone, bare.least, bare.most, merges)

    # --- ActionTokenizer ---------------------------------------------------------------------------------------

    def encode_batch(self, chunks: np.ndarray) -> list[list[int]]:
        """See `ActionTokenizer`."""
        chunks = require_chunks(chunks, self.horizon, len(self.scaling.low))
        spectrum = dct(self.scaling.normalize(chunks), axis=1, norm="ortho")
        strings = self._strings(_rounded(spectrum, self.scale, self.dead_zone))
        return [[token.id for token in self._model.tokenize(text)] for text in strings]

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """See `ActionTokenizer`: what is missing at the end is 0, what is too much is left out."""
        spectrum = np.zeros(self.horizon * len(self.scaling.low))
        at, carried = 0, 0
        for token in known_tokens(tokens, self.vocabulary):
            for symbol in self._pieces[token]:
                if symbol == _DOWN:
                    carried += self.least - 1
                elif symbol == _UP:
                    carried += self.most + 1
                elif at < len(spectrum):
                    spectrum[at] = carried + symbol - 2 + self.least
                    at, carried = at + 1, 0
        return self.scaling.restore(idct(spectrum.reshape(self.horizon, -1) / self.scale, axis=0, norm="ortho"))

    def to_bytes(self) -> bytes:
        """JSON."""
        low, high = ([float(number) for number in side] for side in (self.scaling.low, self.scaling.high))
        document = _Document(
            "fast", self.horizon, low, high, self.scale, self.dead_zone, self.least, self.most, list(self.merges)
        )
        return msgspec.json.encode(document)

    @classmethod
    def from_bytes(cls, data: bytes) -> FastTokenizer:
        """What `to_bytes` gave. Raises `InvalidDataError` for anything else."""
        what = "FAST tokeniser"
        try:
            read = msgspec.json.decode(data, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidDataError(f"{what}: it cannot be read: {error}. Save it again with `to_bytes`.") from error
        symbols = read.most - read.least + 3
        low, high = np.array(read.low, np.float32), np.array(read.high, np.float32)
        longest = [1] * symbols if symbols <= _MAX_SYMBOLS else []
        for left, right in read.merges:
            if not (0 <= left < len(longest) and 0 <= right < len(longest)):
                raise InvalidDataError(f"{what}: a pair {left}, {right} of tokens that are not there; it was changed.")
            longest.append(longest[left] + longest[right])
            if longest[-1] > 4 * read.horizon * len(low):  # pairs of pairs double each time
                break
        sound = (
            1 <= len(low) == len(high)
            and bool(np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all())
            and symbols <= _MAX_SYMBOLS
            and max(longest, default=0) <= 4 * read.horizon * len(low)
        )
        if not sound:
            raise InvalidDataError(f"{what}: values that `fit` never gives; it was changed after it was saved.")
        return cls(Scaling(low, high), read.horizon, read.scale, read.dead_zone, read.least, read.most, read.merges)

    # --- inside ------------------------------------------------------------------------------------------------

    def _strings(self, integers: np.ndarray) -> list[str]:
        """A string of characters for each of int64[m, H, da]; see the module's head."""
        flat = integers.reshape(len(integers), -1)
        plain = np.all((flat >= self.least) & (flat <= self.most), axis=1).tolist()
        ends = flat.shape[1] - np.argmax(flat[:, ::-1] != 0, axis=1)
        ends = np.where(flat.any(1), ends, 0)
        shifted = (flat + (_FIRST_CHARACTER + 2 - self.least)).astype("<u4")
        return [
            shifted[row, :end].tobytes().decode("utf-32-le")
            if plain[row]
            else "".join(map(self._carried, flat[row, :end].tolist()))
            for row, end in enumerate(ends)
        ]

    def _carried(self, integer: int) -> str:
        text = ""
        while integer > self.most:
            text, integer = text + chr(_FIRST_CHARACTER + _UP), integer - self.most - 1
        while integer < self.least:
            text, integer = text + chr(_FIRST_CHARACTER + _DOWN), integer - self.least + 1
        return text + chr(_FIRST_CHARACTER + 2 + integer - self.least)


def _rounded(spectrum: np.ndarray, scale: float, dead_zone: float) -> np.ndarray:
    steps = spectrum * scale
    return np.rint(np.where(np.abs(steps) < dead_zone, 0.0, steps)).astype(np.int64)


def _search(spectrum: np.ndarray, normalized: np.ndarray, goal: float) -> tuple[float, float]:
    """Scale and dead zone with a mean absolute error of at most `goal`, those of the fewest bits."""
    found = []
    for dead_zone in _DEAD_ZONES:
        scale = _coarsest(spectrum, normalized, goal, dead_zone)
        found.append((_bits(_rounded(spectrum, scale, dead_zone)), scale, dead_zone))
    return min(found)[1:]


def _coarsest(spectrum: np.ndarray, normalized: np.ndarray, goal: float, dead_zone: float) -> float:
    """The smallest scale that meets `goal`, to 1 %."""

    def error(scale: float) -> float:
        decoded = idct(_rounded(spectrum, scale, dead_zone) / scale, axis=1, norm="ortho")
        return float(np.abs(np.clip(decoded, -LIMIT, LIMIT) - normalized).mean()) / 2

    low, high = 0.05, 2000.0
    if error(high) > goal:
        raise ConfigError(f"FAST tokeniser: no scale meets error_goal {goal:g}; ask for a larger error.")
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if error(middle) <= goal else (middle, high)
    return high


def _bits(integers: np.ndarray) -> float:
    """What a chunk takes at least if its integers are told one by one, each frequency with its own code."""
    total = 0.0
    for frequency in integers.transpose(1, 0, 2):
        _, counts = np.unique(frequency, return_counts=True)
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total / len(integers)


def _learn(strings: list[str], symbols: int, vocabulary: int) -> list[tuple[int, int]]:
    """The most frequent pairs, one after the other, until the vocabulary is full (Sennrich et al. 2016, 1508.07909)."""
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE())
    alphabet = [chr(_FIRST_CHARACTER + symbol) for symbol in range(symbols)]
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocabulary, symbols), min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(strings, trainer)
    # the trainer's own ids do not say in which order pairs were merged; its list of merges does
    learnt = msgspec.json.decode(tokenizer.to_str())["model"]["merges"]
    ids = {character: symbol for symbol, character in enumerate(alphabet)}
    merges = []
    for left, right in learnt:
        merges.append((ids[left], ids[right]))
        ids.setdefault(left + right, len(ids))
    return merges


def _byte_pairs(pieces: list[tuple[int, ...]], merges: Sequence[tuple[int, int]]) -> Any:
    """The model of `tokenizers` that applies `merges`."""
    from tokenizers import models

    texts = ["".join(chr(_FIRST_CHARACTER + symbol) for symbol in piece) for piece in pieces]
    return models.BPE({text: i for i, text in enumerate(texts)}, [(texts[a], texts[b]) for a, b in merges])
