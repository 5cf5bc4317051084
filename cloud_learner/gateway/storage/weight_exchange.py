"""How gateways that share a ledger and an object store have each other's policy versions.

Where a version was published it is put into the object store, once it is committed; the others look for the newest one
in the ledger each second, fetch it once, and serve it to their own robots. All of it happens in a thread of its own.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cloud_learner.buffer.files import TEMPORARY, move_durably, remove_quietly
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.buffer.store.objects import WEIGHTS, ObjectStore
from wire.errors import CorruptDataError, FleetError, storage_errors
from wire.task_thread import TaskThread
from wire.types import PolicyVersion

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_PART = 16 * 1024 * 1024
_REMEMBERED = 16


class WeightExchange(TaskThread):
    """Puts what is published here there, and fetches what is published elsewhere."""

    def __init__(self, root: Path, ledger: Ledger, objects: ObjectStore, look_s: float = _LOOK_S) -> None:
        """`root`: the directory of weights. Only stores."""
        super().__init__("weight exchange")
        self.on_arrived: Callable[[PolicyVersion], None] = lambda version: None
        """called in the loop for a version that has come: the newest one, or one that was asked for"""
        self._root, self._ledger, self._objects, self._look_s = root, ledger, objects, look_s
        self._wanted: queue.SimpleQueue[VersionRow] = queue.SimpleQueue()
        self._asked: dict[int, VersionRow] = {}
        """by number, until it is here"""
        self._shared: list[int] = []
        """numbers of versions that are there and here, the newest last"""
        self._next_s = 0.0
        self._fault = ""

    def fetch(self, row: VersionRow) -> None:
        """Somebody is to have this version, which is not here; it may not have been put there yet."""
        self._wanted.put(row)

    def pause_s(self) -> float:
        return max(0.0, self._next_s - time.monotonic())

    def step(self) -> bool:
        if self.pause_s():
            return False
        self._next_s = time.monotonic() + self._look_s
        try:
            self._look()
        except FleetError as error:
            if str(error) != self._fault:
                log.warning("versions of other gateways, or for them, wait: %s", error)
            self._fault = str(error)
        else:
            self._fault = ""
        return False

    def _look(self) -> None:
        for _ in range(self._wanted.qsize()):
            row = self._wanted.get_nowait()
            self._asked[row.version.number] = row
        wanted = dict(self._asked)
        newest = self._ledger.newest_version()
        if newest is not None and newest.version.number not in self._shared:
            if (self._root / newest.path).exists():
                self._put(newest)
            else:
                wanted[newest.version.number] = newest
        for number, row in sorted(wanted.items(), reverse=True):
            if (self._root / row.path).exists() or self._get(row):
                self._asked.pop(number, None)
                self.hand_back(partial(self.on_arrived, row.version))

    def _put(self, row: VersionRow) -> None:
        key = f"{WEIGHTS}{row.path}"
        try:
            self._objects.read([(key, row.version.size_bytes - 1, row.version.size_bytes)], cached=False)
        except CorruptDataError:  # it is not there yet
            path = self._root / row.path
            with (
                storage_errors("weights file", path),
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                self._objects.put(key, view)
            log.info("version %d lies in %s for other gateways.", row.version.number, self._objects.place)
        self._note(row)

    def _get(self, row: VersionRow) -> bool:
        """Whether it is here now, whole. It may not have been put there yet."""
        key, path, size = f"{WEIGHTS}{row.path}", self._root / row.path, row.version.size_bytes
        temporary, digest = path.with_name(path.name + TEMPORARY), hashlib.sha256()
        try:
            with storage_errors("weights file", path), open(temporary, "wb") as file:
                for offset in range(0, size, _PART):
                    if self._closing:
                        return False
                    (part,) = self._objects.read([(key, offset, min(offset + _PART, size))], cached=False)
                    file.write(part)
                    digest.update(part)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != row.version.sha256:
                raise CorruptDataError(
                    f"object {self._objects.place}/{key} is not version {row.version.number} as it was published. "
                    "Remove it there; the gateway that has it puts it there again when it is started."
                )
            move_durably(temporary, path)
        except CorruptDataError as error:
            log.debug("version %d is not to be had yet: %s", row.version.number, error)
            return False
        finally:
            remove_quietly(temporary)
        log.info("version %d has come from another gateway.", row.version.number)
        self._note(row)
        return True

    def _note(self, row: VersionRow) -> None:
        self._shared = [*self._shared, row.version.number][-_REMEMBERED:]
