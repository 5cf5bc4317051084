"""A dataset from elsewhere: no claim of it takes memory, leads to another file or host, or runs anything."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.lerobot import dataset_checks
from cloud_learner.buffer.lerobot.dataset_checks import MAX_VALUES, require_picture
from cloud_learner.buffer.lerobot.mapping import DatasetMapping, map_dataset
from cloud_learner.buffer.lerobot.source import DatasetSource
from cloud_learner.buffer.lerobot.video import frames_at
from tests.cloud_learner.buffer.lerobot.lerobot_samples import taken
from tests.extras import needs
from wire.errors import ConfigError, CorruptDataError, FleetError

pytestmark = needs("lerobot")
ROWS, FRONT = 6, "observation.images.front"


def number(length: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [length], "names": None}


INFO = {
    "codebase_version": "v3.0",
    "fps": 10,
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "features": {
        "observation.state": number(2),
        "action": number(2),
        "timestamp": number(1),
        FRONT: {"dtype": "image", "shape": [24, 32, 3], "names": ["height", "width", "channels"]},
    },
}
EPISODE = {"episode_index": 0, "length": ROWS, "data/chunk_index": 0, "data/file_index": 0}


def png(height: int = 24, width: int = 32) -> bytes:
    return cv2.imencode(".png", np.zeros((height, width, 3), np.uint8))[1].tobytes()


def write_table(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_rows(root: Path, **changed: Any) -> None:
    columns: dict[str, Any] = {
        "observation.state": [[0.0, float(row)] for row in range(ROWS)],
        "action": [[0.0, float(row)] for row in range(ROWS)],
        "timestamp": [row / 10 for row in range(ROWS)],
        "episode_index": [0] * ROWS,
        "task_index": [0] * ROWS,
        FRONT: [{"bytes": png(), "path": None}] * ROWS,
    }
    write_table(root / "data/chunk-000/file-000.parquet", columns | changed)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A good one of six rows."""
    root = tmp_path / "dataset"
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(INFO))
    limits = {"min": [-1.0, -1.0], "max": [1.0, 9.0]}
    (root / "meta" / "stats.json").write_text(json.dumps({"observation.state": limits, "action": limits}))
    write_table(root / "meta/tasks.parquet", {"task_index": [0], "task": ["reach"]})
    write_table(root / "meta/episodes/chunk-000/file-000.parquet", {name: [value] for name, value in EPISODE.items()})
    write_rows(root)
    return root


def change(root: Path, how: Callable[[dict[str, Any]], object], name: str = "info.json") -> None:
    path = root / "meta" / name
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


def test_a_good_one_is_taken(dataset: Path) -> None:
    (segment,) = taken(dataset)
    assert segment.steps == ROWS
    assert len(segment.frames["front"].encoded) == 1  # the same picture throughout


@pytest.mark.parametrize(
    "template",
    [
        "../{chunk_index}/{file_index}.parquet",
        "/etc/{chunk_index}{file_index}",
        "data/{chunk_index.__class__.__mro__}/{file_index}",
        "data/{chunk_index:>99999999999}/{file_index}",
        "data/{chunk_index!r}/{file_index}",
        "data/{0}/{file_index}",
        "data/{chunk_index:{file_index}}",
        "data/{open}",
        "data/{",
        "d" * 2000,
        7,
        None,
    ],
)
def test_paths_that_are_no_paths_of_it(dataset: Path, template: object) -> None:
    change(dataset, lambda info: info.update(data_path=template))
    with pytest.raises(FleetError, match=r"info\.json: data_path"):
        taken(dataset)


@pytest.mark.parametrize("key", ["../../front", "..", "a/b", "", "a\nb"])
def test_keys_that_lead_elsewhere(dataset: Path, key: str) -> None:
    change(dataset, lambda info: info["features"].update({key: {"dtype": "video", "shape": [24, 32, 3]}}))
    with pytest.raises(CorruptDataError, match=r"info\.json: .*cannot be a feature"):
        taken(dataset)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("action", [2**40]),
        ("action", [2**16, 2**16]),
        ("action", [-2]),
        ("action", [2.0]),
        ("action", "2"),
        ("action", None),
        (FRONT, [2**20, 2**20, 3]),
        (FRONT, [60_000, 60_000, 3]),
        (FRONT, [24, 32]),
        (FRONT, [True, True, 3]),
    ],
)
def test_shapes_that_cannot_be(dataset: Path, name: str, shape: object) -> None:
    change(dataset, lambda info: info["features"][name].update(shape=shape))
    with pytest.raises(CorruptDataError, match=r"info\.json: feature"):
        taken(dataset)


