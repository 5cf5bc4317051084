"""How long a stop takes: from the press to the first braking command that reaches the driver.

    python -m benchmarks.stop_latency [--quick] [--json FILE] [--write]

A gateway and the edge of one simulated robot run as real processes on this computer, so one clock times both ends. The
robot sways at 40 Hz; its driver notes each command and the stop that it brakes for. Each way of stopping it is pressed
again and again under each load (`loads`). `vla-fleet stop` is a process that has to start first: that is told apart.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, end_in_order, require, run
from benchmarks.stop_latency.fleet import ROBOT, WAYS, StopFleet
from benchmarks.stop_latency.loads import LOADS, publish

PRESSES, QUICK_PRESSES = 50, 5
WEIGHTS, QUICK_WEIGHTS = 2**30, 2**26
GOAL_MS = 50.0
PROCESS = "vla-fleet stop, with the start of its process"


def measure(quick: bool) -> Result:
    require("fastapi", "websockets", "cv2", "torch", "rclpy", extra="learner,web,ros")
    end_in_order()
    presses, size = (QUICK_PRESSES, QUICK_WEIGHTS) if quick else (PRESSES, WEIGHTS)
    others, rows = Others(), []
    with tempfile.TemporaryDirectory(prefix="stop-latency-") as place, StopFleet(Path(place)) as fleet:
        publish(fleet.data, fleet.version, bytearray(64))
        fleet.wait_until_it_moves()
        with WAYS["page"](fleet) as stop:
            # Not counted: the connection for stops is made a moment after the other.
            fleet.press(stop)
            fleet.free()
        for load, begin in LOADS.items():
            for way, make in WAYS.items():
                with make(fleet) as stop, begin(fleet, size) as before:
                    rows.append(_row(way, load, [_press(fleet, before, stop) for _ in range(presses)]))
                    fleet.free()
        started = [_press(fleet, lambda: None, lambda: _process(fleet)) for _ in range(2 if quick else 10)]
        rows.append(_row(PROCESS, "idle", started))
        fleet.free()
    worst = max(row["p99 (ms)"] for row in rows if row["way"] != PROCESS)
    return Result(
        "From the press of a stop to the first braking command at the driver",
        rows,
        [Goal("p99 of every way under every load (ms)", worst, f"under {GOAL_MS:g}", worst < GOAL_MS)],
        [
            f"Weights: versions of {size / 2**20:.0f} MiB are published and fetched one after the other, "
            f"{fleet.version - 1} of them meanwhile. Full disk: each write of the spool blocks for a second and fails. "
            "Ledger: another process has its lock 1.5 s of 2.",
            others.note(),
        ],
    )


def _press(fleet: StopFleet, before: Any, stop: Any) -> float:
    fleet.free()
    before()
    return fleet.press(stop)


def _process(fleet: StopFleet) -> None:
    words = [sys.executable, "-m", "fleet.cli.entry", "stop", ROBOT, "--data", str(fleet.data.root)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _row(way: str, load: str, took_s: list[float]) -> dict[str, Any]:
    p50, p99 = 1e3 * np.percentile(took_s, [50, 99])
    return {
        "way": way,
        "load": load,
        "presses": len(took_s),
        "p50 (ms)": float(p50),
        "p99 (ms)": float(p99),
        "max (ms)": 1e3 * max(took_s),
    }


if __name__ == "__main__":
    sys.exit(run("stop_latency", measure))
