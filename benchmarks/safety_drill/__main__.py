"""Millions of control periods in which everything goes wrong, and every command held against what was known.

    python -m benchmarks.safety_drill [--ticks N] [--resume FILE] [--quick] [--write]

The loop, chunk schedulers, host, limits and stops are the shipped ones, with three kinds of action dimensions, in one
process on a clock that the drill moves. Seeded events: late, lost, doubled, wild and wrong chunks, failed and invalid
readings, still cameras, jumping clocks, refused and late commands, stalls, restarts of control and uplink, takeovers,
bursts of commands, vanished operators, stops, releases and starts in any order, old ids among them, and live speed
limits of two people.

The auditor (`plant`) sees each command that reaches the motors, and time passing. Half of the robots have limits of
velocity and acceleration; the other half have none, so that nothing hides a jump of a plan. `mutations` takes each
guard out: the drill must see it.

What becomes of a seed is the same in every run of one commit, so a run may be interrupted: with `--resume FILE` it goes
on after the seeds that the file has.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.common.machine import commit
from benchmarks.common.table import Goal, Result, run
from benchmarks.safety_drill.bench import STRATEGIES, Bench, quiet
from benchmarks.safety_drill.mutations import MUTATIONS
from benchmarks.safety_drill.progress import Progress

TICKS, QUICK_TICKS = 10_000_000, 140_000
_STRETCH = 5_000
"""ticks of one robot"""
_MUTATION_TICKS = 200_000
"""in which a missing guard has to be seen"""


def drill(seed: int, ticks: int) -> dict[str, Any]:
    """What came of one robot."""
    quiet()
    bench = Bench(seed)
    for _ in range(ticks):
        bench.step()
    plant = bench.plant
    return {
        "strategy": bench.strategy,
        "limited": plant.limited,
        "ticks": bench.ticks,
        "writes": plant.writes,
        "modes": bench.modes,
        "violations": dict(plant.violations),
        "examples": {what: f"seed {seed}, {text}" for what, text in plant.examples.items()},
    }


def mutate(name: str, ticks: int = _MUTATION_TICKS) -> dict[str, Any]:
    """How soon the drill sees that a guard is missing."""
    quiet()
    done = 0
    with MUTATIONS[name]():
        for seed in range(ticks // _STRETCH):
            bench = Bench(seed)
            for _ in range(_STRETCH):
                bench.step()
                done += 1
                if bench.plant.violations:
                    return {"without it": name, "seen after ticks": done, "as": ", ".join(bench.plant.violations)}
    return {"without it": name, "seen after ticks": None, "as": ""}


def measure(quick: bool, ticks: int = 0, resume: Path | None = None) -> Result:
    ticks = ticks or (QUICK_TICKS if quick else TICKS)
    progress = Progress(resume, commit())
    seeds = range(-(-ticks // _STRETCH))
    work: dict[str, tuple[Callable[..., dict[str, Any]], Any, int]]
    work = {f"seed {seed}": (drill, seed, _STRETCH) for seed in seeds}
    work |= {f"without {name}": (mutate, name, _MUTATION_TICKS) for name in MUTATIONS}
    begun_s, drilled, cores = time.monotonic(), 0, os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        left = {piece: call for piece, call in work.items() if piece not in progress.done}
        asked = {pool.submit(do, what, most): piece for piece, (do, what, most) in left.items()}
        try:
            for future in as_completed(asked):
                progress.add(asked[future], one := future.result())
                drilled += one.get("ticks", 0)
                if one.get("ticks") and drilled % 100_000 < _STRETCH:
                    rate = drilled / (time.monotonic() - begun_s) / cores
                    sys.stderr.write(f"{drilled:,} ticks more, {rate:,.0f} a second and core\n")
        finally:
            # An interruption does not wait for all that was to come.
            pool.shutdown(cancel_futures=True)
    rows: dict[tuple[str, bool], Counter[str]] = {}
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    done = 0
    for one in (progress.done[f"seed {seed}"] for seed in seeds):
        done += one["ticks"]
        row = rows.setdefault((one["strategy"], one["limited"]), Counter())
        row.update({"ticks": one["ticks"], "commands": one["writes"], **one["modes"]})
        row["violations"] += sum(one["violations"].values())
        found.update(one["violations"])
        for what, text in one["examples"].items():
            examples.setdefault(what, text)
    mutations = [progress.done[f"without {name}"] for name in MUTATIONS]
    shares = ("policy", "human", "hold", "estop", "reset")
    table = [
        {
            "strategy": strategy,
            "limits": "velocity, acceleration" if limited else "none but bounds and workspace",
            "ticks": row["ticks"],
            "commands": row["commands"],
            **{f"{mode} %": 100 * row[mode] / row["ticks"] for mode in shares},
            "violations": row["violations"],
        }
        for strategy in STRATEGIES
        for limited in (False, True)
        for row in [rows.get((strategy, limited), Counter())]
        if row
    ]
    unseen = [one["without it"] for one in mutations if one["seen after ticks"] is None]
    goals = [
        Goal("violations", sum(found.values()), "0", not found),
        Goal("ticks", done, f"at least {ticks:,}", done >= ticks),
        Goal("guards whose absence is not seen", len(unseen), "0", not unseen),
    ]
    notes = [f"{what}: {count} times, first {examples[what]}" for what, count in found.most_common()]
    notes += [f"Not seen: {name}." for name in unseen]
    return Result("Safety drill", table, goals, notes, more={"Without a guard": mutations})


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ticks", type=int, default=0, help="control periods, all robots together")
    parser.add_argument("--resume", type=Path, help="keep in this file what is done, and go on after what it has")
    known, rest = parser.parse_known_args()
    return run("safety_drill", lambda quick: measure(quick, known.ticks, known.resume), rest)


if __name__ == "__main__":
    sys.exit(main())