@pytest.mark.parametrize("features", [None, {}, [], {"action": 7}, {str(n): number(1) for n in range(2000)}])
def test_features_that_are_none(dataset: Path, features: object) -> None:
    change(dataset, lambda info: info.update(features=features))
    with pytest.raises(CorruptDataError, match=r"info\.json: .*feature"):
        taken(dataset)


@pytest.mark.parametrize("fps", [0, -1, 1e300, float("nan"), "10", None, True])
def test_rates_that_cannot_be(dataset: Path, fps: object) -> None:
    change(dataset, lambda info: info.update(fps=fps))
    with pytest.raises(ConfigError, match=r"info\.json: fps"):
        taken(dataset)


def test_a_rate_that_makes_a_million_steps_of_a_row(dataset: Path) -> None:
    source = DatasetSource.open(dataset)
    spec = msgspec.structs.replace(map_dataset(source, DatasetMapping()).spec, control_hz=1e5)
    with pytest.raises(ConfigError, match="no row is made 1000 times as many"):
        map_dataset(source, DatasetMapping(spec=spec, resample=True))


@pytest.mark.parametrize("field", list(EPISODE))
@pytest.mark.parametrize("value", [-1, 2**60, 0.5, None, "0"])
def test_counts_that_count_nothing(dataset: Path, field: str, value: object) -> None:
    columns = {name: [value if name == field else known] for name, known in EPISODE.items()}
    write_table(dataset / "meta/episodes/chunk-000/file-000.parquet", columns)
    with pytest.raises(CorruptDataError, match="no count"):
        taken(dataset)


def test_an_episode_longer_than_its_rows(dataset: Path) -> None:
    columns = {name: [2**30 if name == "length" else known] for name, known in EPISODE.items()}
    write_table(dataset / "meta/episodes/chunk-000/file-000.parquet", columns)
    with pytest.raises(CorruptDataError, match=f"has 6 rows of it, not {2**30}"):
        taken(dataset)


def test_columns_of_another_width(dataset: Path) -> None:
    write_rows(dataset, action=[[0.0]] * ROWS)
    with pytest.raises(CorruptDataError, match=r"'action' of .* has 1 numbers a row, meta/info\.json says 2"):
        taken(dataset)


def test_a_column_that_is_a_few_bytes_and_unpacks_to_gigabytes(dataset: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = dataset / "data/chunk-000/file-000.parquet"
    schema = pyarrow.schema({"observation.state": pyarrow.float32(), "episode_index": pyarrow.int64()})
    some = 1 << 22
    batch = pyarrow.record_batch([np.zeros(some, np.float32), np.zeros(some, np.int64)], schema=schema)
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for _ in range(MAX_VALUES // some // 2 + 1):
            writer.write_batch(batch, row_group_size=some)
    assert path.stat().st_size < 2**20
    with pytest.raises(CorruptDataError, match=r"numbers and .* bytes of a row group, above the caps"):
        taken(dataset)


def test_one_long_instruction_in_many_rows(dataset: Path) -> None:
    write_table(dataset / "meta/tasks.parquet", {"task_index": list(range(1000)), "task": ["x" * 10**6] * 1000})
    with pytest.raises(CorruptDataError, match="an instruction has more than"):
        taken(dataset)


@pytest.mark.parametrize(
    "limits", [{"min": [0], "max": [1, 2]}, {"min": ["a", "b"], "max": [1, 2]}, {"min": 1, "max": {}}]
)
def test_statistics_of_something_else(dataset: Path, limits: object) -> None:
    change(dataset, lambda stats: stats.update(action=limits), "stats.json")
    with pytest.raises(CorruptDataError, match=r"stats\.json: 'action'"):
        taken(dataset)


@pytest.mark.parametrize("name", ["info.json", "stats.json", "vla_fleet.json"])
@pytest.mark.parametrize("text", ["[" * 10**6, "{", "[]", '{"a": {"b": '])
def test_json_that_is_none(dataset: Path, name: str, text: str) -> None:
    (dataset / "meta" / name).write_text(text)
    with pytest.raises(CorruptDataError, match=name):
        taken(dataset)


@pytest.mark.parametrize(
    "name",
    [
        "meta/info.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
    ],
)
def test_files_that_are_links_to_somewhere_else(dataset: Path, tmp_path: Path, name: str) -> None:
    (dataset / name).rename(tmp_path / "outside")
    (dataset / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptDataError, match="leads out of"):
        taken(dataset)
    if name != "meta/info.json":  # which has to be a file already
        (dataset / name).unlink()
        os.mkfifo(dataset / name)
        with pytest.raises(CorruptDataError, match="no regular file"):
            taken(dataset)


def claiming(height: int, width: int) -> bytes:
    """A whole PNG file of a few bytes whose header claims so many pixels."""
    data = bytearray(png())
    data[16:24] = width.to_bytes(4) + height.to_bytes(4)
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    return bytes(data)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (claiming(30_000, 30_000), "claims 30000x30000 pixels"),
        (claiming(2**31 - 1, 2**31 - 1), "pixels"),
        (claiming(0, 0), "pixels"),
        (cv2.imencode(".tiff", np.zeros((24, 32, 3), np.uint8))[1].tobytes(), "no PNG or JPEG"),
        (b"\x80\x04N.", "no PNG or JPEG"),
        (png()[:40], "cannot be decoded"),
    ],
)
def test_pictures_that_are_bombs_or_none(dataset: Path, picture: bytes, message: str) -> None:
    write_rows(dataset, **{FRONT: [{"bytes": picture, "path": "/etc/hostname"}] * ROWS})
    with pytest.raises(CorruptDataError, match=message):
        taken(dataset)


