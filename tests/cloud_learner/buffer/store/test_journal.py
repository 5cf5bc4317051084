import errno
import hashlib
import multiprocessing
import os
import random

import pytest

from cloud_learner.buffer.ledger.rows import Journaled
from cloud_learner.buffer.store.journal import Journal
from wire.errors import CorruptDataError, DiskFullError, NotWritableError, StorageError


def append(journal, payload):
    """Where one record lies."""
    (at,) = journal.append_all([payload])
    return at


def _files(root):
    return sorted(path.name for path in root.iterdir())


def test_records_come_back_and_say_where_they_are(tmp_path):
    journal = Journal(tmp_path / "deep" / "journal")
    payloads = [b"", b"one", os.urandom(100_000)]
    at = [append(journal, payload) for payload in payloads]
    assert [record.offset for record in at] == [0, 44, 44 + 44 + 3]
    assert {record.journal for record in at} == {1}
    assert at[1].sha256 == hashlib.sha256(b"one").hexdigest()
    assert [journal.read(record) for record in at] == payloads
    # another process, another day
    assert [Journal(journal.directory).read(record) for record in at] == payloads


def test_a_journal_that_is_only_read_touches_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert journal.numbers() == [] and not journal.is_here()
    with pytest.raises(CorruptDataError, match=r"00000007\.journal is gone"):
        journal.read(Journaled(7, 0, 3, "00" * 32))
    assert list(tmp_path.iterdir()) == []


def test_files_are_full_at_some_size_and_every_opening_begins_one(tmp_path):
    journal = Journal(tmp_path, rotate_bytes=200)
    at = [append(journal, b"x" * 60) for _ in range(5)]
    assert [record.journal for record in at] == [1, 1, 2, 2, 3]
    other = Journal(tmp_path, rotate_bytes=200)
    assert append(other, b"y").journal == 4
    assert append(journal, b"z").journal == 3
    journal.close()
    assert append(journal, b"z").journal == 5


def test_many_records_are_flushed_once_and_lie_in_one_file(tmp_path, monkeypatch):
    journal, flushed, flush = Journal(tmp_path, rotate_bytes=100), [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(1) or flush(descriptor))
    payloads = [b"x" * 60, b"", b"y" * 70]
    at = journal.append_all(payloads)
    assert len(flushed) == 1 and [record.journal for record in at] == [1, 1, 1]
    assert [journal.read(record) for record in at] == payloads
    assert append(journal, b"z").journal == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(DiskFullError):
            journal.append_all(payloads)
    assert (tmp_path / "00000002.journal").stat().st_size == 45


def test_a_torn_tail_is_never_appended_to_and_never_read(tmp_path):
    journal = Journal(tmp_path)
    whole, torn = append(journal, b"whole"), append(journal, b"torn" * 10)
    journal.close()
    path = tmp_path / "00000001.journal"
    os.truncate(path, path.stat().st_size - 1)
    journal = Journal(tmp_path)
    assert append(journal, b"later").journal == 2
    assert journal.read(whole) == b"whole"
    with pytest.raises(CorruptDataError, match=r"00000001\.journal: the record at byte 49"):
        journal.read(torn)


def test_every_changed_byte_of_a_record_is_noticed(tmp_path):
    journal = Journal(tmp_path)
    first, at = append(journal, b"before"), append(journal, b"payload")
    path = tmp_path / "00000001.journal"
    good = path.read_bytes()
    for place in range(at.offset, len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptDataError):
            journal.read(at)
        assert journal.read(first) == b"before"


def test_a_place_that_belongs_to_another_record_is_refused(tmp_path):
    journal = Journal(tmp_path)
    at, other = append(journal, b"payload"), append(journal, b"another")
    with pytest.raises(CorruptDataError):
        journal.read(Journaled(at.journal, at.offset, at.bytes, other.sha256))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EACCES, NotWritableError),
        (errno.EIO, StorageError),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_failing_disk_takes_back_what_it_wrote(tmp_path, monkeypatch, code, kind, call, begun):
    journal = Journal(tmp_path)
    before = [append(journal, b"before")] if begun else []
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}

    def fail(*_args):
        raise OSError(code, os.strerror(code))

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(kind, match=r"journal"):
                append(journal, b"x" * 1000)
        assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == sizes
    at = append(journal, b"after")
    assert journal.read(at) == b"after"
    assert [journal.read(record) for record in before] == [b"before"] * begun


def test_a_write_that_stops_half_way_goes_on(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    at = append(journal, b"a payload of some length")
    assert journal.read(at) == b"a payload of some length"


def test_what_nobody_refers_to_goes_but_never_the_open_file(tmp_path):
    journal = Journal(tmp_path, rotate_bytes=1)
    at = [append(journal, b"x") for _ in range(4)]
    assert journal.remove_unused(lambda: {2}) == 2
    assert _files(tmp_path) == ["00000002.journal", "00000004.journal"]
    assert journal.read(at[3]) == b"x"
    assert journal.remove_unused(lambda: set()) == 1
    assert _files(tmp_path) == ["00000004.journal"]
    journal.close()
    assert journal.remove_unused(lambda: set()) == 1
    # numbers are not used twice while this process lives
    assert append(journal, b"y").journal == 5


def test_a_file_that_another_writer_holds_stays(tmp_path):
    writer, other = Journal(tmp_path), Journal(tmp_path)
    at = append(writer, b"not committed yet")
    assert other.remove_unused(lambda: set()) == 0
    assert writer.read(at) == b"not committed yet"


def test_what_is_completed_while_the_ledger_is_asked_stays(tmp_path):
    journal = Journal(tmp_path, rotate_bytes=1)
    append(journal, b"a")

    def ask():
        append(journal, b"b")  # completes file 1 and begins file 2
        return set()

    assert journal.remove_unused(ask) == 0
    assert _files(tmp_path) == ["00000001.journal", "00000002.journal"]


def _write(directory, seed, ledger):
    journal, chance = Journal(directory, rotate_bytes=1000), random.Random(seed)
    with open(ledger, "a") as commits:
        for _ in range(80):
            at = append(journal, chance.randbytes(chance.randrange(400)))
            # most records are never committed, or forgotten at once
            if chance.random() < 0.2:
                commits.write(f"{at.journal} {at.offset} {at.bytes} {at.sha256}\n")
                commits.flush()


@pytest.mark.slow
def test_two_processes_write_while_a_third_removes_what_no_commit_refers_to(tmp_path):
    ledger, directory = tmp_path / "commits", tmp_path / "journal"
    ledger.touch()

    def committed():
        lines = [line.split() for line in ledger.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [Journaled(int(journal), int(offset), int(size), sha256) for journal, offset, size, sha256 in lines]

    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(directory, seed, ledger)) for seed in range(2)]
    for writer in writers:
        writer.start()
    cleaner, removed = Journal(directory), 0
    while any(writer.is_alive() for writer in writers):
        removed += cleaner.remove_unused(lambda: {at.journal for at in committed()})
    assert [writer.exitcode for writer in writers] == [0, 0]
    removed += cleaner.remove_unused(lambda: {at.journal for at in committed()})
    assert removed > 0
    for at in committed():
        assert len(cleaner.read(at)) == at.bytes
    assert len({(at.journal, at.offset) for at in committed()}) == len(committed()) > 15
    assert set(cleaner.numbers()) == {at.journal for at in committed()}
