import contextlib
import hashlib
import os
import shutil
import signal
import sqlite3
import threading
from pathlib import Path

import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance import format1, migrate
from cloud_learner.buffer.maintenance import maintenance as upkeep
from cloud_learner.buffer.store.shard import canonical
from cloud_learner.buffer.synthetic import fake_spec, same_segment
from wire.errors import StorageError

FIXTURE = Path(__file__).parent.parent / "format1"
SPEC = fake_spec(2, size=8)


@pytest.fixture
def place(tmp_path):
    data = tmp_path / "data"
    shutil.copytree(FIXTURE, data)
    return BufferLocation(data)


def _old():
    """Id, path and segment of every row of the fixture."""
    with contextlib.closing(sqlite3.connect(FIXTURE / "ledger.sqlite")) as connection:
        rows = connection.execute("SELECT id, path FROM segments ORDER BY row").fetchall()
    return [(name, path, format1.decode_segment((FIXTURE / "segments" / path).read_bytes())) for name, path in rows]


def _table(path, name):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT * FROM {name} ORDER BY rowid").fetchall()


def _check(place, without=()):
    """Everything of the fixture is there, once, and nothing else."""
    ledger, store = place.open_reader()
    old = [entry for entry in _old() if entry[0] not in without]
    rows = ledger.segments_after(0)
    assert [row.id for row in rows] == [name for name, _, _ in old]
    found = store.read([row.row for row in rows], verify=True)
    assert found.damaged == {}
    for row, (_, _, segment) in zip(rows, old, strict=True):
        assert same_segment(found.segments[row.row], canonical(segment, SPEC))
    times = {name: (received, committed) for _, name, *_, received, committed in _table(_kept(place), "segments")}
    assert {row.id: (row.received_ns, row.committed_ns) for row in rows} == {row.id: times[row.id] for row in rows}
    robots = {row.name: row for row in ledger.robots()}
    assert set(robots) == {"r1", "r2", "trainer"}
    assert robots["r1"].clock_offset_ns == -123456789 and robots["trainer"].spec_hash is None
    assert [row.offset_ns for row in ledger.clock_offsets("r1")] == [-123456789]
    assert (robots["r2"].clock, robots["r2"].first_seen_ns, robots["r2"].last_seen_ns) == ("clock-2", 7, 7)
    assert [row.version.number for row in ledger.versions()] == [1, 2]
    assert [row.path for row in ledger.versions()] == ["1.safetensors", "2.safetensors"]
    (evaluation,) = ledger.evaluations()
    assert evaluation.success == {"drawer-open": 0.5} and evaluation.wall_ns == 1700000000
    assert [(row.robot, row.version, row.announced_ns, row.applied_ns) for row in ledger.applied()] == [
        ("r1", 1, 10, 20)
    ]
    assert [(row.time_ns, row.robot, row.kind, row.detail) for row in ledger.events()] == [
        (30, "r1", "estop", "by web")
    ]
    episodes = {row.id: row for row in ledger.episodes()}
    if not without:
        for name, robot, _, task, _, source, _, outcome, steps, human, interventions in _table(
            _kept(place), "episodes"
        ):
            row = episodes[name]
            assert (row.robot, row.task, row.source, row.outcome) == (robot, task, source, outcome)
            assert (row.steps, row.human_steps, row.interventions) == (steps, human, interventions)
    assert not any(finding.damage for finding in upkeep.verify(store, ledger))
    ledger.close()
    assert not (place.data / "segments").exists() and not (place.data / "ledger.new.sqlite").exists()
    assert format1.ledger_format(_kept(place)) == "1"


def _kept(place):
    return place.data / "ledger.format1.sqlite"


def test_everything_comes_over_to_the_last_bit(place):
    said = []
    ledger, _ = place.open_writer(said.append)
    ledger.close()
    assert [version.newest_segment for version in [row.version for row in ledger.versions()]] == [3, 6]
    ledger.close()
    _check(place)
    assert any("8 of 8 segments, 0 of them damaged" in line for line in said)
    # a second time there is nothing to do
    said.clear()
    place.open_writer(said.append)[0].close()
    assert said == []
    _check(place)


def test_a_reader_of_the_first_form_is_told_what_to_do(place):
    before = sorted(path.name for path in place.data.iterdir())
    with pytest.raises(StorageError, match=r"vla-fleet gateway"):
        place.open_reader()
    assert sorted(path.name for path in place.data.iterdir()) == before


