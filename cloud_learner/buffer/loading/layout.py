"""What the memory of one robot spec looks like: frame shapes, columns of a step, and which steps may be used how."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from wire.messages.gateway import ACTORS, Segment
from wire.types import RobotSpec

Predicate = Callable[[np.ndarray, bool], np.ndarray]
"""(actor uint8[T], demonstration) -> bool[T]; must look at each step alone"""

NO_FRAME = -1
"""in place of a frame's number: no window starts here, or the frame never came"""
UNREADABLE_FRAME = -2
"""in place of a frame's number: its bytes cannot be decoded"""


class Layout(msgspec.Struct, frozen=True):
    """Plain values only, so that it can be told to another process."""

    cameras: tuple[str, ...]
    rates_hz: tuple[float, ...]
    """by camera"""
    shapes: tuple[tuple[int, int, int], ...]
    """the different (height, width, 3) of the cameras"""
    shape_of: tuple[int, ...]
    """index into `shapes` by camera"""
    state_dim: int
    action_dim: int
    period_ns: int
    lookahead: int
    """how many steps after a segment's last one its windows may need"""
    starts: tuple[tuple[bool, ...], ...]
    """[demonstration][actor]: whether a window may begin at such a step"""
    continues: tuple[tuple[bool, ...], ...]
    """[demonstration][actor]: whether a window may go on over such a step"""
    history: int = 0
    """how many steps before its own a segment keeps, for what windows tell of the past"""

    @classmethod
    def of(cls, spec: RobotSpec, lookahead: int, starts: Predicate, continues: Predicate, history: int = 0) -> Layout:
        """`lookahead`: max(H - 1, the farthest of `ahead`)."""
        shapes = tuple(dict.fromkeys((camera.height, camera.width, 3) for camera in spec.cameras))
        return cls(
            cameras=tuple(camera.name for camera in spec.cameras),
            rates_hz=tuple(camera.rate_hz for camera in spec.cameras),
            shapes=shapes,
            shape_of=tuple(shapes.index((camera.height, camera.width, 3)) for camera in spec.cameras),
            state_dim=spec.state_dim,
            action_dim=spec.action_dim,
            period_ns=spec.period_ns,
            lookahead=lookahead,
            starts=_table(starts),
            continues=_table(continues),
            history=history,
        )

    @property
    def record(self) -> np.dtype:
        """One step as a loader hands it on."""
        return np.dtype(
            [
                ("state", np.float32, (self.state_dim,)),
                ("executed", np.float32, (self.action_dim,)),
                ("reward", np.float32),
                ("actor", np.uint8),
                ("version", np.int32),
                ("delay", np.int16),
                ("frame_age", np.float32),
                ("continues", np.bool_),
                ("eligible", np.bool_),
                ("frame", np.int32, (len(self.cameras),)),
            ]
        )

    def frame_bytes(self, shape: int) -> int:
        height, width, channels = self.shapes[shape]
        return height * width * channels

    def frames_at_most(self, frames: np.ndarray, startable: np.ndarray) -> np.ndarray:
        """int64[k, shapes]: how many frames segments that brought `frames` int64[k] may have to keep decoded.

        `startable` int64[k]: steps at which a window may begin; each sees one frame of each camera, and so does each
        step of its history. The frames that cameras of several shapes brought are told apart by their rates, so this
        is an estimate then.
        """
        found = np.zeros((len(frames), len(self.shapes)), np.int64)
        for shape in range(len(self.shapes)):
            mine = [c for c, other in enumerate(self.shape_of) if other == shape]
            share = sum(self.rates_hz[c] for c in mine) / sum(self.rates_hz)
            brought = np.ceil(frames * min(1.0, 1.1 * share)).astype(np.int64)
            # the first steps may still see frames that came before
            before = (2 + self.history) * len(mine)
            found[:, shape] = np.minimum(brought + before, startable * ((1 + self.history) * len(mine)))
        return found


def records_of(segment: Segment, layout: Layout) -> np.ndarray:
    """record[T] of a segment's steps; `eligible` says where windows may begin if all frames are there."""
    found = np.zeros(segment.steps, layout.record)
    demonstration = segment.episode.source == "demonstration"
    found["state"], found["executed"] = segment.state, segment.executed
    found["reward"], found["actor"], found["version"] = segment.reward, segment.actor, segment.version
    found["delay"] = segment.delay_ticks
    found["continues"] = np.array(layout.continues[demonstration])[segment.actor]
    found["eligible"] = np.array(layout.starts[demonstration])[segment.actor]
    found["frame"] = NO_FRAME
    if layout.cameras:
        oldest = np.min([segment.frame_times_ns[camera] for camera in layout.cameras], axis=0)
        found["frame_age"] = (segment.times_ns - oldest) / layout.period_ns
    return found


def _table(predicate: Predicate) -> tuple[tuple[bool, ...], ...]:
    actors = np.arange(len(ACTORS), dtype=np.uint8)
    return tuple(tuple(bool(yes) for yes in predicate(actors, demonstration)) for demonstration in (False, True))
