"""A fleet's data directory that all tests here read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.recipes import fake


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations and two versions of the fake recipe."""
    root, recipe = tmp_path_factory.mktemp("fleet"), fake()
    with DataDirectory(root).prepare(RunIdentity("fake", 0, recipe.spec.data_hash)):
        rehearsal = InProcessFleet(root, recipe, robots=0)
        while (newest := rehearsal.ledger.newest_version()) is None or newest.version.number < 2:
            rehearsal.turn(40, 1.0)
        rehearsal.close()
    return root
