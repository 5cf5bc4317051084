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
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import msgspec
import numpy as np

from cloud_learner.buffer.check import CommittedHistory, check_frames, check_names, check_order, check_steps, jpeg_size
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.lerobot.mapping import ACTION_KEY, STATE_KEY, DatasetMapping, Mapped, map_dataset
from cloud_learner.buffer.lerobot.resampling import TickGrid
from cloud_learner.buffer.lerobot.selection import LeftOut, TransferProgress
from cloud_learner.buffer.lerobot.source import DatasetSource, SourceEpisode
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import CorruptDataError, FleetError, InvalidDataError
from wire.messages.gateway import ACTORS, CameraFrames, Segment
from wire.types import CameraSpec, Episode, RobotSpec

JPEG_QUALITY = 95
SEGMENT_STEPS = 128
SEGMENT_BYTES = 8 * 1024 * 1024
"""A segment is closed at whichever of the two it reaches first."""
_HUMAN = ACTORS.index("human")


class Imported(msgspec.Struct, frozen=True):
    """What came of an import."""

    robot: str
    spec: RobotSpec
    episodes: int
    """stored now"""
    known: int
    """were stored before"""
    steps: int
    left_out: tuple[LeftOut, ...]


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
    source = DatasetSource.open(root)
    mapped = map_dataset(source, mapping or DatasetMapping())
    ledger.see_robot(mapped.robot, mapped.spec, "lerobot", time.monotonic_ns())
    twins: Counter[str] = Counter()
    left_out: list[LeftOut] = []
    episodes = known = steps = 0
    for number, entry in enumerate(source.episodes, 1):
        try:
            for part in _parts(source, mapped, entry):
                episode_id = _name(part, mapped, twins)
                row = ledger.episode(episode_id)
                if row is not None and row.outcome:
                    known += 1
                    continue
                before = CommittedHistory()
                for segment in _segments(source, mapped, entry, part, episode_id):
                    _check(segment, mapped, before, f"episode {entry.index} of {source.root}")
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
    return Imported(mapped.robot, mapped.spec, episodes, known, steps, tuple(left_out))


class _EpisodePart(msgspec.Struct, frozen=True, eq=False):
    """The R rows of an episode that belong to one task, the whole of it nearly always, as T steps: R, or resampled."""

    first: int
    task: str
    outcome: str
    seed: int
    timestamp: np.ndarray
    """float64[R]: as the videos count"""
    times_ns: np.ndarray
    """int64[T]"""
    state: np.ndarray
    """float32[T, ds]"""
    action: np.ndarray
    """float32[T, da]"""
    reward: np.ndarray
    """float32[T]"""
    actor: np.ndarray
    """uint8[T]"""
    terminated: np.ndarray
    """bool[T]"""
    truncated: np.ndarray
    """bool[T]"""
    shown: np.ndarray
    """int64[T]: row whose frames each step sees"""
    row_times_ns: np.ndarray
    """int64[R]"""
    frame_times_ns: np.ndarray | None
    """int64[R, C]: when each frame was taken, in the order of the spec's cameras; None when nobody knows"""


