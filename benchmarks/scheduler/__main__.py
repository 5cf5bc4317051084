"""A thousand robots that fail and return, ten thousand jobs: how much of their time is put to use, and how fast.

The robots are simulated (`benchmarks.scheduler.simulator`); what decides sees greetings, reports and stored episodes as
a gateway does. All arms meet the same robots, jobs and failures.

- `scheduler`: this project's.
- `FIFO, first fit`: a free robot goes to the oldest job that it fits; a job keeps its robots until it is done.
- `static ranks`: a job is placed when it is submitted, on the robots with the least work so far; it waits for just
  these, and stops when one of them fails, to go on where it was when all are back. (RLinf places by rank once, and its
  job ends with the first failed worker.)

The scheduler runs on several seeds, and the other arms on the first: a figure's spread is over the seeds.

All are measured against a bound that knows every arrival and failure beforehand (`benchmarks.scheduler.bound`, which
says why it is one). Decisions are timed in the thread's own processor time, so that what else the machine does is not
counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks.common.table import Goal, Result, run
from benchmarks.scheduler.arms import FirstFit, StaticRanks
from benchmarks.scheduler.audit import Audit, Books, Timed
from benchmarks.scheduler.bound import clairvoyant_s, overtaken_s
from benchmarks.scheduler.simulator import SECOND, Scenario, Scheduled, SchedulerInterface, Simulator, available_ns
from benchmarks.scheduler.world import MEAN_DOWN_S, MEAN_UP_S, REPORT_S, SILENT, WorldSize, scenario
from hal.resource.health import HealthConfig
from hal.resource.lease import Priority
from hal.scheduler.records import SchedulerConfig
from hal.scheduler.scheduler import Scheduler
from wire.messages.fleet import JobKind

FULL = WorldSize(1000, 10_000, 0.5, 0.97, 0.5, (0, 1, 2))
QUICK = WorldSize(120, 700, 0.5, 0.97, 0.5, (0,))

HEALTH = HealthConfig(late_after_s=REPORT_S * 1.5)
"""robots report every two seconds: a thousand of them for hours"""

RANKS = tuple(int(Priority[kind]) for kind in JobKind)
LONGEST_WAIT_MIN = overtaken_s(min(RANKS), max(RANKS), SchedulerConfig()) / 60
"""after which nothing that comes or is served later is before a job of the lowest priority (docs/scheduling.md); in a
fleet with less work than it can do it should have its robot by then"""


def measure(quick: bool) -> Result:
    """Every arm on its seeds."""
    return compare(QUICK if quick else FULL)


def compare(size: WorldSize) -> Result:
    """The scheduler on all seeds, the others on those that are compared."""
    rows, details = [], []
    shares: dict[str, list[float]] = {}
    worst: dict[str, float] = {"double": 0, "unfinished": 0, "p99": 0.0, "max": 0.0, "wait": 0.0}
    for seed in size.seeds:
        world = scenario(size, seed)
        end_ns = round(size.hours * 3600) * SECOND
        bound_s = clairvoyant_s(world, end_ns)
        there_s = sum(available_ns(robot, 0, end_ns) / robot.speed for robot in world.robots) / SECOND
        sys.stderr.write(f"seed {seed}: at most {bound_s / there_s:.3f} of the robots' time can be used\n")
        for name in ARMS if seed in size.compared else (OURS,):
            make = ARMS[name]
            found = _one(size, world, end_ns, make)
            shares.setdefault(name, []).append(found["done_s"] / bound_s)
            sys.stderr.write(f"{name}, seed {seed}: {found['done_s'] / bound_s:.3f} of the bound, {found}\n")
            rows.append(
                {
                    "arm": name,
                    "seed": seed,
                    "work done, over the clairvoyant bound": found["done_s"] / bound_s,
                    "over all robots' time": found["done_s"] / there_s,
                    "jobs done when the last one came": found["done_then"],
                    "jobs never done": found["unfinished"],
                    "all done after, min": found["last_min"],
                    "wait for a robot, min: median": found["wait"][0],
                    "p99": found["wait"][1],
                    "longest": found["wait"][2],
                    "median of teleoperation": found["kinds"]["teleoperation"],
                    "of evaluation": found["kinds"]["evaluation"],
                    "of rollout": found["kinds"]["rollout"],
                }
            )
            if name == OURS:
                details.append(
                    {
                        "seed": seed,
                        "decisions": found["calls"],
                        "p50, ms": found["p50"],
                        "p99, ms": found["p99"],
                        "longest, ms": found["max"],
                        "leases": found["leases"],
                        "looks at all leases": found["looks"],
                        "robots leased twice": found["double"],
                        "outages met": sum(len(robot.outages) for robot in world.robots),
                    }
                )
                worst = {key: max(worst[key], found[key]) for key in ("double", "unfinished", "p99", "max")} | {
                    "wait": max(worst["wait"], found["wait"][2])
                }
    least = min(shares[OURS])
    return Result(
        "A thousand robots and ten thousand jobs",
        rows,
        [
            Goal("work done over the clairvoyant bound, lowest", least, ">= 0.95", least >= 0.95),
            Goal(
                "longest wait for a robot, min",
                worst["wait"],
                f"<= {LONGEST_WAIT_MIN:g}",
                worst["wait"] <= LONGEST_WAIT_MIN,
            ),
            Goal("jobs never done", worst["unfinished"], "0", worst["unfinished"] == 0),
            Goal("robots leased twice", worst["double"], "0", worst["double"] == 0),
            Goal("p99 of a decision, ms", worst["p99"], "< 10", worst["p99"] < 10),
            Goal("longest decision, ms", worst["max"], "< 10", worst["max"] < 10),
        ],
        [
            f"{size.robots} robots of {len({r.capabilities for r in world.robots})} kinds, {size.jobs} jobs in "
            f"{size.hours:g} h (half of them in three bursts of a minute), work for {size.load:.0%} of the time in "
            f"which robots are well; one fails after {MEAN_UP_S / 60:g} min on average, for {MEAN_DOWN_S / 60:g} min; "
            f"{SILENT:.0%} of the failures are silence, the others trouble that it reports.",
            "The bound is the largest flow of work from the intervals in which it comes to the robots that fit, in the "
            "times in which they are well; the module's docstring says why no scheduler can do more. Episodes that run "
            "when the last job comes do not count as work done.",
            "A wait is from the submission of a job to the first episode of it. FIFO keeps robots as busy, whoever "
            "waits: it knows no priorities, and takes no robot from a job that can wait.",
            f"The longest wait is to be at most the {LONGEST_WAIT_MIN:g} min after which nothing that comes or is "
            "served later is before a job of the lowest priority: (30 - 10) x 30 s of ageing and 30 s of head start.",
            "A decision is the answer to a new job, a stored episode or a turn, which follows each of them, in the "
            "thread's processor time, garbage collection left out.",
        ],
        {
            "Decisions and leases of the scheduler": details,
            "The scheduler over its seeds": [
                {"figure": figure, "mean": float(np.mean(values)), "lowest": min(values), "highest": max(values)}
                for figure, values in _over_seeds(rows, details)
            ],
        },
    )


def _over_seeds(rows: list[dict[str, Any]], details: list[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    ours = [row for row in rows if row["arm"] == OURS]
    for figure in ("work done, over the clairvoyant bound", "wait for a robot, min: median", "p99", "longest"):
        yield figure if "wait" in figure or "work" in figure else f"{figure} wait, min", [row[figure] for row in ours]
    for figure in ("p99, ms", "longest, ms"):
        yield f"decision: {figure}", [row[figure] for row in details]


OURS = "scheduler"


def _ours() -> tuple[SchedulerInterface, Audit, Books]:
    audit = Audit()
    scheduler = Scheduler(audit, health=HEALTH)
    return Scheduled(scheduler), audit, Books(scheduler, audit, 5 * SECOND)


ARMS: dict[str, Callable[[], tuple[SchedulerInterface, Audit | None, Books | None]]] = {
    OURS: _ours,
    "FIFO, first fit": lambda: (FirstFit(HEALTH), None, None),
    "static ranks": lambda: (StaticRanks(HEALTH), None, None),
}


def _one(
    size: WorldSize,
    world: Scenario,
    end_ns: int,
    make: Callable[[], tuple[SchedulerInterface, Audit | None, Books | None]],
) -> dict[str, Any]:
    """One arm in one world."""
    decider, audit, books = make()
    timed = Timed(decider)
    simulator = Simulator(world, timed if books is not None else decider, books)
    gc.collect()
    gc.disable()
    try:
        simulator.run(end_ns)
        speeds = {robot.name: robot.speed for robot in world.robots}
        counted = [one for one in simulator.finished if one.counted_for]
        done_s = sum(one.took_ns / speeds[one.robot] for one in counted) / SECOND
        done_then = _done_jobs(world, counted)
        last_ns = end_ns + round(size.drain_hours * 3600) * SECOND
        while simulator.now_ns < last_ns and _done_jobs(world, simulator.finished) < len(world.arrivals):
            simulator.run(min(last_ns, simulator.now_ns + 60 * SECOND))
    finally:
        gc.enable()
    waits = [
        (simulator.first_begun_ns.get(one.request.id, simulator.now_ns) - one.time_ns) / SECOND / 60
        for one in world.arrivals
    ]
    kinds = {
        kind: float(
            np.median([wait for wait, one in zip(waits, world.arrivals, strict=True) if one.request.kind == kind])
        )
        for kind in JobKind
    }
    took_s = timed.took_s or [0.0]
    p50, p99, longest = 1e3 * np.array([*np.percentile(took_s, (50, 99)), max(took_s)])
    return {
        "done_s": done_s,
        "done_then": done_then,
        "unfinished": len(world.arrivals) - _done_jobs(world, simulator.finished),
        "last_min": simulator.now_ns / SECOND / 60,
        "wait": [float(value) for value in (*np.percentile(waits, (50, 99)), max(waits))],
        "kinds": kinds,
        "calls": len(timed.took_s),
        "p50": float(p50),
        "p99": float(p99),
        "max": float(longest),
        "leases": audit.given if audit else 0,
        "double": audit.double + (books.wrong if books else 0) if audit else 0,
        "looks": books.looks if books else 0,
    }


def _done_jobs(world: Scenario, finished: Iterable[Any]) -> int:
    """Jobs of which every episode was counted."""
    counts: dict[str, int] = {}
    for one in finished:
        if one.counted_for:
            counts[one.counted_for] = counts.get(one.counted_for, 0) + 1
    wanted = {
        one.request.id: one.request.episodes * (len(one.request.tasks) if one.request.kind == "evaluation" else 1)
        for one in world.arrivals
    }
    over = [job for job, count in counts.items() if count > wanted[job]]
    if over:
        raise AssertionError(f"more episodes than asked for were counted for {over[:3]}")
    return sum(counts.get(job, 0) == count for job, count in wanted.items())


if __name__ == "__main__":
    sys.exit(run("scheduler", measure))
