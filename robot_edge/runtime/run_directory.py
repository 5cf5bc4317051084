"""Where the processes of one robot meet: a directory in memory that goes when its robot goes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wire.errors import storage_error
from wire.transport.shared_memory import memory_directory

log = logging.getLogger(__name__)

_PREFIX = "vla-fleet-"
_LOCK = "held"


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory under `parent`: by default in memory, else where temporary files lie. Removed at the end.

    What robots left there whose supervisor was killed is removed first, for it takes memory; a directory is theirs as
    long as a process holds its lock. Raises `StorageError` when it cannot be made.
    """
    parent = parent or memory_directory() or Path(tempfile.gettempdir())
    try:
        _sweep(parent)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise storage_error(error, "making a run directory", parent) from error
    try:
        with (directory / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Nobody may see the lock before it is held.
            (directory / "new").rename(directory / _LOCK)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s, whose robot has gone.", lock.parent)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            # Held by a living one, another user's, or removed by somebody else meanwhile.
            log.debug("%s stays.", lock.parent)
