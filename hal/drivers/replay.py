"""A recorded episode as a robot: its observations and pictures come again, tick by tick, whatever is commanded.

    vla-fleet buffer export-episode EPISODE FILE
    ReplayRobot(ReplayConfig("FILE"))

For looking at what a robot saw, for trying a policy on it, and for tests that need real data and no robot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hal.cameras.opencv import import_cv2
from hal.interfaces.robot import Feedback, check_reset
from hal.safety.limiter import hold_action, limit_action
from wire.clock import Clock, MonotonicClock
from wire.episode_file import read_episode, read_header
from wire.errors import CorruptDataError, RobotError
from wire.messages.gateway import Segment
from wire.types import Frame, Observation
from wire.untrusted import picture_size


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Which recording, and what commanding it says."""

    path: str
    """a file written by `vla-fleet buffer export-episode`"""
    executed: Literal["recorded", "given"] = "recorded"
    """what `write` reports: what the robot really did then, or the action it is given now, within limits"""


class ReplayRobot:
    """Keeps the `Robot` protocol, except that it moves as it did, not as it is told (`executed="recorded"`).

    Its one task is the recorded one; every seed gives the same recording. After the last step it stays there.
    """

    def __init__(self, config: ReplayConfig, clock: Clock | None = None) -> None:
        """Reads the file's header for the spec; `clock` stamps observations (default: the machine's monotonic clock).

        Raises `ConfigError` when there is no such file or it is none, `CorruptDataError` when its header is damaged.
        """
        self.config = config
        self._header = read_header(Path(config.path))
        self.spec = self._header.spec
        self.tasks = (self._header.episode.task,)
        self.task = ""
        self.tick = 0
        """the recorded step that is seen now; the number of steps once all were commanded"""
        self.steps: list[tuple[Segment, int]] = []
        """the recorded ones, each as a row of a segment; none before `connect`"""
        self._jpegs: dict[tuple[str, int], bytes] = {}
        """by camera and time"""
        self._clock = clock or MonotonicClock()
        self._frames: dict[str, tuple[int, Frame]] = {}

    def connect(self) -> None:
        """Read the file. Twice is once. Raises `CorruptDataError` when it is damaged, `RobotError` without OpenCV."""
        if self.steps:
            return
        if self.spec.cameras:
            import_cv2(self._where)
        header, segments = read_episode(Path(self.config.path))
        self.spec.require(header.spec, f"{self._where}: the file changed since the robot was made")
        self.steps = [(segment, row) for segment in segments for row in range(len(segment.times_ns))]
        for segment in segments:
            for name, frames in segment.frames.items():
                self._jpegs |= {
                    (name, time_ns): data
                    for time_ns, data in zip(frames.times_ns.tolist(), frames.encoded, strict=True)
                }

    def reset(self, task: str, seed: int) -> None:
        """To the first step. Raises `ConfigError` for another task, `RobotError` before `connect`."""
        check_reset(self._where, task, self.tasks, 0, bool(self.steps))
        self.task, self.tick = task, 0
        self._frames.clear()

    def read(self) -> Observation:
        """The recorded state, and the pictures it was seen with, stamped as old as they were then."""
        segment, row = self._step("read")
        now_ns = self._clock.now_ns()
        frames = {
            name: self._frame(name, int(times_ns[row]), int(segment.times_ns[row]), now_ns)
            for name, times_ns in segment.frame_times_ns.items()
            # a step may have seen none yet
            if times_ns[row] >= 0
        }
        return Observation(now_ns, segment.state[row].copy(), frames, self._header.instruction)

    def write(self, action: np.ndarray) -> Feedback:
        """Go to the next step. `success`: the last step of a recording that ended so was reached, and `terminated` or
        `truncated` as it was.

        Raises `InvalidDataError` for an action that is none of this robot; it stays where it is then.
        """
        segment, row = self._step("write")
        given = limit_action(self.spec, action)
        over = self.tick == len(self.steps)
        self.tick += not over
        success = self.tick == len(self.steps) and self._header.outcome == "success"
        done = segment.executed[row]
        if self.config.executed == "recorded":
            given = hold_action(self.spec, done) if over else done.copy()
        return Feedback(
            given,
            0.0 if over else float(segment.reward[row]),
            success,
            terminated=bool(segment.terminated[row]),
            truncated=bool(segment.truncated[row]),
        )

    def close(self) -> None:
        """Forget the recording. May be called twice."""
        self.steps, self.task = [], ""
        self._jpegs.clear()
        self._frames.clear()

    @property
    def _where(self) -> str:
        return f"robot 'replay' of {self.config.path}"

    def _step(self, what: str) -> tuple[Segment, int]:
        if not self.task:
            raise RobotError(f"{self._where}: {what} without an episode; call connect() and reset() first.")
        return self.steps[min(self.tick, len(self.steps) - 1)]

    def _frame(self, camera: str, seen_ns: int, step_ns: int, now_ns: int) -> Frame:
        """What the step of `step_ns` saw of `camera`: the same `Frame` as long as it saw the same one."""
        held = self._frames.get(camera)
        if held is None or held[0] != seen_ns:
            # as old as then, but never out of order, should control be faster now
            stamp = now_ns - max(0, step_ns - seen_ns)
            if held is not None:
                stamp = min(now_ns, max(stamp, held[1].time_ns + 1))
            held = self._frames[camera] = seen_ns, Frame(stamp, self._picture(camera, seen_ns))
        return held[1]

    def _picture(self, camera: str, time_ns: int) -> np.ndarray:
        """uint8[h, w, 3], RGB. Raises `CorruptDataError` when it is not in the recording or is no JPEG."""
        cv2 = import_cv2(self._where)
        data = self._jpegs.get((camera, time_ns), b"")
        sizes = {camera.name: (camera.height, camera.width) for camera in self.spec.cameras}
        # what it claims is allocated before it is decoded
        fits = picture_size(data) == sizes[camera]
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if fits else None
        if image is None or image.shape[:2] != sizes[camera]:
            size = picture_size(data)
            found = "not in it" if not data else "no JPEG" if fits or size is None else f"of {size[0]}x{size[1]}"
            raise CorruptDataError(
                f"{self.config.path}: the picture of '{camera}' of time {time_ns} is {found}. Export it again."
            )
        return np.ascontiguousarray(image[:, :, ::-1])


class ReplayOperator:
    """Keeps the `Teleoperator` protocol: proposes what was proposed then."""

    def __init__(self, robot: ReplayRobot) -> None:
        self._robot = robot

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[da]; None before the first reset and after the last step."""
        if not self._robot.task or self._robot.tick == len(self._robot.steps):
            return None
        segment, row = self._robot.steps[self._robot.tick]
        return segment.proposed[row].copy()

    def progress(self) -> float:
        """Steps that are left; infinite before the first reset."""
        return float(len(self._robot.steps) - self._robot.tick) if self._robot.task else float("inf")
