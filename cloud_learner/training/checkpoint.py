"""A learner on disk: `<directory>/<number>/learner.safetensors` with a `checkpoint.json` that vouches for it.

A checkpoint is written under a temporary name, synced, and renamed: it is there whole or not at all. The last two are
kept; one that turns out damaged is reported and the one before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from safetensors import SafetensorError

from cloud_learner.buffer.files import make_directory, sync_directory, write_durably
from cloud_learner.training.learner import LearnerState
from wire.errors import CorruptDataError, StorageError, storage_error

log = logging.getLogger(__name__)

FORMAT = 1
_TENSORS = "learner.safetensors"
_RECORD = "checkpoint.json"
_TEMPORARY = ".writing-"
_WRITING = "writing a checkpoint"
_KEPT = 2


class _Record(msgspec.Struct, frozen=True):
    format: int
    sha256: str
    """of the tensor file, whose metadata holds everything that is not a tensor"""


@dataclass(frozen=True)
class Checkpoint:
    """What was read back."""

    path: Path
    state: LearnerState
    meta: dict[str, Any]
    """what the trainer had put beside it"""


def save(directory: Path, state: LearnerState, meta: dict[str, Any]) -> Path:
    """Write the next checkpoint and drop all but the newest two; its path.

    `meta` is JSON. Raises `DiskFullError`, `NotWritableError` or `StorageError`; the earlier checkpoints are then
    untouched.
    """
    number = max((int(path.name) for path in _numbered(directory)), default=0) + 1
    temporary = directory / f"{_TEMPORARY}{number:08d}"
    final = directory / f"{number:08d}"
    texts = {"learner": json.dumps(state.meta), "meta": json.dumps(meta)}
    data = safetensors.torch.save(state.tensors, metadata=texts)
    record = _Record(FORMAT, hashlib.sha256(data).hexdigest())
    try:
        make_directory(directory)
        for unfinished in directory.glob(f"{_TEMPORARY}*"):
            log.info("removing %s, a checkpoint that was never finished.", unfinished)
            shutil.rmtree(unfinished)
        temporary.mkdir()
        write_durably(temporary / _TENSORS, data, _WRITING)
        write_durably(temporary / _RECORD, msgspec.json.encode(record), _WRITING)
        os.rename(temporary, final)
        sync_directory(directory)
        for old in _numbered(directory)[_KEPT:]:
            shutil.rmtree(old)
    except (OSError, StorageError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # best effort: the error below is the one that matters
        if isinstance(error, OSError):
            raise storage_error(error, _WRITING, final) from error
        raise
    return final


def load_newest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None when there is none at all.

    Damaged ones are logged and passed over. Raises `CorruptDataError` if every one is damaged, and `StorageError` for
    one written by another version of this program.
    """
    damaged = []
    for path in _numbered(directory):
        try:
            return _read(path)
        except CorruptDataError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
            damaged.append(path.name)
    if damaged:
        raise CorruptDataError(
            f"all checkpoints in {directory} are damaged ({', '.join(damaged)}). Move them away to train again from "
            "the recorded data, which is not affected."
        )
    return None


def _read(path: Path) -> Checkpoint:
    try:
        record = msgspec.json.decode((path / _RECORD).read_bytes(), type=_Record)
        if record.format != FORMAT:
            raise StorageError(
                f"checkpoint {path} has format {record.format}, this program reads {FORMAT}; use the vla-fleet that "
                "wrote it, or move it away."
            )
        data = (path / _TENSORS).read_bytes()
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise CorruptDataError(f"checkpoint {path}: {_TENSORS} ({len(data)} bytes) does not match its sha256.")
        tensors = safetensors.torch.load(data)
        texts = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        state = LearnerState(tensors, json.loads(texts["learner"]))
        return Checkpoint(path, state, json.loads(texts["meta"]))
    except FileNotFoundError as error:
        raise CorruptDataError(f"checkpoint {path}: {Path(error.filename).name} is missing.") from error
    except OSError as error:
        raise storage_error(error, "reading a checkpoint", path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError, KeyError) as error:
        raise CorruptDataError(f"checkpoint {path} cannot be read: {error}.") from error


def _numbered(directory: Path) -> list[Path]:
    """Newest first."""
    found = [path for path in directory.glob("[0-9]*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)
