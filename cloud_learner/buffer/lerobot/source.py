"""Reads the files of a LeRobot dataset (format v3) episode by episode: parquet, JSON and videos, nothing else.

`lerobot` itself is not needed for it, and no copy of the data is made in a cache.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cloud_learner.buffer.lerobot.dataset_checks import (
    MAX_TEXT,
    check_info,
    place,
    require_picture,
    require_table,
    whole_number,
)
from cloud_learner.buffer.lerobot.video import frames_at, of_lerobot
from wire.errors import ConfigError, CorruptDataError
from wire.types import RobotSpec
from wire.untrusted import MAX_JSON_BYTES, parse_json, read_file, require_file

ABOUT = "meta/vla_fleet.json"
_BATCH = 32


class EpisodeNote(msgspec.Struct, frozen=True, kw_only=True):
    """Which stored episode an episode of our own export was."""

    episode: str
    robot: str
    task: str
    source: str
    seed: int
    outcome: str
    """'' when its end is not in the dataset"""
    first_tick: int
    ticks: int
    first_ns: int


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`ABOUT`: what our own export says about its rows."""

    spec: RobotSpec
    """what a row means as a robot"""
    stored_spec_hash: str
    ticks_per_row: int
    actors: tuple[str, ...]
    cameras: dict[str, str]
    """the image key of each camera of `spec`"""
    episodes: tuple[EpisodeNote, ...]


