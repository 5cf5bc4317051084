"""What the memory of one robot spec looks like: frame shapes, columns of a step, and which steps may be used how."""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.target import StepFilter
from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

SLACK = 1.25
"""how much larger than what is used the step cache's arrays may get before the gaps are closed"""
NO_FRAME = -1
"""in place of a frame's number: no window starts here, or the frame never came"""
UNREADABLE_FRAME = -2
"""in place of a frame's number: its bytes cannot be decoded"""
TERMINATED, TRUNCATED, AFTER_END = 1, 2, 3
"""what `end` says of a step, 0 where the episode goes on; the last: of the observation after the last step"""


class Layout(msgspec.Struct, frozen=True):
    """Of one spec, for one kind of windows."""

    cameras: tuple[str, ...]
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
    n_step: int = 0
    """so many steps after one at which a window may begin, frames are kept as well; 0: they are not"""
    labels: int = 0
    """how many labels each step has"""

    @classmethod
    def of(
        cls,
        spec: RobotSpec,
        lookahead: int,
        starts: StepFilter,
        continues: StepFilter,
        history: int = 0,
        n_step: int = 0,
        labels: int = 0,
    ) -> Layout:
        """`lookahead`: max(H - 1, the farthest of `ahead`, `n_step`)."""
        shapes = tuple(dict.fromkeys((camera.height, camera.width, 3) for camera in spec.cameras))
        return cls(
            cameras=tuple(camera.name for camera in spec.cameras),
            shapes=shapes,
            shape_of=tuple(shapes.index((camera.height, camera.width, 3)) for camera in spec.cameras),
            state_dim=spec.state_dim,
            action_dim=spec.action_dim,
            period_ns=spec.period_ns,
            lookahead=lookahead,
            starts=_table(starts),
            continues=_table(continues),
            history=history,
            n_step=n_step,
            labels=labels,
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
                ("end", np.uint8),
                ("label", np.float32, (self.labels,)),
                ("continues", np.bool_),
                ("eligible", np.bool_),
                ("frame", np.int32, (len(self.cameras),)),
            ]
        )

    @property
    def columns(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Type and shape of one step's value by column of the step cache."""
        found = {
            name: (self.record[name].base, self.record[name].shape)
            for name in self.record.names or ()
            if name != "eligible"
        }
        found |= {name: (np.dtype(np.int32), ()) for name in ("run", "left", "reach")}
        found |= {name: (np.dtype(np.int16), ()) for name in ("group", "mates", "eligible_offset")}
        return found | {"later_reward": (np.dtype(np.float64), ())}

    def frame_bytes(self, shape: int) -> int:
        height, width, channels = self.shapes[shape]
        return height * width * channels

    def step_bytes(self, steps: np.ndarray) -> np.ndarray:
        """int64[k]: memory that segments of int[k] `steps` take at most in the step cache, with gaps between them."""
        size = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.columns.values())
        around = self.history + self.lookahead
        return np.ceil((steps.astype(np.int64) + around) * (size * SLACK)).astype(np.int64)

    def frames_bytes(self, frames: np.ndarray, startable: np.ndarray) -> np.ndarray:
        """int64[k]: memory of the decoded frames of segments that brought `frames` int64[k], at most.

        `startable` int64[k]: steps at which a window may begin; each sees one frame of each camera, and so does each
        step of its history and the one it leads to. Which camera brought how many is not known: the largest first.
        """
        left, found = frames.astype(np.int64), np.zeros(len(frames), np.int64)
        for shape in sorted(range(len(self.shapes)), key=self.frame_bytes, reverse=True):
            cameras = self.shape_of.count(shape)
            most = startable * ((1 + self.history + (self.n_step > 0)) * cameras)
            brought = np.minimum(left, most)
            left = left - brought
            # the first steps may still see frames that came before, and the last lead to some that come after
            around = (2 + self.history + self.n_step) * cameras
            found += np.minimum(brought + around, most) * self.frame_bytes(shape)
        return found


def _table(predicate: StepFilter) -> tuple[tuple[bool, ...], ...]:
    actors = np.arange(len(ACTORS), dtype=np.uint8)
    return tuple(tuple(bool(yes) for yes in predicate(actors, demonstration)) for demonstration in (False, True))
