import hashlib
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cloud_learner.buffer.ledger import commit as ledger_commit
from cloud_learner.buffer.maintenance import compact, shard_writer
from cloud_learner.buffer.maintenance import maintenance as upkeep
from cloud_learner.buffer.maintenance.maintenance import Retention
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.shard import SHARD_BYTES, shard_key
from tests.cloud_learner.buffer.stored import OTHER, SPEC, as_zarr, break_sector
from tests.cloud_learner.buffer.synthetic import same_segment
from wire.errors import StorageError

pytest_plugins = ["tests.s3"]

DAY = 24 * 3600 * 10**9


def _force(buffer):
    return seal(buffer.store, 2000, force=True)


def _key(buffer, spec, number=None):
    """The object of a shard, by default of the newest one."""
    newest = max(shard.number for shard in buffer.ledger.shards(spec.hash))
    return shard_key(spec.hash, newest if number is None else number)


def _whole(buffer):
    return list(upkeep.verify(buffer.store))


def _aside(buffer):
    return [buffer.store.quarantine.read(entry.id) for entry in buffer.store.quarantine.entries()]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_a_whole_buffer_has_nothing_to_say(buffer):
    assert _whole(buffer) == []
    buffer.add_episode("e0", steps=300)
    _force(buffer)
    buffer.add_episode("e1", steps=300)
    buffer.add_episode("o", OTHER, steps=300)
    assert _whole(buffer) == []
    ledger, reader = buffer.place.open_reader()
    assert list(upkeep.verify(reader)) == []
    ledger.close()


@pytest.mark.parametrize("sealed", [True, False])
def test_a_bad_sector_costs_what_lies_on_it_alone(local, monkeypatch, sealed):
    rows = []
    for n in range(3):
        rows += local.add_episode(f"e{n}", OTHER, steps=400, segment_steps=100)
        if sealed:
            _force(local)
    place = local.ledger.places(rows)[rows[5]]
    path = local.store.objects.root / _key(local, OTHER, 1) if sealed else local.place.journal / "00000001.journal"
    break_sector(monkeypatch, path, place.offset + 100, place.offset + 101)
    damaged = local.store.read(rows).damaged
    # the records of a shard are packed together, those of the journal are not
    assert set(damaged) == (set(rows[4:8]) if sealed else {rows[5]})
    assert all(f"{path} cannot be read: the disk has a bad sector" in reason for reason in damaged.values())
    assert all("verify --repair" in reason for reason in damaged.values())
    whole = [row for row in rows if row not in damaged]
    local.check(whole)
    assert {finding.row for finding in _whole(local) if finding.row} == set(damaged)
    assert {finding.row for finding in upkeep.verify(local.store, repair=True) if finding.row} == set(damaged)
    assert _whole(local) == [] and local.ledger.damaged_segments() == len(damaged)
    assert _force(local).segments == (0 if sealed else len(whole))
    local.check(whole)


def test_a_bad_sector_in_the_journal_keeps_no_other_from_being_sealed(local, monkeypatch, caplog):
    rows = local.add_episode("e0", OTHER, steps=400, segment_steps=100)
    at = local.ledger.places(rows)[rows[1]].offset
    path = local.place.journal / "00000001.journal"
    with monkeypatch.context() as patch:
        break_sector(patch, path, at, at + 1)
        assert _force(local).segments == 3 and "bad sector" in caplog.text
    local.check([rows[0], *rows[2:]])
    # what can be read of the disk again is still there
    local.store.close()
    upkeep.drop_dead(local.store)
    assert path.exists()


