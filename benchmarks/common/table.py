"""The form all benchmarks share: a table for people, JSON for programs, goals that hold or do not.

    python -m benchmarks.NAME [--quick] [--json FILE] [--write]

The JSON holds `machine`, `calibration_ms`, `command`, `rows`, `more` (rows by title, of further tables), `goals` (each
`name`, `value`, `target`, `holds`) and `notes`. `--write` puts the tables into docs/results/NAME.md, with the command
that made them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import calibration_ms, label

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure this project set itself."""

    name: str
    value: float
    target: str
    holds: bool


@dataclass(slots=True)
class Result:
    """What a benchmark measured."""

    title: str
    rows: list[dict[str, Any]]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """further tables, by title"""


def require(*modules: str, extra: str) -> None:
    """End before anything is measured when a module that the benchmark needs is not installed."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"this benchmark needs {', '.join(missing)}: pip install -e '.[{extra}]'")


def require_simulation(*more: str) -> None:
    """`require` what trains in simulated scenes, and the modules `more`: of a whole fleet `fastapi` as well."""
    require("torch", "cv2", "metaworld", *more, extra="learner,sim,web")


def end_in_order() -> None:
    """Whoever ends the benchmark, by SIGTERM or Ctrl-C, ends what it started: both raise, so that it is cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # a shell has those it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interval(values: list[float]) -> str:
    """Mean and the lowest and highest of a few seeds."""
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def run(name: str, measure: Callable[[bool], Result], arguments: list[str] | None = None) -> int:
    """Parse the options, measure, print, and write what was asked for. 1 when a goal does not hold.

    name: of the module below `benchmarks`, such as `buffer.scale`, whose table is `buffer_scale.md`
    """
    table = RESULTS / f"{name.replace('.', '_')}.md"
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="a small run that shows the benchmark works")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--write", action="store_true", help=f"update docs/results/{table.name}")
    options = parser.parse_args(arguments)
    result = measure(options.quick)
    command = f"python -m benchmarks.{name}" + (" --quick" if options.quick else "")
    text = render(result, command)
    sys.stdout.write(text)
    if options.json is not None:
        document = {
            "machine": label(),
            "calibration_ms": round(calibration_ms(), 1),
            "command": command,
            "rows": result.rows,
            "more": result.more,
            "goals": [{"name": g.name, "value": g.value, "target": g.target, "holds": g.holds} for g in result.goals],
            "notes": result.notes,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        table.write_text(text)
    return 0 if all(goal.holds for goal in result.goals) else 1


def render(result: Result, command: str) -> str:
    """The result as Markdown."""
    lines = [f"# {result.title}", "", f"`{command}` on {label()}.", "", *_table(result.rows)]
    for title, rows in result.more.items():
        lines += ["", f"## {title}", "", *_table(rows)]
    if result.goals:
        lines += ["", "| goal | value | target | holds |", "| --- | --- | --- | --- |"]
        lines += [f"| {g.name} | {_cell(g.value)} | {g.target} | {'yes' if g.holds else 'no'} |" for g in result.goals]
    if result.notes:
        lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)
