"""Files that several processes of one computer map into their memory."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

from wire.errors import ConfigError, storage_errors

MARK_BYTES = 64
"""what the layout is called stands in front of a mapped file, padded with zeros"""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_PREFERRED = Path("/dev/shm")


def memory_directory() -> Path | None:
    """Where a file lies in memory and no disk is ever waited for; None when this machine has no such place."""
    return _PREFERRED if os.access(_PREFERRED, os.W_OK | os.X_OK) else None


def map_file(path: Path, layout: str, size: int, *, write: bool = True) -> mmap.mmap:
    """Map `size` bytes at `path`, made of zeros when it does not exist; `layout` says what is inside.

    All memory is taken at once, so that nobody meets a full disk or a page fault later. Raises `ConfigError` for a file
    of another layout, `StorageError` when it cannot be made.
    """
    mark = layout.encode().ljust(MARK_BYTES, b"\0")
    assert len(mark) == MARK_BYTES
    with storage_errors(f"making shared memory ({layout})", path):
        if not path.exists():
            _make(path, mark, size)
        descriptor = os.open(path, os.O_RDWR if write else os.O_RDONLY)
    try:
        found = os.pread(descriptor, MARK_BYTES, 0)
        if found != mark or os.fstat(descriptor).st_size != size:
            other = found.rstrip(b"\0").decode("ascii", "replace")
            raise ConfigError(
                f"the shared memory at {path} is '{other}' and this process expects '{layout}': both ends need the "
                "same version, recipe and sizes. Stop all processes of this robot, remove the file, start again."
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED | _POPULATE, protection)
    finally:
        os.close(descriptor)


def _make(path: Path, mark: bytes, size: int) -> None:
    """The file appears whole: two processes may make it at the same moment, and either may die meanwhile."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, mark, 0)
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.close(descriptor)
        temporary.unlink()
