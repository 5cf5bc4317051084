"""The buffer keeps its bounds by itself, in short pieces, and a full disk or a broken shard loses nothing more."""

import errno
import logging
import os
import shutil
import time
from collections import namedtuple

import pytest

from cloud_learner.buffer.ledger.ledger import SEGMENTS_AT_ONCE
from cloud_learner.buffer.maintenance import compact, shard_writer
from cloud_learner.buffer.maintenance import maintenance as upkeep
from cloud_learner.buffer.maintenance.compact import compact_one
from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread, Retention
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.shard import shard_key
from tests.cloud_learner.buffer.stored import OTHER, count_changes
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.clock import ManualClock
from wire.errors import DiskFullError, StorageError

LATER_NS = 2 * 3600 * 10**9
"""after which nothing that was recorded may still run"""


@pytest.fixture(autouse=True)
def any_finished_step_is_worth_a_shard(monkeypatch):
    monkeypatch.setattr(shard_writer, "MIN_ROWS", 1)


def _practice(local, name, **options):
    """An episode in which no person acted."""
    return local.add_episode(name, OTHER, **{"steps": 400, "actor": [0] * 400, **options})


def _thread(local, retention=None, clock=None):
    return MaintenanceThread(
        local.store,
        retention,
        clock or ManualClock(1000),
        lambda: time.time_ns() + LATER_NS,
    )


def _kept(local):
    return {row.id for row in local.ledger.episodes(limit=1000)}


def _sealed(local):
    return [shard for shard in local.ledger.shards() if shard.state == "sealed"]


def _full(*_args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- by itself --------------------------------------------------------------------------------------------------------


def test_nothing_is_forgotten_unasked(local):
    _practice(local, "e0")
    thread = _thread(local)
    while thread.step():
        pass
    assert _kept(local) == {"e0"} and "journal" not in local.where().values()


def test_the_oldest_are_forgotten_and_their_room_given_back(local):
    clock, rows = ManualClock(1000), {}
    for n in range(3):
        rows[n] = _practice(local, f"e{n}")
        seal(local.store, 2000, force=True)
    size = local.ledger.episode("e0").bytes
    thread = _thread(local, Retention(max_bytes=2 * size, keep_human=False), clock)
    while thread.step():
        pass
    assert _kept(local) == {"e1", "e2"}
    assert [shard.number for shard in local.ledger.shards()] == [1, 2]
    assert shard_key(OTHER.hash, 0) not in set(local.store.objects.list())
    # looked at again a minute later
    rows[3] = _practice(local, "e3")
    thread.step()
    assert _kept(local) == {"e1", "e2", "e3"}
    clock.advance(61 * 10**9)
    thread.step()
    assert _kept(local) == {"e2", "e3"}
    local.check(rows[2] + rows[3])


@pytest.mark.parametrize("error", [DiskFullError, StorageError, RuntimeError])
def test_the_bounds_are_kept_though_nothing_can_be_sealed_or_cleaned(local, monkeypatch, caplog, error):
    clock = ManualClock(1000)
    for n in range(3):
        _practice(local, f"e{n}")
        seal(local.store, 2000, force=True)
    rows = _practice(local, "e3")
    size = local.ledger.episode("e0").bytes
    thread = _thread(local, Retention(max_bytes=2 * size, quarantine_bytes=0), clock)
    local.store.quarantine.put("bad/0", b"refused", "why", "r1")
    with monkeypatch.context() as patch:
        patch.setattr(local.store.objects, "put", lambda *_: _raise(error("no shard can be written")))
        patch.setattr(local.store, "clean", lambda: _raise(error("nothing can be removed")))
        patch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(100, 100, 0))
        thread.step()
        assert "no shard can be written" in caplog.text
        assert _kept(local) == {"e2", "e3"} and [shard.number for shard in _sealed(local)] == [2]
        assert local.store.quarantine.entries() == [] and "vla-fleet buffer prune" in caplog.text
        # the next one begins by removing what that one left
        rows += _practice(local, "e4")
        clock.advance(61 * 10**9)
        thread.step()
        assert "nothing can be removed" in caplog.text
        assert _kept(local) == {"e3", "e4"} and _sealed(local) == []
    while thread.step():
        pass
    assert "journal" not in [local.where()[row] for row in rows]
    local.check(rows)


