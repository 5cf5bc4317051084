"""How the processes of a robot computer begin and end: one of each, where they meet, asked to or without a parent."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from wire.errors import ConfigError, storage_errors
from wire.transport.shared_memory import memory_directory

log = logging.getLogger(__name__)


PARENT = "VLA_FLEET_PARENT"
"""environment variable in which a supervisor gives its process id to its children"""

_LOOK_S = 0.1
"""how often a process looks for its supervisor"""

_PREFIX = "vla-fleet-"
_LOCK = "held"

_watched: select.poll | None = None


def watch(supervisor: int) -> None:
    """Have every `ShutdownSignal` of this process watch the descriptor (pidfd) `supervisor`.

    For a process that is not its supervisor's own child.
    """
    global _watched
    _watched = select.poll()
    _watched.register(supervisor, select.POLLIN)


class ShutdownSignal:
    """`requested` turns true when this process should finish: it was asked to, or its supervisor is gone."""

    def __init__(self) -> None:
        self._parent = int(os.environ.get(PARENT, "0"))
        self._watched = _watched
        self.count = 0
        """how often this process was asked"""
        self._look_at = 0.0
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, self._request)

    @property
    def requested(self) -> bool:
        if self.count:
            return True
        # It is asked at every turn of a loop, and a system call tells whether the supervisor is there.
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        return self._alone()

    def _alone(self) -> bool:
        if self._watched is not None:
            return bool(self._watched.poll(0))
        return self._parent != 0 and os.getppid() != self._parent

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@contextlib.contextmanager
def instance_lock(path: Path, timeout_s: float = 30.0) -> Iterator[None]:
    """Hold the lock file `path` meanwhile; wait for a predecessor that is still putting its work away.

    Raises `ConfigError` when it is still held after `timeout_s`, `StorageError` when it cannot be made.
    """
    with storage_errors("locking", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        deadline = time.monotonic() + timeout_s
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{path} is held by another running process: two robots have one name, or the same robot was "
                        "started twice. Stop the other one or choose another --name."
                    ) from error
                if not waited:
                    log.info("waiting for the predecessor that holds %s.", path)
                    waited = True
                time.sleep(0.05)
        yield


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory under `parent`: by default in memory, else where temporary files lie. Removed at the end.

    What robots left there whose supervisor was killed is removed first, for it takes memory; a directory is theirs as
    long as a process holds its lock. Raises `StorageError` when it cannot be made.
    """
    parent = parent or _usual_parent()
    with storage_errors("making a run directory", parent):
        _sweep(parent)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with (directory / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Nobody may see the lock before it is held.
            (directory / "new").rename(directory / _LOCK)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_directories(parent: Path | None = None) -> list[Path]:
    """Those of robots that run here, or were killed and not yet removed."""
    return sorted(lock.parent for lock in (parent or _usual_parent()).glob(f"{_PREFIX}*/{_LOCK}"))


def _usual_parent() -> Path:
    return memory_directory() or Path(tempfile.gettempdir())


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
