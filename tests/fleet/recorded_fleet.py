"""A small fleet that ran in this process, as its data directory is afterwards."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.recipes import fake


def record_fleet(root: Path) -> Path:
    """Demonstrations and two versions of the fake recipe; `root`."""
    recipe = fake()
    with DataDirectory(root).prepare(RunIdentity("fake", 0, recipe.spec.data_hash)):
        rehearsal = InProcessFleet(root, recipe, robots=0)
        while (newest := rehearsal.ledger.newest_version()) is None or newest.version.number < 2:
            rehearsal.turn(40, 1.0)
        rehearsal.close()
    return root