def test_human_data_that_fills_the_budget_is_said_once(local, caplog):
    clock = ManualClock(1000)
    local.add_episode("demo", OTHER, steps=400, source="demonstration")
    thread = _thread(local, Retention(max_bytes=1), clock)
    for _ in range(3):
        thread.step()
        clock.advance(61 * 10**9)
    assert caplog.text.count("episodes in which people acted fill") == 1 and _kept(local) == {"demo"}


def test_a_disk_that_is_nearly_full_is_said_in_log_and_stats(local, caplog, monkeypatch):
    from cloud_learner.buffer.maintenance.stats import collect, render

    clock, usage = ManualClock(1000), namedtuple("usage", "total used free")
    thread = _thread(local, clock=clock)
    said = []
    for free in (50, 4, 3, 50, 4):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(100 * 10**9, 0, free * 10**9))
        thread.step()
        said.append(caplog.text.count("is nearly full"))
        clock.advance(61 * 10**9)
    # when it begins, not all the time
    assert said == [0, 1, 1, 1, 2]
    found = collect(local.store)
    assert "vla-fleet buffer prune" in found.warning and found.warning in render(found)


def test_few_small_shards_wait_for_others_and_many_are_written_together(local):
    clock, rows = ManualClock(1000), []
    thread = _thread(local, clock=clock)
    for n in range(8):
        assert len(local.ledger.shards()) == n
        rows += _practice(local, f"e{n}")
        more = thread.step()
    assert more and [shard.live_steps for shard in local.ledger.shards()] == [3200]
    assert not thread.step()
    local.check(rows)


def test_a_shard_at_a_time_is_compacted(local, monkeypatch):
    for module in (shard_writer, compact):
        monkeypatch.setattr(module, "SHARD_BYTES", 600_000)
    kept = []
    for n in range(24):
        rows = _practice(local, f"e{n}", steps=1300, segment_steps=325, actor=[0] * 1300)
        kept += rows if n % 3 == 2 else []
    seal(local.store, 2000, force=True)
    local.ledger.prune([f"e{n}" for n in range(24) if n % 3 != 2], 9)
    before, pieces = len(local.ledger.shards()), []
    while (piece := compact_one(local.store, 3000, set())) is not None:
        pieces.append(piece)
        local.check(kept)
    assert len(pieces) > 1 and all(piece.written_shards == 1 for piece in pieces)
    assert len(local.ledger.shards()) < before


def test_a_round_looks_at_no_shard_that_is_full(local, monkeypatch):
    monkeypatch.setattr(compact, "SHARD_BYTES", 1000)
    _practice(local, "e0")
    seal(local.store, 2000, force=True)
    shards, asked = local.ledger.shards, []

    def count(*args, **options):
        asked.append(len(shards(*args, **options)))
        return shards(*args, **options)

    monkeypatch.setattr(local.ledger, "shards", count)
    assert compact_one(local.store, 3000, set()) is None
    assert asked == [0] and len(shards()) == 1


def test_within_its_sizes_no_episode_is_looked_at(local, monkeypatch):
    _practice(local, "e0")
    size = local.ledger.episode("e0").bytes
    kept, asked = local.ledger.kept_episodes, []
    monkeypatch.setattr(local.ledger, "kept_episodes", lambda: asked.append(1) or kept())
    later = time.time_ns() + LATER_NS
    assert upkeep.prune(local.ledger, Retention(max_bytes=size + 1), later).episodes == 0 and asked == []
    assert upkeep.prune(local.ledger, Retention(max_bytes=size - 1), later).episodes == 1 and asked == [1]


