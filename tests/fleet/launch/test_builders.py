"""How a trainer waits for the buffer that it is to read."""

from __future__ import annotations

import logging

import pytest

from fleet.launch.builders import wait_for_buffer
from wire.errors import (
    ConfigError,
    CorruptDataError,
    FormatError,
    InvalidDataError,
    NothingStoredError,
    NotWritableError,
    StorageError,
)


def test_it_says_why_it_waits_once_and_goes_on_when_the_buffer_is_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    results = [NothingStoredError("no ledger."), *[StorageError("connection refused.")] * 2, "the trainer"]

    def make() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    assert wait_for_buffer(make, lambda: False) == "the trainer"
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the buffer: no ledger.",
        "waiting for the buffer: connection refused.",
        "waiting for the buffer: that is over.",
    ]


@pytest.mark.parametrize("kind", [FormatError, CorruptDataError, NotWritableError, ConfigError, InvalidDataError])
def test_what_waiting_does_not_mend_ends_it(kind: type[Exception]) -> None:
    def make() -> None:
        raise kind("it stays so.")

    with pytest.raises(kind, match="it stays so"):
        wait_for_buffer(make, lambda: False)


def test_it_ends_when_it_is_asked_to() -> None:
    asked = iter([False, True])

    def make() -> None:
        raise StorageError("away.")

    assert wait_for_buffer(make, lambda: next(asked)) is None
