"""From stored segments to the rows of a LeRobot dataset: pure functions on arrays.

LeRobot has one row for each frame time, equally spaced: a control tick, or a whole number of them made one row by the
rules of `resampling`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set

import msgspec
import numpy as np

from cloud_learner.buffer.control import arrival_lag, is_recovery, marked_actor
from cloud_learner.buffer.lerobot.resampling import Steps
from wire.errors import ConfigError
from wire.messages.gateway import ACTORS, Segment
from wire.types import CommandType, RobotSpec

Frames = tuple[dict[int, bytes], ...]
"""By camera: the JPEG image of a time."""


def steps_of(
    segments: Sequence[Segment], spec: RobotSpec, newest_versions: Sequence[int] | None = None
) -> tuple[Steps, Frames]:
    """Put the segments of one episode together, in order of their index, at least one; ticks of a missing one lack.

    `newest_versions`: of the fleet when each arrived; without them no step has a lag.
    """
    cameras = [camera.name for camera in spec.cameras]
    frames: Frames = tuple({} for _ in cameras)
    for segment in segments:
        for name, there in zip(cameras, frames, strict=True):
            if (brought := segment.frames.get(name)) is not None and not brought.sha256:
                there.update(zip(brought.times_ns.tolist(), brought.encoded, strict=True))

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(segment, name) for segment in segments])

    tick = np.concatenate([np.arange(s.first_tick, s.first_tick + s.steps, dtype=np.int64) for s in segments])
    seen = [np.concatenate([s.frame_times_ns[name] for s in segments]) for name in cameras]
    newest = newest_versions or [0] * len(segments)
    lag = [arrival_lag(segment.version, number) for segment, number in zip(segments, newest, strict=True)]
    last, truncated = segments[-1], column("truncated")
    # the segment that ends an episode may have no step of its own
    ends = last.last & (tick + 1 == last.first_tick + last.steps)
    return Steps(
        times_ns=column("times_ns"),
        state=column("state"),
        action=column("executed"),
        reward=column("reward"),
        actor=column("actor"),
        version=column("version"),
        lag=np.concatenate(lag).astype(np.int32),
        done=ends | column("terminated") | truncated,
        truncated=truncated,
        frame_times_ns=np.stack(seen, 1) if seen else np.zeros((len(tick), 0), np.int64),
        row=tick,
        recovery=is_recovery(np.concatenate([marked_actor(segment) for segment in segments])),
    ), frames


def pieces_of(steps: Steps, frames: Frames, actors: Set[str]) -> list[Steps]:
    """The longest runs of steps without a gap whose frames are there and that one of `actors` made (all when empty)."""
    good = np.ones(len(steps), bool)
    if actors:
        good &= np.isin(steps.actor, [ACTORS.index(actor) for actor in actors])
    for camera, there in enumerate(frames):
        good &= np.isin(steps.frame_times_ns[:, camera], np.fromiter(there, np.int64, len(there)))
    breaks = np.flatnonzero((np.diff(steps.row) != 1) | (np.diff(good.astype(np.int8)) != 0)) + 1
    edges = [0, *breaks.tolist(), len(good)]
    return [steps.at(slice(a, b)) for a, b in itertools.pairwise(edges) if good[a:b].any()]


def choose_rate(spec: RobotSpec, fps: int | str) -> tuple[int, int]:
    """(rows a second, ticks a row) for `fps`: 'control', 'camera' (the fastest one's) or a number.

    Raises `ConfigError` unless that is a whole number of rows a second and of ticks a row.
    """
    control = spec.control_hz
    wanted: float | str = fps
    if fps == "control":
        wanted = control
    elif fps == "camera":
        if not spec.cameras:
            raise ConfigError(f"robot spec '{spec.embodiment}' has no camera whose rate could be taken; use 'control'.")
        wanted = max(camera.rate_hz for camera in spec.cameras)
    whole = [rate for rate in range(1, int(control) + 1) if control % rate == 0]
    if wanted not in whole:
        known = ", ".join(map(str, whole)) or f"none: {control} has no whole divisor"
        raise ConfigError(
            f"fps {wanted} does not divide the control rate of {control:g} Hz into whole ticks, or is no whole "
            f"number, as LeRobot needs. Choose 'control', 'camera' or one of: {known}."
        )
    return int(wanted), int(control / int(wanted))


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
