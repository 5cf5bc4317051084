"""Whether a segment may be stored: pure functions that raise `InvalidDataError` naming the field that is wrong."""

from __future__ import annotations

import bisect
import functools
import math
import random
from collections.abc import Iterator, Mapping, Set

import msgspec
import numpy as np
import simplejpeg

from cloud_learner.buffer.control import by_human
from cloud_learner.buffer.files import checked_name
from wire.errors import InvalidDataError
from wire.identity.sealing import HASH_BYTES
from wire.messages.gateway import ACTORS, Segment
from wire.messages.recording import FlowTrace
from wire.types import RobotSpec

MAX_STEPS = 4096
MAX_BYTES = 32 * 1024 * 1024
"""Caps of one segment, far above the second or so that an edge puts in one."""
MAX_EPISODE_STEPS = 1_000_000
"""Cap of one episode: hours of control ticks."""
SOURCES = ("online", "demonstration", "evaluation")
OUTCOMES = ("success", "failure", "aborted", "unjudged", "discarded")
DISCARDED = OUTCOMES.index("discarded")
_MAX_INT64 = 2**63 - 1
VALUE_MARGIN = 0.25
"""of a dimension's range: so far beyond its limits a value is still believed"""
MAX_REWARD = 1e6

KnownFrames = Mapping[str, Set[int]]
"""Times of the frames that earlier segments of the episode brought, by camera."""


def check_names(segment: Segment, peer: str) -> None:
    """That the segment is named as it must be and came from the robot whose episode it is."""
    episode = segment.episode
    checked_name(episode.id, "episode id")
    checked_name(episode.robot, "robot")
    checked_name(episode.spec_hash, "spec hash")
    if episode.robot != peer:
        raise InvalidDataError(f"it belongs to robot {episode.robot!r} but was sent by {peer!r}.")
    if segment.id != f"{episode.id}/{segment.index}":
        raise InvalidDataError(
            f"id {segment.id[:200]!r} is not '<episode id>/<index>' of {episode.id!r}, {segment.index}."
        )
    if episode.source not in SOURCES:
        raise InvalidDataError(f"episode source {episode.source[:50]!r} is none of {SOURCES}.")
    if not 1 <= len(episode.task) <= 200:
        raise InvalidDataError(f"a task name has 1 to 200 characters, this one {len(episode.task)}.")
    allowed = OUTCOMES if segment.last else ("",)
    if segment.outcome not in allowed:
        place = "the last segment" if segment.last else "a segment that is not the last"
        raise InvalidDataError(f"outcome {segment.outcome[:50]!r} of {place} is none of {allowed}.")
    for name, value in (("index", segment.index), ("first_tick", segment.first_tick), ("seed", episode.seed)):
        if not 0 <= value < 2**53:
            raise InvalidDataError(f"{name} {value} is negative or too large.")
    for name, value in (("closed_ns", segment.closed_ns), ("started_ns", episode.started_ns)):
        if abs(value) > _MAX_INT64:
            raise InvalidDataError(f"{name} {value} does not fit 64 bits.")