class SourceEpisode(msgspec.Struct, frozen=True):
    """Where an episode lies in the files."""

    index: int
    rows: int
    path: Path
    videos: dict[str, tuple[Path, float]]
    """by key the file, and at how many seconds of it the episode begins"""


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

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """dtype, shape and names by key."""
        return self.info["features"]

    def limits(self, key: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The least and the greatest of each number of a column, None where the dataset has no statistics of it.

        Raises `CorruptDataError` for statistics of something else.
        """
        stats = self.stats.get(key, {})
        if not {"min", "max"} <= set(stats):
            return None
        with _unreadable(f"{self.root / 'meta' / 'stats.json'}: '{key}'"):
            low, high = (np.ravel(np.asarray(stats[name], np.float64)) for name in ("min", "max"))
        if not len(low) == len(high) == math.prod(self.features[key]["shape"]):
            raise CorruptDataError(
                f"{self.root / 'meta' / 'stats.json'}: '{key}' has {len(low)} least and {len(high)} greatest numbers, "
                f"the column has {math.prod(self.features[key]['shape'])}. Copy the whole dataset again."
            )
        return low, high

    @classmethod
    def open(cls, root: Path) -> DatasetSource:
        """Read what the dataset at `root` says about itself.

        Raises `ConfigError` if there is none or it has another format, `CorruptDataError` if a file of it cannot be
        read or claims what cannot be (`dataset_checks`).
        """
        path = root / "meta" / "info.json"
        if not path.is_file():
            raise ConfigError(f"there is no LeRobot dataset at {root}: {path} is missing.")
        info = _read_json(path, dict[str, Any], root)
        version = str(info.get("codebase_version", "unknown"))
        if not version.startswith("v3."):
            raise ConfigError(
                f"the LeRobot dataset at {root} has format {version}; this reads v3. Convert it: "
                "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=NAME --root=DIRECTORY"
            )
        check_info(info, path)
        about, stats = root / ABOUT, root / "meta" / "stats.json"
        return cls(
            root,
            info,
            _read_tasks(root / "meta" / "tasks.parquet", root),
            _read_episodes(root, info),
            _read_json(stats, dict[str, dict[str, Any]], root) if stats.is_file() else {},
            _read_json(about, About, root) if about.is_file() else None,
        )

    def columns(self, episode: SourceEpisode, names: Sequence[str]) -> dict[str, np.ndarray]:
        """[rows, n] of those of `names` that the dataset has as numbers."""
        there = [name for name in names if name in self.features]
        with _unreadable(f"episode {episode.index}: {episode.path}"):
            require_table(episode.path, self.root, [*there, "episode_index"], f"episode {episode.index}: ")
            table = of_lerobot("pyarrow.parquet").read_table(
                episode.path, columns=there, filters=[("episode_index", "=", episode.index)]
            )
        if table.num_rows != episode.rows:
            raise CorruptDataError(
                f"episode {episode.index}: {episode.path} has {table.num_rows} rows of it, not {episode.rows}."
            )
        found = {name: _numbers(table[name], name) for name in there}
        for name, values in found.items():
            if values.shape[1] != (width := math.prod(self.features[name]["shape"])) and len(values):
                raise CorruptDataError(
                    f"episode {episode.index}: '{name}' of {episode.path} has {values.shape[1]} numbers a row, "
                    f"meta/info.json says {width}."
                )
        return found

    def pictures(self, episode: SourceEpisode, key: str, rows: np.ndarray) -> Iterator[bytes | np.ndarray]:
        """For each of the growing `rows` an encoded image, or uint8[h, w, 3] in BGR.

        Raises `CorruptDataError` naming episode and file.
        """
        what = f"episode {episode.index}"
        if key in episode.videos:
            path, from_s = episode.videos[key]
            if path.exists():  # or the decoder says what is missing
                require_file(path, root=self.root, wrong=CorruptDataError)
            times_s = from_s + self.columns(episode, ("timestamp",))["timestamp"][rows, 0].astype(np.float64)
            yield from frames_at(path, times_s.tolist(), 0.5 / self.fps, what)
            return
        parquet = of_lerobot("pyarrow.dataset")
        with _unreadable(f"{what}: images '{key}' of {episode.path}"):
            require_table(episode.path, self.root, [key, "episode_index"], f"{what}: ")
            scanner = parquet.dataset(episode.path, format="parquet").scanner(
                columns=[key],
                filter=parquet.field("episode_index") == episode.index,
                batch_size=_BATCH,
                batch_readahead=1,
                use_threads=False,
            )
            cells = (cell for batch in scanner.to_batches() for cell in batch.column(0).to_pylist())
            for cell in itertools.compress(cells, np.isin(np.arange(episode.rows), rows)):
                data = cell.get("bytes") if isinstance(cell, dict) else None
                if not data:
                    raise CorruptDataError(f"{what}: {episode.path} has a row without an image in '{key}'.")
                require_picture(data, f"{what}: an image in '{key}' of {episode.path}")
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


def _read_tasks(path: Path, root: Path) -> dict[int, str]:
    with _unreadable(path):
        require_table(path, root)
        names = of_lerobot("pyarrow.parquet").read_schema(path).names
        text = [name for name in names if name != "task_index"]
        if "task_index" not in names or not text:
            raise CorruptDataError(f"{path} has no column 'task_index' beside the tasks' texts: {names}.")
        # one long text that stands in a million rows stays one
        table = of_lerobot("pyarrow.parquet").read_table(
            path, columns=["task_index", text[0]], read_dictionary=[text[0]]
        )
        found: dict[int, str] = {}
        for chunk in table[text[0]].chunks:
            for word in chunk.dictionary:
                if not 0 < len(word.as_buffer() or b"") <= 4 * MAX_TEXT:
                    raise CorruptDataError(f"{path}: an instruction has more than {MAX_TEXT} characters, or none.")
        for number, word in zip(table["task_index"].to_pylist(), table[text[0]].to_pylist(), strict=True):
            found[whole_number(number, f"{path}: task_index")] = str(word)
    return found


def _read_episodes(root: Path, info: dict[str, Any]) -> tuple[SourceEpisode, ...]:
    videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    wanted += [f"videos/{key}/{what}" for key in videos for what in ("chunk_index", "file_index", "from_timestamp")]

    def file(row: dict[str, Any], kind: str, column: str, what: str, key: str = "") -> Path:
        chunk, number = (whole_number(row[f"{column}/{part}"], what) for part in ("chunk_index", "file_index"))
        return place(root, info[kind], key, chunk, number)

    found = []
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        with _unreadable(path):
            require_table(path, root, wanted)
            for row in of_lerobot("pyarrow.parquet").read_table(path, columns=wanted).to_pylist():
                index, length = (whole_number(row[name], f"{path}: {name}") for name in ("episode_index", "length"))
                parts = {}
                for key in videos:
                    begin = float(row[f"videos/{key}/from_timestamp"])
                    if not 0 <= begin < math.inf:
                        raise CorruptDataError(f"{path}: episode {index} begins at {begin} s of its video '{key}'.")
                    parts[key] = file(row, "video_path", f"videos/{key}", f"{path}: a video's file", key), begin
                found.append(SourceEpisode(index, length, file(row, "data_path", "data", f"{path}: a file"), parts))
    if not found:
        raise ConfigError(f"the LeRobot dataset at {root} has no episode (was it finalized?).")
    return tuple(sorted(found, key=lambda episode: episode.index))


def _numbers(column: Any, name: str) -> np.ndarray:
    """A parquet column of numbers, or of lists of equally many, as an array [rows, n]."""
    flat = column.combine_chunks()
    while hasattr(flat.type, "value_type"):
        flat = flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    if values.dtype == object or (len(column) and len(values) % len(column)):
        raise CorruptDataError(f"column '{name}' holds no numbers, or lists of different lengths.")
    return values.reshape(len(column), -1) if len(column) else np.zeros((0, 1), values.dtype)


def _read_json(path: Path, kind: Any, root: Path) -> Any:
    data = read_file(path, MAX_JSON_BYTES, root, CorruptDataError)
    # msgspec takes no NaN, which lerobot writes
    with _unreadable(path):
        return msgspec.convert(parse_json(data, path, "Copy the whole dataset again.", CorruptDataError), kind)


@contextlib.contextmanager
def _unreadable(what: object) -> Iterator[None]:
    try:
        yield
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError, ArithmeticError),
        *(MemoryError, msgspec.ValidationError),
    ) as error:
        raise CorruptDataError(f"{what} cannot be read: {error}. Copy the whole dataset again.") from error
