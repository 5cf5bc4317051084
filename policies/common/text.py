"""Instructions as numbers: each word is hashed into a small vocabulary, so no word list has to travel.

The hash is CRC-32, which is the same on every machine and in every process (Python's own `hash` is not).
"""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np

PADDING = 0
_WORD = re.compile(r"\w+")


def word_id(word: str, vocabulary: int) -> int:
    """The id of one lower-case word, 1 to vocabulary - 1."""
    return 1 + zlib.crc32(word.encode()) % (vocabulary - 1)


@functools.lru_cache(maxsize=4096)
def _ids(instruction: str, vocabulary: int, length: int) -> tuple[int, ...]:
    ids = [word_id(word, vocabulary) for word in _WORD.findall(instruction.lower())][:length]
    return (*ids, *[PADDING] * (length - len(ids)))


def tokenize(instruction: str, vocabulary: int, length: int) -> np.ndarray:
    """int64[length]: the ids of the first `length` words of `instruction`, then `PADDING`.

    Case, punctuation and spacing do not matter; `vocabulary` counts the padding id.
    """
    return np.array(_ids(instruction, vocabulary, length), np.int64)
