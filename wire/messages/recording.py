"""What a recorded segment is made of, beside its steps."""

from __future__ import annotations

import msgspec
import numpy as np


class CameraFrames(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """The frames of one camera that a segment brings, each once."""

    times_ns: np.ndarray
    """int64[F]"""
    encoded: tuple[bytes, ...]
    """F JPEG images, RGB; all of them b'' while their pictures are held back"""
    sha256: bytes = b""
    """of pictures that are held back, 32 bytes each: F of them one after the other; b'' where the pictures are here"""


class FlowTrace(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """How a policy that explores came from noise to a chunk: what its probability is of, and what it was made from."""

    first_tick: int
    """of its chunk"""
    step: int
    """the first of its random steps, of those from noise to actions"""
    points: np.ndarray
    """float32[P, H * da]: what the first random step began with, and where that one and those after it led"""
    state: np.ndarray
    """float32[ds]: the robot's at the first action, as it was foretold"""
    age_ticks: float
    """of what the slow path saw, at the first action"""


class RecordedChunk(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """An action chunk as the policy made it."""

    first_tick: int
    """tick of the episode at which its first action was due: `Segment.chunk_tick` of the steps that it brought"""
    version: int
    actions: np.ndarray
    """float32[H, da]; with a speed-up q, step `chunk_tick + i` executed those from q * i on as one"""
    observed_ns: int
    seed: int
    """`ActionChunk.seed`"""
    log_prob: float
    """`ActionChunk.log_prob`"""


class TerminalObservation(msgspec.Struct, frozen=True, eq=False):
    """What was observed after the last action of an episode, before anything was reset."""

    time_ns: int
    state: np.ndarray
    """float32[ds]"""
    frame_times_ns: dict[str, int]
    """by camera: the time of the frame that was seen; the frame comes like those of steps"""
