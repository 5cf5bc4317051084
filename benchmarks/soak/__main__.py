"""Everything that can fail does, for ten minutes: is anything lost, and how soon is all as it was?

    python -m benchmarks.soak [--quick] [--minutes M] [--seed N] [--json FILE] [--write]

A gateway on a PostgreSQL and an object store of its own, and whole edges, each behind a TCP proxy, run as real
processes. What fails, when and for whom is drawn by the seed (`faults`). Each robot notes what it made durable and what
was acknowledged (`robot`); the notes are held against the ledger and the stored bytes at the end (`truth`).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, end_in_order, require, run
from benchmarks.soak.delays import TOLERANCE_S, Delay, delays_of, median_s, recovery_s, silence_s
from benchmarks.soak.faults import FaultKind, PlannedFault, begin, plan_faults
from benchmarks.soak.fleet import SoakFleet
from benchmarks.soak.memory import MemoryLog, ProcessGrowth
from benchmarks.soak.robot import read_notes
from benchmarks.soak.services import StorageServices, storage_services
from benchmarks.soak.truth import StoredTruth, compare
from wire.transport.keys import GATEWAY

MINUTES, QUICK_MINUTES = 10.0, 4.0
ROBOTS, QUICK_ROBOTS = 8, 3
_BACK_S, _RECORDING_S = 10.0, 30.0
_GROWTH_MIB = 24.0
_LONG_S = 60.0
"""a process that lived shorter says nothing of growth"""
_USUAL_NS = 15_000_000_000
"""before a fault: what is usual then"""
_LOOP_S = 0.05


@dataclass
class Happened:
    """One fault, in ns of the machine's clock."""

    fault: PlannedFault
    begun_ns: int
    over_ns: int = 0


@dataclass
class Seen:
    """What a soak came to."""

    faults: list[Happened] = field(default_factory=list)
    delays: dict[str, list[Delay]] = field(default_factory=dict)
    truth: StoredTruth = field(default_factory=StoredTruth)
    growth: list[ProcessGrowth] = field(default_factory=list)
    ended_ns: int = 0
    published: int = 0
    restarts: dict[str, int] = field(default_factory=dict)


def soak(
    place: Path,
    plan: tuple[PlannedFault, ...],
    seconds: float,
    robots: int,
    services: StorageServices | None,
    seed: int,
) -> Seen:
    """Run a fleet through `plan`, for `seconds` from when all robots record, and look at what is left of it."""
    seen, memory = Seen(), MemoryLog()
    with SoakFleet(place, robots, services) as fleet:
        fleet.wait_until_all_record()
        begun_s = time.monotonic()
        waiting, current, over = list(plan), None, None
        while (now_s := time.monotonic() - begun_s) < seconds:
            if over is not None and current is not None and now_s >= current.start_s + current.seconds:
                over()
                seen.faults[-1].over_ns, over = time.monotonic_ns(), None
            elif over is None and waiting and now_s >= waiting[0].start_s:
                current = waiting.pop(0)
                seen.faults.append(Happened(current, time.monotonic_ns()))
                over = begin(current, fleet, services, seed)
            fleet.tend()
            if memory.due:
                memory.look(_by_kind(fleet))
            time.sleep(_LOOP_S)
        seen.ended_ns, seen.published, seen.restarts = time.monotonic_ns(), fleet.published, fleet.restarts
        fleet.finish()
        seen.truth = compare(place, fleet.data, fleet.robots)
        seen.delays = {name: delays_of(read_notes(place, name)) for name in fleet.robots}
    seen.growth = memory.growth(_LONG_S)
    return seen


def _by_kind(fleet: SoakFleet) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"gateway": list(fleet.pids(GATEWAY).values())}
    for name in fleet.robots:
        for part, pid in fleet.pids(name).items():
            found.setdefault({"": "edge (supervisor)", "robot": "driver"}.get(part, part), []).append(pid)
    return found


