"""A stand-in robot arm for `benchmarks.edge_latency`: numpy and a clock, the same behind all edges.

Six joints swing slowly, so that observations differ as a working arm's do; two cameras film at 25 Hz. A lamp switches
at random moments. A touch sensor (a state dimension) shows it at once, the front camera in its next frame. The policy
of the benchmark (`benchmarks.edge_latency.vla`) answers in two action dimensions with the sign of the lamp as its
observation showed it: so the robot alone sees when the first action arrives that was made from an observation with the
change.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

CONTROL_HZ = 50.0
PERIOD_NS = 20_000_000
CAMERA_HZ = 25.0
PX = 96
JOINTS = tuple(f"joint_{i}" for i in range(6))
STATE = (*JOINTS, "touch")
MARKS = ("touch_seen", "light_seen")
ACTION = (*JOINTS, *MARKS)
CAMERAS = ("front", "wrist")
LIT = "front"
"""the camera that the lamp is in front of"""
LAMP_PX = 16
"""the lamp fills this many rows and columns of a corner"""
TASK = "push the red cube to the target"
_SWING_DEG = 30.0
_SWING_S = 6.0
_FRAME_NS = round(1e9 / CAMERA_HZ)


def arm_spec() -> RobotSpec:
    """The stand-in arm, as this project names it. Marks are `delta`: a robot that holds says 0."""
    joints = tuple(Dimension(name, "deg", -180.0, 180.0) for name in JOINTS)
    marks = tuple(Dimension(name, "1", -1.5, 1.5, CommandType.delta) for name in ACTION[len(JOINTS) :])
    return RobotSpec(
        embodiment="stand-in-arm",
        state=(*joints, Dimension(STATE[-1], "1", -1.0, 1.0)),
        action=(*joints, *marks),
        cameras=tuple(CameraSpec(name, PX, PX, CAMERA_HZ) for name in CAMERAS),
        control_hz=CONTROL_HZ,
    )


def switches(seed: int, duration_s: float, least_s: float = 1.2, most_s: float = 2.2) -> np.ndarray:
    """int64[n], ns after the start: when the lamp switches."""
    rng = np.random.default_rng(seed)
    gaps = rng.uniform(least_s, most_s, int(duration_s / least_s) + 2)
    times = np.cumsum(gaps)
    return (times[times < duration_s] * 1e9).astype(np.int64)


@dataclass(slots=True)
class ArmRecord:
    """What happened at the robot, in ns of the monotonic clock."""

    switches_ns: np.ndarray
    """int64[k]"""
    reads_ns: list[int] = field(default_factory=list)
    writes_ns: list[int] = field(default_factory=list)
    """when each action arrived"""
    marks: list[tuple[float, float]] = field(default_factory=list)
    """what each action said of the touch sensor and of the light: its sign; 0 for an action the policy did not make"""

    def save(self, path: Path) -> None:
        """Write a .npz file, whole or not at all."""
        new = path.with_suffix(".new.npz")
        np.savez(
            new,
            switches_ns=self.switches_ns,
            reads_ns=np.array(self.reads_ns, np.int64),
            writes_ns=np.array(self.writes_ns, np.int64),
            marks=np.array(self.marks, np.float32).reshape(-1, len(MARKS)),
        )
        new.rename(path)

    @classmethod
    def load(cls, path: Path) -> ArmRecord:
        with np.load(path) as file:
            return cls(
                file["switches_ns"],
                file["reads_ns"].tolist(),
                file["writes_ns"].tolist(),
                [(float(touch), float(light)) for touch, light in file["marks"]],
            )


class Arm:
    """Reading and commanding cost next to nothing; every call is recorded with its time."""

    def __init__(self, path: Path, seed: int = 0, longest_s: float = 3600.0) -> None:
        """`path`: where `save` will write the record; next to it, a file says that the first action has come."""
        self._path = path
        self._start_ns = time.monotonic_ns()
        self.record = ArmRecord(self._start_ns + switches(seed, longest_s))
        self._switches = self.record.switches_ns.tolist()
        self._phases = np.linspace(0, 2 * np.pi, len(JOINTS), endpoint=False)
        self._background = {
            name: np.random.default_rng(i).integers(0, 120, (PX, PX, 3), np.uint8) for i, name in enumerate(CAMERAS)
        }
        self._moved = False
        self._filmed: tuple[int, dict[str, np.ndarray]] = (-1, {})

    def lamp(self, at_ns: int) -> float:
        """1 when it is on at `at_ns`, else -1."""
        return 1.0 if bisect_right(self._switches, at_ns) % 2 else -1.0

    def read(self) -> tuple[int, np.ndarray, int, dict[str, np.ndarray]]:
        """(now, state float32[7] in degrees and the touch sensor, time of the frames, frames uint8[96, 96, 3])."""
        now_ns = time.monotonic_ns()
        self.record.reads_ns.append(now_ns)
        state = np.empty(len(STATE), np.float32)
        angle = (now_ns - self._start_ns) / 1e9 * (2 * np.pi / _SWING_S)
        state[:-1] = _SWING_DEG * np.sin(angle + self._phases)
        state[-1] = self.lamp(now_ns)
        frame_ns = now_ns - now_ns % _FRAME_NS
        if frame_ns != self._filmed[0]:
            self._filmed = frame_ns, {name: self._film(name, frame_ns) for name in CAMERAS}
        return now_ns, state, *self._filmed

    def write(self, action: np.ndarray) -> None:
        """Take `action`, float32[8]."""
        self.record.writes_ns.append(time.monotonic_ns())
        self.record.marks.append((float(action[-2]), float(action[-1])))
        if not self._moved and action[-1] != 0:
            self._moved = True
            self._path.with_suffix(".moving").touch()

    def save(self) -> None:
        """Write the record to its path."""
        self.record.save(self._path)

    def _film(self, camera: str, at_ns: int) -> np.ndarray:
        image = self._background[camera].copy()
        row = at_ns // _FRAME_NS % (PX - 2 * LAMP_PX)
        image[LAMP_PX + row : 2 * LAMP_PX + row, -LAMP_PX:] = 200
        if camera == LIT:
            image[:LAMP_PX, :LAMP_PX] = 255 if self.lamp(at_ns) > 0 else 0
        return image