def test_a_damaged_segment_is_set_aside_and_named_and_the_rest_comes_over(place):
    (second, path, _), (sixth, gone, _) = _old()[1], _old()[5]
    file = place.data / "segments" / path
    bad = bytearray(file.read_bytes())
    bad[500] ^= 1
    file.write_bytes(bad)
    (place.data / "segments" / gone).unlink()
    said = []
    place.open_writer(said.append)[0].close()
    _check(place, without={second, sixth})
    assert any(f"segment {second} is damaged" in line for line in said)
    assert any(f"segment {sixth} is damaged" in line and "is gone" in line for line in said)
    assert any("2 of them damaged" in line for line in said)
    kept = {file.name: file.read_bytes() for file in (place.data / "quarantine").iterdir()}
    name = path.replace("/", "-")
    assert kept[name] == bytes(bad) and b"sha256" in kept[name + ".txt"]
    assert set(kept) == {name, name + ".txt", gone.replace("/", "-") + ".txt"}
    # a version that could have seen old rows 1 to 6 has seen new rows 1 to 4
    ledger, _ = place.open_reader()
    assert [row.version.newest_segment for row in ledger.versions()] == [2, 4]
    ledger.close()


def test_what_the_old_writer_left_in_its_wal_comes_over(place, tmp_path):
    old = place.data / "ledger.sqlite"
    child = os.fork()
    if child == 0:
        connection = sqlite3.connect(old)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("INSERT INTO applied VALUES ('r2', 2, 70, 80)")
        connection.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (place.data / "ledger.sqlite-wal").stat().st_size > 0
    place.open_writer()[0].close()
    ledger, _ = place.open_reader()
    assert [(row.robot, row.version) for row in ledger.applied()] == [("r1", 1), ("r2", 2)]
    ledger.close()


def test_a_ledger_that_is_in_use_is_not_swapped(place):
    user = sqlite3.connect(place.data / "ledger.sqlite")
    user.execute("PRAGMA journal_mode=WAL")
    user.execute("SELECT count(*) FROM segments").fetchone()
    with pytest.raises(StorageError, match="another process"):
        place.open_writer()
    assert format1.ledger_format(place.data / "ledger.sqlite") == "1"
    user.close()
    place.open_writer()[0].close()
    _check(place)


def _die_at(at):
    """Have this process die right before, or right after, a call that changes the disk; returns how to count them."""
    count, lock = [0], threading.Lock()

    def step():
        with lock:  # objects are put by several threads
            count[0] += 1
            here = count[0] == at
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(name, module=os):
        real = getattr(module, name)

        def call(*args, **options):
            step()
            # a killed process loses nothing that it wrote, flushed or not
            result = None if "sync" in name else real(*args, **options)
            step()
            return result

        setattr(module, name, call)

    for name in ("fdatasync", "fsync", "replace", "link", "unlink", "ftruncate"):
        watch(name)
    watch("rmtree", shutil)
    for name in ("commit_segment", "commit_shard", "add_event", "commit_version"):
        watch(name, migrate.Ledger)
    return lambda: count[0]


def _in_a_child(place, at):
    """The status of a child that dies at a call, and how many calls there were if it came to its end."""
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            calls = _die_at(at)
            place.open_writer(lambda line: None)[0].close()
            os.write(said, str(calls()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(said)
    with open(heard) as file:
        counted = file.read()
    return os.waitpid(child, 0)[1], int(counted or 0)


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_and_nothing_is_lost_or_doubled(place, tmp_path):
    damaged, path, _ = _old()[3]
    (place.data / "segments" / path).write_bytes(b"torn")
    pristine = tmp_path / "pristine"
    shutil.copytree(place.data, pristine)
    status, total = _in_a_child(place, 0)
    assert status == 0 and total > 60
    _check(place, without={damaged})
    # Threads settle how many calls there are: a run may end a few before the one counted here.
    for at in range(1, total * 9 // 10, max(1, total // 12)):
        shutil.rmtree(place.data)
        shutil.copytree(pristine, place.data)
        status, _ = _in_a_child(place, at)
        assert os.WIFSIGNALED(status)
        # and once more on the way, if there is as much left to do
        status, _ = _in_a_child(place, max(1, at // 2))
        assert os.WIFSIGNALED(status) or status == 0
        place.open_writer()[0].close()
        _check(place, without={damaged})
        aside = (place.data / "quarantine" / path.replace("/", "-")).read_bytes()
        assert hashlib.sha256(aside).digest() == hashlib.sha256(b"torn").digest()
