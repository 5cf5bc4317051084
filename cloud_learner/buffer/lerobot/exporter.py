"""Writes stored episodes as a LeRobot dataset (format v3.0, lerobot 0.4.4) that `lerobot-train` takes as it is.

| column | type | what |
|---|---|---|
| `observation.state` | float32[ds] | as recorded |
| `action` | float32[da] | executed, after limits; see `rows.thin` for fewer rows than ticks |
| `observation.images.<camera>` | video or image | the newest frame that the step saw |
| `next.reward`, `next.done`, `next.truncated`, `next.success` | float32, bool | what the action brought |
| `actor` | int64 | index into `wire.messages.gateway.ACTORS`: policy, human, script, hold |
| `policy_version` | int64 | the version that acted or was ready to act |
| `time_s`, `frame_time_s` | float64 | real times of the row and of its frames, from the first row on |
| `task` | text | the instruction |

`meta/vla_fleet.json` keeps the robot spec of the rows, `meta/vla_fleet_episodes.jsonl` which stored episode each came
from; LeRobot passes over both, the import reads them back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import EpisodeRow
from cloud_learner.buffer.lerobot.rows import (
    Rows,
    Track,
    choose_rate,
    image_keys,
    pieces_of,
    row_spec,
    thin,
    track_of,
)
from cloud_learner.buffer.lerobot.selection import LeftOut, Selection, TransferProgress, select
from cloud_learner.buffer.lerobot.video import LEAST_SIDE, MOST_HZ, VideoEncoder
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import ConfigError, CorruptDataError, StorageError, storage_errors
from wire.messages.gateway import ACTORS, Segment
from wire.types import RobotSpec

LEAST_ROWS = 2
"""A piece of fewer rows is left out: LeRobot takes no statistics of it."""
_VIDEO_FILE_ROWS = 4000
"""LeRobot copies a whole video file for every episode it adds to it, so short files keep a long export linear."""
_SEGMENTS_AT_ONCE = 64
_NOT_HERE = "forgotten, or still in the journal of a gateway on another machine"


class Exported(msgspec.Struct, frozen=True):
    """What was written."""

    path: Path
    episodes: int
    """of the dataset; one stored episode may have become several"""
    rows: int
    fps: int
    video: bool
    left_out: tuple[LeftOut, ...]


def export(
    ledger: Ledger,
    store: SegmentStore,
    spec: RobotSpec,
    out: Path,
    *,
    selection: Selection | None = None,
    instructions: Mapping[str, str] | None = None,
    fps: int | str = "control",
    video: bool | None = None,
    progress: Callable[[TransferProgress], None] | None = None,
) -> Exported:
    """Write the selected episodes of robots with `spec` to the new directory `out`, oldest first.

    instructions: by task name; a task that is not in it is called by its name
    fps: 'control' (every tick), 'camera' (the fastest camera's rate) or a number that divides the control rate
    video: False keeps every frame as a lossless image; None takes video (AV1) where the cameras are large enough
    progress: called after every episode

    `out` appears when it is whole: it is written beside under a name that ends in `.part`. Memory holds one episode.
    Raises `ConfigError` when lerobot is missing, `out` exists, nothing matches or an option cannot work, `StorageError`
    (`DiskFullError`, ...) when it cannot be written, `CorruptDataError` for a stored frame that cannot be decoded.
    """
    out = Path(out)
    selection = selection or Selection()
    rate, stride = choose_rate(spec, fps)
    part = out.with_name(out.name + ".part")
    for path in (out, part):
        if path.exists():
            raise ConfigError(f"{path} exists already: name a new directory for the dataset, or remove that one.")
    episodes = select(ledger, spec, selection)
    until_row = selection.until_row or 2**63 - 1
    lerobot = _lerobot()
    video = _choose_video(spec, rate, video)
    features = _features(spec, video)
    try:
        with storage_errors("LeRobot dataset", out), _quiet(), _full_disk_is_said(part):
            dataset = lerobot.create(
                f"local/{out.name}",
                rate,
                features,
                root=part,
                robot_type=spec.embodiment,
                use_videos=video,
                video_backend="pyav",
                image_writer_threads=0 if video else 4,
            )
            if video:
                dataset._streaming_encoder = VideoEncoder(rate)
            dataset.meta.update_chunk_settings(video_files_size_in_mb=_video_file_mb(spec))
            with _closed(dataset):
                writer = _Writer(dataset, spec, stride, dict(instructions or {}), frozenset(selection.actors))
                for number, episode in enumerate(episodes, 1):
                    rows = [row.row for row in ledger.segments_of(episode.id) if row.row <= until_row]
                    writer.add(episode, store, rows)
                    if progress is not None:
                        progress(TransferProgress(number, len(episodes), writer.rows))
                if not writer.episodes:
                    reasons = "; ".join(f"{one.episode}: {one.reason}" for one in writer.left_out[:3])
                    raise ConfigError(f"no step of the {len(episodes)} selected episodes can be exported ({reasons}).")
            about = {
                "format": 1,
                "spec": row_spec(spec, rate, stride),
                "stored_spec_hash": spec.hash,
                "ticks_per_row": stride,
                "actors": ACTORS,
                "cameras": image_keys(spec),
            }
            (part / "meta" / "vla_fleet.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)))
            # lerobot empties it after every episode
            shutil.rmtree(part / "images", ignore_errors=True)
            part.rename(out)
    finally:
        # nothing is there any more when it was done
        shutil.rmtree(part, ignore_errors=True)
    return Exported(out, writer.episodes, writer.rows, rate, video, tuple(writer.left_out))


@contextlib.contextmanager
def _full_disk_is_said(directory: Path) -> Iterator[None]:
    """lerobot's threads only log that a picture could not be written; what fails later does not name the reason."""
    try:
        yield
    except OSError as error:
        if error.errno is None and directory.is_dir():
            # Where there is no room this says so itself.
            (directory / "room").write_bytes(bytes(2**20))
        raise


class _Writer:
    """Puts stored episodes into an open LeRobotDataset, one after the other."""

    def __init__(
        self, dataset: Any, spec: RobotSpec, stride: int, instructions: dict[str, str], actors: frozenset[str]
    ) -> None:
        self.episodes = self.rows = 0
        self.left_out: list[LeftOut] = []
        self._dataset, self._spec, self._stride = dataset, spec, stride
        self._instructions, self._actors = instructions, actors
        self._keys = list(image_keys(spec).values())

    def add(self, episode: EpisodeRow, store: SegmentStore, rows: Sequence[int]) -> None:
        segments: list[Segment] = []
        for at in range(0, len(rows), _SEGMENTS_AT_ONCE):
            found = store.read(rows[at : at + _SEGMENTS_AT_ONCE])
            segments += [found.segments[row] for row in rows[at : at + _SEGMENTS_AT_ONCE] if row in found.segments]
            missing = [row for row in rows[at : at + _SEGMENTS_AT_ONCE] if row not in found.segments]
            self._leave_out(episode, *(f"row {row}: {found.damaged.get(row, _NOT_HERE)}" for row in missing))
        if not segments:
            return self._leave_out(episode, "nothing of it is stored any more")
        track = track_of(segments, self._spec)
        before = self.episodes
        for piece in pieces_of(track, self._actors):
            rows_there = thin(track, piece, self._spec, self._stride)
            if len(rows_there.first) < LEAST_ROWS:
                self._leave_out(episode, f"ticks from {track.tick[piece.start]} make less than {LEAST_ROWS} rows")
            else:
                self._save(episode, track, piece, rows_there)
        if self.episodes == before:
            self._leave_out(episode, "no step of it is left to write")
        return None

    def _leave_out(self, episode: EpisodeRow, *reasons: str) -> None:
        self.left_out += [LeftOut(episode.id, reason) for reason in reasons]

    def _save(self, episode: EpisodeRow, track: Track, piece: slice, rows: Rows) -> None:
        instruction = self._instructions.get(episode.task, episode.task)
        success = rows.done & (episode.outcome == "success")
        images = [self._images(episode, track, rows, camera) for camera in range(len(self._keys))]
        for at, step in enumerate(rows.first.tolist()):
            frame: dict[str, Any] = dict(zip(self._keys, (next(camera) for camera in images), strict=True))
            if self._spec.state:
                frame["observation.state"] = track.state[step]
            if images:
                frame["frame_time_s"] = rows.frame_time_s[at]
            one = slice(at, at + 1)
            frame |= {
                "action": rows.action[at],
                "next.reward": rows.reward[one],
                "next.done": rows.done[one],
                "next.truncated": rows.truncated[one],
                "next.success": success[one],
                "actor": rows.actor[one],
                "policy_version": rows.version[one],
                "time_s": rows.time_s[one],
                "task": instruction,
            }
            self._dataset.add_frame(frame)
        try:
            self._dataset.save_episode(parallel_encoding=False)
        except (RuntimeError, ValueError) as error:
            raise StorageError(
                f"lerobot could not write episode {episode.id} to {self._dataset.root}: {error}"
            ) from error
        self._check_videos(episode, len(rows.first))
        self._note(episode, track, piece, rows)
        self.episodes += 1
        self.rows += len(rows.first)

    def _images(self, episode: EpisodeRow, track: Track, rows: Rows, camera: int) -> Iterator[np.ndarray]:
        """uint8[h, w, 3] RGB for each row; a frame that several rows saw is decoded once."""
        shape = (self._spec.cameras[camera].height, self._spec.cameras[camera].width, 3)
        image: np.ndarray = np.zeros(shape, np.uint8)
        before_ns = None
        for time_ns in track.frame_times_ns[rows.first, camera].tolist():
            if time_ns != before_ns:
                before_ns = time_ns
                jpeg = np.frombuffer(track.frames[camera][time_ns], np.uint8)
                decoded = cv2.imdecode(jpeg, cv2.IMREAD_COLOR)
                if decoded is None or decoded.shape != shape:
                    raise CorruptDataError(
                        f"episode {episode.id}: a stored frame of camera '{self._spec.cameras[camera].name}' cannot be "
                        f"decoded to {shape}. Run `vla-fleet buffer verify --repair`, or leave the episode out."
                    )
                image = cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB)
            yield image

    def _check_videos(self, episode: EpisodeRow, rows: int) -> None:
        saved = self._dataset.meta.latest_episode
        for key in self._dataset.meta.video_keys:
            seconds = saved[f"videos/{key}/to_timestamp"][0] - saved[f"videos/{key}/from_timestamp"][0]
            frames = seconds * self._dataset.fps
            if abs(frames - rows) > 0.5:
                raise StorageError(
                    f"episode {episode.id}: the video of '{key}' has {frames:.1f} frames for {rows} rows. "
                    "Write images instead of video."
                )

    def _note(self, episode: EpisodeRow, track: Track, piece: slice, rows: Rows) -> None:
        line = {
            "index": self.episodes,
            "episode": episode.id,
            "robot": episode.robot,
            "task": episode.task,
            "source": episode.source,
            "seed": episode.seed,
            "outcome": episode.outcome if rows.done[-1] else "",
            "first_tick": int(track.tick[piece.start]),
            "ticks": piece.stop - piece.start,
            "first_ns": int(track.times_ns[piece.start]),
        }
        with open(self._dataset.root / "meta" / "vla_fleet_episodes.jsonl", "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _features(spec: RobotSpec, video: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"action": _vector("float32", [d.name for d in spec.action])}
    if spec.state:
        found["observation.state"] = _vector("float32", [d.name for d in spec.state])
    for camera, key in zip(spec.cameras, image_keys(spec).values(), strict=True):
        found[key] = {
            "dtype": "video" if video else "image",
            "shape": (camera.height, camera.width, 3),
            "names": ["height", "width", "channels"],
        }
    found["next.reward"] = _vector("float32", ["reward"])
    for name in ("done", "truncated", "success"):
        found[f"next.{name}"] = _vector("bool", [name])
    for name in ("actor", "policy_version"):
        found[name] = _vector("int64", [name])
    found["time_s"] = _vector("float64", ["time_s"])
    if spec.cameras:
        found["frame_time_s"] = _vector("float64", [camera.name for camera in spec.cameras])
    return found


def _video_file_mb(spec: RobotSpec) -> int:
    """What about `_VIDEO_FILE_ROWS` frames of the largest camera take: some 0.03 bytes a pixel were measured."""
    pixels = max((camera.height * camera.width for camera in spec.cameras), default=0)
    return max(1, round(0.03 * pixels * _VIDEO_FILE_ROWS / 1e6))


def _vector(dtype: str, names: list[str]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": (len(names),), "names": names}


def _choose_video(spec: RobotSpec, fps: int, wanted: bool | None) -> bool:
    if wanted is False or not spec.cameras:
        return False
    problems = [
        f"camera '{c.name}' ({c.width}x{c.height}): a side is shorter than {LEAST_SIDE} pixels"
        for c in spec.cameras
        if min(c.width, c.height) < LEAST_SIDE
    ]
    if fps > MOST_HZ:
        problems.append(f"{fps} frames a second are more than {MOST_HZ}")
    if problems and wanted:
        raise ConfigError(f"no video can be made: {'; '.join(problems)}. Write images instead of video.")
    return not problems


def _lerobot() -> Any:
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise ConfigError(f"LeRobot is not installed here ({error}): pip install 'vla-fleet[lerobot]'") from error
    return LeRobotDataset


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars, codec banners and type warnings of the libraries below."""
    import av
    from lerobot.utils.utils import SuppressProgressBars

    os.environ.setdefault("SVT_LOG", "0")
    av.logging.set_libav_level(av.logging.ERROR)
    with SuppressProgressBars(), warnings.catch_warnings():
        for message in ("Converting input from bool", "Conversion of an array with ndim > 0"):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextlib.contextmanager
def _closed(dataset: Any) -> Iterator[None]:
    """Finalize the dataset in the end; after an error only give its files and threads back."""
    try:
        yield
        dataset.finalize()
    except BaseException:
        # what is left in here would be written, and its directory made again, when the object goes
        dataset.meta.metadata_buffer.clear()
        for holder in (dataset, dataset.meta):
            # on a full disk closing fails as well; the first error counts
            with contextlib.suppress(OSError):
                holder._close_writer()
            holder.writer = None
        if dataset._streaming_encoder is not None:
            dataset._streaming_encoder.close()
        raise
    finally:
        dataset.stop_image_writer()
