"""Reads the files of a LeRobot dataset (format v3) episode by episode: parquet, JSON and videos, nothing else.

`lerobot` itself is not needed for it, and no copy of the data is made in a cache.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cloud_learner.buffer.lerobot.video import frames_at
from wire.errors import ConfigError, CorruptDataError
from wire.types import RobotSpec

_BATCH = 32


class VideoPart(msgspec.Struct, frozen=True):
    """Where an episode lies in a video file."""

    path: Path
    from_s: float


class SourceEpisode(msgspec.Struct, frozen=True):
    """Where an episode lies in the files."""

    index: int
    rows: int
    path: Path
    videos: dict[str, VideoPart]


class About(msgspec.Struct, frozen=True):
    """`meta/vla_fleet.json`: what our own export says about its rows."""

    format: int
    spec: RobotSpec
    actors: tuple[str, ...]
    cameras: dict[str, str]


class Note(msgspec.Struct, frozen=True):
    """A line of `meta/vla_fleet_episodes.jsonl`: which stored episode this one was."""

    index: int
    task: str
    seed: int
    outcome: str
    first_ns: int


class DatasetSource(msgspec.Struct, frozen=True, eq=False):
    """An opened dataset. Get one from `DatasetSource.open`."""

    root: Path
    info: dict[str, Any]
    tasks: dict[int, str]
    """instruction by `task_index`"""
    episodes: tuple[SourceEpisode, ...]
    stats: dict[str, dict[str, Any]]
    about: About | None
    """None for a dataset that is not of our own export"""
    notes: dict[int, Note]

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    def limits(self, key: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The least and the greatest of each number of a column, None where the dataset has no statistics of it."""
        stats = self.stats.get(key, {})
        return (np.ravel(stats["min"]), np.ravel(stats["max"])) if {"min", "max"} <= set(stats) else None

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """dtype, shape and names by key."""
        return self.info["features"]

    @classmethod
    def open(cls, root: Path) -> DatasetSource:
        """Read what the dataset at `root` says about itself.

        Raises `ConfigError` if there is none or it has another format, `CorruptDataError` if a file of it cannot be
        read.
        """
        path = root / "meta" / "info.json"
        if not path.is_file():
            raise ConfigError(f"there is no LeRobot dataset at {root}: {path} is missing.")
        info = _json(path)
        version = str(info.get("codebase_version", "unknown"))
        if not version.startswith("v3."):
            raise ConfigError(
                f"the LeRobot dataset at {root} has format {version}; this reads v3. Convert it: "
                "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=NAME --root=DIRECTORY"
            )
        about, notes = None, {}
        if (path := root / "meta" / "vla_fleet.json").is_file():
            about = _decoded(path, path.read_bytes(), About)
            if (path := root / "meta" / "vla_fleet_episodes.jsonl").is_file():
                lines = [_decoded(path, line, Note) for line in path.read_bytes().splitlines()]
                notes = {note.index: note for note in lines}
        path = root / "meta" / "stats.json"
        stats = _json(path) if path.is_file() else {}
        return cls(root, info, _read_tasks(root), _read_episodes(root, info), stats, about, notes)

    def columns(self, episode: SourceEpisode, names: Sequence[str]) -> dict[str, np.ndarray]:
        """[rows] or [rows, n] of those of `names` that the dataset has as numbers."""
        there = [name for name in dict.fromkeys(names) if name in self.features]
        with _unreadable(f"episode {episode.index}: {episode.path}"):
            table = _pyarrow().parquet.read_table(
                episode.path, columns=there, filters=[("episode_index", "=", episode.index)]
            )
        if table.num_rows != episode.rows:
            raise CorruptDataError(
                f"episode {episode.index}: {episode.path} has {table.num_rows} rows of it, not {episode.rows}."
            )
        return {name: _numbers(table[name], name) for name in there}

    def pictures(
        self, episode: SourceEpisode, key: str, times_s: np.ndarray, first: int = 0
    ) -> Iterator[bytes | np.ndarray]:
        """For rows from `first` on an encoded image, or uint8[h, w, 3] in BGR.

        `times_s`: the `timestamp` of those rows. Raises `CorruptDataError` naming episode and file.
        """
        what = f"episode {episode.index}"
        if (part := episode.videos.get(key)) is not None:
            yield from frames_at(part.path, (times_s + part.from_s).tolist(), 0.5 / self.fps, what)
            return
        parquet = _pyarrow().dataset
        with _unreadable(f"{what}: images '{key}' of {episode.path}"):
            scanner = parquet.dataset(episode.path, format="parquet").scanner(
                columns=[key],
                filter=parquet.field("episode_index") == episode.index,
                batch_size=_BATCH,
                batch_readahead=1,
                use_threads=False,
            )
            cells = (cell for batch in scanner.to_batches() for cell in batch.column(0).to_pylist())
            for cell in itertools.islice(cells, first, None):
                data = cell.get("bytes") if isinstance(cell, dict) else None
                if not data:
                    raise CorruptDataError(f"{what}: {episode.path} has a row without an image in '{key}'.")
                yield data