def _parts(source: DatasetSource, mapped: Mapped, entry: SourceEpisode) -> Iterator[_EpisodePart]:
    """Read the numbers of an episode; one part for each run of rows with the same task."""
    ours = source.about is not None
    extra = ("next.reward", "next.done", "next.truncated", "next.success")
    own = ("actor", "time_s", "frame_time_s") if ours else ()
    columns = source.columns(entry, (STATE_KEY, ACTION_KEY, "timestamp", "task_index", *extra, *own))
    rows = entry.rows
    if not rows:
        return
    flat = {name: column.reshape(rows, -1)[:, 0] for name, column in columns.items()}
    note = source.notes.get(entry.index)
    start = note.first_ns if note is not None else 0
    if ours and "time_s" in flat:
        times = start + np.rint(flat["time_s"] * 1e9).astype(np.int64)
    else:
        times = start + np.rint(np.arange(rows) * (1e9 / source.fps)).astype(np.int64)
    frame_times = None
    if ours and "frame_time_s" in columns:
        frame_times = start + np.rint(columns["frame_time_s"].reshape(rows, -1) * 1e9).astype(np.int64)
        frame_times = frame_times[:, mapped.frame_columns]
    actor: np.ndarray = np.full(rows, _HUMAN, np.uint8)
    if ours and "actor" in flat:
        actor = flat["actor"].astype(np.uint8)
    task_index = flat["task_index"].astype(np.int64) if "task_index" in flat else np.zeros(rows, np.int64)
    reward = flat["next.reward"].astype(np.float32) if "next.reward" in flat else np.zeros(rows, np.float32)
    for first, end in itertools.pairwise([0, *(np.flatnonzero(np.diff(task_index)) + 1).tolist(), rows]):
        here = slice(first, end)
        outcome, terminated, truncated = _ending(flat, here, note.outcome if note else "")
        instruction = source.tasks.get(int(task_index[first]), "")
        part = _EpisodePart(
            first=first,
            task=mapped.task(instruction, note.task if note else "", entry.index),
            outcome=outcome,
            seed=note.seed if note else 0,
            timestamp=flat["timestamp"][here].astype(np.float64),
            times_ns=times[here],
            state=mapped.state(columns[STATE_KEY].reshape(rows, -1)[here]),
            action=mapped.action(columns[ACTION_KEY].reshape(rows, -1)[here]),
            reward=reward[here],
            actor=actor[here],
            terminated=terminated,
            truncated=truncated,
            shown=np.arange(end - first),
            row_times_ns=times[here],
            frame_times_ns=None if frame_times is None else frame_times[here],
        )
        yield part if mapped.at_its_rate else _resampled(part, mapped.spec, source.fps)


def _resampled(part: _EpisodePart, spec: RobotSpec, fps: float) -> _EpisodePart:
    grid = TickGrid(len(part.times_ns), fps, spec.control_hz)
    return msgspec.structs.replace(
        part,
        times_ns=grid.times(part.times_ns),
        state=grid.states(part.state),
        action=grid.actions(part.action, spec.action),
        reward=grid.sums(part.reward).astype(np.float32),
        actor=part.actor[grid.last],
        terminated=grid.sums(part.terminated) > 0,
        truncated=grid.sums(part.truncated) > 0,
        shown=grid.shown,
    )


def _ending(flat: dict[str, np.ndarray], here: slice, noted: str) -> tuple[str, np.ndarray, np.ndarray]:
    """(outcome, terminated bool[T], truncated bool[T]) of rows `here` of an episode, from what the dataset says.

    noted: what our own export noted, or ''. Where nothing is said it is a success.
    """
    count = here.stop - here.start
    whole = here.stop == len(flat["timestamp"])
    done, success = flat.get("next.done"), flat.get("next.success")
    if noted and whole:
        outcome = noted
    elif success is None or success[here].any() or not whole or (done is not None and not done[-1]):
        outcome = "success"
    else:
        outcome = "failure"
    cut_off = flat.get("next.truncated", np.zeros(len(flat["timestamp"]), bool))[here].astype(bool)
    if done is not None:
        return outcome, done[here].astype(bool) & ~cut_off, cut_off
    terminated = np.arange(count) == count - 1
    return outcome, terminated & (outcome == "success"), terminated & (outcome != "success")


def _name(part: _EpisodePart, mapped: Mapped, twins: Counter[str]) -> str:
    """An id made of what the episode holds; a second episode with the same content gets a number."""
    facts = (mapped.spec.hash, mapped.robot, part.task, part.outcome, part.seed, mapped.cameras)
    digest = hashlib.sha256(msgspec.json.encode(facts))
    for array in (part.times_ns, part.state, part.action, part.reward, part.actor):
        digest.update(np.ascontiguousarray(array).tobytes())
    name = f"lerobot-{digest.hexdigest()[:16]}"
    twins[name] += 1
    return name if twins[name] == 1 else f"{name}-{twins[name]}"


