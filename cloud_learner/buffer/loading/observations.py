"""Observations as robots had them, a few of them, apart from batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import simplejpeg

from cloud_learner.buffer.loading.decode import Read
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from wire.messages.gateway import Segment
from wire.types import Frame, Observation, RobotSpec


def choose_rows(index: SegmentIndex, count: int) -> list[int]:
    """Ledger rows of up to `count` segments, spread evenly: of demonstrations where there are any."""
    usable = ~index.gone & (index.steps > 0)
    usable[index.left_out] = False
    shown = np.flatnonzero(usable & index.demonstration)
    able = shown if len(shown) else np.flatnonzero(usable)
    if not len(able):
        return []
    return [int(row) for row in index.row[able[np.unique(np.linspace(0, len(able) - 1, count).astype(int))]]]


def read_observations(
    rows: Sequence[int], read: Read, spec: RobotSpec, instructions: Mapping[str, str]
) -> list[Observation]:
    """One observation of each segment of these ledger rows: of its first step whose frames the segment has itself.

    `instructions`: the sentence by task. Segments that are damaged, elsewhere or of another robot, or that lack a frame
    are left out. Raises `StorageError`.
    """
    found = read(list(rows)).segments
    seen = (_first(found[row], spec, instructions) for row in rows if row in found)
    return [observation for observation in seen if observation is not None]


def _first(segment: Segment, spec: RobotSpec, instructions: Mapping[str, str]) -> Observation | None:
    if segment.state.shape[1:] != (spec.state_dim,) or segment.episode.task not in instructions:
        return None
    there = np.ones(segment.steps, np.bool_)
    for camera in spec.cameras:
        if camera.name not in segment.frames or camera.name not in segment.frame_times_ns:
            return None
        there &= np.isin(segment.frame_times_ns[camera.name], segment.frames[camera.name].times_ns)
    if not there.any():
        return None
    step, images = int(np.argmax(there)), {}
    for camera in spec.cameras:
        brought, time_ns = segment.frames[camera.name], int(segment.frame_times_ns[camera.name][step])
        try:
            image = simplejpeg.decode_jpeg(brought.encoded[int(np.argmax(brought.times_ns == time_ns))], "RGB")
        except ValueError:
            return None
        if image.shape != (camera.height, camera.width, 3):
            return None
        images[camera.name] = Frame(time_ns, image)
    state = np.asarray(segment.state[step], np.float32)
    return Observation(int(segment.times_ns[step]), state, images, instructions[segment.episode.task])
