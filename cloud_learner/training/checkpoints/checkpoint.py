"""A learner on disk: directories `<number>-<sha256 of its manifest>`, each there whole or not at all.

    manifest.json                   format, policy version, size and sha256 of every other file
    shard-00001-model-....safetensors   of the first rank: its shards of weights, averages and moments
    learner.json, meta.json         what the learner, and the trainer, keep beside them
    sampling-00000.json             of the first rank: where its sampling is

Tensors are written and read by torch.distributed.checkpoint, whose safetensors files have no pickle in them: what one
rank wrote, two can read. What it would believe of a file from elsewhere is checked here before: it reads every
safetensors file of a directory, so no directory with another file is looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from cloud_learner.buffer.files import TEMPORARY, make_directory, move_durably, sync_directory, write_durably
from cloud_learner.training.checkpoints.checkpoint_tensors import Sizes, read_sizes, read_tensors, write_tensors
from cloud_learner.training.learner import LearnerState
from cloud_learner.training.ranks.group import ALONE, RankGroup
from wire.errors import CorruptDataError, StorageError, WeightsError, storage_error, storage_errors
from wire.untrusted import MAX_JSON_BYTES, require_file

log = logging.getLogger(__name__)

FORMAT = 2
KEPT = 2
_WRITING = "writing a checkpoint"
_NAME = re.compile(r"(\d+)-([0-9a-f]{64})")
_OLD_NAME = re.compile(r"\d+-[0-9a-f]{64}\.safetensors")
_MANIFEST, _LEARNER, _META = "manifest.json", "learner.json", "meta.json"
_MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_MAX_SAMPLING_BYTES = 1024**3
"""a trainer keeps what it had drawn and not yet learned from"""
_SHARD, _SAMPLING = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"), re.compile(r"sampling-\d{5}\.json")
Like = Callable[[Sizes], dict[str, torch.Tensor]]
"""tensors to read into, of the sizes that a checkpoint has; sharded ones get their shards"""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    version: int
    """policy version published last, 0 for none"""
    files: dict[str, _File]


@dataclass(frozen=True)
class Checkpoint:
    """What was read back."""

    state: LearnerState
    meta: dict[str, Any]
    """what the trainer had put beside it"""
    sampling: Any
    """what this rank, or one in its place, had put beside it"""


def save(
    directory: Path,
    state: LearnerState,
    meta: dict[str, Any],
    sampling: Any = None,
    *,
    kept: int = KEPT,
    success: Mapping[int, float] | None = None,
    group: RankGroup = ALONE,
) -> Path:
    """Write the next checkpoint and drop older ones; its path.

    `meta` and `sampling` are JSON; of several ranks each has its own shards and sampling, the first one's `meta`
    counts, and all of them call this.

    kept: the newest so many stay
    success: held-out success by policy version: the checkpoint of the best that has one stays, too

    Raises `DiskFullError`, `NotWritableError` or `StorageError`; the earlier checkpoints are then untouched.
    """
    part = directory / f"next{TEMPORARY}"
    made: list[Path] = []
    # Each part is done by all or by none: a rank that went on alone would wait for the others for ever.
    try:
        group.together(lambda: _begin(directory, part) if group.rank == 0 else None)
        group.together(lambda: _write(part, state, sampling, group))
        group.together(lambda: made.append(_finish(directory, part, state, meta)) if group.rank == 0 else None)
    except StorageError:
        if group.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if group.rank:
        return directory
    _drop_old(directory, kept, success or {})
    return made[0]


def load_newest(directory: Path, like: Like | None = None, rank: int = 0) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None when there is none at all.

    `like` gives the tensors to read into; None: whole ones on the CPU. Damaged checkpoints are logged and passed over.
    Raises `CorruptDataError` if every one is damaged, and `StorageError` for one written by another version of this
    program.
    """
    damaged = []
    for path in _newest_first(directory):
        try:
            return _read(path, like or _whole, rank)
        except CorruptDataError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
            damaged.append(path.name)
    if damaged:
        raise CorruptDataError(
            f"all checkpoints in {directory} are damaged ({', '.join(damaged)}). Move them away to train again from "
            "the recorded data, which is not affected."
        )
    if old := sorted(path.name for path in directory.glob("*.safetensors") if _OLD_NAME.fullmatch(path.name)):
        raise StorageError(
            f"checkpoint {directory / old[-1]} has format 1, this program reads {FORMAT}; use the vla-fleet that wrote "
            "it, or move it away and begin with its newest version: --from DATA."
        )
    return None