@pytest.mark.slow
def test_only_the_segments_that_are_hit_are_named_and_the_rest_serves_on(buffer):
    rows = buffer.add_episode("e0", steps=2000, segment_steps=100)
    other = buffer.add_episode("o", OTHER, steps=200)
    _force(buffer)
    key = _key(buffer, SPEC)
    good = buffer.store.objects.get(key)
    # in the data of the fourth chunk of 256 KiB, somewhere
    index = np.frombuffer(good[: 16 * 256], "<u8").reshape(-1, 2)
    at = int(index[3, 0] + index[3, 1] // 2)
    buffer.store.objects.put(key, good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    chunk = range(3 << 18, 4 << 18)
    hit = {
        row
        for row, place in buffer.ledger.places(rows).items()
        if place.offset < chunk.stop and place.offset + place.bytes > chunk.start
    }
    assert 1 < len(hit) < len(rows) - 1
    findings = _whole(buffer)
    assert [finding.damage for finding in findings] == [True] * (1 + len(hit))
    assert key in findings[0].text and {finding.row for finding in findings[1:]} == hit
    assert all(f"segment {buffer.segments[finding.row].id} " in finding.text for finding in findings[1:])
    # nothing was changed
    assert not any(place.damaged for place in buffer.ledger.places(rows).values())

    generation = buffer.ledger.generation()
    repaired = list(upkeep.verify(buffer.store, repair=True))
    assert {finding.row for finding in repaired if finding.row} == hit
    assert buffer.ledger.generation() > generation
    found = buffer.store.read(rows + other)
    assert set(found.damaged) == hit and set(found.segments) == set(rows + other) - hit
    assert all(same_segment(segment, buffer.segments[row]) for row, segment in found.segments.items())
    index = buffer.ledger.index(0, SPEC.data_hash)
    assert set(index.row.tolist()) == set(rows) - hit
    ((_, copy),) = _aside(buffer)
    assert copy != good and len(copy) == len(good)
    # what is whole lies elsewhere now; the old shard may go and then all is well
    upkeep.drop_dead(buffer.store)
    assert [finding for finding in _whole(buffer) if finding.damage] == []
    buffer.check(sorted(set(rows + other) - hit))


def test_objects_that_are_gone_or_torn_and_damage_where_nothing_lies(local):
    rows = local.add_episode("e0", steps=300)
    _force(local)
    key = _key(local, SPEC)
    good = local.store.objects.get(key)
    for bad in (good[:-1], b""):
        local.store.objects.put(key, bad)
        findings = _whole(local)
        assert findings[0].damage and key in findings[0].text
        assert {finding.row for finding in findings if finding.row} <= set(rows)
    local.store.objects.delete(key)
    findings = _whole(local)
    assert "is gone" in findings[0].text and {finding.row for finding in findings if finding.row} == set(rows)
    # bytes behind the last chunk belong to nobody: the object is not what was written, yet nothing is lost
    local.store.objects.put(key, good + b"more")
    findings = _whole(local)
    assert [finding.row for finding in findings] == [0] and findings[0].damage
    repaired = list(upkeep.verify(local.store, repair=True))
    assert [finding.damage for finding in repaired] == [True, False]
    upkeep.drop_dead(local.store)
    assert _whole(local) == []
    local.check()


def test_a_damaged_record_of_the_journal_is_set_aside(local):
    rows = local.add_episode("e0", steps=320)
    place = local.ledger.places(rows)[rows[1]]
    path = local.place.journal / f"{place.journal:08d}.journal"
    data = bytearray(path.read_bytes())
    data[place.offset + 60] ^= 1
    path.write_bytes(data)
    assert set(local.store.read(rows).damaged) == {rows[1]}
    assert [(finding.damage, finding.row) for finding in _whole(local)] == [(True, rows[1])]
    list(upkeep.verify(local.store, repair=True))
    ((entry, copy),) = _aside(local)
    assert entry.id.startswith("e0-1-") and bytes(data[place.offset : place.offset + 44]) == copy[:44]
    assert _whole(local) == []
    # sealing goes on without it
    assert _force(local).segments == 3
    local.check([row for row in rows if row != rows[1]])


def test_the_sealer_sets_a_damaged_record_aside_by_itself(local, caplog):
    rows = local.add_episode("e0", steps=320)
    place = local.ledger.places(rows)[rows[3]]
    path = local.place.journal / f"{place.journal:08d}.journal"
    path.write_bytes(path.read_bytes()[: place.offset + 50])
    assert _force(local).segments == 3
    assert "e0/3" in caplog.text
    assert [entry.id[:5] for entry, _ in _aside(local)] == ["e0-3-"]
    local.check(rows[:3])
    assert set(local.store.read(rows).damaged) == {rows[3]}


def test_a_journal_file_that_is_gone_waits_for_a_person(local, caplog):
    rows = local.add_episode("e0", steps=160)
    path = local.place.journal / "00000001.journal"
    path.rename(path.with_suffix(".away"))
    assert _force(local).segments == 0
    assert "file 1, which is gone" in caplog.text
    assert [finding.row for finding in _whole(local)] == rows
    # somebody brings it back
    path.with_suffix(".away").rename(path)
    assert _force(local).segments == 2
    local.check()


def test_metadata_is_checked_and_can_be_written_again(buffer):
    import zarr

    buffer.add_episode("e0", steps=300)
    _force(buffer)
    key, group = f"{SPEC.hash}/records/zarr.json", f"{SPEC.hash}/zarr.json"
    described = buffer.store.objects.get(key)
    buffer.store.objects.put(key, described.replace(b"uint8", b"int16"))
    buffer.store.objects.delete(group)
    findings = _whole(buffer)
    assert [finding.damage for finding in findings] == [True, True]
    assert key in findings[1].text + findings[0].text
    buffer.check()
    list(upkeep.verify(buffer.store, repair=True))
    assert _whole(buffer) == []
    opened = zarr.open_group(as_zarr(buffer.store.objects), path=SPEC.hash, mode="r")
    place = buffer.ledger.places([1])[1]
    first = place.shard * SHARD_BYTES + place.offset
    record = bytes(opened["records"][first : first + place.bytes])
    assert hashlib.sha256(record).hexdigest() == place.sha256


def test_orphans_are_named(local):
    local.add_episode("e0", steps=160)
    local.store.objects.put("stray/object", b"x")
    (finding,) = _whole(local)
    assert not finding.damage and "stray/object" in finding.text


# --- prune, drop and compact ------------------------------------------------------------------------------------------


def _ids(ledger):
    return {row.id for row in ledger.episodes(limit=1000) if not row.pruned_ns}


def _policy_only(steps):
    return [0] * steps


@pytest.fixture
def filled(local, monkeypatch):
    """Episodes of four days, and others of the first one."""

    def on_day(day, name, **options):
        # only the ledger's clock on the wall: how old something is must not depend on when the machine was started
        monkeypatch.setattr(ledger_commit, "time", SimpleNamespace(time_ns=lambda: day * DAY))
        local.add_episode(name, steps=160, **options)

    policy = {"actor": _policy_only(160)}
    for n in range(4):
        on_day(n + 1, f"policy{n}", **policy)
    on_day(1, "demo", source="demonstration")
    on_day(1, "helped", actor=[0] * 80 + [1] * 80)
    on_day(1, "running", finished=False, **policy)
    return local


def test_what_is_too_old_is_forgotten_but_never_what_people_did(filled):
    everything = _ids(filled.ledger)
    retention = Retention(max_age_s=2.5 * 24 * 3600)
    would = upkeep.prune(filled.ledger, retention, 5 * DAY, dry_run=True)
    assert (would.episodes, would.segments) == (3, 6) and _ids(filled.ledger) == everything
    assert upkeep.prune(filled.ledger, retention, 5 * DAY) == would
    assert _ids(filled.ledger) == everything - {"policy0", "policy1", "running"}
    assert upkeep.prune(filled.ledger, retention, 5 * DAY).episodes == 0
    nothing_kept = Retention(max_age_s=2.5 * 24 * 3600, keep_human=False, keep_demonstrations=False)
    upkeep.prune(filled.ledger, nothing_kept, 5 * DAY)
    assert _ids(filled.ledger) == {"policy2", "policy3"}


def test_the_oldest_go_until_the_rest_fits(filled):
    size = {row.id: row.bytes for row in filled.ledger.episodes(limit=100)}
    everything = set(size)
    budget = sum(size.values()) - size["policy0"] - 1
    pruned = upkeep.prune(filled.ledger, Retention(max_bytes=budget), 5 * DAY)
    assert pruned.bytes == size["policy0"] + size["policy1"]
    assert _ids(filled.ledger) == everything - {"policy0", "policy1"}
    upkeep.prune(filled.ledger, Retention(max_bytes=0), 5 * DAY)
    assert _ids(filled.ledger) == {"demo", "helped"}


def test_outcomes_decide_and_an_episode_that_runs_stays(filled):
    everything = _ids(filled.ledger)
    assert upkeep.prune(filled.ledger, Retention(drop_outcomes=("failure",)), 5 * DAY).episodes == 0
    upkeep.prune(filled.ledger, Retention(max_bytes=0, keep_outcomes=("success",)), DAY + 10**9)
    assert _ids(filled.ledger) == everything
    upkeep.prune(filled.ledger, Retention(drop_outcomes=("success",)), 5 * DAY)
    assert _ids(filled.ledger) == {"demo", "helped", "running"}


def test_the_room_of_forgotten_episodes_comes_back(buffer, monkeypatch):
    # four episodes fill a shard
    for module in (shard_writer, compact):
        monkeypatch.setattr(module, "SHARD_BYTES", 600_000)
    kept = []
    for n in range(6):
        rows = buffer.add_episode(f"e{n}", OTHER, steps=1300, segment_steps=325)
        kept += rows if n % 3 == 2 else []
    _force(buffer)
    assert len(buffer.ledger.shards()) == 2
    buffer.ledger.prune([f"e{n}" for n in range(6) if n % 3 != 2], 9)
    before = sum(1 for key in buffer.store.objects.list() if "/c/" in key)
    done = upkeep.compact(buffer.store, 3000)
    assert (done.read_shards, done.written_shards) == (2, 1) and done.freed_bytes > 0
    assert sum(1 for key in buffer.store.objects.list() if "/c/" in key) < before
    assert [shard.live_steps for shard in buffer.ledger.shards()] == [2600]
    buffer.check(kept)
    assert _whole(buffer) == []
    # it is as small as it gets
    again = upkeep.compact(buffer.store, 3000)
    assert (again.read_shards, again.written_shards, again.freed_bytes) == (0, 0, 0)
    buffer.ledger.prune(["e2", "e5"], 9)
    assert upkeep.drop_dead(buffer.store) == 1
    assert buffer.ledger.shards() == ()
    assert [key for key in buffer.store.objects.list() if "/c/" in key] == []


def test_small_shards_are_written_together(local):
    for n in range(5):
        local.add_episode(f"e{n}", OTHER, steps=400)
        _force(local)
    assert len(local.ledger.shards()) == 5
    done = upkeep.compact(local.store, 3000)
    assert (done.read_shards, done.written_shards) == (5, 1)
    local.check()
    (shard,) = local.ledger.shards()
    assert (shard.live_steps, shard.live_bytes) == (2000, shard.record_bytes)
    again = upkeep.compact(local.store, 3000)
    assert (again.read_shards, again.written_shards) == (0, 0)


def test_damage_is_not_copied_when_shards_are_rewritten(local, caplog):
    rows = []
    for n in range(3):
        rows += local.add_episode(f"e{n}", OTHER, steps=400)
        _force(local)
    key = _key(local, OTHER)
    good = local.store.objects.get(key)
    local.store.objects.put(key, good[:-3])
    upkeep.compact(local.store, 3000)
    assert "is damaged" in caplog.text
    hit = set(local.store.read(rows).damaged)
    assert hit and hit <= set(rows[10:])
    local.check([row for row in rows if row not in hit])
    # the old bytes are still there: with them comes the segment
    local.store.objects.put(key, good)
    local.check()
    upkeep.compact(local.store, 3000)
    local.check()


def test_upkeep_waits_for_nobody_for_ever(local):
    local.add_episode("e0", steps=160, actor=_policy_only(160))
    other, store = local.place.open_writer()
    with local.ledger.exclusive(wait_s=0):
        for call in (
            lambda: upkeep.prune(other, Retention(max_bytes=0), time.time_ns(), wait_s=0.05),
            lambda: upkeep.compact(store, 1, wait_s=0.05),
            lambda: upkeep.drop_dead(store, wait_s=0.05),
        ):
            with pytest.raises(StorageError):
                call()
    other.close()
