"""The durable spool: segments wait here until the gateway has acknowledged them.

SQLite does the hard part (atomic, durable, checked); a kill at any point leaves either the whole segment or none.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from wire.codec import decode, encode
from wire.errors import CorruptDataError, DiskFullError, NotWritableError, StorageError, storage_errors
from wire.messages.gateway import Segment


class Spool:
    """First in, first out; `forget` takes a segment out for good. Used by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create the spool. Raises `StorageError` that says what to do."""
        self._path = path
        with storage_errors("opening the spool", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS segments (row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
                " data BLOB NOT NULL)"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
            # Nobody else writes here, so what a status asks for is known without asking the file.
            count, newest = self._db.execute("SELECT count(*), max(row) FROM segments").fetchone()
            steps = self._db.execute("SELECT value FROM counters WHERE name = 'steps'").fetchone()
            self._count: int = count
            self.newest: int = newest or 0
            """row of the newest segment ever put in, 0 when there was none"""
            self.steps_recorded: int = steps[0] if steps else 0
            """steps ever put in, acknowledged or not"""
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def __len__(self) -> int:
        return self._count

    def put(self, segment: Segment) -> None:
        """Durable when this returns; nothing of it is kept when it raises."""
        try:
            with self._db:
                put = self._db.execute("INSERT INTO segments (id, data) VALUES (?, ?)", (segment.id, encode(segment)))
                self._db.execute(
                    "INSERT INTO counters VALUES ('steps', ?)"
                    " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                    (segment.steps,),
                )
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self.newest = put.lastrowid or self.newest
        self._count += 1
        self.steps_recorded += segment.steps

    def waiting(self, after: int, count: int) -> list[tuple[int, str]]:
        """(row, id) of up to `count` segments with a row above `after`, oldest first."""
        query = "SELECT row, id FROM segments WHERE row > ? ORDER BY row LIMIT ?"
        return self._db.execute(query, (after, count)).fetchall()

    def get(self, row: int) -> Segment | None:
        """The segment in `row`, or None if it was forgotten meanwhile."""
        found = self._db.execute("SELECT data FROM segments WHERE row = ?", (row,)).fetchone()
        if found is None:
            return None
        segment = decode(found[0], stored=True)
        if not isinstance(segment, Segment):
            raise CorruptDataError(
                f"row {row} of {self._path} holds a {type(segment).__name__}. Move the file away to start anew."
            )
        return segment

    def forget(self, ids: tuple[str, ...]) -> None:
        """Drop acknowledged segments. Raises `DiskFullError`, with nothing dropped: even forgetting needs some room."""
        try:
            with self._db:
                gone = self._db.executemany("DELETE FROM segments WHERE id = ?", [(segment_id,) for segment_id in ids])
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self._count -= gone.rowcount

    def close(self) -> None:
        self._db.close()

    def _explain(self, error: sqlite3.Error) -> StorageError:
        text = str(error)
        if "full" in text:
            return DiskFullError(
                f"the spool {self._path}: the disk is full. Free some room; the robot holds until then."
            )
        if "readonly" in text or "unable to open" in text or "permission" in text:
            return NotWritableError(f"the spool {self._path} may not be written ({text}). Fix its permissions.")
        if "malformed" in text or "not a database" in text:
            return CorruptDataError(
                f"the spool {self._path} is damaged ({text}). Move it away; unsent segments in it are not lost."
            )
        return StorageError(f"the spool {self._path}: {text}.")
