"""What robots say they recorded, held against what is stored."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.robot import read_notes
from cloud_learner.buffer.maintenance.maintenance import verify
from fleet.config.data_directory import DataDirectory

_ROWS = 1000


@dataclass
class StoredTruth:
    """Of all robots; nothing but the first three should be above 0."""

    recorded_steps: int = 0
    """made durable on a robot"""
    acknowledged_segments: int = 0
    stored_steps: int = 0
    lost_steps: int = 0
    """of segments that were acknowledged, or have left the spool, and are not stored"""
    doubled_steps: int = 0
    """ticks of an episode that are stored more than once"""
    spooled_segments: int = 0
    """that still wait on a robot"""
    set_aside: int = 0
    """quarantined"""
    damaged: int = 0
    unlike: list[str] = field(default_factory=list)
    """robots whose own count is not the ledger's"""


def compare(place: Path, data: DataDirectory, robots: Sequence[str]) -> StoredTruth:
    """Once the fleet has ended; reads all that is stored."""
    found = StoredTruth()
    ledger, store = data.buffer.open_reader()
    try:
        stored: dict[str, int] = {}
        ticks: set[tuple[str, int]] = set()
        row = 0
        while rows := ledger.segments_after(row, _ROWS):
            row = rows[-1].row
            held = store.read([one.row for one in rows]).segments
            for one in rows:
                segment = held[one.row]
                stored[one.id] = stored.get(one.id, 0) + segment.steps
                mine = {(one.episode, segment.first_tick + n) for n in range(segment.steps)}
                found.doubled_steps += len(mine & ticks)
                ticks |= mine
                found.stored_steps += segment.steps
        found.set_aside = len(store.quarantine.entries())
        found.damaged = sum(finding.damage for finding in verify(store))
        totals = ledger.robot_totals()
        for name in robots:
            notes = read_notes(place, name)
            steps = {note.id: note.steps for note in notes if note.steps}
            acknowledged = {note.id for note in notes if not note.steps}
            found.acknowledged_segments += len(acknowledged)
            waiting, recorded_steps = _spooled(data.edge(name) / "spool.sqlite")
            found.spooled_segments += len(waiting)
            found.recorded_steps += recorded_steps
            found.lost_steps += sum(steps.get(one, 1) for one in (acknowledged | set(steps)) - waiting - set(stored))
            if not waiting and totals[name].steps != recorded_steps:
                found.unlike.append(f"{name}: {recorded_steps} recorded, {totals[name].steps} stored")
    finally:
        store.close()
        ledger.close()
    return found


def _spooled(path: Path) -> tuple[set[str], int]:
    """Ids that wait in a spool, and the steps ever put into it: read from the file, whatever the fleet makes of it."""
    with contextlib.closing(sqlite3.connect(path)) as spool:
        waiting = {f"{episode}/{number}" for episode, number in spool.execute("SELECT episode, number FROM segments")}
        steps = spool.execute("SELECT value FROM counters WHERE name = 'steps'").fetchone()
    return waiting, steps[0] if steps else 0
