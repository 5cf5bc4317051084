"""Observations as robots had them, and what people did there, a few of them, apart from batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg

from cloud_learner.buffer.control import by_human
from cloud_learner.buffer.loading.decode import Read
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from wire.messages.gateway import Segment
from wire.types import Frame, Observation, RobotSpec

_GOLDEN = 0.6180339887


@dataclass(frozen=True, slots=True, eq=False)
class ShownStep:
    """A step as it was recorded."""

    observation: Observation
    shown: np.ndarray
    """float32[n, da], executed from then on for as long as a person or a script acted; n is 0 where the policy did"""


def choose_rows(index: SegmentIndex, count: int, draw: int = 0) -> list[int]:
    """Ledger rows of up to `count` segments, spread evenly: of those in which somebody taught, where there are any.

    Another `draw` has others, where there are more.
    """
    usable = ~index.gone & (index.steps > 0)
    usable[index.left_out] = False
    taught = index.demonstration.copy()
    taught[index.run_segment[by_human(index.run_actor)]] = True
    shown = np.flatnonzero(usable & taught)
    able = shown if len(shown) else np.flatnonzero(usable)
    share = (np.arange(count) + (0.5 + draw * _GOLDEN) % 1) / max(1, count)
    return [int(row) for row in index.row[able[np.unique((share * len(able)).astype(int))]]] if len(able) else []


def read_shown_steps(
    rows: Sequence[int], read: Read, spec: RobotSpec, instructions: Mapping[str, str]
) -> list[ShownStep]:
    """One step of each segment of these ledger rows: the first one at which somebody taught, else the first one, of
    those whose frames the segment has itself.

    `instructions`: the sentence by task. Segments that are damaged, elsewhere or of another robot, or that lack a frame
    are left out. Raises `StorageError`.
    """
    found = read(list(rows)).segments
    seen = (_first(found[row], spec, instructions) for row in rows if row in found)
    return [step for step in seen if step is not None]


def _first(segment: Segment, spec: RobotSpec, instructions: Mapping[str, str]) -> ShownStep | None:
    if segment.state.shape[1:] != (spec.state_dim,) or segment.episode.task not in instructions:
        return None
    there = np.ones(segment.steps, np.bool_)
    for camera in spec.cameras:
        if camera.name not in segment.frames or camera.name not in segment.frame_times_ns:
            return None
        there &= np.isin(segment.frame_times_ns[camera.name], segment.frames[camera.name].times_ns)
    if not there.any():
        return None
    taught = by_human(segment.actor)
    step, images = int(np.argmax(there & taught if (there & taught).any() else there)), {}
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
    observation = Observation(int(segment.times_ns[step]), state, images, instructions[segment.episode.task])
    others = np.flatnonzero(~taught[step:])
    end = step + int(others[0]) if len(others) else segment.steps
    return ShownStep(observation, np.asarray(segment.executed[step:end], np.float32))
