"""Segments on disk: one zarr v3 store in one ZIP file each, at `<spec hash>/<episode id>/<index>.zarr.zip`.

Steps are arrays of T rows under the names they have in `wire.messages.Segment`. Frames keep the JPEG bytes that came:
`jpeg` holds all of them in a row, `jpeg_offsets` where each ends, `jpeg_times_ns` when each was taken, camera after
camera; the group's attributes say how many belong to which camera. The same segment always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.core.array_spec import ArrayConfig
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from cloud_learner.buffer.files import checked_name, make_directory, remove_leftovers, remove_quietly, write_durably
from cloud_learner.buffer.rows import Stored
from wire.errors import Corrupt, InvalidData, storage_error
from wire.messages import ACTORS, CameraFrames, Segment
from wire.types import Episode

FORMAT = 1
_STEP_ARRAYS = (
    "times_ns",
    "state",
    "proposed",
    "executed",
    "actor",
    "chunk_tick",
    "delay_ticks",
    "version",
    "reward",
    "terminated",
    "truncated",
)
_PLAIN = ("id", "index", "first_tick", "last", "outcome", "closed_ns")
_EPOCH = (1980, 1, 1, 0, 0, 0)


class SegmentStore:
    """The directory of segment files. Readers construct it; the one writer uses `open`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def open(cls, root: Path) -> SegmentStore:
        """Create the directory, or remove what a crash left half-written in it. For the writer only."""
        try:
            make_directory(root)
        except OSError as error:
            raise storage_error(error, "segments", root) from error
        remove_leftovers(root, "segments")
        return cls(root)

    def write(self, segment: Segment, data: bytes | None = None) -> Stored:
        """Put a segment on disk, replacing a file that was never committed; it is durable when this returns.

        `data`: the result of `encode_segment(segment)` if it is at hand. Raises `InvalidData` for an id that cannot be
        a file name, `DiskFull`, `NotWritable` or `StorageError`; then nothing half-written is left.
        """
        path = segment_path(segment)
        data = encode_segment(segment) if data is None else data
        write_durably(self.root / path, data, f"segment {segment.id}")
        return Stored(path, len(data), hashlib.sha256(data).hexdigest())

    def read(self, path: str, sha256: str) -> Segment:
        """The segment in the file at `path`, equal to the last bit to the one written.

        Raises `Corrupt` if it is gone, torn or not what `sha256` was taken from.
        """
        try:
            data = (self.root / path).read_bytes()
        except FileNotFoundError as error:
            raise Corrupt(f"segment file {self.root / path} is gone. Restore it from a backup.") from error
        except OSError as error:
            raise storage_error(error, "segment file", self.root / path) from error
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise Corrupt(
                f"segment file {self.root / path}: sha256 {found[:12]} of {len(data)} bytes instead of {sha256[:12]}. "
                "Restore it from a backup."
            )
        try:
            return decode_segment(data)
        except InvalidData as error:
            raise Corrupt(f"segment file {self.root / path}: {error}") from error

    def has(self, stored_path: str, size: int) -> bool:
        """Whether a file of that size is there; its content is not read."""
        try:
            return (self.root / stored_path).stat().st_size == size
        except OSError:
            return False

    def remove(self, stored: Stored) -> None:
        """Remove a file that was written but that the ledger refused."""
        remove_quietly(self.root / stored.path)


def segment_path(segment: Segment) -> str:
    """Where a segment belongs, relative to the store. Raises `InvalidData` for names that are not safe in a path."""
    spec = checked_name(segment.episode.spec_hash, "spec hash")
    episode = checked_name(segment.episode.id, "episode id")
    if segment.index < 0 or segment.id != f"{episode}/{segment.index}":
        raise InvalidData(f"segment {segment.id[:200]!r} is not number {segment.index} of episode {episode!r}.")
    return f"{spec}/{episode}/{segment.index:06d}.zarr.zip"


def encode_segment(segment: Segment) -> bytes:
    """A segment as the bytes of a ZIP file that `zarr.storage.ZipStore` opens. Always the same for the same segment."""
    cameras = list(segment.frames)
    encoded = [image for camera in cameras for image in segment.frames[camera].encoded]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(image) for image in encoded], out=offsets[1:])
    seen = list(segment.frame_times_ns)
    steps = segment.steps
    arrays: dict[str, np.ndarray] = {name: getattr(segment, name) for name in _STEP_ARRAYS}
    arrays["frame_times_ns"] = np.array([segment.frame_times_ns[camera] for camera in seen], np.int64).reshape(
        len(seen), steps
    )
    arrays["jpeg_times_ns"] = np.concatenate(
        [np.zeros(0, np.int64), *(segment.frames[camera].times_ns for camera in cameras)], dtype=np.int64
    )
    arrays["jpeg_offsets"] = offsets
    arrays["jpeg"] = np.frombuffer(b"".join(encoded), np.uint8)
    attributes = {
        "format": FORMAT,
        "segment": {name: getattr(segment, name) for name in _PLAIN},
        "episode": msgspec.to_builtins(segment.episode),
        "actors": list(ACTORS),
        "cameras": seen,
        "frames": [[camera, len(segment.frames[camera].encoded)] for camera in cameras],
    }
    files: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(files), attributes=attributes)
    # a chunk of zeros is a chunk: zarr would leave it out, and with it the sign of a zero
    config = ArrayConfig(order="C", write_empty_chunks=True)
    for name, array in arrays.items():
        # one chunk, not compressed: JPEG does not shrink, and the rest is small
        chunks = tuple(max(1, size) for size in array.shape)
        group.create_array(name, data=array, chunks=chunks, compressors=None, config=config)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name].to_bytes())
    return out.getvalue()


def decode_segment(data: bytes) -> Segment:
    """The segment that `encode_segment` made `data` from. Raises `InvalidData` for any other bytes."""
    try:
        buffer = default_buffer_prototype().buffer
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: buffer.from_bytes(archive.read(name)) for name in archive.namelist()}
        group = zarr.open_group(MemoryStore(files, read_only=True), mode="r")
        attributes: dict[str, Any] = dict(group.attrs)
        if attributes.get("format") != FORMAT:
            raise InvalidData(
                f"segment format {attributes.get('format')}, this vla-fleet reads {FORMAT}: "
                "install the one that wrote it."
            )
        arrays: dict[str, Any] = {name: _array(group, name) for name in (*_STEP_ARRAYS, "frame_times_ns")}
        times, offsets = _array(group, "jpeg_times_ns"), _array(group, "jpeg_offsets")
        jpeg = _array(group, "jpeg").tobytes()
        frames, first = {}, 0
        for camera, count in attributes["frames"]:
            ends = offsets[first : first + count + 1].tolist()
            images = tuple(jpeg[a:b] for a, b in itertools.pairwise(ends))
            frames[camera] = CameraFrames(times_ns=times[first : first + count], encoded=images)
            first += count
        seen = arrays.pop("frame_times_ns")
        return Segment(
            episode=msgspec.convert(attributes["episode"], Episode),
            frame_times_ns=dict(zip(attributes["cameras"], seen, strict=True)),
            frames=frames,
            **attributes["segment"],
            **arrays,
        )
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, NotImplementedError) as error:
        raise InvalidData(f"not a segment file: {error!r}.") from error


def _array(group: zarr.Group, name: str) -> np.ndarray:
    array = group[name]
    if not isinstance(array, zarr.Array):
        raise InvalidData(f"not a segment file: '{name}' is no array.")
    return np.asarray(array[...])