class CommittedHistory:
    """What the stored segments of one episode brought: ticks and times by index, and frame times by camera."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._extents: dict[int, _Extent] = {}
        self._frames: dict[str, set[int]] = {}
        self.ended_at: int | None = None
        """index of the segment it ended with"""

    def add(self, segment: Segment) -> None:
        bisect.insort(self._indices, segment.index)
        if segment.last:
            self.ended_at = segment.index
        first_ns, last_ns = (segment.times_ns[[0, -1]].tolist()) if segment.steps else (None, None)
        end = segment.first_tick + segment.steps
        seen = {camera: times[[0, -1]].tolist() for camera, times in segment.frame_times_ns.items() if segment.steps}
        self._extents[segment.index] = _Extent(segment.first_tick, end, first_ns, last_ns, seen)
        for camera, frames in segment.frames.items():
            self._frames.setdefault(camera, set()).update(frames.times_ns.tolist())

    def remove(self, segment: Segment) -> None:
        """Undo `add` of a segment that passed `check_order`, which lets no frame be brought twice."""
        self._indices.remove(segment.index)
        del self._extents[segment.index]
        if segment.last:
            self.ended_at = None
        for camera, frames in segment.frames.items():
            self._frames[camera].difference_update(frames.times_ns.tolist())

    def __contains__(self, index: int) -> bool:
        return index in self._extents

    def frames_until(self, index: int) -> KnownFrames | None:
        """Times of the frames of the segments before `index`, or None when one of those is not there."""
        if bisect.bisect_left(self._indices, index) != index:
            return None
        return self._frames

    def brought(self, camera: str) -> Set[int]:
        """Times of all frames of a camera that are stored."""
        return self._frames.get(camera, frozenset())

    @property
    def newest_index(self) -> int:
        """-1 when nothing is stored."""
        return self._indices[-1] if self._indices else -1

    def neighbours(self, index: int) -> tuple[_Extent | None, _Extent | None]:
        """The stored segments next to `index`, before and after it."""
        at = bisect.bisect_left(self._indices, index)
        before = self._extents[self._indices[at - 1]] if at else None
        after = self._extents[self._indices[at]] if at < len(self._indices) else None
        return before, after


class _Extent(msgspec.Struct, frozen=True):
    """Where a stored segment lies in its episode; times are None when it has no steps."""

    first_tick: int
    end_tick: int
    first_ns: int | None
    last_ns: int | None
    seen: dict[str, list[int]]
    """times of the frames that its first and its last step saw, by camera"""


def check_order(segment: Segment, before: CommittedHistory) -> None:
    """That ticks and times go on where the stored neighbours of the segment end, and the episode is not endless."""
    end = segment.first_tick + segment.steps
    if end > MAX_EPISODE_STEPS:
        raise InvalidDataError(
            f"first_tick: episode {segment.episode.id!r} would have {end} steps; at most {MAX_EPISODE_STEPS} are "
            "taken. End episodes earlier (LoopConfig.max_ticks)."
        )
    if before.ended_at is not None and segment.index > before.ended_at:
        raise InvalidDataError(f"index {segment.index}: episode {segment.episode.id!r} ended with {before.ended_at}.")
    if segment.last and before.ended_at is not None:
        raise InvalidDataError(f"last: episode {segment.episode.id!r} ended with segment {before.ended_at} already.")
    if segment.last and before.newest_index > segment.index:
        raise InvalidDataError(f"last: segment {before.newest_index} of the episode is stored, which comes after it.")
    for camera, frames in segment.frames.items():
        if twice := before.brought(camera) & set(frames.times_ns.tolist()):
            raise InvalidDataError(f"camera '{camera}': the frame of time {min(twice)} was brought before.")
    earlier, later = before.neighbours(segment.index)
    if earlier is not None and segment.first_tick < earlier.end_tick:
        raise InvalidDataError(
            f"first_tick {segment.first_tick} is below tick {earlier.end_tick}, where the one before ends."
        )
    if later is not None and end > later.first_tick:
        raise InvalidDataError(f"tick {end - 1} is stored already: the next segment begins at {later.first_tick}.")
    if not segment.steps:
        return
    first_ns, last_ns = segment.times_ns[[0, -1]].tolist()
    if earlier is not None and earlier.last_ns is not None and first_ns < earlier.last_ns:
        raise InvalidDataError(f"times_ns runs backwards at tick {segment.first_tick}, from the segment before.")
    if later is not None and later.first_ns is not None and last_ns > later.first_ns:
        raise InvalidDataError(f"times_ns runs backwards at tick {later.first_tick}, to the segment after.")
    for camera, seen in segment.frame_times_ns.items():
        if earlier is not None and camera in earlier.seen and int(seen[0]) < earlier.seen[camera][1]:
            raise InvalidDataError(
                f"camera '{camera}': tick {segment.first_tick} saw an older frame than the tick before."
            )
        if later is not None and camera in later.seen and int(seen[-1]) > later.seen[camera][0]:
            raise InvalidDataError(
                f"camera '{camera}': tick {later.first_tick} saw an older frame than the tick before."
            )


def check_steps(segment: Segment, spec: RobotSpec) -> None:
    """That every step array has the shape, type and range that `spec` and the message say."""
    t = segment.steps
    if t > MAX_STEPS or segment_bytes(segment) > MAX_BYTES:
        raise InvalidDataError(
            f"{t} steps, {segment_bytes(segment)} bytes; at most {MAX_STEPS} steps, {MAX_BYTES} bytes are taken."
        )
    if t == 0 and not segment.last:
        raise InvalidDataError("no steps, and the episode does not end with it.")
    for name, dtype, shape in (
        ("times_ns", "<i8", (t,)),
        ("state", "<f4", (t, spec.state_dim)),
        ("proposed", "<f4", (t, spec.action_dim)),
        ("executed", "<f4", (t, spec.action_dim)),
        ("actor", "|u1", (t,)),
        ("chunk_tick", "<i4", (t,)),
        ("delay_ticks", "<i2", (t,)),
        ("version", "<i4", (t,)),
        ("reward", "<f4", (t,)),
        ("terminated", "|b1", (t,)),
        ("truncated", "|b1", (t,)),
    ):
        array: np.ndarray = getattr(segment, name)
        _require_array(array, dtype, shape, name)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            tick = segment.first_tick + int(np.argwhere(~np.isfinite(array))[0][0])
            raise InvalidDataError(f"{name} is not finite at tick {tick}.")
    # A driver whose state comes slower than the ticks gives the same one twice: that is no reason to lose steps.
    if (np.diff(segment.times_ns) < 0).any():
        tick = segment.first_tick + int(np.argmax(np.diff(segment.times_ns) < 0)) + 1
        raise InvalidDataError(f"times_ns runs backwards at tick {tick}.")
    for name in ("terminated", "truncated"):
        flags: np.ndarray = getattr(segment, name)
        if flags[: t - 1].any() or (t and flags[-1] and not segment.last):
            tick = segment.first_tick + int(np.argmax(flags))
            raise InvalidDataError(f"{name} at tick {tick}, but the episode goes on.")
    if (segment.terminated & segment.truncated).any():
        raise InvalidDataError(f"tick {segment.first_tick + t - 1} is both terminated and truncated.")
    if t and int(segment.actor.max()) >= len(ACTORS):
        raise InvalidDataError(f"actor {int(segment.actor.max())} is none of {ACTORS}.")
    if not isinstance(segment.recovery, msgspec.UnsetType):
        _require_array(segment.recovery, "|b1", (t,), "recovery")
        if (wrong := segment.recovery & ~by_human(segment.actor)).any():
            tick = segment.first_tick + int(np.argmax(wrong))
            raise InvalidDataError(f"recovery at tick {tick}, and neither a human nor a script acts.")
    if t and int(segment.version.min()) < 0:
        raise InvalidDataError(f"version {int(segment.version.min())} is negative.")
    _check_chunks(segment, spec)
    if (terminal := segment.terminal) is not None:
        if not (segment.last and t):
            raise InvalidDataError("terminal: an observation after the last action, but no last action is here.")
        _require_finite(terminal.state, (spec.state_dim,), "terminal.state")
        if not int(segment.times_ns[-1]) < terminal.time_ns <= _MAX_INT64:
            raise InvalidDataError(f"terminal.time_ns {terminal.time_ns} is not after the last step.")


def find_out_of_range(segment: Segment, spec: RobotSpec) -> str:
    """What of a segment that passed `check_steps` cannot be true: the first value that lies beyond the limits of `spec`
    by more than `VALUE_MARGIN` of their range, or a reward beyond `MAX_REWARD`; '' when there is none."""
    for name, of_state, values, first_tick in _values(segment, spec):
        if (wrong := _disbelieved(values, spec, of_state)).any():
            row, column = np.argwhere(wrong)[0].tolist()
            one = (spec.state if of_state else spec.action)[column]
            return (
                f"{name} '{one.name}' is {values[row, column]:.6g} at tick {first_tick + row}; its limits are "
                f"{one.low:g} to {one.high:g} {one.unit}, and {VALUE_MARGIN:g} of that range beyond them is taken."
            )
    if (wrong := np.abs(segment.reward) > MAX_REWARD).any():
        row = int(np.argmax(wrong))
        return f"reward is {segment.reward[row]:.6g} at tick {segment.first_tick + row}; up to {MAX_REWARD:g} is taken."
    return ""


def _values(segment: Segment, spec: RobotSpec) -> Iterator[tuple[str, bool, np.ndarray, int]]:
    """(what, whether it has the state's dimensions or the action's, float32[k, d], tick of the first row) of all that a
    robot measured or was told; chunks only if something is wrong with one."""
    yield "state", True, segment.state, segment.first_tick
    yield "proposed", False, segment.proposed, segment.first_tick
    yield "executed", False, segment.executed, segment.first_tick
    if segment.terminal is not None:
        yield "terminal.state", True, segment.terminal.state[None], segment.first_tick + segment.steps
    made = [chunk.actions for chunk in segment.chunks]
    if made and _disbelieved(np.concatenate(made), spec, False).any():
        for number, chunk in enumerate(segment.chunks):
            yield f"chunk {number}: action", False, chunk.actions, chunk.first_tick


def _disbelieved(values: np.ndarray, spec: RobotSpec, of_state: bool) -> np.ndarray:
    """bool[k, d] of float32[k, d]."""
    low, high = _believed(spec, of_state)
    return (values < low) | (values > high)


@functools.lru_cache(256)
def _believed(spec: RobotSpec, of_state: bool) -> tuple[np.ndarray, np.ndarray]:
    """float64[d] least and greatest values that are believed."""
    dimensions = spec.state if of_state else spec.action
    low, high = (np.array([getattr(one, side) for one in dimensions], np.float64) for side in ("low", "high"))
    return low - VALUE_MARGIN * (high - low), high + VALUE_MARGIN * (high - low)


def _check_chunks(segment: Segment, spec: RobotSpec) -> None:
    executed = set(segment.chunk_tick.tolist())
    for number, chunk in enumerate(segment.chunks):
        what = f"chunk {number}"
        if chunk.first_tick not in executed:
            raise InvalidDataError(f"{what} of tick {chunk.first_tick}: no step of the segment executed any of it.")
        for name in ("version", "observed_ns", "seed"):
            if abs(getattr(chunk, name)) > _MAX_INT64:
                raise InvalidDataError(f"{what}: {name} {getattr(chunk, name)} does not fit 64 bits.")
        _require_finite(chunk.actions, (*chunk.actions.shape[:1], spec.action_dim), f"{what}: actions")
    sizes = {chunk.first_tick: chunk.actions.size for chunk in segment.chunks}
    for number, trace in enumerate(traces_of(segment)):
        what = f"trace {number}"
        if (size := sizes.get(trace.first_tick)) is None:
            raise InvalidDataError(f"{what} of tick {trace.first_tick}: no chunk of the segment is of it.")
        _require_finite(trace.points, (*trace.points.shape[:1], size), f"{what}: points")
        _require_finite(trace.state, (spec.state_dim,), f"{what}: state")
        if not (0 <= trace.step < MAX_STEPS and 0 <= trace.age_ticks < math.inf):
            raise InvalidDataError(f"{what}: step {trace.step} of an age of {trace.age_ticks} ticks cannot be.")


def traces_of(segment: Segment) -> tuple[FlowTrace, ...]:
    """How its chunks came about, of those of which that is known."""
    return () if isinstance(segment.traces, msgspec.UnsetType) else segment.traces


def check_frames(segment: Segment, spec: RobotSpec, known: KnownFrames | None, decoded: int | None = None) -> None:
    """That frames are JPEG images of the spec's size, or held back, and that every step refers to one that is there.

    `known`: the frames of earlier segments, or None when some of them have not come, so that nobody can tell.
    `decoded`: so many pictures of each camera are decoded, drawn by chance, and of the others head and end are looked
    at; None: all. Whoever reads pictures must get along with one that cannot be decoded all the same.
    """
    names, terminal = {camera.name for camera in spec.cameras}, segment.terminal
    seen_in_the_end = names if terminal is None else terminal.frame_times_ns.keys()
    if set(segment.frame_times_ns) != names or seen_in_the_end != names or not set(segment.frames) <= names:
        raise InvalidDataError(
            f"frames of cameras {sorted({*segment.frame_times_ns, *seen_in_the_end, *segment.frames})[:20]}; "
            f"the robot has {sorted(names)}."
        )
    for camera in spec.cameras:
        what = f"camera '{camera.name}'"
        seen = segment.frame_times_ns[camera.name]
        _require_array(seen, "<i8", (segment.steps,), f"frame_times_ns of {what}")
        if (np.diff(seen) < 0).any():
            raise InvalidDataError(f"{what}: a step saw an older frame than the step before.")
        if (seen > segment.times_ns).any():
            tick = segment.first_tick + int(np.argmax(seen > segment.times_ns))
            raise InvalidDataError(f"{what}: the step at tick {tick} saw a frame that was taken after it.")
        if terminal is not None:
            time_ns = terminal.frame_times_ns[camera.name]
            if not int(seen[-1]) <= time_ns <= terminal.time_ns:
                raise InvalidDataError(
                    f"{what}: the terminal observation saw a frame of time {time_ns}, older than the last step's or "
                    "taken after it."
                )
            seen = np.append(seen, time_ns)
        brought: list[int] = []
        if (frames := segment.frames.get(camera.name)) is not None:
            _require_array(frames.times_ns, "<i8", (len(frames.encoded),), f"frame times of {what}")
            if (np.diff(frames.times_ns) <= 0).any():
                raise InvalidDataError(f"{what}: frame times do not grow.")
            count = len(frames.encoded)
            if frames.sha256 and (len(frames.sha256) != HASH_BYTES * count or any(frames.encoded)):
                raise InvalidDataError(f"{what}: {len(frames.sha256)} bytes of hashes for {count} pictures held back.")
            parsed = range(count) if decoded is None else random.sample(range(count), min(decoded, count))
            for number, image in enumerate(frames.encoded if not frames.sha256 else ()):
                size = jpeg_size(image)
                if size != (camera.height, camera.width, 3):
                    raise InvalidDataError(
                        f"{what}: frame {number} is {'no JPEG image' if size is None else f'a JPEG of {size}'}, "
                        f"expected {(camera.height, camera.width, 3)}."
                    )
                if number not in parsed:
                    continue
                # a small grey picture of it: everything is parsed, little is computed, and what is missing is an error
                try:
                    simplejpeg.decode_jpeg(image, "GRAY", fastdct=True, min_height=8, min_width=8, strict=True)
                except ValueError as error:
                    raise InvalidDataError(f"{what}: frame {number} cannot be decoded: {error}.") from error
            brought = frames.times_ns.tolist()
        if known is not None:
            there = known.get(camera.name, ())
            missing = [time for time in np.unique(seen).tolist() if time not in there and time not in brought]
            if missing:
                raise InvalidDataError(f"{what}: steps refer to a frame of time {missing[0]} that never came.")


def jpeg_size(data: bytes) -> tuple[int, int, int] | None:
    """(height, width, channels) that a JPEG header promises, or None if `data` is no whole JPEG file."""
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    channels = {"Gray": 1, "CMYK": 4, "YCCK": 4}.get(colors, 3)
    return (height, width, channels) if data[-2:] == b"\xff\xd9" else None


def segment_bytes(segment: Segment) -> int:
    """Size of its arrays, chunks and pictures."""
    return (
        sum(len(image) for frames in segment.frames.values() for image in frames.encoded)
        + sum(chunk.actions.nbytes for chunk in segment.chunks)
        + sum(trace.points.nbytes + trace.state.nbytes for trace in traces_of(segment))
        + sum(
            value.nbytes
            for name in segment.__struct_fields__
            if isinstance(value := getattr(segment, name), np.ndarray)
        )
    )


def _require_finite(array: np.ndarray, shape: tuple[int, ...], what: str) -> None:
    _require_array(array, "<f4", shape, what)
    if not np.isfinite(array).all():
        raise InvalidDataError(f"{what} is not finite.")


def _require_array(array: np.ndarray, dtype: str, shape: tuple[int, ...], what: str) -> None:
    if array.dtype.str != dtype or array.shape != shape:
        raise InvalidDataError(f"{what} is {array.dtype.str}{list(array.shape)}, expected {dtype}{list(shape)}.")
