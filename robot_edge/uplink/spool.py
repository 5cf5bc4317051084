"""Segments on the robot's disk: durable until they are acknowledged, and no more of them than there is room for."""

from __future__ import annotations

import contextlib
import logging
import os
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
_RESERVE_BYTES = 16 * 1024 * 1024
"""of the disk, kept aside: also to drop or forget something takes some room, and a write-ahead log of up to half of it
has to be brought into the file first"""
_FIT_SHARE = 0.8
"""of what is there when the disk is full: the quota from then on, so that new segments fit where others were"""
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
    file. Used by one process at a time, and in it by one thread; what it counts any thread may read, and `index`.
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
            # Opened by the uplink's loop, then used by the thread that waits for the disk.
            self._db = sqlite3.connect(path, check_same_thread=False)
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
        self._fresh: tuple[int, Segment] | None = None
        """the row that was put in last, and what it is"""
        self.steps_recorded: int = counters.get("steps", 0)
        """steps ever put in, acknowledged or not"""
        self.dropped = Dropped(*(counters.get(f"dropped_{name}", 0) for name in Dropped._fields))
        self.reported = Dropped(*(counters.get(f"reported_{name}", 0) for name in Dropped._fields))
        """what of it people were told"""
        self._reserve = path.with_name("spool.reserve")
        self._has_reserve = self._reserve.exists()
        self._quota, self._disk_is_full = self.max_bytes, False
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
        if self._disk_is_full and self.size > self.max_bytes:
            # What room there is is for forgetting.
            raise self._explain(sqlite3.OperationalError("disk is full"))
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
        self._fresh = place.row, segment
        self.index.add(episode, place, segment.steps, kept, segment.last, begun)
        self.steps_recorded += segment.steps
        self._keep_quota()
        self._keep_reserve()

    def get(self, row: int) -> Segment | None:
        """The segment in `row`, or None if it was forgotten meanwhile."""
        try:
            found = self._db.execute("SELECT data FROM segments WHERE row = ?", (row,)).fetchone()
        except sqlite3.Error as error:
            raise self._explain(error) from error
        if found is None:
            return None
        return self._decode(found[0], f"row {row}")

    def load(self, episode: SpooledEpisode, segment: SpooledSegment) -> Segment | None:
        """What the index handed out, to be sent: from now on its episode is not dropped. None if it was before."""
        if (found := self.get(segment.row)) is not None:
            self.begin(episode)
        return found

    def at_hand(self, episode: SpooledEpisode, segment: SpooledSegment) -> Segment | None:
        """As `load`, for any thread, where it needs no disk: what was put in last, of an episode that stays anyway."""
        fresh = self._fresh
        return fresh[1] if fresh and fresh[0] == segment.row and (episode.kept or episode.begun) else None

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
        try:
            with self._db:
                self._db.executemany("INSERT OR IGNORE INTO begun VALUES (?)", [(one.id,) for one in begun])
        except sqlite3.Error as error:
            # To send is what makes room again.
            log.error("%s", self._explain(error))
        for one in begun:
            one.begun = True

    def forget(self, ids: tuple[str, ...]) -> None:
        """Drop acknowledged segments. Raises `DiskFullError`, with nothing dropped, when even the reserve is used."""
        try:
            gone = self._forget(ids)
        except DiskFullError:
            if not self._spend_reserve():
                raise
            gone = self._forget(ids)
        for one in gone:
            self.index.remove(*one)
        self._update_full()
        self._keep_reserve()
        if gone and not self.index.segments:
            self._shrink()

    def _forget(self, ids: tuple[str, ...]) -> list[tuple[str, int, int, int]]:
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
        return gone

    def make_room(self, size: int) -> bool:
        """Drop so many bytes of what may go, or all of it; whether anything went. Raises `StorageError`, with nothing
        dropped."""
        if not (victims := self.index.droppable(size)):
            return False
        try:
            self._drop(victims)
        except DiskFullError:
            if not self._spend_reserve():
                raise
            self._drop(victims)
        self._keep_reserve()
        return True

    def on_disk_full(self) -> bool:
        """The disk takes nothing more: what is there has to do from now on. Whether something was dropped for that.
        Raises `StorageError`."""
        if not self._disk_is_full:
            self._disk_is_full, self.max_bytes = True, min(self.max_bytes, round(_FIT_SHARE * self.size))
            log.error("%s: the disk is full; its quota is %.3g GB until it is not.", self._path, self.max_bytes / 1e9)
        dropped = self.make_room(self.size - self.max_bytes)
        self._update_full()
        return dropped

    def check_room(self) -> None:
        """See whether a disk that was full has room again; after that its quota is what it was."""
        self._keep_reserve()
        self._update_full()

    def _drop(self, victims: list[SpooledEpisode]) -> None:
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

    def note_reported(self, told: Dropped) -> None:
        """People were told of so much that was dropped. Raises `StorageError`."""
        news = [now - then for now, then in zip(told, self.reported, strict=True)]
        try:
            with self._db:
                for name, count in zip(Dropped._fields, news, strict=True):
                    self._count(f"reported_{name}", count)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self.reported = told

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
        self.is_full = over and not self.index.droppable()

    def _count(self, name: str, more: int) -> None:
        query = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
        self._db.execute(query, (name, more))

    def _keep_reserve(self) -> None:
        """Set room aside, where there is some and it is of use; see whether a full disk has room again."""
        wanted = not self._has_reserve and self.size > _RESERVE_BYTES
        if not (wanted or self._disk_is_full):
            return
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._path.parent).free < 4 * _RESERVE_BYTES:
                return
            self._disk_is_full, self.max_bytes = False, self._quota
            if wanted:
                with self._reserve.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
                self._has_reserve = True

    def _spend_reserve(self) -> bool:
        """Whether there was one."""
        self._has_reserve = False
        try:
            self._reserve.unlink()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except (OSError, sqlite3.Error):
            return False
        return True

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
