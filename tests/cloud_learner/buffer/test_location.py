"""Whether somebody has stored something at a place, and what is said when nobody can tell."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger import notes, tables
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.location import BufferLocation
from wire.errors import FormatError, NothingStoredError, StorageError


@pytest.fixture
def location(tmp_path: Path, ledger_place: str) -> BufferLocation:
    return BufferLocation(tmp_path, ledger_place if "://" in ledger_place else "")


def test_it_is_there_once_a_writer_was(location: BufferLocation) -> None:
    assert not location.exists()
    with pytest.raises(NothingStoredError, match="start the gateway"):
        location.open_reader()
    Ledger.open(location.ledger_location).close()
    assert location.exists()


def test_another_format_is_not_nothing(location: BufferLocation) -> None:
    with contextlib.closing(Ledger.open(location.ledger_location)) as ledger, ledger.writing() as connection:
        notes.write_meta(connection, "format", "99")
    with pytest.raises(FormatError, match=f"has format 99, this vla-fleet reads format {tables.FORMAT}: install"):
        location.exists()


def test_a_database_that_cannot_be_reached_is_not_nothing(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with socket.socket() as free:
        # bound and not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        location = BufferLocation(tmp_path, f"postgresql://fleet@127.0.0.1:{free.getsockname()[1]}/fleet")
        with pytest.raises(StorageError, match="refused"):
            location.exists()