def test_a_picture_of_more_bytes_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_checks, "MAX_PICTURE_BYTES", 50)
    with pytest.raises(CorruptDataError, match="no PNG or JPEG file of up to 50 bytes"):
        require_picture(png() + bytes(50), "it")


def test_a_pickle_in_the_schema_is_not_loaded(dataset: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was run"),)

    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Evil())}
    path = dataset / "data/chunk-000/file-000.parquet"
    table = pyarrow.parquet.read_table(path)
    at = table.schema.get_field_index("timestamp")
    field = table.schema.field(at).with_metadata(about)
    pyarrow.parquet.write_table(table.set_column(at, field, table["timestamp"]), path)
    source = DatasetSource.open(dataset)
    with contextlib.suppress(CorruptDataError):
        source.columns(source.episodes[0], ("timestamp", "action"))
    assert not (tmp_path / "was run").exists()


class TestVideos:
    @pytest.fixture
    def film(self, tmp_path: Path) -> Path:
        import av

        path = tmp_path / "film.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for value in range(5):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 40 * value, np.uint8), format="bgr24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    def test_a_film_is_read(self, film: Path) -> None:
        assert [frame.shape for frame in frames_at(film, [0.0, 0.2], 0.05, "it")] == [(48, 64, 3)] * 2

    @pytest.mark.parametrize(
        "playlist",
        [
            "ffconcat version 1.0\nfile {film}\n",
            "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{film}\n#EXT-X-ENDLIST\n",
            "#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/film.ts\n#EXT-X-ENDLIST\n",
        ],
    )
    def test_a_playlist_under_the_name_of_a_film(self, film: Path, tmp_path: Path, playlist: str) -> None:
        path = tmp_path / "other.mp4"
        path.write_text(playlist.format(film=film.name))
        with pytest.raises(CorruptDataError, match=r"other\.mp4 cannot be decoded"):
            list(frames_at(path, [0.0], 0.05, "it"))

    def test_frames_larger_than_any(self, film: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cloud_learner.buffer.lerobot import video

        monkeypatch.setattr(video, "MAX_PICTURE_PIXELS", 64 * 48 - 1)
        with pytest.raises(CorruptDataError, match="claims more than"):
            list(frames_at(film, [0.0], 0.05, "it"))

    def test_frames_larger_than_the_film_says(self, film: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cloud_learner.buffer.lerobot import video

        data = bytearray(film.read_bytes())
        at = data.index(b"mp4v", data.index(b"stsd")) + 28  # width and height of the sample entry
        assert data[at : at + 4] == b"\x00\x40\x00\x30"
        data[at : at + 4] = b"\x00\x10\x00\x10"
        film.write_bytes(data)
        monkeypatch.setattr(video, "MAX_PICTURE_PIXELS", 64 * 48 - 1)
        with pytest.raises(CorruptDataError, match=r"claims more than|cannot be decoded"):
            list(frames_at(film, [0.0], 0.05, "it"))
