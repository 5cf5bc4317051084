"""Files that are either wholly there or not there at all, whatever happens while they are written.

A file is written under a temporary name, flushed to the device, renamed, and its directory flushed. What a crash leaves
is at most a temporary file, which the owner of the directory removes at its next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from wire.errors import CorruptDataError, InvalidDataError, storage_errors

_NEARLY_FULL = 0.05
"""part of a disk"""
FLUSHED_BYTES = 2 * 1024 * 1024
"""What is on its way to the device at once: whoever flushes another file meanwhile, as the journal, waits behind it."""
TEMPORARY = ".part"
"""Suffix of files that are being written."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=-]{0,127}\Z")


def checked_name(name: str, what: str) -> str:
    """`name` if it is safe as one component of a path; raises `InvalidDataError` naming `what` otherwise."""
    if not _NAME.match(name) or ".." in name or name.endswith(TEMPORARY):
        raise InvalidDataError(
            f"{what} {name[:200]!r} cannot be a file name: use 1 to 128 letters, digits and any of _ . : @ + = -, "
            "not starting with a dot and without '..'."
        )
    return name


def write_durably(path: Path, data: bytes | memoryview, what: str, temporary: Path | None = None) -> None:
    """Write `data` to `path`, replacing what is there; it is on the device when this returns.

    temporary: where it is written first, on the same file system; beside `path` when None

    Raises `DiskFullError`, `NotWritableError` or `StorageError`; then nothing new stands at `path` and no temporary is
    left.
    """
    temporary = temporary or path.with_name(path.name + TEMPORARY)
    with storage_errors(what, path):
        try:
            make_directory(path.parent)
            make_directory(temporary.parent)
            with open(temporary, "wb") as file:
                for first in range(0, max(1, len(data)), FLUSHED_BYTES):
                    file.write(memoryview(data)[first : first + FLUSHED_BYTES])
                    file.flush()
                    os.fsync(file.fileno())
            move_durably(temporary, path)
        except OSError:
            remove_quietly(temporary)
            raise


def move_durably(temporary: Path, path: Path) -> None:
    """Give an already flushed file its final name. Raises `OSError`."""
    os.replace(temporary, path)
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create `path` and its parents so that they survive a power cut. Raises `OSError`."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the device. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def bad_sectors(what: str, path: Path) -> Iterator[None]:
    """Raises `CorruptDataError` when the device cannot read a part of `path`: that part alone is damaged."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise CorruptDataError(
            f"{what} {path} cannot be read: the disk has a bad sector there. Copy the disk while the rest of it can be "
            "read; then `vla-fleet buffer verify --repair` sets aside what is lost."
        ) from error


def open_directory(path: Path, what: str) -> None:
    """Create `path` if it is not there, and remove what a crash left half-written in it; only for who writes there."""
    with storage_errors(what, path):
        make_directory(path)
    remove_leftovers(path, what)


def room_warning(path: Path) -> str:
    """What to say when the disk below `path` is nearly full, '' while it is not or nobody can tell."""
    try:
        disk = shutil.disk_usage(path)
    except OSError:
        return ""
    if disk.free >= _NEARLY_FULL * disk.total:
        return ""
    return (
        f"the disk below {path} is nearly full: less than {_NEARLY_FULL:.0%} of its {disk.total / 1e9:.0f} GB are "
        "free. Free some room, set the recipe's retention, or forget episodes with `vla-fleet buffer prune` and "
        "`compact`."
    )


def spare_bytes(path: Path) -> int:
    """How many bytes the disk below `path` takes until it is nearly full. Raises `OSError`."""
    disk = shutil.disk_usage(path)
    return int(disk.free - _NEARLY_FULL * disk.total)


def remove_quietly(path: Path) -> None:
    """Remove a temporary file; one that is gone, or cannot be removed now, waits for `remove_leftovers`."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_leftovers(root: Path, what: str) -> int:
    """Remove temporary files below `root`; only the process that writes there may call this. Returns how many."""
    found = sorted(root.rglob("*" + TEMPORARY))
    for path in found:
        with storage_errors(what, path):
            path.unlink(missing_ok=True)
    return len(found)
