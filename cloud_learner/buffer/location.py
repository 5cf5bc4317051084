"""Where the buffer of a fleet lies, as plain strings that can be told to another process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.store.objects import open_objects
from cloud_learner.buffer.store.range_cache import RangeCache
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import NothingStoredError


@dataclass(frozen=True, slots=True)
class BufferLocation:
    """Ledger, store and journal of one buffer. Nothing is touched before it is opened."""

    data: Path
    """directory of the journal, of what is set aside, and of ledger and store when they have no URL"""
    ledger: str = ""
    """SQLAlchemy URL of a PostgreSQL database"""
    store: str = ""
    """URL of an object store, such as s3://bucket/prefix"""
    cache_bytes: int = 0
    """what readers keep of an object store on this machine's disk, at most; 0: nothing"""
    gateway: str = ""
    """name of the gateway that writes here; '': as it was called before, at first as its machine"""

    @property
    def ledger_location(self) -> str:
        return self.ledger or str(self.data / "ledger.sqlite")

    @property
    def store_location(self) -> str:
        return self.store or str(self.data / "store")

    @property
    def journal(self) -> Path:
        return self.data / "journal"

    def exists(self) -> bool:
        """Whether a writer has been here: a reader finds something to open.

        Raises `StorageError` when nobody can tell, or what is there cannot be read by this version.
        """
        try:
            Ledger.open(self.ledger_location, read_only=True).close()
        except NothingStoredError:
            return False
        return True

    def open_reader(self) -> tuple[Ledger, SegmentStore]:
        """Ledger and store to read from. Raises `StorageError` when there is none."""
        ledger = Ledger.open(self.ledger_location, read_only=True)
        with contextlib.ExitStack() as undo:
            undo.callback(ledger.close)
            cache = RangeCache(self.data / "cache", self.cache_bytes) if self.cache_bytes else None
            store = SegmentStore(self.journal, open_objects(self.store_location, cache), ledger)
            store.require_there()
            undo.pop_all()
        return ledger, store

    def open_writer(self) -> tuple[Ledger, SegmentStore]:
        """Ledger and store to write to, created if they are not there.

        Raises `StorageError`, `CorruptDataError`, `DiskFullError` or `NotWritableError`.
        """
        ledger = Ledger.open(self.ledger_location)
        with contextlib.ExitStack() as undo:
            undo.callback(ledger.close)
            store = SegmentStore.open(self.journal, open_objects(self.store_location), ledger, self.gateway)
            undo.pop_all()
        return ledger, store
