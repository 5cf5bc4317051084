"""From the ticks of a robot to the rows of a LeRobot dataset: pure functions on arrays.

LeRobot has one row for each frame time, equally spaced. A row is made of `stride` control ticks: it holds what was
seen and felt at the first of them, and what was commanded over all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set

import msgspec
import numpy as np

from wire.errors import ConfigError, suggest
from wire.messages.gateway import ACTORS, Segment
from wire.types import CommandType, RobotSpec


class Track(msgspec.Struct, frozen=True, eq=False):
    """All stored steps of one episode in order of their ticks; T of them, C cameras in the spec's order."""

    tick: np.ndarray
    """int64[T], growing; a gap where a segment is missing"""
    times_ns: np.ndarray
    """int64[T]"""
    state: np.ndarray
    """float32[T, ds]"""
    executed: np.ndarray
    """float32[T, da]"""
    actor: np.ndarray
    """uint8[T]"""
    version: np.ndarray
    """int32[T]"""
    reward: np.ndarray
    """float32[T]"""
    terminated: np.ndarray
    """bool[T]"""
    truncated: np.ndarray
    """bool[T]"""
    frame_times_ns: np.ndarray
    """int64[T, C]"""
    frames: tuple[dict[int, bytes], ...]
    """by camera: the JPEG image of a time"""
    end_tick: int
    """tick after the episode's last step, -1 while that is not known"""

    @property
    def steps(self) -> int:
        return len(self.tick)


class Rows(msgspec.Struct, frozen=True, eq=False):
    """R rows of a dataset, made of neighbouring ticks of a `Track`."""

    first: np.ndarray
    """int64[R]: the step of the track whose observation the row shows"""
    action: np.ndarray
    """float32[R, da]"""
    reward: np.ndarray
    """float32[R], summed over the ticks of the row"""
    actor: np.ndarray
    """int64[R]: who chose the last command of the row"""
    version: np.ndarray
    """int64[R]: the newest policy version within the row"""
    done: np.ndarray
    """bool[R]: the episode ends with this row"""
    truncated: np.ndarray
    """bool[R]: it was cut off there, by time or by a person"""
    time_s: np.ndarray
    """float64[R]: when the row was seen, from the first row on"""
    frame_time_s: np.ndarray
    """float64[R, C]: when its frames were taken, on the same clock"""


def track_of(segments: Sequence[Segment], spec: RobotSpec) -> Track:
    """Put the segments of one episode together; `segments` in order of their index, at least one."""
    tick = [np.arange(s.first_tick, s.first_tick + s.steps, dtype=np.int64) for s in segments]
    cameras = [camera.name for camera in spec.cameras]
    seen = [
        np.stack([s.frame_times_ns[name] for name in cameras], axis=1) if cameras else np.zeros((s.steps, 0), np.int64)
        for s in segments
    ]
    frames: tuple[dict[int, bytes], ...] = tuple({} for _ in cameras)
    for segment in segments:
        for name, there in zip(cameras, frames, strict=True):
            if (brought := segment.frames.get(name)) is not None:
                there.update(zip(brought.times_ns.tolist(), brought.encoded, strict=True))
    last = segments[-1]
    columns = {
        name: np.concatenate([getattr(s, name) for s in segments])
        for name in ("times_ns", "state", "executed", "actor", "version", "reward", "terminated", "truncated")
    }
    return Track(
        tick=np.concatenate(tick),
        frame_times_ns=np.concatenate(seen),
        frames=frames,
        end_tick=last.first_tick + last.steps if last.last else -1,
        **columns,
    )


def pieces_of(track: Track, actors: Set[str]) -> list[slice]:
    """The longest runs of steps without a gap whose frames are there and that one of `actors` made (all when empty)."""
    good = np.ones(track.steps, bool)
    if actors:
        good &= np.isin(track.actor, [ACTORS.index(actor) for actor in actors])
    for camera, there in enumerate(track.frames):
        known = np.fromiter(there, np.int64, len(there))
        good &= np.isin(track.frame_times_ns[:, camera], known)
    if not track.steps:
        return []
    breaks = np.flatnonzero((np.diff(track.tick) != 1) | (np.diff(good.astype(np.int8)) != 0)) + 1
    edges = [0, *breaks.tolist(), track.steps]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if good[a]]


