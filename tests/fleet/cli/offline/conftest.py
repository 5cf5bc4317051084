"""A fleet's data directory that all tests here read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.recorded_fleet import record_fleet


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_fleet(tmp_path_factory.mktemp("fleet"))
