"""A recorded episode as a robot: its observations and pictures come again, tick by tick, whatever is commanded.

    vla-fleet buffer export-episode EPISODE FILE
    ReplayRobot(ReplayConfig("FILE"))

For looking at what a robot saw, for trying a policy on it, and for tests that need real data and no robot.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hal.interfaces.robot import Feedback, check_reset
from hal.safety.limiter import hold_action, limit_action
from wire.clock import Clock, MonotonicClock
from wire.episode_file import read_episode, read_header
from wire.errors import ConfigError, CorruptDataError, RobotError
from wire.messages.gateway import Segment
from wire.types import Frame, Observation, RobotSpec


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Which recording, and what commanding it says."""

    path: str
    """a file written by `vla-fleet buffer export-episode`"""
    executed: Literal["recorded", "given"] = "recorded"
    """what `write` reports: what the robot really did then, or the action it is given now, within limits"""


class Recording:
    """The steps and pictures of an episode in memory; pictures stay JPEG until they are asked for."""

    def __init__(self, spec: RobotSpec, segments: tuple[Segment, ...]) -> None:
        self._sizes = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
        self.times_ns = np.concatenate([s.times_ns for s in segments])
        self.state = np.concatenate([s.state for s in segments])
        self.proposed = np.concatenate([s.proposed for s in segments])
        self.executed = np.concatenate([s.executed for s in segments])
        self.reward = np.concatenate([s.reward for s in segments])
        self.cameras = tuple(segments[0].frame_times_ns)
        self.seen_ns = {name: np.concatenate([s.frame_times_ns[name] for s in segments]) for name in self.cameras}
        self._jpeg: dict[tuple[str, int], bytes] = {}
        for segment in segments:
            for name, frames in segment.frames.items():
                for time_ns, data in zip(frames.times_ns.tolist(), frames.encoded, strict=True):
                    self._jpeg[name, time_ns] = data

    def __len__(self) -> int:
        return len(self.times_ns)

    def picture(self, camera: str, time_ns: int, path: str) -> np.ndarray:
        """uint8[h, w, 3], RGB. Raises `CorruptDataError` when it is not in the recording or is no JPEG."""
        import cv2

        data = self._jpeg.get((camera, time_ns))
        if data is None:
            raise CorruptDataError(
                f"{path}: the picture of '{camera}' of time {time_ns} is not in it. Export it again."
            )
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        if image is None or image.shape[:2] != self._sizes[camera]:
            size = "no JPEG" if image is None else f"of {image.shape[0]}x{image.shape[1]}"
            raise CorruptDataError(f"{path}: the picture of '{camera}' of time {time_ns} is {size}. Export it again.")
        return np.ascontiguousarray(image[:, :, ::-1])


class ReplayRobot:
    """Keeps the `Robot` protocol, except that it moves as it did, not as it is told (`executed="recorded"`).

    Its one task is the recorded one; every seed gives the same recording. After the last step it stays there.
    """

    def __init__(self, config: ReplayConfig, clock: Clock | None = None) -> None:
        """Reads the file's header for the spec; `clock` stamps observations (default: the machine's monotonic clock).

        Raises `ConfigError` when there is no such file or it is none, `CorruptDataError` when its header is damaged.
        """
        if config is None:
            raise ConfigError("robot 'replay': it needs a configuration with the path of a recorded episode.")
        self.config = config
        self._header = read_header(Path(config.path))
        self.spec = self._header.spec
        self.tasks = (self._header.episode.task,)
        self.task = ""
        self.tick = 0
        """the recorded step that is seen now; the number of steps once all were commanded"""
        self.recording: Recording | None = None
        self._clock = clock or MonotonicClock()
        self._frames: dict[str, tuple[int, Frame]] = {}

    def connect(self) -> None:
        """Read the file. Twice is once. Raises `CorruptDataError` when it is damaged, `RobotError` without OpenCV."""
        if self.recording is not None:
            return
        if self.spec.cameras:
            try:
                import cv2  # noqa: F401
            except ImportError as error:
                raise RobotError(
                    f"{self._where}: OpenCV, which reads its pictures, is missing: `pip install 'vla-fleet[edge]'`."
                ) from error
        header, segments = read_episode(Path(self.config.path))
        self.spec.require(header.spec, f"{self._where}: the file changed since the robot was made")
        self.recording = Recording(self.spec, segments)

    def reset(self, task: str, seed: int) -> None:
        """To the first step. Raises `ConfigError` for another task, `RobotError` before `connect`."""
        check_reset(self._where, task, self.tasks, 0, self.recording is not None)
        self.task, self.tick = task, 0
        self._frames.clear()

    def read(self) -> Observation:
        """The recorded state, and the pictures it was seen with, stamped as old as they were then."""
        recording = self._ready("read")
        now_ns = self._clock.now_ns()
        at = min(self.tick, len(recording) - 1)
        frames = {}
        for name in recording.cameras:
            if (frame := self._frame(recording, name, at, now_ns)) is not None:
                frames[name] = frame
        return Observation(now_ns, recording.state[at].copy(), frames, self._header.instruction)

    def write(self, action: np.ndarray) -> Feedback:
        """Go to the next step. `success`: the last step of a recording that ended so was reached.

        Raises `InvalidDataError` for an action that is none of this robot; it stays where it is then.
        """
        recording = self._ready("write")
        given = limit_action(self.spec, action)
        at = self.tick
        over = at >= len(recording)
        self.tick = min(at + 1, len(recording))
        success = self.tick == len(recording) and self._header.outcome == "success"
        reward = 0.0 if over else float(recording.reward[at])
        if self.config.executed == "given":
            return Feedback(given, reward, success)
        done = recording.executed[min(at, len(recording) - 1)]
        return Feedback(hold_action(self.spec, done) if over else done.copy(), reward, success)

    def close(self) -> None:
        """Forget the recording. May be called twice."""
        self.recording, self.task = None, ""
        self._frames.clear()

    @property
    def _where(self) -> str:
        return f"robot 'replay' of {self.config.path}"

    def _ready(self, what: str) -> Recording:
        if self.recording is None or not self.task:
            raise RobotError(f"{self._where}: {what} without an episode; call connect() and reset() first.")
        return self.recording

    def _frame(self, recording: Recording, camera: str, at: int, now_ns: int) -> Frame | None:
        """What the step saw of `camera`: the same `Frame` as long as it saw the same one; None if it saw none."""
        seen_ns = int(recording.seen_ns[camera][at])
        if seen_ns < 0:
            return None
        held = self._frames.get(camera)
        if held is None or held[0] != seen_ns:
            # as old as then, but never out of order, should control be faster now
            stamp = now_ns - max(0, int(recording.times_ns[at]) - seen_ns)
            if held is not None:
                stamp = min(now_ns, max(stamp, held[1].time_ns + 1))
            held = seen_ns, Frame(stamp, recording.picture(camera, seen_ns, self.config.path))
            self._frames[camera] = held
        return held[1]


class ReplayOperator:
    """Keeps the `Teleoperator` protocol: proposes what was proposed then."""

    def __init__(self, robot: ReplayRobot) -> None:
        self._robot = robot

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[da]; None before the first reset and after the last step."""
        recording = self._robot.recording
        if recording is None or not self._robot.task or self._robot.tick >= len(recording):
            return None
        with contextlib.suppress(IndexError):
            return recording.proposed[self._robot.tick].copy()
        return None

    def progress(self) -> float:
        """Steps that are left; infinite before the first reset."""
        recording = self._robot.recording
        return float(len(recording) - self._robot.tick) if recording is not None and self._robot.task else float("inf")
