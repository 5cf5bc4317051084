"""Segments on the robot's disk: durable until they are acknowledged, and no more of them than there is room for."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from pathlib import Path
from typing import NamedTuple

from robot_edge.uplink.spool_index import SpooledEpisode, SpooledSegment, SpoolIndex, is_kept
from wire.codec import decode, encode
from wire.errors import ConfigError, CorruptDataError, DiskFullError, NotWritableError, StorageError, storage_errors
from wire.messages.gateway import Segment

log = logging.getLogger(__name__)

MOST_BYTES = 20_000_000_000
LEAST_BYTES = 64 * 1024 * 1024
"""room for an episode of minutes, however little is free"""
_FREE_SHARE = 0.9
"""a spool that was full takes segments again when no more than this share of its room is used"""
_BEGUN_AT_ONCE = 4
_SHRINK_BYTES = 64 * 1024 * 1024
"""an empty spool whose file is larger gives the disk back"""


class Dropped(NamedTuple):
    """What was dropped for want of room, ever: whole episodes of the policy alone."""

    episodes: int = 0
    steps: int = 0
    bytes: int = 0


def quota_bytes(option: str, gigabytes: float) -> int:
    """Bytes of a quota that an option gives, 0 for none. Raises `ConfigError` for too little to work with."""
    if gigabytes and not gigabytes * 1e9 >= LEAST_BYTES:
        raise ConfigError(
            f"{option} {gigabytes:g}: a spool needs room for an episode of minutes, {LEAST_BYTES / 1e9:.3f} GB at "
            "least; 0 takes what is sensible."
        )
    return round(gigabytes * 1e9)


def default_quota(path: Path) -> int:
    """Bytes that the spool at `path` may hold when nobody says: half of what is free, at most 20 GB."""
    there = path.stat().st_size if path.exists() else 0
    with storage_errors("asking how much is free", path.parent):
        return max(LEAST_BYTES, min(MOST_BYTES, (shutil.disk_usage(path.parent).free + there) // 2))


class Spool:
    """Segments wait here until the gateway has acknowledged them; `forget` takes one out for good.

    Over its quota whole episodes go in which the policy alone acted, and of which the gateway has nothing, oldest
    first: an episode with a hole is worth little, and so is a correction without what led to it. Whatever a person or
    a script had a hand in stays, all of its episode with it. When nothing is left that may go, the spool `is_full`.

    Beside them lies what the episode ends with that goes on, in case its next segment never comes.

    SQLite does the hard part (atomic, durable, checked); a kill at any point leaves either the whole segment or none.
    What is in it, and in which order it is to be sent, is kept in memory: nobody else writes here, and a poll asks no
    file. Used by one process at a time.
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """Open or create the spool. `max_bytes` of segments, 0: `default_quota`. Raises `StorageError` that says what
        to do."""
        self._path = path
        with storage_errors("opening the spool", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes or default_quota(path)
        self.index = SpoolIndex()
        self.sends_at_once = False
        """what is put in now is sent soon: an episode that begins is noted as begun with its first segment"""
        self.is_full = False
        """over its quota with nothing in it that may be dropped; then until enough of it was acknowledged"""
        try:
            self._db = sqlite3.connect(path)
            # A segment is long: of larger pages there is less to read and to free.
            self._db.execute("PRAGMA page_size=8192")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS segments (row INTEGER PRIMARY KEY AUTOINCREMENT, episode TEXT NOT NULL,"
                " number INTEGER NOT NULL, steps INTEGER NOT NULL, size INTEGER NOT NULL, kept INTEGER NOT NULL,"
                " last INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (episode, number))"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS begun (episode TEXT PRIMARY KEY)")
            self._db.execute("CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS running"
                " (episode TEXT NOT NULL, kept INTEGER NOT NULL, ending BLOB NOT NULL)"
            )
            begun = {episode for (episode,) in self._db.execute("SELECT episode FROM begun")}
            rows = self._db.execute("SELECT row, episode, number, steps, size, kept, last FROM segments ORDER BY row")
            for row, episode, number, steps, size, kept, last in rows:
                segment = SpooledSegment(row, number, size)
                self.index.add(episode, segment, steps, bool(kept), bool(last), episode in begun)
            for episode, kept in self._db.execute("SELECT episode, kept FROM running"):
                self.index.expect(episode, bool(kept), episode in begun)
            counters = dict(self._db.execute("SELECT name, value FROM counters"))
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self.steps_recorded: int = counters.get("steps", 0)
        """steps ever put in, acknowledged or not"""
        self.dropped = Dropped(*(counters.get(f"dropped_{name}", 0) for name in Dropped._fields))
        self.reported = Dropped(*(counters.get(f"reported_{name}", 0) for name in Dropped._fields))
        """what of it people were told"""
        self._update_full()

    def __len__(self) -> int:
        """Segments."""
        return self.index.segments

    @property
    def size(self) -> int:
        """Bytes of segments."""
        return self.index.size

    def put(self, segment: Segment, ending: Segment | None = None) -> None:
        """Durable when this returns; nothing of it is kept when it raises. Drops what there is no room for.

        `ending`: the episode's last segment if this process dies before it puts the next one; None when it is over.
        """
        data, episode = encode(segment), segment.episode.id
        # Whatever is left of a kept episode in the end, its last segment says that it is one.
        kept = is_kept(segment) or self.index.is_kept(episode)
        begun = self.sends_at_once and segment.index == 0
        values = (episode, segment.index, segment.steps, len(data), kept, segment.last, data)
        try:
            with self._db:
                put = self._db.execute(
                    "INSERT INTO segments (episode, number, steps, size, kept, last, data)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
                self._count("steps", segment.steps)
                if begun:
                    self._db.execute("INSERT OR IGNORE INTO begun VALUES (?)", (episode,))
                self._db.execute("DELETE FROM running")
                if ending is not None:
                    self._db.execute("INSERT INTO running VALUES (?, ?, ?)", (episode, kept, encode(ending)))
        except sqlite3.Error as error:
            raise self._explain(error) from error
        place = SpooledSegment(put.lastrowid or 0, segment.index, len(data))
        self.index.add(episode, place, segment.steps, kept, segment.last, begun)
        self.steps_recorded += segment.steps
        self._keep_quota()

    def get(self, row: int) -> Segment | None:
        """The segment in `row`, or None if it was forgotten meanwhile."""
        found = self._db.execute("SELECT data FROM segments WHERE row = ?", (row,)).fetchone()
        if found is None:
            return None
        return self._decode(found[0], f"row {row}")

    def ending(self) -> Segment | None:
        """The `ending` that was put last: whoever opens the spool finds the end of what a dead process recorded."""
        found = self._db.execute("SELECT ending FROM running").fetchone()
        return None if found is None else self._decode(found[0], "the end of the running episode")

    def begin(self, episode: SpooledEpisode) -> None:
        """The gateway will have some of it: it is not to be dropped any more, also by a later process."""
        if episode.kept or episode.begun:
            return
        # With it those that come next: a flush takes as long as it takes to send one.
        begun = [episode, *(one for one in self.index.next_to_begin(_BEGUN_AT_ONCE) if one is not episode)]
        for one in begun:
            one.begun = True
        try:
            with self._db:
                self._db.executemany("INSERT OR IGNORE INTO begun VALUES (?)", [(one.id,) for one in begun])
        except sqlite3.Error as error:
            # To send is what makes room again.
            log.error("%s", self._explain(error))

    def forget(self, ids: tuple[str, ...]) -> None:
        """Drop acknowledged segments. Raises `DiskFullError`, with nothing dropped: even forgetting needs some room."""
        gone = []
        try:
            with self._db:
                for episode, _, number in (segment_id.rpartition("/") for segment_id in ids):
                    found = self._db.execute(
                        "DELETE FROM segments WHERE episode = ? AND number = ? RETURNING number, steps, size, last",
                        (episode, number),
                    ).fetchone()
                    if found is not None:
                        gone.append((episode, *found[:3]))
                        if found[3]:
                            self._db.execute("DELETE FROM begun WHERE episode = ?", (episode,))
        except sqlite3.Error as error:
            raise self._explain(error) from error
        for one in gone:
            self.index.remove(*one)
        self._update_full()
        if gone and not self.index.segments:
            self._shrink()

    def make_room(self, size: int) -> bool:
        """Drop so many bytes of what may go, or all of it; whether anything went. Raises `StorageError`, with nothing
        dropped."""
        victims: list[SpooledEpisode] = []
        for episode in self.index.droppable():
            if size <= 0:
                break
            victims.append(episode)
            size -= episode.size
        if not victims:
            return False
        news = Dropped(len(victims), sum(one.steps for one in victims), sum(one.size for one in victims))
        try:
            with self._db:
                for episode in victims:
                    self._db.execute("DELETE FROM segments WHERE episode = ?", (episode.id,))
                for name, count in zip(Dropped._fields, news, strict=True):
                    self._count(f"dropped_{name}", count)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        for episode in victims:
            self.index.drop(episode)
        self.dropped = Dropped(*map(sum, zip(self.dropped, news, strict=True)))
        return True

    def note_reported(self) -> None:
        """People were told of all that was dropped. Raises `StorageError`."""
        news = [now - then for now, then in zip(self.dropped, self.reported, strict=True)]
        try:
            with self._db:
                for name, count in zip(Dropped._fields, news, strict=True):
                    self._count(f"reported_{name}", count)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self.reported = self.dropped

    def close(self) -> None:
        self._db.close()

    def _keep_quota(self) -> None:
        """What there is no room for goes; a disk that does not even let go of it is told of by whoever writes next."""
        if self.size > self.max_bytes:
            try:
                self.make_room(self.size - self.max_bytes)
            except StorageError as error:
                log.error("%s", error)
        self._update_full()

    def _update_full(self) -> None:
        over = self.size > self.max_bytes * (_FREE_SHARE if self.is_full else 1.0)
        self.is_full = over and next(self.index.droppable(), None) is None

    def _count(self, name: str, more: int) -> None:
        query = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
        self._db.execute(query, (name, more))

    def _shrink(self) -> None:
        """Give the disk back what a long drain has left unused."""
        try:
            pages, page_bytes = (
                self._db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size")
            )
            if pages * page_bytes > _SHRINK_BYTES:
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            log.warning("%s", self._explain(error))

    def _decode(self, data: bytes, what: str) -> Segment:
        segment = decode(data, stored=True)
        if not isinstance(segment, Segment):
            raise CorruptDataError(
                f"{what} in {self._path} is a {type(segment).__name__}. Move the file away to start anew."
            )
        return segment

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
