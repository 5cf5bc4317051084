"""How much is kept of what was measured of a robot's clocks: which clock it has, and by how much it jumps, is the
robot's own word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cloud_learner.buffer.ledger.rows import OffsetRow

CLOCKS = 64
"""of one robot, the newest: boots of its computer"""
BASES = 4
"""of each, the newest: boots of the gateway's computer, or gateways"""
MEASUREMENTS = 512
"""of one robot; at least the first and the last one of each of these clocks and bases"""
_LEAST_STEP_NS = 100_000


def kept(rows: Sequence[OffsetRow], clocks: int = CLOCKS) -> list[OffsetRow]:
    """Of all of a robot, in the order in which they were measured, those that are to be kept, of so many `clocks`.

    When there are too many, those go by which the offset changed least: what a time is carried by is then as wrong as
    two that follow each other differ.
    """
    bases: dict[str, list[int]] = {}
    for row in reversed(rows):
        if row.clock in bases or len(bases) < clocks:
            of_clock = bases.setdefault(row.clock, [])
            if row.base_ns not in of_clock and len(of_clock) < BASES:
                of_clock.append(row.base_ns)
    left = [row for row in rows if row.base_ns in bases.get(row.clock, ())]
    step_ns = _LEAST_STEP_NS
    while len(left) > MEASUREMENTS and step_ns < 2**64:
        left, step_ns = _thinned(left, step_ns), 2 * step_ns
    return left


def by_clock(rows: Iterable[OffsetRow]) -> list[list[OffsetRow]]:
    """The measurements of each clock by each base, in the order in which they were made."""
    clocks: dict[tuple[str, int], list[OffsetRow]] = {}
    for row in rows:
        clocks.setdefault((row.clock, row.base_ns), []).append(row)
    return list(clocks.values())


def _thinned(rows: Sequence[OffsetRow], step_ns: int) -> list[OffsetRow]:
    """Without those that differ by less than `step_ns` from the one of the same clock that is kept before them."""
    left = []
    for clock in by_clock(rows):
        last = clock[0]
        left.append(last)
        for row in clock[1:-1]:
            if abs(row.offset_ns - last.offset_ns) >= step_ns:
                left.append(last := row)
        left += clock[-1:] if len(clock) > 1 else []
    return sorted(left, key=lambda row: row.id)
