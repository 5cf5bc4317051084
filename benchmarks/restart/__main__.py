"""How soon a fleet works: from `vla-fleet up` to robots that move, and from kill -9 to working again.

    python -m benchmarks.restart [--before DIR] [--drill] [--recipe pixels|state] [--quick] [--json FILE] [--write]

Each kind of process is killed beside three robots at work. `--before DIR` measures another checkout the same way in the
same run. `--drill` kills 30 processes at random in three minutes of a ten-minute main job and tells what it learned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.cpu import Others
from benchmarks.common.machine import commit
from benchmarks.common.table import Goal, Result, end_in_order, require_simulation, run
from benchmarks.restart.job import FleetUnderTest, NotWithinError, working
from benchmarks.restart.kinds import KINDS, Kind

HERE = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0
_CALM_S = 3.0
"""between robots that work again and the next kill"""
GOAL_S = 2.0
_SOON = ("trainer", "inference", "control")
"""kinds with that goal"""
DRILL_KILLS, DRILL_S, DRILL_MINUTES = 30, 180.0, 10.0
DRILL_SUCCESS = 0.75


def measure(quick: bool, before: Path | None, recipe: str, drill: bool) -> Result:
    """Starts of both checkouts in turn, kills in one and in the other, then the drill."""
    robots, times = (1, 1) if quick else (3, 3)
    others = Others()
    commits = f"Commit {commit()}" + (f", before {commit(before)}." if before else ".")
    roots = [HERE] if before is None else [HERE, before.resolve()]
    # The first of all waits for the disk: the median is of a warm one.
    starts: list[list[dict[str, float]]] = [[] for _ in roots]
    for _ in range(times):
        for root, found in zip(roots, starts, strict=True):
            found.append(_start(root, recipe, robots))
    each = [
        {name: float(np.median([one[name] for one in found])) for name in found[0]}
        | _fleet(root, recipe, robots, times)
        for root, found in zip(roots, starts, strict=True)
    ]
    now, then = each[0], each[1] if before is not None else None
    rows = []
    for name, value in now.items():
        row: dict[str, Any] = {"": name}
        if then is not None:
            row["before"] = then[name]
        rows.append({**row, "now": value})
    goals = [
        Goal(f"{kind}, s", now[f"{kind}, s"], f"at most {GOAL_S:.0f}", now[f"{kind}, s"] <= GOAL_S) for kind in _SOON
    ]
    if then is not None:
        first = now[_FIRST] / then[_FIRST]
        goals.append(Goal(f"{_FIRST}, now to before", first, "at most 0.5", first <= 0.5))
    result = Result("From kill -9 to working again", rows, goals)
    result.notes += [
        f"Recipe `{recipe}`, {robots} robot(s): medians of {times} start(s) on new data and of {times} kill(s) of each "
        "kind of process.",
        "Working means: " + "; ".join(f"{kind.name}: {kind.means}" for kind in KINDS) + ".",
        "Memory is the proportional set size of all processes, shared pages counted once.",
        "`up` on new data: recording demonstrations and pretraining included, each commit as long as its recipe says.",
        commits,
        others.note(),
    ]
    if drill:
        _drill(recipe, quick, result)
    return result


_FIRST = "`up`, new data, to the first robot at work, s"


def _start(root: Path, recipe: str, robots: int) -> dict[str, float]:
    """Seconds that `up` needs on new data, by what for."""
    with (
        _directory() as place,
        FleetUnderTest(root, place / "data", "--recipe", recipe, "--robots", str(robots), log=place / "up.log") as job,
    ):
        job.wait("the page", lambda now: True, TIMEOUT_S)
        page_s = time.monotonic() - job.begun_s
        job.wait("a first robot at work", lambda now: working(now, 1), TIMEOUT_S)
        first_s = time.monotonic() - job.begun_s
    sys.stderr.write(f"up of {root.name}: the page {page_s:.1f} s, a robot {first_s:.1f} s\n")
    return {"`up`, new data, to the page, s": page_s, _FIRST: first_s}


def _fleet(root: Path, recipe: str, robots: int, times: int) -> dict[str, float]:
    """What one checkout needs once it works, by what is measured."""
    found: dict[str, float] = {}
    with _directory() as place:
        data = place / "data"
        options = ("--recipe", recipe, "--robots", str(robots))
        with FleetUnderTest(root, data, *options, log=place / "first.log") as job:
            job.wait("all robots at work", lambda now: working(now, robots), TIMEOUT_S)
            found["memory of all processes, MiB"] = job.memory_mib()
            for kind in KINDS:
                found[f"{kind.name}, s"] = float(np.median([_kill(job, kind, robots) for _ in range(times)]))
        with FleetUnderTest(root, data, *options, log=place / "again.log") as job:
            job.wait("a robot at work again", lambda now: working(now, 1), TIMEOUT_S)
            found["`up`, data there, to the first robot at work, s"] = time.monotonic() - job.begun_s
    return found


def _kill(job: FleetUnderTest, kind: Kind, robots: int) -> float:
    """Seconds from kill -9 of one process of a kind until it works again."""
    job.wait(f"all robots at work before the {kind.name} is killed", lambda now: working(now, robots), TIMEOUT_S)
    time.sleep(_CALM_S)
    before, pid = job.snapshot(), job.pid(*kind.words)
    if before is None or not pid:
        raise NotWithinError(f"there is no {kind.name} to kill.")
    works = kind.works(job, pid, before)
    os.kill(pid, signal.SIGKILL)
    took_s = job.wait(f"the {kind.name} works again", works, TIMEOUT_S)
    sys.stderr.write(f"{kind.name}: {took_s:.2f} s\n")
    return took_s


def _drill(recipe: str, quick: bool, result: Result) -> None:
    """Random kills within a main job; adds what came of it to `result`."""
    kills, seconds, minutes = (3, 12.0, 0.5) if quick else (DRILL_KILLS, DRILL_S, DRILL_MINUTES)
    draw, killed = random.Random(0), []
    with _directory() as place:
        report = place / "report.json"
        options = ("--recipe", recipe, "--robots", "1" if quick else "3", "--minutes", str(minutes))
        with FleetUnderTest(HERE, place / "data", *options, "--report", str(report), log=place / "drill.log") as job:
            job.wait("a robot at work", lambda now: working(now, 1), TIMEOUT_S)
            for _ in range(kills):
                time.sleep(seconds / kills)
                pid, words = draw.choice([one for one in job.processes().items() if one[1][0] != "up"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(" ".join(words[:2]) if words[0] == "edge-part" else words[0])
            status = job.process.wait(60 * minutes + 1200.0)
        if status != 0:
            raise NotWithinError(f"`up` ended with {status}: {(place / 'drill.log').read_text()[-1500:]}")
        after = json.loads(report.read_text())
    success, lost = after["success_after"], after["steps_lost"] + after["steps_duplicated"]
    keys = ("success_before", "success_after", "gradient_steps", "steps_recorded", "steps_lost", "steps_duplicated")
    counted = ", ".join(f"{killed.count(name)} {name}" for name in sorted(set(killed)))
    result.more[f"{len(killed)} kills at random in {seconds:.0f} s of {minutes:g} minutes"] = [
        {k: after[k] for k in keys}
    ]
    result.notes.append(f"Killed at random: {counted}.")
    result.goals.append(Goal("drill: steps lost or doubled", lost, "0", lost == 0))
    if not quick:
        result.goals.append(
            Goal("drill: success at the end", success, f"at least {DRILL_SUCCESS}", success >= DRILL_SUCCESS)
        )


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vla-fleet-restart-") as directory:
        yield Path(directory)


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation("fastapi")
    end_in_order()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--drill", action="store_true")
    parser.add_argument("--recipe", choices=("pixels", "state"), default="state")
    own, others = parser.parse_known_args(arguments)
    return run("restart", lambda quick: measure(quick, own.before, own.recipe, own.drill), others)


if __name__ == "__main__":
    sys.exit(main())