# --- in short pieces --------------------------------------------------------------------------------------------------


def test_no_transaction_of_maintenance_changes_more_than_a_few_hundred_rows(local, monkeypatch):
    segments = fake_episode(OTHER, "long", steps=500, segment_steps=1, actor=[0] * 500)
    rows = local.store.append_all([(segment, 1) for segment in segments], 2)
    changed = count_changes(local.ledger)
    # sealed, all of it written again, some found damaged, forgotten
    assert seal(local.store, 2000, force=True).segments == 500
    with local.ledger.exclusive():
        compact.rewrite(local.store, OTHER.hash, list(local.ledger.places(rows).values()), 9)
    upkeep.drop_dead(local.store)
    key = shard_key(OTHER.hash, local.ledger.shards()[0].number)
    local.store.objects.put(key, local.store.objects.get(key)[:9])
    assert len([one for one in upkeep.verify(local.store, repair=True) if one.row]) == 500
    pruned = upkeep.prune(local.ledger, Retention(max_bytes=0), time.time_ns() + LATER_NS)
    assert (pruned.episodes, pruned.segments) == (1, 500) and local.ledger.segments_after(0) == ()
    assert sum(changed) >= 4 * 500 and max(changed) == SEGMENTS_AT_ONCE


def test_others_are_at_work_while_verify_reads_and_between_the_pieces_of_prune(local, monkeypatch):
    for n in range(3):
        _practice(local, f"e{n}")
        seal(local.store, 2000, force=True)
    key = shard_key(OTHER.hash, 1)
    local.store.objects.put(key, local.store.objects.get(key)[:9])
    get, reads = local.store.objects.get, []

    def read(key):
        # whoever seals comes in at once
        with local.ledger.exclusive(wait_s=0):
            reads.append(key)
        return get(key)

    monkeypatch.setattr(local.store.objects, "get", read)
    assert [one.row for one in upkeep.verify(local.store, repair=True) if one.row]
    assert len(reads) > 3
    monkeypatch.setattr("cloud_learner.buffer.maintenance.prune.EPISODES_AT_ONCE", 1)
    turns = []

    def stop():
        with local.ledger.exclusive(wait_s=0):
            turns.append(len(_kept(local)))
        return len(turns) == 3

    upkeep.prune(local.ledger, Retention(max_bytes=0), time.time_ns() + LATER_NS, stop=stop)
    assert turns == [3, 2, 1] and _kept(local) == {"e2"}


def test_what_changed_while_it_was_chosen_or_read_is_left_alone(local, monkeypatch):
    segments = fake_episode(OTHER, "e0", steps=400, actor=[0] * 400)
    local.add(segments[:-1])
    _practice(local, "e1")
    choose = Retention.choose

    def meanwhile(self, episodes, now_ns):
        local.add(segments[-1:])
        return choose(self, episodes, now_ns)

    monkeypatch.setattr(Retention, "choose", meanwhile)
    done = upkeep.prune(local.ledger, Retention(max_bytes=0), time.time_ns() + LATER_NS)
    assert done.episodes == 1 and _kept(local) == {"e0"}


# --- the quarantine's quota -------------------------------------------------------------------------------------------


def test_the_oldest_leave_a_quarantine_that_is_too_large(local, caplog, monkeypatch):
    for n in range(4):
        monkeypatch.setattr(time, "time_ns", lambda n=n: 10**18 + n)
        local.store.quarantine.put(f"e{n}/0", bytes([n]) * 1000, f"reason {n}", "r1")
    monkeypatch.undo()
    # each has a line before it
    assert all(1000 < entry.bytes < 1100 for entry in local.store.quarantine.entries())
    _thread(local, Retention(quarantine_bytes=2500)).step()
    assert [entry.reason for entry in local.store.quarantine.entries()] == ["reason 2", "reason 3"]
    assert "reason 0" in caplog.text and "reason 1" in caplog.text
    (local.place.data / "quarantine" / "torn.quarantine").write_bytes(b"no note\n")
    assert "cannot be read" in local.store.quarantine.entries()[0].reason


