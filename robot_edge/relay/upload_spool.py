"""Segments of a site's robots on the relay's disk: durable until the gateway has them, within a quota.

A segment lies here as it came, with all its pictures. Where pictures are held back it goes out without them, and stays
until they are asked for or the room is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from robot_edge.relay.upload_rows import SENT, NewUpload, PutResult, UploadFacts, UploadRow, UploadState
from robot_edge.uplink.spool import default_quota
from robot_edge.uplink.spool_index import SpooledEpisode, SpooledSegment, SpoolIndex
from wire.codec import decode, encode
from wire.errors import (
    CorruptDataError,
    DiskFullError,
    InvalidDataError,
    StorageError,
    WireError,
    storage_errors,
)
from wire.messages.gateway import SealedSegment, Segment

log = logging.getLogger(__name__)

ALL_CAMERAS = "all"
_FULL_SHARE = 1 / 16
"""of the quota: with less room than that nothing more is taken"""
_RESERVE_BYTES = 16 * 1024 * 1024
"""of the disk, kept aside: also to delete something takes some room"""


class UploadSpool:
    """Keeps `SegmentQueue`. Used by one process at a time, and in it by one thread; what it counts any thread may read,
    and `index`.

    What the gateway lacks is never dropped. Over the quota what it has, or refuses, goes, the oldest first; then
    nothing more is taken. A kill at any point leaves a segment whole, or it was never put in.
    """

    def __init__(self, path: Path, max_bytes: int = 0, hold: Sequence[str] = ()) -> None:
        """Open or create the spool. `max_bytes` of segments, 0: `default_quota`; `hold`: cameras whose pictures are
        held back, or `ALL_CAMERAS`. Raises `StorageError`."""
        self._path, self._hold = path, frozenset(hold)
        with storage_errors("opening the relay's spool", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes or default_quota(path)
        self.index = SpoolIndex()
        self.sends_at_once = False
        self.size = 0
        """bytes of all that is here"""
        self.spare_bytes = 0
        """of them of what may go for want of room"""
        self.held = self.refused = 0
        """segments in these states"""
        try:
            # Opened by the relay's loop, then used by the thread that waits for the disk.
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA page_size=8192")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS uploads (row INTEGER PRIMARY KEY AUTOINCREMENT, episode TEXT NOT NULL,"
                " number INTEGER NOT NULL, steps INTEGER NOT NULL, kept INTEGER NOT NULL, last INTEGER NOT NULL,"
                " state INTEGER NOT NULL, cameras TEXT NOT NULL, size INTEGER NOT NULL, sent_size INTEGER NOT NULL,"
                " data BLOB NOT NULL, UNIQUE (episode, number))"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS uploads_state ON uploads (state, row)")
            with self._db:
                again = (UploadState.waiting, UploadState.refused)
                self._db.execute("UPDATE uploads SET state = ? WHERE state = ?", again)
            for values in self._db.execute(f"SELECT {', '.join(UploadRow._fields)} FROM uploads ORDER BY row"):
                one = UploadRow(*values)
                self._count(one.state, one.size)
                if one.state in SENT:
                    self._line_up(one.row, one.episode, one.number, one.about, one.bytes_to_send)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self._reserve = path.with_name("upload.reserve")
        self._keep_reserve()

    @property
    def room_bytes(self) -> int:
        """So much more can be put in."""
        return max(0, self.max_bytes - self.size + self.spare_bytes)

    @property
    def is_full(self) -> bool:
        """Whether it should be given nothing more, until some of it has gone."""
        return self.room_bytes < _FULL_SHARE * self.max_bytes

    def put_all(self, messages: Sequence[SealedSegment]) -> PutResult:
        """Durable when this returns; nothing of them is kept when it raises. Raises `DiskFullError`, also over the
        quota, and `StorageError`."""
        fresh: dict[str, NewUpload] = {}
        stored: list[str] = []
        invalid: dict[str, str] = {}
        for message in messages:
            try:
                if message.id not in fresh and not self._has(message):
                    fresh[message.id] = self._read(message)
                stored.append(message.id)
            except (WireError, InvalidDataError) as error:
                invalid[message.id] = str(error)
        size = sum(len(one.data) for one in fresh.values())
        self._make_room(size)
        try:
            rows = self._insert_all(fresh.values())
        except DiskFullError:
            # Within the file there is room where something else was.
            if not self._drop_spare(2 * size):
                raise
            rows = self._insert_all(fresh.values())
        for row, one in zip(rows, fresh.values(), strict=True):
            self._count(UploadState.waiting, len(one.data))
            self._line_up(row, one.segment.episode.id, one.segment.index, one.about, one.sent_bytes)
        return PutResult(tuple(stored), invalid)

    def at_hand(self, episode: SpooledEpisode, segment: SpooledSegment) -> SealedSegment | None:
        """Nothing is: each is read from the disk."""
        return None

    def load(self, episode: SpooledEpisode, segment: SpooledSegment) -> SealedSegment | None:
        """What the index handed out, without the pictures that are held back, unless they were asked for. None if it is
        gone. Raises `StorageError`."""
        with self._explained():
            query = "SELECT state, cameras, data FROM uploads WHERE row = ?"
            found = self._db.execute(query, (segment.row,)).fetchone()
        if found is None or found[0] not in SENT:
            return None
        message = self._decode(found[2])
        return message if found[0] == UploadState.asked else _without(message, _names(found[1]))

    def forget(self, ids: Sequence[str]) -> None:
        """The gateway has these; what is held back of them stays. Raises `StorageError`, with nothing changed; of a
        full disk only when the reserve is used as well."""
        self._with_reserve(partial(self._settle, ids, refused=False))

    def set_aside(self, ids: Sequence[str]) -> None:
        """The gateway does not take these. Raises `StorageError`."""
        self._settle(ids, refused=True)

    def ask(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Have these sent with all their pictures; those that are not here any more. Raises `StorageError`."""
        gone, asked = [], []
        with self._explained(), self._db:
            for segment_id in ids:
                found = self._find(segment_id)
                if found is None or found.state == UploadState.refused:
                    gone.append(segment_id)
                elif found.state == UploadState.held:
                    self._db.execute("UPDATE uploads SET state = ? WHERE row = ?", (UploadState.asked, found.row))
                    asked.append(found)
        for one in asked:
            self._count(UploadState.held, one.size, -1)
            self._count(UploadState.asked, one.size)
            self._line_up(one.row, one.episode, one.number, one.about, one.size)
        return tuple(gone)

    def has_room_again(self) -> bool:
        """Whether a disk that was full can be tried again."""
        self._keep_reserve()
        return self._reserve.exists()

    def close(self) -> None:
        self._db.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _has(self, message: SealedSegment) -> bool:
        """Whether it was put in before. Raises `InvalidDataError` when another one was, under its id."""
        with self._explained():
            found = self._find(message.id)
            if found is None:
                return False
            (data,) = self._db.execute("SELECT data FROM uploads WHERE row = ?", (found.row,)).fetchone()
        before = self._decode(data)
        if (before.robot, before.body) != (message.robot, message.body):
            raise InvalidDataError(f"{message.id[:200]!r} came before with other content, from '{before.robot}'.")
        return True

    def _read(self, message: SealedSegment) -> NewUpload:
        """Raises `WireError` or `InvalidDataError` for what is no segment of the robot that it is said to be of."""
        segment = decode(message.body)
        if not isinstance(segment, Segment) or segment.episode.robot != message.robot:
            raise InvalidDataError(f"{message.id[:200]!r} is no segment of robot {message.robot[:64]!r}.")
        if message.id != segment.id or segment.id != f"{segment.episode.id}/{segment.index}":
            raise InvalidDataError(f"{message.id[:200]!r} is not '<episode id>/<index>' of what it is of.")
        cameras = tuple(name for name in message.pictures if self._hold & {name, ALL_CAMERAS})
        data = encode(message)
        left_out = sum(len(picture) for name in cameras for picture in message.pictures[name])
        return NewUpload(segment, cameras, data, len(data) - left_out)

    def _insert_all(self, uploads: Iterable[NewUpload]) -> list[int]:
        with self._explained(), self._db:
            return [self._insert(one) for one in uploads]

    def _insert(self, one: NewUpload) -> int:
        place = (one.segment.episode.id, one.segment.index)
        about = (UploadState.waiting, "\n".join(one.cameras), len(one.data), one.sent_bytes, one.data)
        put = self._db.execute(
            "INSERT INTO uploads (episode, number, steps, kept, last, state, cameras, size, sent_size, data)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*place, *one.about, *about),
        )
        return put.lastrowid or 0

    def _find(self, segment_id: str) -> UploadRow | None:
        episode, _, number = segment_id.rpartition("/")
        query = f"SELECT {', '.join(UploadRow._fields)} FROM uploads WHERE episode = ? AND number = ?"
        found = self._db.execute(query, (episode, number)).fetchone()
        return None if found is None else UploadRow(*found)

    def _line_up(self, row: int, episode: str, number: int, about: UploadFacts, size: int) -> None:
        """It is to be sent: so many bytes."""
        self.index.add(episode, SpooledSegment(row, number, size), *about, begun=True)

    def _settle(self, ids: Sequence[str], refused: bool) -> None:
        """They need not be sent any more."""
        settled: list[tuple[UploadRow, UploadState | None]] = []
        with self._explained(), self._db:
            for segment_id in ids:
                one = self._find(segment_id)
                if one is None or one.state not in SENT:
                    continue
                held = bool(one.cameras) and one.state == UploadState.waiting
                stays = UploadState.refused if refused else UploadState.held if held else None
                if stays is None:
                    self._db.execute("DELETE FROM uploads WHERE row = ?", (one.row,))
                else:
                    self._db.execute("UPDATE uploads SET state = ? WHERE row = ?", (stays, one.row))
                settled.append((one, stays))
        for one, stays in settled:
            self._count(one.state, one.size, -1)
            if stays is not None:
                self._count(stays, one.size)
            self.index.remove(one.episode, one.number, one.steps, one.bytes_to_send)

    def _make_room(self, size: int) -> None:
        """Drop what may go for so many bytes more. Raises `DiskFullError`, with nothing dropped."""
        over = self.size + size - self.max_bytes
        if over <= 0:
            return
        if over > self.spare_bytes:
            raise DiskFullError(
                f"the relay's spool {self._path} is full: {self.size / 1e9:.3g} GB wait for the gateway. Give it more "
                "with --spool-max, or mend the line."
            )
        self._drop_spare(over)

    def _drop_spare(self, size: int) -> bool:
        """Drop what may go, so many bytes or all of it; whether anything went. Raises `StorageError`."""
        dropped: list[UploadRow] = []
        states = (UploadState.held, UploadState.refused)
        query = f"SELECT {', '.join(UploadRow._fields)} FROM uploads WHERE state IN (?, ?) ORDER BY row"
        with self._explained():
            for values in self._db.execute(query, states):
                dropped.append(UploadRow(*values))
                size -= dropped[-1].size
                if size <= 0:
                    break
        self._with_reserve(partial(self._delete, dropped))
        for one in dropped:
            self._count(one.state, one.size, -1)
        return bool(dropped)

    def _delete(self, rows: Sequence[UploadRow]) -> None:
        with self._explained(), self._db:
            self._db.executemany("DELETE FROM uploads WHERE row = ?", [(one.row,) for one in rows])

    def _count(self, state: int, size: int, sign: int = 1) -> None:
        self.size += sign * size
        if state in (UploadState.held, UploadState.refused):
            self.spare_bytes += sign * size
            self.held += sign * (state == UploadState.held)
            self.refused += sign * (state == UploadState.refused)

    def _decode(self, data: bytes) -> SealedSegment:
        message = decode(data, stored=True)
        if not isinstance(message, SealedSegment):
            raise CorruptDataError(f"the relay's spool {self._path} holds a {type(message).__name__}. Move it away.")
        return message

    def _with_reserve(self, change: Callable[[], None]) -> None:
        """What takes little and gives room; on a full disk with what was set aside for that."""
        try:
            change()
        except DiskFullError:
            if not self._spend_reserve():
                raise
            change()
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        with contextlib.suppress(OSError):
            if not self._reserve.exists() and shutil.disk_usage(self._path.parent).free > 4 * _RESERVE_BYTES:
                with self._reserve.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)

    def _spend_reserve(self) -> bool:
        """Whether there was one."""
        try:
            self._reserve.unlink()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except (OSError, sqlite3.Error):
            return False
        return True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _explain(self, error: sqlite3.Error) -> StorageError:
        text = str(error)
        if "full" in text:
            return DiskFullError(f"the relay's spool {self._path}: the disk is full. Free some room.")
        if "malformed" in text or "not a database" in text:
            return CorruptDataError(f"the relay's spool {self._path} is damaged ({text}). Move it away.")
        return StorageError(f"the relay's spool {self._path}: {text}.")


def _without(message: SealedSegment, cameras: Sequence[str]) -> SealedSegment:
    kept = {name: pictures for name, pictures in message.pictures.items() if name not in cameras}
    return msgspec.structs.replace(message, pictures=kept)


def _names(text: str) -> list[str]:
    return text.split("\n") if text else []
