"""A learner on disk: `<directory>/<number>-<sha256>.safetensors`, whose name vouches for what is in it.

A checkpoint is there whole or not at all. The last two are kept; one that turns out damaged is reported and the one
before it is taken.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import SafetensorError

from cloud_learner.buffer.files import remove_leftovers, remove_quietly, write_durably
from cloud_learner.training.learner import Learner, LearnerState
from wire.errors import CorruptDataError, InvalidDataError, StorageError, WeightsError, storage_error
from wire.untrusted import read_safetensors_header, require_file

if TYPE_CHECKING:
    from cloud_learner.buffer.loading.dataset import ReplayDataset

log = logging.getLogger(__name__)

FORMAT = 1
_WRITING = "writing a checkpoint"
_KEPT = 2
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""beside its tensors a trainer keeps what it had drawn and not yet learned from"""
_NAME = re.compile(r"\d+-[0-9a-f]{64}\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What was read back."""

    state: LearnerState
    meta: dict[str, Any]
    """what the trainer had put beside it"""


def save(directory: Path, state: LearnerState, meta: dict[str, Any]) -> Path:
    """Write the next checkpoint and drop all but the newest two; its path.

    `meta` is JSON. Raises `DiskFullError`, `NotWritableError` or `StorageError`; the earlier checkpoints are then
    untouched.
    """
    number = max(map(_number, _newest_first(directory)), default=0) + 1
    texts = {"format": str(FORMAT), "learner": json.dumps(state.meta), "meta": json.dumps(meta)}
    data = safetensors.torch.save(state.tensors, metadata=texts)
    path = directory / f"{number:08d}-{hashlib.sha256(data).hexdigest()}.safetensors"
    remove_leftovers(directory, _WRITING)
    write_durably(path, data, _WRITING)
    for old in _newest_first(directory)[_KEPT:]:
        remove_quietly(old)
    return path


def load_newest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None when there is none at all.

    Damaged ones are logged and passed over. Raises `CorruptDataError` if every one is damaged, and `StorageError` for
    one written by another version of this program.
    """
    damaged = []
    for path in _newest_first(directory):
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


def save_run(directory: Path, learner: Learner, source: ReplayDataset, meta: dict[str, Any]) -> None:
    """Write what `resume_run` needs: the learner, where sampling is, and `meta`. Raises as `save` does."""
    save(directory, learner.state(), {**meta, "sampling": source.state()})


def resume_run(directory: Path, learner: Learner, source: ReplayDataset) -> dict[str, Any] | None:
    """Go on from the newest checkpoint; its `meta`, None when there is none.

    Sampling begins anew where it cannot go on: the weights are what matters, and it costs nothing but the exact order
    of batches. Raises `PolicyError` for a checkpoint of another network, and as `load_newest` does.
    """
    found = load_newest(directory)
    if found is None:
        return None
    learner.restore(found.state)
    try:
        if not source.restore(found.meta["sampling"]):
            log.info("episodes were forgotten since the checkpoint: sampling begins a new pass.")
    except InvalidDataError as error:
        log.warning("sampling begins anew: %s", error)
    return found.meta


def _read(path: Path) -> Checkpoint:
    try:
        require_file(path, root=path.parent, wrong=CorruptDataError)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.stem.partition("-")[2]:
            raise CorruptDataError(f"checkpoint {path} ({len(data)} bytes) does not match the sha256 in its name.")
        texts = read_safetensors_header(io.BytesIO(data), len(data), path, _MAX_HEADER_BYTES).metadata
        if texts["format"] != str(FORMAT):
            raise StorageError(
                f"checkpoint {path} has format {texts['format']}, this program reads {FORMAT}; use the vla-fleet that "
                "wrote it, or move it away."
            )
        state = LearnerState(safetensors.torch.load(data), json.loads(texts["learner"]))
        return Checkpoint(state, json.loads(texts["meta"]))
    except OSError as error:
        raise storage_error(error, "reading a checkpoint", path) from error
    except (ValueError, RecursionError, SafetensorError, KeyError, WeightsError) as error:
        raise CorruptDataError(f"checkpoint {path} cannot be read: {error}.") from error


def _newest_first(directory: Path) -> list[Path]:
    """Only files of our own naming: somebody may keep other weights beside them."""
    found = [path for path in directory.glob("*.safetensors") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])