# --- full disks and broken shards -------------------------------------------------------------------------------------


def _leftovers(local):
    return [path for path in local.place.data.rglob("*.part") if path.is_file()]


def test_a_disk_that_fills_while_sealing_leaves_everything_in_the_journal(local, monkeypatch):
    rows = _practice(local, "e0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(DiskFullError, match=r"no space left for .* Free some room"):
            seal(local.store, 2000, force=True)
        assert local.ledger.shards() == () and _leftovers(local) == []
        local.check(rows)
    assert seal(local.store, 2000, force=True).shards == 1
    local.check()


def test_a_disk_that_fills_while_compacting_leaves_the_old_shards(local, monkeypatch):
    for n in range(3):
        _practice(local, f"e{n}")
        seal(local.store, 2000, force=True)
    before = local.ledger.shards()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(DiskFullError, match=r"no space left for .* Free some room"):
            upkeep.compact(local.store, 3000)
        assert local.ledger.shards() == before and _leftovers(local) == []
        # nor when the ledger cannot be written either, and the next writer removes what was begun
        patch.setattr(local.ledger, "forget_shard", lambda *_: _raise(DiskFullError("the ledger has no room")))
        with pytest.raises(DiskFullError, match="no space left for"):
            upkeep.compact(local.store, 3000)
        local.check()
    local.reopen()
    assert local.ledger.shards() == before
    local.check()
    assert upkeep.compact(local.store, 3000).written_shards == 1
    local.check()


def test_what_is_dead_goes_before_anything_is_written(local, monkeypatch):
    rows = []
    for n in range(3):
        rows += _practice(local, f"e{n}")
        seal(local.store, 2000, force=True)
    local.ledger.prune(["e0"], 9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(DiskFullError, match="no space left for"):
            compact_one(local.store, 3000, set())
    # or nothing on the disk would ever make room for what is to be written
    assert [shard.number for shard in _sealed(local)] == [1, 2]
    assert shard_key(OTHER.hash, 0) not in set(local.store.objects.list())
    local.check([row for row in rows if row in local.ledger.places(rows)])


def _raise(error):
    raise error


def test_the_thread_goes_on_when_the_disk_has_room_again(local, monkeypatch, caplog):
    _practice(local, "e0")
    thread = _thread(local)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        thread.step()
        assert "no space left" in caplog.text and "journal" in local.where().values()
    thread.step()
    assert "journal" not in local.where().values()
    local.check()


def test_a_shard_cut_in_half_gives_what_is_whole_and_keeps_the_rest(local, caplog):
    spec = fake_spec(1, size=128)
    local.ledger.see_robot("r1", spec, "clock", 1)
    rows = local.add_episode("e0", spec, steps=600, segment_steps=20)
    seal(local.store, 2000, force=True)
    more = local.add_episode("e1", spec, steps=20)
    seal(local.store, 2000, force=True)
    key = shard_key(spec.hash, 0)
    local.store.objects.put(key, local.store.objects.get(key)[: local.ledger.shards()[0].bytes // 2])
    stuck = set()
    with caplog.at_level(logging.ERROR):
        done = compact_one(local.store, 3000, stuck)
    assert done is not None and "verify --repair` sets it aside" in caplog.text
    damaged = set(local.store.read(rows).damaged)
    assert 0 < len(damaged) < len(rows)
    local.check([row for row in rows + more if row not in damaged])
    # what cannot be read lies where it lay, and is not tried for ever
    assert {local.where()[row] for row in damaged} == {0} and stuck == {(spec.hash, 0)}
    assert compact_one(local.store, 3000, stuck) is None
    list(upkeep.verify(local.store, repair=True))
    assert [finding for finding in upkeep.verify(local.store) if finding.damage] == []
    local.check([row for row in rows + more if row not in damaged])
