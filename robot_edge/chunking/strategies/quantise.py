"""Every q-th action: a chunk executed q times as fast (action quantisation, VLASH, arXiv 2512.01031, section 3.4).

q neighbours become one action by what a dimension means: the last of a group for absolute targets, the sum for deltas
and velocities, for each action lasts one control tick. A sum beyond the limits of its dimension is clipped: that much
of the motion is lost (`lost`), and the robot ends up short of where the chunk wanted it. So a speed-up pays where
actions use little of their range, and with absolute actions.
"""

from __future__ import annotations

import msgspec
import numpy as np

from wire.errors import ConfigError
from wire.types import ActionChunk, CommandType, RobotSpec


def quantise(chunk: ActionChunk, q: int, spec: RobotSpec) -> ActionChunk:
    """`chunk` with ceil(H / q) actions; the last one stands for what is left. Its first tick stays.

    Raises `ConfigError` for q below 1.
    """
    if q == 1:
        return chunk
    actions = np.clip(_grouped(chunk.actions, q, spec), spec.action_low(), spec.action_high())
    return msgspec.structs.replace(chunk, actions=actions.astype(np.float32))


def lost(chunk: ActionChunk, q: int, spec: RobotSpec) -> np.ndarray:
    """float32[ceil(H / q), da]: what clipping takes from each action of `quantise(chunk, q, spec)`, 0 where nothing."""
    wanted = _grouped(chunk.actions, q, spec)
    return (wanted - np.clip(wanted, spec.action_low(), spec.action_high())).astype(np.float32)


def _grouped(actions: np.ndarray, q: int, spec: RobotSpec) -> np.ndarray:
    if q < 1:
        raise ConfigError(f"speed-up {q}: execute every q-th action with q of 1 or more.")
    horizon = len(actions)
    sums = np.add.reduceat(actions, np.arange(0, horizon, q), axis=0)
    last = actions[np.minimum(np.arange(q - 1, horizon + q - 1, q), horizon - 1)]
    absolute = np.array([d.meaning is CommandType.absolute for d in spec.action], bool)
    return np.where(absolute, last, sums)