def _segments(
    source: DatasetSource, mapped: Mapped, entry: SourceEpisode, part: _EpisodePart, name: str
) -> Iterator[Segment]:
    spec = mapped.spec
    episode = Episode(name, mapped.robot, spec.hash, part.task, part.seed, "demonstration", int(part.times_ns[0]))
    cameras = [
        _Camera(
            camera,
            source.pictures(entry, mapped.cameras[camera.name], part.timestamp, part.first),
            part.row_times_ns if part.frame_times_ns is None else part.frame_times_ns[:, number],
            part.frame_times_ns is not None,
            f"episode {entry.index} of {source.root}",
        )
        for number, camera in enumerate(spec.cameras)
    ]
    total = len(part.times_ns)
    index = start = 0
    for row in range(total):
        for camera in cameras:
            camera.add(int(part.shown[row]))
        size = sum(camera.size for camera in cameras)
        if row + 1 - start < SEGMENT_STEPS and size < SEGMENT_BYTES and row + 1 < total:
            continue
        here = slice(start, row + 1)
        count, last = row + 1 - start, row + 1 == total
        taken = {camera.spec.name: camera.close() for camera in cameras}
        yield Segment(
            id=f"{name}/{index}",
            episode=episode,
            index=index,
            first_tick=start,
            last=last,
            outcome=part.outcome if last else "",
            closed_ns=int(part.times_ns[row]),
            times_ns=part.times_ns[here],
            state=part.state[here],
            proposed=part.action[here],
            executed=part.action[here],
            actor=part.actor[here],
            chunk_tick=np.full(count, -1, np.int32),
            delay_ticks=np.full(count, -1, np.int16),
            version=np.zeros(count, np.int32),
            reward=part.reward[here],
            terminated=part.terminated[here],
            truncated=part.truncated[here],
            frame_times_ns={camera: seen for camera, (seen, _) in taken.items()},
            frames={camera: frames for camera, (_, frames) in taken.items()},
        )
        index, start = index + 1, row + 1


class _Camera:
    """The frames of one camera on their way into segments; each is encoded once."""

    def __init__(
        self,
        spec: CameraSpec,
        pictures: Iterator[bytes | np.ndarray],
        times_ns: np.ndarray,
        known: bool,
        what: str,
    ) -> None:
        """`pictures` of rows at `times_ns`, at which they were taken if that is `known`."""
        self.spec, self.size = spec, 0
        self._pictures, self._times_ns, self._known, self._what = pictures, times_ns, known, what
        self._before: bytes | np.ndarray = b""
        self._row, self._seen_ns = -1, 0
        self._seen: list[int] = []
        self._times: list[int] = []
        self._encoded: list[bytes] = []

    def add(self, row: int) -> None:
        """Another step, which sees the frame of `row`: a new one, or the one that is there already."""
        if row != self._row:
            picture = next(itertools.islice(self._pictures, row - self._row - 1, None))
            time_ns = int(self._times_ns[row])
            if self._known:
                same = time_ns == self._seen_ns
            elif isinstance(picture, bytes):
                same = picture == self._before
            else:
                same = picture is self._before or np.array_equal(picture, self._before)
            if self._row < 0 or not same:
                jpeg = self._jpeg(picture)
                self._encoded.append(jpeg)
                self._times.append(time_ns)
                self._seen_ns, self._before = time_ns, picture
                self.size += len(jpeg)
            self._row = row
        self._seen.append(self._seen_ns)

    def close(self) -> tuple[np.ndarray, CameraFrames]:
        """int64[T] times seen and the new frames since the last call."""
        found = np.array(self._seen, np.int64), CameraFrames(np.array(self._times, np.int64), tuple(self._encoded))
        self._seen, self._times, self._encoded, self.size = [], [], [], 0
        return found

    def _jpeg(self, picture: bytes | np.ndarray) -> bytes:
        size = (self.spec.height, self.spec.width, 3)
        if isinstance(picture, bytes):
            if jpeg_size(picture) == size:
                return picture
            decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
            if decoded is None:
                raise CorruptDataError(f"{self._what}: an image of camera '{self.spec.name}' cannot be decoded.")
            picture = decoded
        if picture.shape != size:
            picture = cv2.resize(picture, (self.spec.width, self.spec.height), interpolation=cv2.INTER_AREA)
        return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()


def _check(segment: Segment, mapped: Mapped, before: CommittedHistory, what: str) -> None:
    try:
        check_names(segment, mapped.robot)
        check_steps(segment, mapped.spec)
        check_order(segment, before)
        check_frames(segment, mapped.spec, before.frames_until(segment.index))
    except FleetError as error:
        raise InvalidDataError(f"{what}: {error}") from error
