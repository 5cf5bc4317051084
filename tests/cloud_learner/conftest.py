"""What the tests of the learner share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests import postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """One server for the whole test run; tests that need it are skipped where there is none."""
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(postgres.server())
        except postgres.UnavailableError as error:
            pytest.skip(f"no PostgreSQL: {error}")
        yield server


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """URL of an empty database."""
    with postgres_server.database() as url:
        yield url
