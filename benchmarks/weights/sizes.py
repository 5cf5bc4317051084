"""What an update costs in bytes and in time, over the versions of a training run."""

from __future__ import annotations

import io
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.weights.training import paths_of
from cloud_learner.training.config import PublisherConfig
from wire.weights.delta import DeltaStats, Precision, WeightsLayout, apply, encode, read_frames

_INDEX_BYTES, _VALUE_BYTES = 4, 2
"""of a changed bfloat16 value in the sparse deltas of trainers of large models (PEERS: TRL, verl, slime)"""
_ANCHOR_EVERY = PublisherConfig().anchor_every


def load(place: Path) -> list[np.ndarray]:
    """uint8[size] of each version of a run, oldest first; read from disk as they are looked at."""
    return [np.memmap(path, np.uint8, "r") for path in paths_of(place)]


def sizes(name: str, versions: Sequence[np.ndarray], parameters: int) -> dict[str, Any]:
    """Medians over the updates, and what one takes on average with the versions that travel whole. The quantised deltas
    follow each other, as a trainer's do."""
    whole = len(versions[0])
    quantised: list[int] = []
    changed: list[float] = []
    encode_s: list[float] = []
    rebuild_s: list[float] = []
    off: list[float] = []
    published = np.array(versions[0])
    for trained in versions[1:]:
        frames: list[bytes] = []
        stats, target = DeltaStats(), np.array(trained)
        encode_s.append(_timed(partial(encode, published, target, frames.append, stats=stats)))
        data = b"".join(frames)
        rebuilt = published.copy()
        rebuild_s.append(_timed(partial(apply, rebuilt, read_frames(io.BytesIO(data)))))
        if not np.array_equal(rebuilt, target):
            raise AssertionError(f"{name}: what is rebuilt is not what was published")
        off.append(_off(published, trained, target))
        published = target
        quantised.append(len(data))
        changed.append(stats.changed / max(1, stats.values))
    exact: list[int] = []
    sparse: list[int] = []
    for before, after in itertools.pairwise(versions):
        frames = []
        encode(before, np.array(after), frames.append, Precision.exact)
        exact.append(sum(map(len, frames)))
        sparse.append((_INDEX_BYTES + _VALUE_BYTES) * _bf16_changes(before, after))
    median = statistics.median
    return {
        "policy": name,
        "parameters (M)": parameters / 1e6,
        "updates": len(versions) - 1,
        "whole, fp32 (MB)": whole / 1e6,
        "whole, bf16 (MB)": whole / 2e6,
        "sparse bf16 delta (MB)": median(sparse) / 1e6,
        "lossless delta (MB)": median(exact) / 1e6,
        "our delta (MB)": median(quantised) / 1e6,
        "1 /": whole / median(quantised),
        "1 /, on average": whole / ((statistics.mean(quantised) * (_ANCHOR_EVERY - 1) + whole) / _ANCHOR_EVERY),
        "values changed (%)": 100 * median(changed),
        "left for the next (% of an update)": 100 * median(off),
        "encode s": median(encode_s),
        "rebuild s": median(rebuild_s),
    }


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _floats(file: np.ndarray) -> list[np.ndarray]:
    layout = WeightsLayout.of(file)
    places = (one.data_offsets for one in layout.header.tensors.values() if one.dtype == "F32")
    return [file[layout.data_offset + begin : layout.data_offset + end].view("<f4") for begin, end in places]


def _off(before: np.ndarray, trained: np.ndarray, published: np.ndarray) -> float:
    """Root mean square of what rounding left out, over that of the change."""
    left = moved = 0.0
    for old, wanted, got in zip(_floats(before), _floats(trained), _floats(published), strict=True):
        left += float(np.sum(np.square(wanted - got)))
        moved += float(np.sum(np.square(wanted - old)))
    return (left / moved) ** 0.5 if moved else 0.0


def _bf16_changes(before: np.ndarray, after: np.ndarray) -> int:
    """How many values of the bfloat16 state differ."""
    pairs = zip(_floats(before), _floats(after), strict=True)
    return sum(int(np.count_nonzero(_bf16(old) != _bf16(new))) for old, new in pairs)


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
