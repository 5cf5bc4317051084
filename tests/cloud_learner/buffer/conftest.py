"""Where ledgers of tests lie: every test of the ledger runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.buffer.location import BufferLocation
from tests.cloud_learner.buffer.stored import Buffer


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def ledger_place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Path or URL of a ledger that is not there yet."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.sqlite")
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(params=["local", pytest.param("cloud", marks=pytest.mark.slow)])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Buffer]:
    """On this machine's disk, or with its ledger in PostgreSQL and its shards in an object store."""
    urls = {}
    if request.param == "cloud":
        urls = {"ledger": request.getfixturevalue("postgres_url"), "store": request.getfixturevalue("s3")}
    buffer = Buffer(BufferLocation(tmp_path / "data", **urls))
    yield buffer
    buffer.ledger.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Buffer]:
    """On this machine's disk alone."""
    buffer = Buffer(BufferLocation(tmp_path / "data"))
    yield buffer
    buffer.ledger.close()
