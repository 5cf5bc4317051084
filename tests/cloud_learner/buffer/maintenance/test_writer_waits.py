"""Maintenance never holds up who takes segments in: whatever takes its time is done while they are committed."""

import contextlib
import gc
import itertools
import threading
import time

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.maintenance import maintenance as upkeep
from cloud_learner.buffer.maintenance import shard_writer
from cloud_learner.buffer.maintenance.compact import compact_one
from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread, Retention
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store import shard as shard_module
from cloud_learner.buffer.store import store as store_module
from tests.cloud_learner.buffer.stored import OTHER, put
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.clock import ManualClock
from wire.messages.gateway import CameraFrames

HELD_S = 0.05
"""how long the ledger's writer may be held"""
JOINED_S = 60
JPEG_BYTES = 80_000
"""of a picture of 640x480 pixels"""


def _large_episode(local, name):
    """A second of two cameras of 640x480 pixels and 20 Hz: a record of 3 MB that does not compress."""
    spec, chance = fake_spec(2, size=16), np.random.default_rng(0)
    local.ledger.see_robot("r1", spec, "clock", 1)
    (segment,) = fake_episode(spec, name, steps=80, actor=[0] * 80)
    frames = {
        camera: CameraFrames(some.times_ns, tuple(chance.bytes(JPEG_BYTES) for _ in some.encoded))
        for camera, some in segment.frames.items()
    }
    return local.add([msgspec.structs.replace(segment, frames=frames)])


class Meanwhile:
    """Takes a segment in, in another thread, before each call of what is watched goes on: a call may last for ever."""

    def __init__(self, local, monkeypatch):
        self._local, self._monkeypatch, self._numbers = local, monkeypatch, itertools.count()
        self.calls = []

    def watch(self, owner, name):
        call = getattr(owner, name)

        def watched(*args, **options):
            self.calls.append(name)
            taken = []
            writer = threading.Thread(target=lambda: taken.append(self._take()), daemon=True)
            writer.start()
            writer.join(JOINED_S)
            assert len(taken) == 1, f"nothing can be committed while {name} is under way"
            return call(*args, **options)

        self._monkeypatch.setattr(owner, name, watched)

    def _take(self):
        # of an episode that goes on, and so is not sealed itself
        (segment,) = fake_episode(OTHER, f"meanwhile-{next(self._numbers)}", steps=1, actor=[0], finished=False)
        return put(self._local.store, segment, 1000)


def test_segments_are_committed_while_large_ones_are_read_packed_stored_and_deleted(local, monkeypatch):
    monkeypatch.setattr(shard_writer, "MIN_ROWS", 1)
    rows = [_large_episode(local, f"e{n}")[0] for n in range(3)]
    meanwhile = Meanwhile(local, monkeypatch)
    meanwhile.watch(local.store.journal, "read")
    meanwhile.watch(local.store.journal, "remove_unused")
    meanwhile.watch(store_module, "encode_shard")
    meanwhile.watch(shard_module, "_joined")
    for name in ("put", "read", "delete"):
        meanwhile.watch(local.store.objects, name)
    thread = MaintenanceThread(local.store, clock=ManualClock(1000))
    while thread.step():
        pass
    assert {"read", "remove_unused", "encode_shard", "_joined", "put"} == set(meanwhile.calls)
    assert {local.where()[row] for row in rows} == {0}
    # most of it is forgotten, and the rest written again
    later_ns = time.time_ns() + 2 * 3600 * 10**9
    meanwhile.calls.clear()
    thread = MaintenanceThread(
        local.store, Retention(max_bytes=4e6, keep_human=False), ManualClock(1000), lambda: later_ns
    )
    while thread.step():
        pass
    assert {"read", "encode_shard", "put", "delete"} <= set(meanwhile.calls)
    assert {row: place for row, place in local.where().items() if row in rows} == {rows[-1]: 1}
    local.check(rows[-1:])


@pytest.fixture
def held_s(local, monkeypatch):
    """What each transaction that writes cost this thread while nobody else could write, in seconds of the processor."""
    found, writing = [], local.ledger.writing

    @contextlib.contextmanager
    def timed():
        with writing() as connection:
            began = time.thread_time()
            yield connection
            # the rest is the commit
        found.append(time.thread_time() - began)

    monkeypatch.setattr(local.ledger, "writing", timed)
    # A collection goes through all that the tests before this one have left in the process.
    gc.disable()
    yield found
    gc.enable()


def test_no_transaction_of_maintenance_takes_long_whatever_the_size_of_records(local, held_s):
    _large_episode(local, "large")
    many = fake_episode(OTHER, "many", steps=300, segment_steps=1, actor=[0] * 300)
    local.store.append_all([(segment, 1) for segment in many], 2)
    held_s.clear()
    assert seal(local.store, 2000, force=True).segments == 301
    assert compact_one(local.store, 3000, set()) is None
    pruned = upkeep.prune(local.ledger, Retention(max_bytes=0), time.time_ns() + 2 * 3600 * 10**9)
    assert pruned.segments == 301 and upkeep.drop_dead(local.store) == 2
    # about a tenth of it, so that a slow computer does not fail
    assert len(held_s) > 10 and max(held_s) < HELD_S