def measure(quick: bool, minutes: float | None, seed: int) -> Result:
    require("fastapi", "psycopg", "moto", "boto3", "torch", "cv2", extra="learner,web,postgres,dev")
    end_in_order()
    minutes = minutes or (QUICK_MINUTES if quick else MINUTES)
    robots = QUICK_ROBOTS if quick else ROBOTS
    others = Others()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        with storage_services(place) as services:
            names = tuple(f"robot-{number}" for number in range(robots))
            plan = plan_faults(60 * minutes, seed, names, tuple(FaultKind))
            seen = soak(place, plan, 60 * minutes, robots, services, seed)
    return table(seen, minutes, robots, seed, others.note())


def table(seen: Seen, minutes: float, robots: int, seed: int, note: str) -> Result:
    """The result of a soak."""
    rows = [_row(seen, number) for number in range(len(seen.faults))]
    worst_s, silent_s = (max(row[key] for row in rows) for key in ("usual again (s)", "recording (s)"))
    grown = max((one.mib for one in seen.growth), default=math.inf)
    truth = seen.truth
    goals = [
        Goal("acknowledged steps lost", truth.lost_steps, "0", not truth.lost_steps),
        Goal("steps stored twice", truth.doubled_steps, "0", not truth.doubled_steps),
        Goal("robots whose own count is not the ledger's", len(truth.unlike), "0", not truth.unlike),
        Goal(
            "segments damaged or set aside", truth.damaged + truth.set_aside, "0", not truth.damaged + truth.set_aside
        ),
        Goal("segments left in a spool", truth.spooled_segments, "0", not truth.spooled_segments),
        Goal("slowest return to usual delays (s)", worst_s, f"at most {_BACK_S:g}", worst_s <= _BACK_S),
        Goal("longest until all robots record (s)", silent_s, f"at most {_RECORDING_S:g}", silent_s <= _RECORDING_S),
        Goal("largest growth of a process (MiB)", grown, f"under {_GROWTH_MIB:g}", grown < _GROWTH_MIB),
    ]
    return Result(
        f"A soak with faults: {robots} robots, {minutes:g} minutes",
        rows,
        goals,
        [
            f"{truth.recorded_steps:,} steps recorded, {truth.stored_steps:,} stored; "
            f"{truth.acknowledged_segments:,} segments acknowledged; {seen.published} versions published; seed {seed}.",
            "Delay: from the recording of a segment's last step until its robot hears that it is stored. Usual again: "
            f"no three successive segments of any robot have a median delay more than {TOLERANCE_S:g} s above the "
            "median before the fault. Recording: until each robot has recorded a segment after the fault, which takes "
            "2 s where nothing failed.",
            f"Started again: {', '.join(f'{name} {count}' for name, count in sorted(seen.restarts.items()))}.",
            *truth.unlike,
            note,
        ],
        {
            "Memory (PSS, the process of each kind that grew most)": [
                {"process": one.kind, "begin (MiB)": one.begin_mib, "end (MiB)": one.end_mib, "growth (MiB)": one.mib}
                for one in seen.growth
            ]
            or [{"process": "none lived long enough"}]
        },
    )


def _row(seen: Seen, number: int) -> dict[str, Any]:
    happened = seen.faults[number]
    later = seen.faults[number + 1 :]
    next_ns = later[0].begun_ns if later else seen.ended_ns
    usual_s = median_s(seen.delays, happened.begun_ns - _USUAL_NS, happened.begun_ns - 1_000_000_000)
    over_ns = happened.over_ns or next_ns
    return {
        "fault": str(happened.fault.kind),
        "for (s)": (over_ns - happened.begun_ns) / 1e9,
        "usual delay before (ms)": 1e3 * usual_s,
        "median delay meanwhile (s)": median_s(seen.delays, happened.begun_ns, over_ns),
        "usual again (s)": max(recovery_s(each, usual_s, over_ns, next_ns) for each in seen.delays.values()),
        "recording (s)": max(silence_s(each, over_ns) for each in seen.delays.values()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--minutes", type=float, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options, others = parser.parse_known_args()
    sys.exit(run("soak", lambda quick: measure(quick, options.minutes, options.seed), others))
