"""Writes stored episodes as a LeRobot dataset (format v3.0, lerobot 0.4.4) that `lerobot-train` takes as it is.

| column | type | what |
|---|---|---|
| `observation.state` | float32[ds] | as recorded |
| `action` | float32[da] | executed, after limits; see `resampling` for fewer rows than ticks |
| `observation.images.<camera>` | video or image | the newest frame that the step saw |
| `next.reward`, `next.done`, `next.truncated`, `next.success` | float32, bool | what the action brought |
| `actor` | int64 | index into `wire.messages.gateway.ACTORS`: policy, human, script, hold |
| `recovery` | bool | whoever acted only brought the robot back, before correcting |
| `policy_version` | int64 | the version that acted or was ready to act |
| `policy_version_lag` | int64 | how many versions the fleet was ahead of that when the step arrived |
| `time_s`, `frame_time_s` | float64 | real times of the row and of its frames, from the first row on |
| `task` | text | the instruction |

`meta/vla_fleet.json` keeps the robot spec of the rows and which stored episode each came from; LeRobot passes over it,
the import reads it back.
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
import simplejpeg

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import EpisodeRow, SegmentRow
from cloud_learner.buffer.lerobot.resampling import Steps, resampled
from cloud_learner.buffer.lerobot.rows import Frames, choose_rate, image_keys, pieces_of, row_spec, steps_of
from cloud_learner.buffer.lerobot.selection import LeftOut, Selection, TransferProgress, select
from cloud_learner.buffer.lerobot.source import ABOUT, About, EpisodeNote
from cloud_learner.buffer.lerobot.video import never_real_time, of_lerobot
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import ConfigError, CorruptDataError, StorageError, storage_errors
from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

LEAST_SIDE = 64
"""pixels; SVT-AV1 ends the whole process when it is given a picture much smaller than this"""
MOST_HZ = 240
"""frames a second that SVT-AV1 takes"""
_VIDEO_FILE_MB = 16
"""LeRobot copies a whole video file for every episode it adds to it, so small files keep a long export linear."""
_NUMBERS = {
    "next.reward": "float32",
    "next.done": "bool",
    "next.truncated": "bool",
    "next.success": "bool",
    "actor": "int64",
    "recovery": "bool",
    "policy_version": "int64",
    "policy_version_lag": "int64",
    "time_s": "float64",
}
"""one a row"""
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
    video: False keeps every frame as the JPEG image it was stored as; None takes video (AV1) where the cameras are
        large enough
    progress: called after every episode

    `out` appears when it is whole: it is written beside under a name that ends in `.part`. Memory holds one episode.
    Raises `ConfigError` when lerobot is missing, `out` exists, nothing matches or an option cannot work, `StorageError`
    (`DiskFullError`, ...) when it cannot be written. An episode of which a picture cannot be decoded is left out.
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
    lerobot = of_lerobot("lerobot.datasets.lerobot_dataset")
    video = _choose_video(spec, rate, video)
    try:
        with storage_errors("LeRobot dataset", out), _quiet():
            dataset = lerobot.LeRobotDataset.create(
                f"local/{out.name}",
                rate,
                _features(spec, video),
                root=part,
                robot_type=spec.embodiment,
                use_videos=video,
                video_backend="pyav",
            )
            dataset.meta.update_chunk_settings(video_files_size_in_mb=_VIDEO_FILE_MB)
            writer = _Writer(dataset, spec, rate, instructions or {}, frozenset(selection.actors))
            with _finalized(dataset):
                for number, episode in enumerate(episodes, 1):
                    rows = [row for row in ledger.segments_of(episode.id) if row.row <= until_row]
                    writer.add(episode, store, rows)
                    if progress is not None:
                        progress(TransferProgress(number, len(episodes), writer.rows))
                if not writer.notes:
                    reasons = "; ".join(f"{one.episode}: {one.reason}" for one in writer.left_out[:3])
                    raise ConfigError(f"no step of the {len(episodes)} selected episodes can be exported ({reasons}).")
            writer.correct_deviations()
            about = About(
                spec=row_spec(spec, rate, stride),
                stored_spec_hash=spec.hash,
                ticks_per_row=stride,
                actors=ACTORS,
                cameras=image_keys(spec),
                episodes=tuple(writer.notes),
            )
            (part / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)))
            part.rename(out)
    finally:
        # nothing is there any more when it was done
        shutil.rmtree(part, ignore_errors=True)
    return Exported(out, len(writer.notes), writer.rows, rate, video, tuple(writer.left_out))


class _Writer:
    """Puts stored episodes into an open LeRobotDataset, one after the other."""

    def __init__(
        self, dataset: Any, spec: RobotSpec, rate: int, instructions: Mapping[str, str], actors: frozenset[str]
    ) -> None:
        self.rows = 0
        self.notes: list[EpisodeNote] = []
        """of the episodes that were written"""
        self.left_out: list[LeftOut] = []
        self._dataset, self._spec, self._rate = dataset, spec, rate
        self._instructions, self._actors = instructions, actors
        self._keys = list(image_keys(spec).values())
        self._moments: dict[str, list[np.ndarray]] = {key: [] for key in self._keys}

    def add(self, episode: EpisodeRow, store: SegmentStore, stored: Sequence[SegmentRow]) -> None:
        newest_versions = {row.row: row.newest_version for row in stored}
        rows = list(newest_versions)
        found = store.read(rows)
        missing = [row for row in rows if row not in found.segments]
        self._leave_out(episode, *(f"row {row}: {found.damaged.get(row, _NOT_HERE)}" for row in missing))
        if len(missing) == len(rows):
            return self._leave_out(episode, "nothing of it is stored any more")
        rows = [row for row in rows if row in found.segments]
        newest = [newest_versions[row] for row in rows]
        steps, frames = steps_of([found.segments[row] for row in rows], self._spec, newest)
        pieces = pieces_of(steps, frames, self._actors)
        for piece in pieces:
            self._save(episode, piece, frames)
        if not pieces:
            self._leave_out(episode, "no step of it is left to write")
        return None

    def _leave_out(self, episode: EpisodeRow, *reasons: str) -> None:
        self.left_out += [LeftOut(episode.id, reason) for reason in reasons]

    def _save(self, episode: EpisodeRow, steps: Steps, frames: Frames) -> None:
        first_ns = int(steps.times_ns[0])
        rows = resampled(steps, self._spec.control_hz, self._rate, self._spec.action)
        data = self._dataset.create_episode_buffer() | {
            "size": len(rows),
            "task": [self._instructions.get(episode.task, episode.task)] * len(rows),
            "frame_index": np.arange(len(rows)),
            "timestamp": np.arange(len(rows)) / self._rate,
            "action": rows.action,
            "next.reward": rows.reward,
            "next.done": rows.done,
            "next.truncated": rows.truncated,
            "next.success": rows.done & (episode.outcome == "success"),
            "actor": rows.actor.astype(np.int64),
            "recovery": rows.recovery,
            "policy_version": rows.version.astype(np.int64),
            "policy_version_lag": rows.lag.astype(np.int64),
            "time_s": (rows.times_ns - first_ns) / 1e9,
        }
        if self._spec.state:
            data["observation.state"] = rows.state
        if self._keys:
            data["frame_time_s"] = (rows.frame_times_ns - first_ns) / 1e9
        moments: dict[str, np.ndarray] = {}
        try:
            for camera, key in enumerate(self._keys):
                data[key], moments[key] = self._write_pictures(frames[camera], rows.frame_times_ns[:, camera], camera)
        except CorruptDataError as error:
            shutil.rmtree(self._dataset.root / "images", ignore_errors=True)
            return self._leave_out(episode, str(error))
        try:
            with never_real_time():
                self._dataset.save_episode(data, parallel_encoding=False)
        except (RuntimeError, ValueError) as error:
            raise StorageError(
                f"lerobot could not write episode {episode.id} to {self._dataset.root}: {error}"
            ) from error
        for key, found in moments.items():
            self._moments[key].append(found)
        shutil.rmtree(self._dataset.root / "images", ignore_errors=True)
        self._check_videos(episode, len(rows))
        self.notes.append(
            EpisodeNote(
                episode=episode.id,
                robot=episode.robot,
                task=episode.task,
                source=episode.source,
                seed=episode.seed,
                outcome=episode.outcome if rows.done[-1] else "",
                first_tick=int(steps.row[0]),
                ticks=len(steps),
                first_ns=first_ns,
            )
        )
        self.rows += len(rows)
        return None

    def _write_pictures(
        self, frames: Mapping[int, bytes], times_ns: np.ndarray, camera: int
    ) -> tuple[list[str], np.ndarray]:
        """The frame of each row, int64[R], where lerobot looks for it: it encodes and reads by content, not by name.
        With them float64[2, 3], the mean over all of `_moments_of`. Raises `CorruptDataError`."""
        image_path = of_lerobot("lerobot.datasets.utils").DEFAULT_IMAGE_PATH
        paths: list[str] = []
        moments: dict[int, np.ndarray] = {}
        for number, time_ns in enumerate(times_ns.tolist()):
            name = image_path.format(image_key=self._keys[camera], episode_index=len(self.notes), frame_index=number)
            path = self._dataset.root / name
            if time_ns not in moments:
                path.parent.mkdir(parents=True, exist_ok=True)
                moments[time_ns] = self._moments_of(frames[time_ns], camera)
            path.write_bytes(frames[time_ns])
            paths.append(str(path))
        return paths, np.mean([moments[time_ns] for time_ns in times_ns.tolist()], 0)

    def _moments_of(self, jpeg: bytes, camera: int) -> np.ndarray:
        """float64[2, 3]: mean and mean square of each colour of an image, on the scale 0 to 1."""
        spec = self._spec.cameras[camera]
        try:
            image = simplejpeg.decode_jpeg(jpeg, "RGB", strict=True)
        except ValueError:
            image = np.zeros(())
        if image.shape != (spec.height, spec.width, 3):
            raise CorruptDataError(
                f"a stored frame of camera '{spec.name}' cannot be decoded to {spec.height} x {spec.width} pixels"
            )
        mean, deviation = (found.ravel() / 255 for found in cv2.meanStdDev(image))
        return np.stack([mean, deviation**2 + mean**2])

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

    def correct_deviations(self) -> None:
        """Of the pictures, in the finished dataset: lerobot 0.4.4 squares their bytes as bytes (its issue 3682)."""
        if not self._keys:
            return
        parquet, meta = of_lerobot("pyarrow.parquet"), self._dataset.meta
        total = {key: np.zeros((2, 3)) for key in self._keys}
        for path in sorted(meta.root.glob("meta/episodes/*/*.parquet")):
            table = parquet.read_table(path)
            episodes, lengths = table["episode_index"].to_numpy(), table["length"].to_numpy()
            for key in self._keys:
                moments = np.stack(self._moments[key])[episodes]
                total[key] += np.tensordot(lengths, moments, 1)
                at = table.schema.get_field_index(f"stats/{key}/std")
                table = table.set_column(at, table.schema.field(at), [_deviation(moments).tolist()])
            parquet.write_table(table, path)
        for key in self._keys:
            meta.stats[key]["std"] = _deviation(total[key] / self.rows)
        of_lerobot("lerobot.datasets.utils").write_stats(meta.stats, meta.root)


def _deviation(moments: np.ndarray) -> np.ndarray:
    """float64[..., 3, 1, 1] of mean and mean square float64[..., 2, 3]."""
    return np.sqrt(np.maximum(moments[..., 1, :] - moments[..., 0, :] ** 2, 0))[..., None, None]


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
    found |= {name: _vector(dtype, [name]) for name, dtype in _NUMBERS.items()}
    if spec.cameras:
        found["frame_time_s"] = _vector("float64", [camera.name for camera in spec.cameras])
    return found


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars, codec banners and type warnings of the libraries below."""
    av = of_lerobot("av")
    os.environ.setdefault("SVT_LOG", "0")
    av.logging.set_libav_level(av.logging.ERROR)
    with of_lerobot("lerobot.utils.utils").SuppressProgressBars(), warnings.catch_warnings():
        for message in ("Converting input from bool", "Conversion of an array with ndim > 0"):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextlib.contextmanager
def _finalized(dataset: Any) -> Iterator[None]:
    try:
        with of_lerobot("lerobot.datasets.video_utils").VideoEncodingManager(dataset):
            yield
    except BaseException:
        # what is left in here would be written, and its directory made again, when the object goes
        dataset.meta.metadata_buffer.clear()
        raise
