"""How many versions robots are behind while their machine is busy with something else, and how soon they are back.

    python -m benchmarks.update_lag [--quick] [--json FILE] [--write]

The main job, and beside it, for a while, processes that only compute: two for each core, as important as the fleet. Its
page is looked at five times a second. A robot that has just been told of a version is one behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.table import RESULTS, Goal, Result, require_simulation, run
from benchmarks.restart.job import FleetUnderTest

_LOOK_S = 0.2
_HOGS_A_CORE = 2
_ROBOTS = 3


def measure(quick: bool) -> Result:
    """Quiet, busy, quiet again."""
    require_simulation("fastapi")
    seconds = {"quiet": 10.0, "busy": 20.0, "quiet again": 20.0} if quick else {"quiet": 60.0, "busy": 120.0}
    seconds.setdefault("quiet again", 60.0)
    with tempfile.TemporaryDirectory(prefix="update-lag-") as name:
        place, root = Path(name), RESULTS.parents[1]
        recipe = "state" if quick else "pixels"
        words = ("--recipe", recipe, "--robots", str(_ROBOTS))
        with FleetUnderTest(root, place / "data", *words, log=place / "up.log") as fleet:
            fleet.wait("robots act by a version", _all_act, 300.0)
            lags, versions = {}, {}
            for phase, length_s in seconds.items():
                with _hogs() if phase == "busy" else contextlib.nullcontext():
                    lags[phase], versions[phase] = _watch(fleet, length_s)
    rows = [_row(phase, lags[phase], seconds[phase], versions[phase]) for phase in seconds]
    again = lags["quiet again"]
    late_s = max((at_s for at_s, lag in again if lag > 1), default=0.0)
    most = max(lag for _, lag in lags["busy"])
    goals = [
        Goal("versions behind while busy, at most", most, "at most 3", most <= 3),
        Goal("seconds until 1 again", late_s, "at most 10", late_s <= 10),
    ]
    hogs = _HOGS_A_CORE * (os.cpu_count() or 1)
    notes = [f"Recipe `{recipe}`, {_ROBOTS} robots; while it was busy, {hogs} processes computed beside it."]
    return Result("Versions behind on a busy machine", rows, goals, notes)


def _all_act(snapshot: dict[str, Any]) -> bool:
    robots = snapshot["robots"]
    return len(robots) == _ROBOTS and all(robot["version"] > 1 for robot in robots)


def _newest(snapshot: dict[str, Any]) -> int:
    return snapshot["version"]["number"] if isinstance(snapshot["version"], dict) else snapshot["version"]


def _watch(fleet: FleetUnderTest, seconds: float) -> tuple[list[tuple[float, int]], int]:
    """(seconds since the beginning, versions that the last robot was behind) of each look, and versions that came."""
    began_s, found, first, last = time.monotonic(), [], 0, 0
    while (at_s := time.monotonic() - began_s) < seconds:
        if (snapshot := fleet.snapshot()) is not None:
            last = _newest(snapshot)
            first = first or last
            found.append((at_s, max(last - robot["version"] for robot in snapshot["robots"])))
        time.sleep(_LOOK_S)
    return found, last - first


def _row(phase: str, lags: list[tuple[float, int]], seconds: float, versions: int) -> dict[str, Any]:
    values = np.array([lag for _, lag in lags])
    shares = {f"{lag} behind (%)": 100 * float(np.mean(values == lag)) for lag in (0, 1, 2)}
    more = {"3 and more (%)": 100 * float(np.mean(values > 2)), "at most": int(values.max())}
    return {"": phase, "s": seconds, "versions": versions, "looks": len(lags)} | shares | more


@contextlib.contextmanager
def _hogs() -> Iterator[None]:
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(_HOGS_A_CORE * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


if __name__ == "__main__":
    sys.exit(run("update_lag", measure))
