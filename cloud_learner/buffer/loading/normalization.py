"""What a policy's normalisation is fitted to: states and action chunks of the steps that are learned from."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cloud_learner.buffer.control import marked_actor
from cloud_learner.buffer.loading.decode import Read
from cloud_learner.buffer.loading.layout import Layout
from policies.interface.policy import NormalizationData
from wire.errors import StorageError

_SEGMENTS_AT_ONCE = 256


def read_examples(
    rows: np.ndarray, startable: np.ndarray, read: Read, layout: Layout, horizon: int, steps: int
) -> NormalizationData:
    """States at which windows may begin and chunks of `horizon` of their actions, of about `steps` steps at most.

    `rows` int64[n] of the ledger and `startable` int64[n], the steps of each segment at which a window may begin. Whole
    segments spread evenly are read; chunks overlap by half. Raises `StorageError`, also while segments lie in the
    journal of another machine: a normalisation fitted to a part would stay for good.
    """
    able = np.flatnonzero(startable)
    share = min(1.0, steps / max(1, int(startable.sum())))
    count = max(1, round(share * len(able)))
    chosen = able[np.unique(np.linspace(0, len(able) - 1, count).astype(int))] if len(able) else able
    states: list[np.ndarray] = [np.zeros((0, layout.state_dim), np.float32)]
    chunks: list[np.ndarray] = [np.zeros((0, horizon, layout.action_dim), np.float32)]
    for first in range(0, len(chosen), _SEGMENTS_AT_ONCE):
        found = read(rows[chosen[first : first + _SEGMENTS_AT_ONCE]].tolist())
        if found.elsewhere:
            raise StorageError(
                f"{len(found.elsewhere)} of the {len(chosen)} segments to fit the normalisation to lie in the journal "
                "of the gateway's machine: wait until it seals them, or run `vla-fleet buffer compact` there."
            )
        for segment in found.segments.values():
            imitable = layout.starts[int(segment.episode.source == "demonstration"), marked_actor(segment)]
            states.append(segment.state[imitable])
            if len(imitable) < horizon:
                continue
            whole = np.flatnonzero(sliding_window_view(imitable, horizon).all(1))
            windows = sliding_window_view(segment.executed, horizon, 0).transpose(0, 2, 1)
            chunks.append(windows[whole[:: max(1, horizon // 2)]].astype(np.float32))
    return NormalizationData(np.concatenate(states), np.concatenate(chunks))
