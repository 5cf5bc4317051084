"""Who may open a ledger, who waits for whom, and what is said when something is wrong with it."""

import contextlib
import sqlite3
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sqlalchemy as sa

from cloud_learner.buffer.control import summarise_control
from cloud_learner.buffer.ledger import commit as ledger_commit
from cloud_learner.buffer.ledger import engine, notes, tables
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled, Totals
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import ConfigError, CorruptDataError, DiskFullError, InvalidDataError, NotWritableError, StorageError

SPEC = fake_spec()
AT = Journaled(1, 0, 100, "0" * 64)


@pytest.fixture
def ledger(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    yield ledger
    ledger.close()


def _commit(ledger, segment):
    (row,) = ledger.commit_segments([(segment, AT, 10)], 11)
    return row


# --- several at once ------------------------------------------------------------------------------------------------


def test_others_read_while_the_gateway_writes(ledger, ledger_place):
    reader = Ledger.open(ledger_place, read_only=True)
    for number, segment in enumerate(fake_episode(SPEC, "e1", steps=200), start=1):
        _commit(ledger, segment)
        assert reader.totals().segments == number
    with pytest.raises(NotWritableError, match="reading only"):
        reader.add_event(1, "r1", "no")
    with pytest.raises(NotWritableError, match="reading only"), reader.exclusive():
        pass
    # not only this class says no
    with pytest.raises(NotWritableError), reader._explained(), reader._reader.begin() as connection:
        connection.execute(sa.text("DELETE FROM segments"))
    ledger.close()
    # the last writer may have tidied up behind it; readers still come in
    assert Ledger.open(ledger_place, read_only=True).totals().segments == 3
    reader.close()


def test_rows_appear_in_the_order_of_their_numbers(ledger):
    """A reader that has seen row n never finds a smaller one later: who comes second waits for the first to commit."""
    first, second = (fake_episode(SPEC, name, steps=40)[0] for name in ("a", "b"))
    with ledger.writing() as connection:
        (row,) = ledger_commit.commit_segments(connection, ledger.gateway, [(first, AT, 1)], 2)
        late = []
        thread = threading.Thread(target=lambda: late.append(_commit(ledger, second)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert (late, ledger.totals().newest_row) == ([], 0)
    thread.join(30)
    assert late == [row + 1]
    assert [found.id for found in ledger.segments_after(0)] == ["a/0", "b/0"]


def test_many_threads_commit_and_one_follows(ledger):
    episodes = [fake_episode(SPEC, f"e{n}", steps=60, segment_steps=6, seed=n) for n in range(4)]
    failures, seen, after = [], [], 0

    def commit(segments):
        try:
            for segment in segments:
                assert _commit(ledger, segment) is not None
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=commit, args=(segments,)) for segments in episodes]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or after < ledger.totals().newest_row:
        found = ledger.index(after, SPEC.data_hash)
        seen += found.row.tolist()
        after = seen[-1] if seen else 0
    assert failures == []
    assert seen == sorted(seen)
    assert len(seen) == len(set(seen)) == 40
    assert ledger.totals().duplicated_steps == ledger.totals().missing_steps == 0
    assert ledger.totals().interventions == sum(
        summarise_control(np.concatenate([s.actor for s in segments])).takeovers for segments in episodes
    )


def test_a_reader_sees_one_state_however_long_it_looks(ledger):
    _commit(ledger, fake_episode(SPEC, "e1", steps=40)[0])
    with ledger.reading() as connection:
        query = sa.text("SELECT count(*) FROM segments")
        assert connection.scalar(query) == 1
        _commit(ledger, fake_episode(SPEC, "e2", steps=40)[0])
        assert connection.scalar(query) == 1
    assert ledger.totals().segments == 2


def test_two_open_a_new_ledger_at_once(ledger_place):
    opened, failures = [], []

    def open_it():
        try:
            opened.append(Ledger.open(ledger_place))
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert [ledger.totals() for ledger in opened] == [Totals()] * 4
    for ledger in opened:
        ledger.close()


# --- opening --------------------------------------------------------------------------------------------------------


def test_a_ledger_of_another_format_is_refused(ledger, ledger_place):
    with ledger.writing() as connection:
        connection.execute(sa.text("UPDATE meta SET value = '99' WHERE key = 'format'"))
    for read_only in (False, True):
        with pytest.raises(
            StorageError, match=f"has format 99, this vla-fleet reads format {tables.FORMAT}: install the newer"
        ):
            Ledger.open(ledger_place, read_only=read_only)
    with ledger.writing() as connection:
        connection.execute(sa.text("DROP TABLE meta"))
    with pytest.raises(StorageError, match="format unknown"):
        Ledger.open(ledger_place)


def test_there_must_be_something_to_read(ledger_place):
    with pytest.raises(StorageError, match="start the gateway"):
        Ledger.open(ledger_place, read_only=True)


def test_a_commit_is_on_the_device(ledger, ledger_place):
    with ledger.writing() as connection:
        if "://" in ledger_place:
            assert connection.scalar(sa.text("SHOW synchronous_commit")) == "on"
            assert connection.scalar(sa.text("SHOW transaction_isolation")) == "read committed"
            return
        names = ("journal_mode", "synchronous", "foreign_keys")
        pragmas = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names}
        assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_files_that_are_no_ledger_are_named(tmp_path):
    with sqlite3.connect(tmp_path / "other.sqlite") as raw:
        raw.execute("create table t (x)")
    with pytest.raises(StorageError, match="format unknown"):
        Ledger.open(tmp_path / "other.sqlite")
    (tmp_path / "text.sqlite").write_text("this is no database" * 100)
    with pytest.raises(CorruptDataError, match=r"text\.sqlite"):
        Ledger.open(tmp_path / "text.sqlite")
    # directories are made, and any name will do
    path = tmp_path / "name with ? and # and %" / "ledger.sqlite"
    ledger = Ledger.open(path)
    assert ledger.location == str(path)
    ledger.close()
    assert path.exists()
    with contextlib.closing(Ledger.open(f"sqlite:///{tmp_path}/name.sqlite")) as ledger:
        assert ledger.location == str(tmp_path / "name.sqlite")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        Ledger.open(tmp_path / "file" / "ledger.sqlite")


