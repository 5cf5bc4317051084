"""The ends of episodes out of the store, as models are shown them, and which episodes there are to judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import simplejpeg

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.loading.decode import Read
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.rewards.interface import EpisodeEnd
from wire.messages.gateway import Segment
from wire.types import EpisodeOutcome, RobotSpec

_JUDGED = tuple(map(OUTCOMES.index, (EpisodeOutcome.success, EpisodeOutcome.failure, EpisodeOutcome.unjudged)))


def ended_episodes(index: SegmentIndex) -> np.ndarray:
    """int64 growing dense numbers of the episodes that are here from first to last segment and were neither aborted nor
    discarded."""
    there = ~index.gone
    here = np.bincount(index.episode[there], minlength=len(index.episode_numbers))
    last = np.flatnonzero(index.last & there)
    whole = last[here[index.episode[last]] == index.index[last] + 1]
    return np.unique(index.episode[whole[np.isin(index.outcome(whole), _JUDGED)]])


def read_ends(
    index: SegmentIndex, episodes: Sequence[int], read: Read, spec: RobotSpec, steps: int
) -> tuple[dict[int, EpisodeEnd], Counter[str]]:
    """(by dense number the last `steps` steps of these ended episodes, or as many as there are and have their pictures;
    how many were left out, by reason). Raises `StorageError`."""
    rows: dict[int, list[int]] = {}
    for episode in episodes:
        members = index.members(np.array([episode]))
        members = members[np.argsort(index.index[members])]
        # and one more: its frames may be what the first of these steps saw
        before = np.cumsum(index.steps[members][::-1])[::-1] - index.steps[members]
        first = int(np.argmax(before < steps))
        rows[episode] = index.row[members[max(0, first - 1) :]].tolist()
    found = read([row for some in rows.values() for row in some])
    ends, left_out = {}, Counter[str]()
    for episode, some in rows.items():
        if any(row in found.damaged for row in some):
            left_out["damaged"] += 1
        elif not all(row in found.segments for row in some):
            left_out["pruned, or not on this machine"] += 1
        elif (end := _end([found.segments[row] for row in some], spec, steps)) is None:
            left_out["without pictures"] += 1
        else:
            ends[episode] = end
    return ends, left_out


def _end(segments: Sequence[Segment], spec: RobotSpec, steps: int) -> EpisodeEnd | None:
    state = np.concatenate([segment.state for segment in segments])[-steps:].astype(np.float32)
    shown, images = np.ones(len(state), bool), {}
    for camera in spec.cameras:
        times = np.concatenate([segment.frame_times_ns.get(camera.name, segment.times_ns) for segment in segments])
        brought = {
            int(time): encoded
            for segment in segments
            if camera.name in segment.frames
            for time, encoded in zip(
                segment.frames[camera.name].times_ns.tolist(), segment.frames[camera.name].encoded, strict=True
            )
        }
        wanted = [int(time) for time in times[-steps:]]
        decoded = {time: _decode(brought[time], camera.height, camera.width) for time in {*wanted} & brought.keys()}
        shown &= np.array([decoded.get(time) is not None for time in wanted])
        images[camera.name] = [decoded.get(time) for time in wanted]
    if not shown.any():
        return None
    kept = np.flatnonzero(shown)
    pictures = {name: np.stack([found[at] for at in kept]) for name, found in images.items()}
    episode = segments[0].episode
    return EpisodeEnd(episode.id, episode.task, state[kept], pictures)


def _decode(encoded: bytes, height: int, width: int) -> np.ndarray | None:
    try:
        image = simplejpeg.decode_jpeg(encoded, "RGB")
    except ValueError:
        return None
    return image if image.shape == (height, width, 3) else None
