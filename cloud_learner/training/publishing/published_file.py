"""The file that robots rebuild of a version, kept so that a trainer that is started again goes on with deltas.

`<directory>/<number>-<sha256>.safetensors`: those of the versions that the last two checkpoints go on from.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

import numpy as np

from cloud_learner.buffer.files import remove_leftovers, remove_quietly, write_durably
from wire.errors import CorruptDataError, storage_errors
from wire.untrusted import require_file

log = logging.getLogger(__name__)
_WRITING = "keeping a published version"
_KEPT = 2
_NAME = re.compile(r"\d+-[0-9a-f]{64}\.safetensors")


def keep_file(directory: Path, number: int, sha256: str, data: np.ndarray) -> None:
    """Keep uint8[size] `data` of a version, and drop all but the newest two. Only one process may do so.

    Raises `DiskFullError`, `NotWritableError` or `StorageError`; what was kept before is then untouched.
    """
    path = _path(directory, number, sha256)
    if path.exists():
        return
    remove_leftovers(directory, _WRITING)
    write_durably(path, data.data, _WRITING)
    found = [path for path in directory.glob("*.safetensors") if _NAME.fullmatch(path.name)]
    for old in sorted(found, key=lambda path: int(path.name.partition("-")[0]), reverse=True)[_KEPT:]:
        remove_quietly(old)


def read_kept(directory: Path, number: int, sha256: str) -> np.ndarray | None:
    """uint8[size] of a version that is kept; None if it is not, or is damaged. Raises `StorageError`."""
    path = _path(directory, number, sha256)
    if not path.exists():
        return None
    try:
        require_file(path, root=directory, wrong=CorruptDataError)
        with storage_errors("a published version", path):
            data = np.fromfile(path, np.uint8)
        if hashlib.sha256(data.data).hexdigest() != sha256:
            raise CorruptDataError(f"{path} ({len(data)} bytes) does not match the sha256 in its name.")
    except CorruptDataError as error:
        log.warning("%s The next version travels whole.", error)
        return None
    return data


def _path(directory: Path, number: int, sha256: str) -> Path:
    return directory / f"{number}-{sha256}.safetensors"
