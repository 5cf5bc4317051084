"""A stretch of a flight as a table, for people at a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import numpy as np

from robot_edge.flight_recorder.events import FlightHeader, Gap
from robot_edge.flight_recorder.rows import Row, rows

_NUMBERS = 7
"""action dimensions shown"""


def show(
    path: Path, out: TextIO, first_tick: int | None = None, last_tick: int | None = None, session_id: str = ""
) -> int:
    """Print the ticks of a stretch to `out`, one a line; how many. Raises as `rows` does."""
    header, stretch = rows(path, first_tick, last_tick, session_id)
    count = 0
    for item in stretch:
        if isinstance(item, Gap):
            out.write(f"{item.first:>8}  … {item.last}: not recorded: {item.reason}\n")
        elif isinstance(item, Row):
            if count % 40 == 0:
                out.write(_head(header))
            out.write(_line(item) + "\n")
            count += 1
    return count


def _head(header: FlightHeader) -> str:
    names = " ".join(f"{d.name[:6]:>6}" for d in header.spec.action[:_NUMBERS])
    return f"{'tick':>8} {'late ms':>7} {'mode':<6} {'who':<6} {'chunk':>6} {'delay':>5}  {names}  reason, events\n"


def _line(row: Row) -> str:
    step = row.step
    who = step.actor.value if step is not None else "-"
    chunk = f"{step.chunk_tick}" if step is not None and step.chunk_tick >= 0 else "-"
    delay = f"{step.delay_ticks}" if step is not None and step.delay_ticks >= 0 else "-"
    text = "; ".join(word for word in (row.reason, row.notes) if word)
    return (
        f"{row.tick:>8} {row.late_s * 1e3:>7.2f} {row.mode:<6} {who:<6} {chunk:>6} {delay:>5}"
        f"  {_numbers(row.executed)}  {text}"
    ).rstrip()


def _numbers(action: np.ndarray | None) -> str:
    if action is None:
        return "-"
    return " ".join(f"{value:>6.3g}" for value in action[:_NUMBERS]) + (" …" if len(action) > _NUMBERS else "")