def thin(track: Track, piece: slice, spec: RobotSpec, stride: int) -> Rows:
    """The rows of one piece, `stride` ticks each (the last may have fewer).

    A command that sets a target (absolute) is the last one of the row's ticks, deltas add up, velocities are averaged.
    """
    start, stop = piece.start, piece.stop
    first = np.arange(start, stop, stride, dtype=np.int64)
    last = np.minimum(first + stride, stop) - 1
    count = (last - first + 1).astype(np.float32)[:, None]
    executed = track.executed[start:stop]
    at = first - start
    action = executed[last - start].copy()
    if stride > 1:
        summed = np.add.reduceat(executed.astype(np.float64), at, axis=0).astype(np.float32)
        meaning = np.array([dimension.meaning.value for dimension in spec.action])
        delta, velocity = meaning == CommandType.delta.value, meaning == CommandType.velocity.value
        action[:, delta] = summed[:, delta]
        action[:, velocity] = (summed / count)[:, velocity]
    whole = track.end_tick >= 0 and track.tick[stop - 1] + 1 == track.end_tick
    ends = np.logical_or.reduceat((track.terminated | track.truncated)[start:stop], at)
    ends[-1] |= whole
    clock = track.times_ns[start]
    return Rows(
        first=first,
        action=action,
        reward=np.add.reduceat(track.reward[start:stop], at).astype(np.float32),
        actor=track.actor[last].astype(np.int64),
        version=np.maximum.reduceat(track.version[start:stop], at).astype(np.int64),
        done=ends,
        truncated=np.logical_or.reduceat(track.truncated[start:stop], at),
        time_s=(track.times_ns[first] - clock) / 1e9,
        frame_time_s=(track.frame_times_ns[first] - clock) / 1e9,
    )


def choose_rate(spec: RobotSpec, fps: int | str) -> tuple[int, int]:
    """(rows a second, ticks a row) for `fps`: 'control', 'camera' (the fastest one's) or a number.

    Raises `ConfigError` unless that is a whole number of rows a second and of ticks a row.
    """
    control = spec.control_hz
    whole = [rate for rate in range(1, int(control) + 1) if _ratio(control, rate)]
    known = ", ".join(map(str, whole)) or f"none: {control} has no whole divisor"
    if fps == "control":
        wanted = control
    elif fps == "camera":
        if not spec.cameras:
            raise ConfigError(f"robot spec '{spec.embodiment}' has no camera whose rate could be taken; use 'control'.")
        wanted = max(camera.rate_hz for camera in spec.cameras)
    elif isinstance(fps, int):
        wanted = float(fps)
    else:
        raise ConfigError(
            f"fps {fps!r}: give 'control', 'camera' or a whole number.{suggest(fps, ('control', 'camera'))}"
        )
    if wanted != round(wanted) or round(wanted) not in whole:
        raise ConfigError(
            f"fps {wanted:g} does not divide the control rate of {control:g} Hz into whole ticks, or is no whole "
            f"number, as LeRobot needs. Choose one of: {known}."
        )
    return round(wanted), _ratio(control, round(wanted))


def row_spec(spec: RobotSpec, fps: int, stride: int) -> RobotSpec:
    """What the rows mean as a robot: the same names and units at `fps`; deltas over `stride` ticks reach further."""
    action = tuple(
        msgspec.structs.replace(d, low=d.low * stride, high=d.high * stride) if d.meaning == CommandType.delta else d
        for d in spec.action
    )
    return msgspec.structs.replace(spec, control_hz=float(fps), action=action)


def image_keys(spec: RobotSpec) -> dict[str, str]:
    """The dataset's key of each camera; LeRobot allows no slash in one. Raises `ConfigError` if two would be one."""
    keys = {camera.name: "observation.images." + camera.name.strip("/").replace("/", ".") for camera in spec.cameras}
    if len(set(keys.values())) != len(keys):
        raise ConfigError(
            f"cameras {sorted(keys)} would share a name in a LeRobot dataset; rename one in the robot spec."
        )
    return keys


def _ratio(control_hz: float, rate: int) -> int:
    """Ticks in a row at `rate`, 0 when that is no whole number."""
    ticks = control_hz / rate
    return round(ticks) if ticks >= 1 and abs(ticks - round(ticks)) < 1e-6 else 0