def names_of(feature: dict[str, Any], prefix: str) -> tuple[str, ...]:
    """The names of a vector's numbers; `prefix` and a number each where the dataset has none that fit."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = [name for group in names.values() for name in (group if isinstance(group, list) else [group])]
    length = int(np.prod(feature["shape"]))
    if not isinstance(names, list) or len(names) != length or len({str(name) for name in names}) != length:
        return tuple(f"{prefix}{number}" for number in range(length))
    return tuple(str(name) for name in names)


def picture_size(feature: dict[str, Any]) -> tuple[int, int, int]:
    """(height, width, channels) of an image or video feature."""
    shape = [int(side) for side in feature["shape"]]
    names = feature.get("names") or ["height", "width", "channels"]
    if str(names[0]).startswith("channel"):
        shape = [shape[1], shape[2], shape[0]]
    return shape[0], shape[1], shape[2]


def _read_tasks(root: Path) -> dict[int, str]:
    path = root / "meta" / "tasks.parquet"
    table = _read_table(path, None)
    text = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or not text:
        raise CorruptDataError(f"{path} has no column 'task_index' beside the tasks' texts: {table.column_names}.")
    return dict(zip(table["task_index"].to_pylist(), table[text[0]].to_pylist(), strict=True))


def _read_episodes(root: Path, info: dict[str, Any]) -> tuple[SourceEpisode, ...]:
    videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    wanted += [f"videos/{key}/{what}" for key in videos for what in ("chunk_index", "file_index", "from_timestamp")]
    found = []
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        for row in _read_table(path, wanted).to_pylist():
            parts = {}
            for key in videos:
                name = info["video_path"].format(
                    video_key=key,
                    chunk_index=row[f"videos/{key}/chunk_index"],
                    file_index=row[f"videos/{key}/file_index"],
                )
                parts[key] = VideoPart(root / name, float(row[f"videos/{key}/from_timestamp"]))
            name = info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
            found.append(SourceEpisode(row["episode_index"], row["length"], root / name, parts))
    if not found:
        raise ConfigError(f"the LeRobot dataset at {root} has no episode (was it finalized?).")
    return tuple(sorted(found, key=lambda episode: episode.index))


def _numbers(column: Any, name: str) -> np.ndarray:
    """A parquet column of numbers, or of lists of equally many, as an array."""
    count = len(column)
    flat = column.combine_chunks()
    while hasattr(flat, "flatten") and hasattr(flat.type, "value_type"):
        flat = flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    if values.dtype == object or (count and len(values) % count):
        raise CorruptDataError(f"column '{name}' holds no numbers, or lists of different lengths.")
    return values if len(values) == count and not hasattr(column.type, "value_type") else values.reshape(count, -1)


def _read_table(path: Path, columns: list[str] | None) -> Any:
    with _unreadable(path):
        return _pyarrow().parquet.read_table(path, columns=columns)


def _json(path: Path) -> dict[str, Any]:
    # msgspec takes no NaN, which lerobot writes
    with _unreadable(path):
        return json.loads(path.read_bytes())


def _decoded(path: Path, data: bytes, kind: Any) -> Any:
    with _unreadable(path):
        return msgspec.json.decode(data, type=kind)


@contextlib.contextmanager
def _unreadable(what: object) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, msgspec.DecodeError) as error:
        raise CorruptDataError(f"{what} cannot be read: {error}. Copy the whole dataset again.") from error


def _pyarrow() -> Any:
    try:
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"pyarrow is not installed, which reads parquet: pip install 'vla-fleet[lerobot]' ({error})"
        ) from error
    return pyarrow
