"""What the memory of one robot spec looks like: frame shapes, columns of a step, and which steps may be used how."""

from __future__ import annotations

import numpy as np

from cloud_learner.buffer.control import RECOVERY
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.sampling.target import StepFilter
from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

SLACK = 1.25
"""how much larger than what is used the step cache's arrays may get before the gaps are closed"""
NO_FRAME = -1
"""in place of a frame's number: no window starts here, or the frame never came"""
UNREADABLE_FRAME = -2
"""in place of a frame's number: its bytes cannot be decoded"""
NO_TRACE = -1
"""in place of the first random step of a chunk's trace: there is none"""
TERMINATED, TRUNCATED, AFTER_END = 1, 2, 3
"""what `end` says of a step, 0 where the episode goes on; the last: of the observation after the last step"""


class Layout:
    """Of one spec, for the windows that `config` asks for. Nothing of it changes."""

    def __init__(self, spec: RobotSpec, config: DatasetConfig) -> None:
        self.config = config
        self.cameras = tuple(camera.name for camera in spec.cameras)
        sizes = [(camera.height, camera.width, 3) for camera in spec.cameras]
        self.shapes = tuple(dict.fromkeys(sizes))
        """the different (height, width, 3) of the cameras"""
        self.shape_of = tuple(map(self.shapes.index, sizes))
        """index into `shapes` by camera"""
        self.state_dim, self.action_dim, self.period_ns = spec.state_dim, spec.action_dim, spec.period_ns
        self.starts, self.continues = _table(config.target.starts), _table(config.target.continues)
        """bool[demonstration, marked actor]: whether a window may begin at such a step; whether it may go on over it"""
        self.record = np.dtype(
            [
                ("state", np.float32, (self.state_dim,)),
                ("executed", np.float32, (self.action_dim,)),
                ("reward", np.float32),
                ("actor", np.uint8),
                ("version", np.int32),
                ("delay", np.int16),
                ("frame_age", np.float32),
                ("end", np.uint8),
                ("label", np.float32, (len(config.labels),)),
                ("continues", np.bool_),
                # no memory is taken for what nobody asks about
                *([("arrival_lag", np.int32)] if config.target.staleness else []),
                *(self._trace_fields() if config.traces else []),
                ("frame", np.int32, (len(self.cameras),)),
                # what follows is not kept: where windows may begin, and when the frames were taken
                ("eligible", np.bool_),
                ("frame_time", np.int64, (len(self.cameras),)),
            ]
        )
        """one step as a loader hands it on"""
        names = (self.record.names or ())[:-2]
        self.columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
            **{name: (self.record[name].base, self.record[name].shape) for name in names},
            **{name: (np.dtype(np.int32), ()) for name in ("run", "left", "reach")},
            **{name: (np.dtype(np.int16), ()) for name in ("group", "mates", "eligible_offset")},
            "later_reward": (np.dtype(np.float64), ()),
        }
        """type and shape of one step's value by column of the step cache"""
        self.row_bytes = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.columns.values())

    def _trace_fields(self) -> list[tuple[str, type, tuple[int, ...]]]:
        """Of a chunk's trace at its first step, how many steps before it those frames were the newest that the chunk
        was made from, and how many steps before each its chunk's first step is."""
        points = self.config.traces, self.config.horizon * self.action_dim
        return [
            ("trace_points", np.float32, points),
            ("trace_state", np.float32, (self.state_dim,)),
            ("trace_age", np.float32, ()),
            ("trace_log_prob", np.float32, ()),
            ("trace_step", np.int16, ()),
            ("trace_lead", np.int16, ()),
            ("chunk_back", np.int16, ()),
        ]

    def frame_bytes(self, shape: int) -> int:
        return int(np.prod(self.shapes[shape]))

    def step_bytes(self, steps: np.ndarray) -> np.ndarray:
        """int64[k]: memory that segments of int[k] `steps` take at most in the step cache, with gaps between them."""
        around = self.config.history + self.config.lookahead
        return np.ceil((steps.astype(np.int64) + around) * (self.row_bytes * SLACK)).astype(np.int64)

    def frames_bytes(self, frames: np.ndarray, startable: np.ndarray) -> np.ndarray:
        """int64[k]: memory of the decoded frames of segments that brought `frames` int64[k], at most.

        `startable` int64[k]: steps at which a window may begin; each sees one frame of each camera, and so does each
        step of its history and the one it leads to. Which camera brought how many is not known: the largest first.
        """
        left, found = frames.astype(np.int64), np.zeros(len(frames), np.int64)
        history, n_step = self.config.history, self.config.n_step
        for shape in sorted(range(len(self.shapes)), key=self.frame_bytes, reverse=True):
            cameras = self.shape_of.count(shape)
            most = startable * ((1 + history + (n_step > 0)) * cameras)
            brought = np.minimum(left, most)
            left = left - brought
            # the first steps may still see frames that came before, and the last lead to some that come after
            around = (2 + history + n_step) * cameras
            found += np.minimum(brought + around, most) * self.frame_bytes(shape)
        return found


def _table(predicate: StepFilter) -> np.ndarray:
    actors = np.arange(RECOVERY + len(ACTORS), dtype=np.uint8)
    return np.array([np.broadcast_to(predicate(actors, part), len(actors)) for part in (False, True)], bool)