def newest_gradient_steps(directory: Path) -> int:
    """Gradient steps of the newest checkpoint, without its tensors; 0 when there is none."""
    for path in _newest_first(directory):
        with contextlib.suppress(OSError, CorruptDataError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
            _read_manifest(path)
            require_file(path / _LEARNER, MAX_JSON_BYTES, root=path, wrong=CorruptDataError)
            return int(json.loads((path / _LEARNER).read_bytes())["gradient_steps"])
    return 0


def copy_newest(source: Path, directory: Path) -> Path | None:
    """Make the newest checkpoint of `source` the newest of `directory`, whole or not at all: its path. None when there
    is none to copy. Raises `StorageError`."""
    found = next(iter(_newest_first(source)), None)
    if found is None:
        return None
    part, number = directory / f"next{TEMPORARY}", max(map(_number, _newest_first(directory)), default=0) + 1
    path = directory / f"{number:08d}-{found.name.partition('-')[2]}"
    with storage_errors("copying a checkpoint", path):
        _clear(directory)
        make_directory(directory)
        shutil.copytree(found, part)
        sync_directory(part)
        move_durably(part, path)
    return path


# --- writing ----------------------------------------------------------------------------------------------------------


def _begin(directory: Path, part: Path) -> None:
    with storage_errors(_WRITING, part):
        _clear(directory)
        make_directory(part)


def _clear(directory: Path) -> None:
    """Of what a kill left half written."""
    for left in directory.glob("*" + TEMPORARY):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _write(part: Path, state: LearnerState, sampling: Any, group: RankGroup) -> None:
    write_durably(part / f"sampling-{group.rank:05d}.json", json.dumps(sampling).encode(), _WRITING)
    write_tensors(part, state.tensors, group, _WRITING)


def _finish(directory: Path, part: Path, state: LearnerState, meta: dict[str, Any]) -> Path:
    number = max(map(_number, _newest_first(directory)), default=0) + 1
    write_durably(part / _LEARNER, json.dumps(state.meta).encode(), _WRITING)
    write_durably(part / _META, json.dumps(meta).encode(), _WRITING)
    with storage_errors(_WRITING, part):
        # read back: what other ranks wrote is seen from here, or there is no checkpoint
        files = {path.name: _File(path.stat().st_size, _sha256(path)) for path in sorted(part.iterdir())}
    text = msgspec.json.encode(_Manifest(FORMAT, int(meta.get("version", 0)), files))
    write_durably(part / _MANIFEST, text, _WRITING)
    path = directory / f"{number:08d}-{hashlib.sha256(text).hexdigest()}"
    with storage_errors(_WRITING, path):
        sync_directory(part)
        move_durably(part, path)
    return path


def _drop_old(directory: Path, kept: int, success: Mapping[int, float]) -> None:
    found = _newest_first(directory)
    best = max(found, key=lambda path: (success.get(_version(path), -1.0), _number(path)))
    for old in found[kept:]:
        if old != best or _version(old) not in success:
            # under a name of what is not there: half a checkpoint must not be taken for a damaged one
            gone = old.with_name(old.name + TEMPORARY)
            try:
                os.replace(old, gone)
            except OSError:
                continue
            shutil.rmtree(gone, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path, like: Like, rank: int) -> Checkpoint:
    try:
        manifest = _read_manifest(path)
        if manifest.format != FORMAT:
            raise StorageError(
                f"checkpoint {path} has format {manifest.format}, this program reads {FORMAT}; use the vla-fleet that "
                "wrote it, or move it away."
            )
        shards, samplings = _check_files(path, manifest)
        sizes = read_sizes(shards)
        sampling = json.loads(samplings[rank % len(samplings)].read_bytes())
        meta, learner = json.loads((path / _META).read_bytes()), json.loads((path / _LEARNER).read_bytes())
        if not isinstance(meta, dict) or not isinstance(learner, dict):
            raise CorruptDataError(f"checkpoint {path}: {_META} and {_LEARNER} must be JSON objects.")
        return Checkpoint(LearnerState(read_tensors(path, like(sizes)), learner), meta, sampling)
    except OSError as error:
        raise storage_error(error, "reading a checkpoint", path) from error
    except (ValueError, RecursionError, msgspec.MsgspecError, WeightsError) as error:
        raise CorruptDataError(f"checkpoint {path} cannot be read: {error}.") from error


def _read_manifest(path: Path) -> _Manifest:
    file = path / _MANIFEST
    require_file(file, _MAX_MANIFEST_BYTES, root=path.parent, wrong=CorruptDataError)
    text = file.read_bytes()
    if hashlib.sha256(text).hexdigest() != path.name.partition("-")[2]:
        raise CorruptDataError(
            f"checkpoint {path}: its manifest ({len(text)} bytes) does not match the sha256 in its name."
        )
    return msgspec.json.decode(text, type=_Manifest)


def _check_files(path: Path, manifest: _Manifest) -> tuple[Sequence[Path], Sequence[Path]]:
    """(files with tensors, files with samplings by rank), all files being as the manifest says."""
    shards = [path / name for name in sorted(manifest.files) if _SHARD.fullmatch(name)]
    samplings = [path / name for name in sorted(manifest.files) if _SAMPLING.fullmatch(name)]
    known = {one.name for one in (*shards, *samplings)} | {_LEARNER, _META}
    there = {one.name for one in path.iterdir()} - {_MANIFEST}
    if known != manifest.files.keys() or there != known or not shards or not samplings:
        odd = sorted((known ^ manifest.files.keys()) | (there ^ known)) or ["no shard or no sampling"]
        raise CorruptDataError(f"checkpoint {path}: files are missing or are none of a checkpoint's: {odd[0][:200]!r}.")
    for name, said in manifest.files.items():
        file = path / name
        most = None if _SHARD.fullmatch(name) else _MAX_SAMPLING_BYTES if _SAMPLING.fullmatch(name) else MAX_JSON_BYTES
        size = require_file(file, most, root=path.parent, wrong=CorruptDataError)
        if size != said.bytes or _sha256(file) != said.sha256:
            raise CorruptDataError(f"checkpoint file {file} ({size} bytes) does not match the sha256 in its manifest.")
    return shards, samplings


def _whole(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in sizes.items()}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _newest_first(directory: Path) -> list[Path]:
    """Only what has our own naming: somebody may keep other weights beside them."""
    found = [path for path in directory.glob("*-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _version(path: Path) -> int:
    """Policy version of a checkpoint, -1 for one that is damaged."""
    try:
        return _read_manifest(path).version
    except (CorruptDataError, OSError, msgspec.MsgspecError):
        return -1
