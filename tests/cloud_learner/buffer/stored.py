"""A buffer that tests write to, and know what is in it."""

import errno
import os
from pathlib import Path

import obstore
import sqlalchemy as sa
import zarr.storage
from obstore.exceptions import GenericError

from cloud_learner.buffer.store import range_cache
from cloud_learner.buffer.store.objects import LocalObjects
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment

SPEC = fake_spec(2, size=16)
OTHER = fake_spec(0, state_dim=7)


def as_zarr(objects):
    """The same objects as zarr sees them, to be read only."""
    if isinstance(objects, LocalObjects):
        return zarr.storage.LocalStore(objects.root, read_only=True)
    return zarr.storage.ObjectStore(objects._store, read_only=True)


class WatchedRequests:
    """The parts of objects that are asked for from now on; nothing is answered while `down`. No disk is full."""

    def __init__(self, monkeypatch):
        self.asked, self.down, get_range = [], False, obstore.get_range

        def watched(store, key, *, start, end):
            self.asked.append((key, start, end))
            if self.down:
                raise GenericError(
                    "Error performing GET in 20s, after 1 retries, max_retries: 5 - error sending request"
                )
            return get_range(store, key, start=start, end=end)

        monkeypatch.setattr(obstore, "get_range", watched)
        monkeypatch.setattr(range_cache, "spare_bytes", lambda path: 2**40)

    def pop(self):
        asked, self.asked = self.asked, []
        return asked


def break_sector(monkeypatch, path, first, end):
    """The device reads nothing any more that holds a byte of `path` from `first` until `end`."""
    read_bytes, pread = Path.read_bytes, os.pread

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(descriptor, count, offset):
        hit = os.path.samestat(os.fstat(descriptor), path.stat()) and offset < end and first < offset + count
        return fail() if hit else pread(descriptor, count, offset)

    monkeypatch.setattr(Path, "read_bytes", lambda self: fail() if self == path else read_bytes(self))
    monkeypatch.setattr(os, "pread", read)


def count_changes(ledger):
    """A list to which every transaction from now on adds how many rows of segments and of episodes it changed."""
    engine, found, now = ledger._engine, [], []

    @sa.event.listens_for(engine, "begin")
    def begin(connection):
        now.clear()

    @sa.event.listens_for(engine, "after_cursor_execute")
    def execute(connection, cursor, statement, parameters, context, executemany):
        verb, *rest = statement.split()
        if verb in ("INSERT", "UPDATE", "DELETE") and {"segments", "episodes"} & set(rest[:2]):
            now.append(cursor.rowcount)

    @sa.event.listens_for(engine, "commit")
    def commit(connection):
        found.append(sum(now))

    return found


def put(store, segment, committed_ns=2):
    """Take one segment; its row, None if it was there."""
    (row,) = store.append_all([(segment, committed_ns - 1)], committed_ns)
    return row


class Buffer:
    """A writer of one place, and what was put into it by row."""

    def __init__(self, place):
        self.place = place
        self.ledger, self.store = place.open_writer()
        self.segments = {}
        for spec in (SPEC, OTHER):
            self.ledger.see_robot("r1", spec, "clock", 1)

    def add(self, segments, committed_ns=1000):
        rows = []
        for segment in segments:
            row = put(self.store, segment, committed_ns)
            self.segments[row] = segment
            rows.append(row)
        return rows

    def add_episode(self, name, spec=SPEC, committed_ns=1000, **options):
        return self.add(fake_episode(spec, name, **{"seed": len(self.segments), **options}), committed_ns)

    def check(self, rows=None, store=None):
        """That everything, or `rows`, is there to the last bit, for this writer or another reader."""
        rows = list(self.segments if rows is None else rows)
        found = (store or self.store).read(rows)
        assert found.damaged == {} and found.elsewhere == ()
        assert set(found.segments) == set(rows)
        assert all(same_segment(found.segments[row], self.segments[row]) for row in rows)

    def where(self):
        """'journal' or the shard's number by row."""
        places = self.ledger.places(list(self.segments))
        return {row: "journal" if place.shard is None else place.shard for row, place in places.items()}

    def reopen(self):
        self.store.close()
        self.ledger.close()
        self.ledger, self.store = self.place.open_writer()