def test_a_full_disk_is_said_and_survived(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.see_robot("r1", SPEC, "clock", 5)
    engine = ledger._engine
    limit = lambda raw, _record: raw.execute("PRAGMA max_page_count=1")  # noqa: E731
    sa.event.listen(engine, "connect", limit)
    engine.dispose()
    with pytest.raises(DiskFullError, match=r"no space left for .*ledger\.sqlite"):
        for index in range(10_000):
            ledger.add_event(index, "r1", "kind", "x" * 1000)
    sa.event.remove(engine, "connect", limit)
    engine.dispose()
    for segment in fake_episode(SPEC, "e1"):
        assert _commit(ledger, segment)
    ledger.close()


# --- PostgreSQL -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_password_is_shown_to_nobody(postgres_url):
    secret = "sesame-4711"
    url = postgres_url.replace("fleet@", f"fleet:{secret}@")
    ledger = Ledger.open(url)
    assert secret not in ledger.location + repr(ledger)
    assert ledger.location.startswith("postgresql://fleet@/")
    with pytest.raises(InvalidDataError, match="out of range") as raised:
        ledger.see_robot("r1", None, "clock", 2**70)
    ledger.close()
    texts = ["".join(traceback.format_exception(raised.value))]
    for wrong in (
        f"postgresql://fleet:{secret}@127.0.0.1:1/x",
        f"postgresql://fleet@127.0.0.1:1/x?password={secret}",
        f"postgresql://fleet:{secret}@127.0.0.1:port/x",
        f"mysql://fleet:{secret}@host/x",
        f"postgresql+other://fleet:{secret}@host/x",
    ):
        with pytest.raises((StorageError, ConfigError)) as raised:
            Ledger.open(wrong)
        texts += ["".join(traceback.format_exception(raised.value)), repr(raised.value)]
    assert secret not in "".join(texts)
    assert "ledger postgresql://fleet@127.0.0.1:1/x: " in texts[1]


@pytest.mark.slow
def test_connections_that_broke_are_replaced(postgres_server, postgres_url):
    ledger = Ledger.open(postgres_url)
    ledger.see_robot("r1", SPEC, "clock", 5)
    segments = fake_episode(SPEC, "e1", steps=200)
    _commit(ledger, segments[0])
    end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'vla-fleet%'"
    postgres_server.execute(end_all)
    assert _commit(ledger, segments[1]) is not None
    # in the middle of a transaction nothing of it is kept
    with pytest.raises(StorageError), ledger.writing() as connection:
        ledger_commit.commit_segments(connection, 0, [(segments[2], AT, 1)], 2)
        postgres_server.execute(end_all)
    assert ledger.totals().segments == 2
    assert _commit(ledger, segments[2]) is not None
    ledger.close()


@pytest.mark.slow
def test_a_text_that_cannot_be_stored_is_invalid_data(postgres_url):
    ledger = Ledger.open(postgres_url)
    ledger.see_robot("r1", SPEC, "clock", 5)
    with pytest.raises(InvalidDataError, match="NUL"):
        _commit(ledger, fake_episode(SPEC, "e1", task="a\0b")[0])
    ledger.close()


@pytest.mark.slow
def test_a_silent_server_is_given_up_and_one_that_is_busy_is_waited_for(postgres_server, postgres_url, monkeypatch):
    monkeypatch.setattr(engine, "_SILENT_S", 0.2)
    # the least that PostgreSQL's clients take
    monkeypatch.setattr(engine, "_PROBE_S", 2)
    monkeypatch.setattr(engine, "_CONNECT_S", 2)
    with contextlib.closing(Ledger.open(postgres_url)) as ledger:
        with ledger.reading() as connection:
            assert connection.scalar(sa.text("SELECT pg_sleep(1)")) is not None, "it answered others meanwhile"
        began = time.monotonic()
        with postgres_server.stopped():
            with pytest.raises(
                StorageError, match=r"ledger postgresql://fleet@/.* takes no connection in 2 s: it may be stopped"
            ):
                ledger.totals()
            assert time.monotonic() - began < 30
        ledger.see_robot("r1", SPEC, "clock", 5)
        # in the middle of a transaction nothing of it is kept
        with pytest.raises(StorageError, match="did not answer"), ledger.writing() as connection:
            notes.write_meta(connection, "a", "b")
            with postgres_server.stopped():
                notes.write_meta(connection, "c", "d")
        with ledger.reading() as connection:
            assert notes.read_meta(connection, "a") == ""
        assert ledger.robot("r1") is not None


def test_what_is_done_together_is_one_transaction_of_one_thread(ledger_place):
    with contextlib.closing(Ledger.open(ledger_place)) as ledger:
        before = ledger.writes
        with ledger.together():
            ledger.see_robot("r1", SPEC, "clock", 5)
            ledger.set_clock_offset("r1", 7, 6)
            assert ledger.robot("r1").clock_offset_ns == 7, "it sees what it wrote"
            with ThreadPoolExecutor(1) as other:
                assert other.submit(ledger.robot, "r1").result() is None, "nobody else does before it ends"
        assert ledger.writes == before + 1
        with pytest.raises(KeyError), ledger.together():
            ledger.add_event(1, "r1", "undone")
            raise KeyError("something else")
        assert ledger.events() == ()
        ledger.add_event(2, "r1", "afterwards")
        assert [event.kind for event in ledger.events()] == ["afterwards"]
