"""Takes the episodes of a LeRobot dataset (format v3) into the buffer as demonstrations.

Every row becomes a step: `observation.state`, `action` as proposed and executed, one JPEG image of quality 95 for each
new frame of each camera. An episode's id is made of its content, so importing twice stores once, and an import that was
interrupted goes on where it stopped. Memory holds the numbers of one episode and the images of one segment.
Rows at another rate than the robot's are resampled where that was asked for: `resampling` has the rules.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import msgspec
import numpy as np

from cloud_learner.buffer.check import CommittedHistory, check_frames, check_names, check_order, check_steps, jpeg_size
from cloud_learner.buffer.control import by_human
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.lerobot.mapping import ACTION_KEY, STATE_KEY, DatasetMapping, Mapped, map_dataset
from cloud_learner.buffer.lerobot.resampling import Steps, resampled
from cloud_learner.buffer.lerobot.selection import LeftOut, TransferProgress
from cloud_learner.buffer.lerobot.source import ABOUT, DatasetSource, SourceEpisode
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import ConfigError, CorruptDataError, FleetError, InvalidDataError
from wire.messages.gateway import ACTORS, CameraFrames, Segment
from wire.types import CameraSpec, Episode, RobotSpec

JPEG_QUALITY = 95
SEGMENT_STEPS = 128
SEGMENT_BYTES = 8 * 1024 * 1024
"""A segment is closed at whichever of the two it reaches first."""
_HUMAN = ACTORS.index("human")
_PRUNED = (
    "it was stored before and then forgotten, by `vla-fleet buffer prune` or by retention, and is not taken again "
    "under its name: import it with another `--robot NAME`."
)
_COLUMNS = (
    STATE_KEY,
    ACTION_KEY,
    "timestamp",
    "task_index",
    "next.reward",
    "next.done",
    "next.truncated",
    "next.success",
)
_OWN_COLUMNS = ("actor", "recovery", "time_s", "frame_time_s")
"""of our own exports"""


class Imported(msgspec.Struct, frozen=True):
    """What came of an import."""

    robot: str
    spec: RobotSpec
    episodes: int
    """stored now"""
    known: int
    """are stored since an import before"""
    steps: int
    left_out: tuple[LeftOut, ...]
    """what is broken, or was pruned"""


def import_dataset(
    ledger: Ledger,
    store: SegmentStore,
    root: Path,
    mapping: DatasetMapping | None = None,
    *,
    skip_broken: bool = False,
    progress: Callable[[TransferProgress], None] | None = None,
) -> Imported:
    """Store every episode that is not there as a whole, each segment checked as if a robot had sent it.

    skip_broken: note an episode that cannot be read or is not valid and go on; what came before the fault stays as an
        unfinished episode, which a later import of the mended dataset completes
    progress: called after every episode

    Raises `CorruptDataError` or `InvalidDataError` naming the episode and the file, as `map_dataset` does, and what
    writing may raise.
    """
    source, mapping = DatasetSource.open(root), mapping or DatasetMapping()
    mapped = map_dataset(source, mapping)
    ledger.see_robot(mapping.robot, mapped.spec, "lerobot", time.monotonic_ns())
    twins: Counter[str] = Counter()
    left_out: list[LeftOut] = []
    episodes = known = steps = 0
    for number, entry in enumerate(source.episodes, 1):
        try:
            for episode, outcome, part in _parts(source, mapping, mapped, entry, twins):
                row = ledger.episode(episode.id)
                if row is not None and row.pruned_ns:
                    left_out.append(LeftOut(f"episode {entry.index}", _PRUNED))
                    continue
                if row is not None and row.outcome:
                    known += 1
                    continue
                before = CommittedHistory()
                for segment in _segments(source, mapped, entry, episode, outcome, part):
                    _check(segment, mapped.spec, before, f"episode {entry.index} of {source.root}")
                    now_ns = time.monotonic_ns()
                    store.append_all([(segment, now_ns)], now_ns)
                    before.add(segment)
                    steps += segment.steps
                episodes += 1
        except (CorruptDataError, InvalidDataError) as error:
            if not skip_broken:
                raise
            left_out.append(LeftOut(f"episode {entry.index}", str(error)))
        if progress is not None:
            progress(TransferProgress(number, len(source.episodes), steps))
    return Imported(mapping.robot, mapped.spec, episodes, known, steps, tuple(left_out))


def _parts(
    source: DatasetSource, mapping: DatasetMapping, mapped: Mapped, entry: SourceEpisode, twins: Counter[str]
) -> Iterator[tuple[Episode, str, Steps]]:
    """An episode and its outcome for each run of rows with the same task: all rows of `entry` nearly always."""
    about, spec, rows = source.about, mapped.spec, entry.rows
    columns = source.columns(entry, _COLUMNS + (_OWN_COLUMNS if about is not None else ()))
    if not rows:
        return
    note = about.episodes[entry.index] if about is not None and entry.index < len(about.episodes) else None
    task_index = columns.get("task_index", np.zeros((rows, 1), np.int64))[:, 0]
    edges = [0, *(np.flatnonzero(np.diff(task_index)) + 1).tolist(), rows]
    steps = _steps(source, mapped, columns, np.isin(np.arange(1, rows + 1), edges), note.first_ns if note else 0)
    for first, end in itertools.pairwise(edges):
        part, whole = steps.at(slice(first, end)), end - first == rows
        instruction = source.tasks.get(int(task_index[first]), "")
        task = mapping.tasks.get(instruction) or (note.task if note else "") or instruction
        if not 1 <= len(task) <= 200:
            raise ConfigError(
                f"episode {entry.index}: a task name has 1 to 200 characters, the instruction {instruction[:60]!r} has "
                f"{len(instruction)}: say what the task is called (DatasetMapping.tasks)."
            )
        outcome = "success"
        if whole and note is not None and note.outcome:
            outcome = note.outcome
        elif whole and part.done[-1] and "next.success" in columns and not columns["next.success"].any():
            outcome = "failure"
        if "next.done" not in columns and outcome != "success":
            part = msgspec.structs.replace(part, truncated=part.done)
        part = resampled(part, source.fps, spec.control_hz, spec.action)
        seed = note.seed if note else 0
        name = _name((spec.hash, mapping.robot, task, outcome, seed, mapped.cameras), part, twins)
        started_ns = int(part.times_ns[0])
        yield Episode(name, mapping.robot, spec.hash, task, seed, "demonstration", started_ns), outcome, part


def _steps(
    source: DatasetSource, mapped: Mapped, columns: dict[str, np.ndarray], last: np.ndarray, start_ns: int
) -> Steps:
    """The rows of an episode that began at `start_ns`; `last`: bool[R], where a task ends."""
    rows = len(last)

    def one(name: str, otherwise: np.ndarray) -> np.ndarray:
        return columns[name][:, 0] if name in columns else otherwise

    def times(seconds: np.ndarray) -> np.ndarray:
        return start_ns + np.rint(seconds * 1e9).astype(np.int64)

    times_ns = times(one("time_s", np.arange(rows) / source.fps))
    frame_times_ns = np.repeat(times_ns[:, None], len(mapped.cameras), 1)
    if source.about is not None and "frame_time_s" in columns:
        keys = list(source.about.cameras.values())
        if columns["frame_time_s"].shape[1] != len(keys) or not set(mapped.cameras.values()) <= set(keys):
            raise CorruptDataError(f"the cameras in {source.root / ABOUT} are not those of its frame_time_s.")
        frame_times_ns = times(columns["frame_time_s"][:, [keys.index(key) for key in mapped.cameras.values()]])
    actor = one("actor", np.full(rows, _HUMAN)).astype(np.uint8)
    return Steps(
        times_ns=times_ns,
        state=mapped.state(columns[STATE_KEY]),
        action=mapped.action(columns[ACTION_KEY]),
        reward=one("next.reward", np.zeros(rows)).astype(np.float32),
        actor=actor,
        version=np.zeros(rows, np.int32),
        lag=np.zeros(rows, np.int32),
        done=one("next.done", last).astype(bool),
        truncated=one("next.truncated", np.zeros(rows)).astype(bool),
        frame_times_ns=frame_times_ns,
        row=np.arange(rows),
        recovery=one("recovery", np.zeros(rows)).astype(bool) & by_human(actor),
    )


def _name(facts: object, steps: Steps, twins: Counter[str]) -> str:
    """An id made of what the episode holds; a second episode with the same content gets a number."""
    digest = hashlib.sha256(msgspec.json.encode(facts))
    for array in (steps.times_ns, steps.state, steps.action, steps.reward, steps.actor):
        digest.update(np.ascontiguousarray(array).tobytes())
    name = f"lerobot-{digest.hexdigest()[:16]}"
    twins[name] += 1
    return name if twins[name] == 1 else f"{name}-{twins[name]}"


def _segments(
    source: DatasetSource, mapped: Mapped, entry: SourceEpisode, episode: Episode, outcome: str, steps: Steps
) -> Iterator[Segment]:
    cameras = [camera.name for camera in mapped.spec.cameras]
    known = source.about is not None and "frame_time_s" in source.features
    streams = [
        _frames(
            camera,
            source.pictures(entry, mapped.cameras[camera.name], np.unique(steps.row)),
            steps.row,
            steps.frame_times_ns[:, number],
            known,
            f"episode {entry.index} of {source.root}",
        )
        for number, camera in enumerate(mapped.spec.cameras)
    ]
    total, index, start, size = len(steps), 0, 0, 0
    seen: list[list[tuple[int, bytes]]] = [[] for _ in cameras]
    for end in range(1, total + 1):
        for frames, stream in zip(seen, streams, strict=True):
            frames.append(next(stream))
            size += len(frames[-1][1])
        if end - start < SEGMENT_STEPS and size < SEGMENT_BYTES and end < total:
            continue
        here, count = steps.at(slice(start, end)), end - start
        brought = [[frame for frame in frames if frame[1]] for frames in seen]
        yield Segment(
            id=f"{episode.id}/{index}",
            episode=episode,
            index=index,
            first_tick=start,
            last=end == total,
            outcome=outcome if end == total else "",
            closed_ns=int(here.times_ns[-1]),
            times_ns=here.times_ns,
            state=here.state,
            proposed=here.action,
            executed=here.action,
            actor=here.actor,
            chunk_tick=np.full(count, -1, np.int32),
            delay_ticks=np.full(count, -1, np.int16),
            version=here.version,
            reward=here.reward,
            terminated=here.done & ~here.truncated,
            truncated=here.truncated,
            frame_times_ns={camera: _times(frames) for camera, frames in zip(cameras, seen, strict=True)},
            frames={
                camera: CameraFrames(_times(frames), tuple(jpeg for _, jpeg in frames))
                for camera, frames in zip(cameras, brought, strict=True)
            },
            recovery=here.recovery if here.recovery.any() else msgspec.UNSET,
        )
        index, start, size = index + 1, end, 0
        seen = [[] for _ in cameras]


def _times(frames: Sequence[tuple[int, bytes]]) -> np.ndarray:
    return np.array([time_ns for time_ns, _ in frames], np.int64)


def _frames(
    camera: CameraSpec,
    pictures: Iterator[bytes | np.ndarray],
    rows: np.ndarray,
    times_ns: np.ndarray,
    known: bool,
    what: str,
) -> Iterator[tuple[int, bytes]]:
    """For each step the time of the frame it sees, and its JPEG image where no step before it saw that, else b"".

    pictures: one for each new number in `rows`, int64[T]
    times_ns: int64[T], when they were taken if that is `known`, else when those rows were
    """
    row, seen_ns, before = -1, 0, b""
    for number, time_ns in zip(rows.tolist(), times_ns.tolist(), strict=True):
        jpeg = b""
        if number != row:
            picture = next(pictures)
            if row < 0 or not known or time_ns != seen_ns:
                jpeg = _jpeg(picture, camera, what)
            if not known and jpeg == before:
                jpeg = b""
            row = number
        if jpeg:
            seen_ns, before = time_ns, jpeg
        yield seen_ns, jpeg


def _jpeg(picture: bytes | np.ndarray, camera: CameraSpec, what: str) -> bytes:
    """`picture` as it is where it is a JPEG image of the camera's size."""
    size = (camera.height, camera.width, 3)
    if isinstance(picture, bytes):
        if jpeg_size(picture) == size:
            return picture
        try:
            decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error:  # a size that OpenCV refuses
            decoded = None
        if decoded is None:
            raise CorruptDataError(f"{what}: an image of camera '{camera.name}' cannot be decoded.")
        picture = decoded
    if picture.shape != size:
        picture = cv2.resize(picture, (camera.width, camera.height), interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()


def _check(segment: Segment, spec: RobotSpec, before: CommittedHistory, what: str) -> None:
    try:
        check_names(segment, segment.episode.robot)
        check_steps(segment, spec)
        check_order(segment, before)
        check_frames(segment, spec, before.frames_until(segment.index))
    except FleetError as error:
        raise InvalidDataError(f"{what}: {error}") from error
