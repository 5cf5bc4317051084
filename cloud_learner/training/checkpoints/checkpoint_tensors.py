"""Tensors of a checkpoint as safetensors files, by torch.distributed.checkpoint: sharded or whole, never a pickle.

Its reader takes the place of a shard in its tensor from the file, and the tensor's size from that: `read_sizes` refuses
shards that overlap, leave holes or claim more than is there, so that no claim takes memory.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from cloud_learner.buffer.files import FLUSHED_BYTES
from cloud_learner.training.ranks.group import RankGroup
from wire.errors import CorruptDataError, StorageError, storage_error
from wire.untrusted import read_safetensors_header

Sizes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""shape and type of whole tensors by name"""
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_MAX_TENSORS = 1_000_000
_SHARDING = "DCP_SHARDING_INFO"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# It would tell of each tensor, in every log.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


class _Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    saved_offsets: tuple[int, ...]


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], group: RankGroup, what: str) -> None:
    """Write this rank's part of `tensors`, which are on the CPU, to `directory`; of several ranks all call this.

    Raises `DiskFullError`, `NotWritableError` or `StorageError`, saying `what` was done.
    """
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    writer.fs = _FlushedFiles()
    # the writer asks for storages, and says so each time that there is one process
    with warnings.catch_warnings(), _our_errors(what, directory):
        warnings.simplefilter("ignore")
        alone = group.world == 1
        dcp.save(dict(tensors), storage_writer=writer, process_group=group.background, no_dist=alone)


def read_sizes(files: Sequence[Path]) -> Sizes:
    """What whole tensors there are in the shards of `files`. Raises `CorruptDataError`."""
    shards: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], str]]] = {}
    for path in files:
        with open(path, "rb") as file:
            header = read_safetensors_header(file, path.stat().st_size, path, _MAX_HEADER_BYTES)
        try:
            places = msgspec.json.decode(header.metadata[_SHARDING], type=dict[str, _Shard])
            for name, tensor in header.tensors.items():
                shards.setdefault(name, []).append((places[name].saved_offsets, tensor.shape, tensor.dtype))
        except (KeyError, msgspec.MsgspecError, RecursionError) as error:
            raise CorruptDataError(f"{path}: what it says of its shards cannot be read: {error}.") from error
    if len(shards) > _MAX_TENSORS:
        raise CorruptDataError(f"{files[0].parent}: {len(shards)} tensors, above the cap of {_MAX_TENSORS}.")
    return {name: (_whole_size(name, parts, files[0].parent), _DTYPES[parts[0][2]]) for name, parts in shards.items()}


def read_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read into `tensors`, of the sizes that `read_sizes` said. Raises `CorruptDataError` or `StorageError`."""
    with warnings.catch_warnings(), _our_errors("reading a checkpoint", directory):
        warnings.simplefilter("ignore")
        # each rank finds what it needs by itself: nothing is to be agreed on
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return tensors


def _whole_size(name: str, parts: list[tuple[tuple[int, ...], tuple[int, ...], str]], where: Path) -> tuple[int, ...]:
    """Shards are of the first dimension, and follow each other."""
    parts = sorted(parts)
    _, first, dtype = parts[0]
    end = 0
    for offsets, shape, kind in parts:
        if not shape:
            follows = len(parts) == 1
        else:
            follows = offsets[:1] == (end,) and not any(offsets[1:]) and shape[1:] == first[1:]
            end += shape[0]
        if not follows or kind != dtype or kind not in _DTYPES or not len(offsets) == len(shape) == len(first):
            raise CorruptDataError(f"{where}: the shards of '{name[:200]}' do not make one tensor.")
    return (end, *first[1:]) if first else ()


class _FlushedFile(io.BufferedWriter):
    """Goes to the device bit by bit: whoever flushes another file meanwhile waits behind it."""

    def write(self, data: Any) -> int:
        for first in range(0, len(data), FLUSHED_BYTES):
            super().write(memoryview(data)[first : first + FLUSHED_BYTES])
            self.flush()
            os.fsync(self.fileno())
        return len(data)


class _FlushedFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise ValueError(f"a checkpoint's file is opened with {mode}.")
        with _FlushedFile(io.FileIO(path, "w")) as file:
            yield file


@contextmanager
def _our_errors(what: str, where: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as failure:
        error = next(iter(failure.failures.values()))[0]
        if isinstance(error, OSError):
            raise storage_error(error, what, where) from error
        if isinstance(error, (ValueError, SafetensorError, KeyError, AssertionError)):
            raise CorruptDataError(f"{where}: {error}.") from error
        raise StorageError(f"{what} in {where} failed: {error!r}.") from error
