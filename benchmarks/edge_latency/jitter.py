"""How late control periods begin, with and without what a process with deadlines asks of the system.

    python -m benchmarks.edge_latency.jitter [--quick] [--write]

The shipped `Rate` at 100 Hz in a process of its own, whose ticks make garbage that only a collector finds, beside
200,000 objects that live on. `as it was` lets Python collect when it likes and asks for real-time priority; `real time`
is `become_real_time` with garbage collected in the slack, as control and host do it; `ordinary` asks for nothing.
Idle, and beside two processes that use the processor and the memory. The arms run in turns, several times: what else
the machine did falls on all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.table import Goal, Result, run

HZ = 100
ARMS = ("ordinary", "as it was", "real time")
_QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
_ROOT = Path(__file__).resolve().parents[2]
_LOAD = "import numpy as np\na = np.zeros(2**23)\nwhile True: a += 1"


def ticks(arm: str, count: int) -> list[float]:
    """Seconds that each period began late, measured in this process, which is changed for good."""
    import gc
    import time

    from hal.driver_host.priority import real_time
    from hal.driver_host.real_time import GarbageCollector, become_real_time
    from robot_edge.control.rate import Rate
    from wire.clock import MonotonicClock

    lives: list[dict[str, Any]] = [{"number": number} for number in range(200_000)]
    garbage = GarbageCollector()
    if arm == "real time":
        garbage.start()
        become_real_time()
    elif arm == "as it was":
        gc.collect()
        gc.freeze()
        real_time()
    rate, late = Rate(10**9 // HZ, MonotonicClock()), []
    for _ in range(count):
        late.append(rate.wait() / 1e9)
        for _ in range(300):
            cycle: dict[str, Any] = {}
            cycle["itself"] = cycle
        if arm == "real time":
            garbage.poll((rate.next_ns - time.monotonic_ns()) / 1e9)
    assert len(lives) == 200_000
    return late[HZ // 2 :]


def measure(quick: bool) -> Result:
    seconds, rounds = (2, 1) if quick else (10, 4)
    found: dict[tuple[bool, str], list[float]] = {}
    for _ in range(rounds):
        for busy in (False, True):
            for arm in ARMS:
                load = [subprocess.Popen([sys.executable, "-c", _LOAD]) for _ in range(2 if busy else 0)]
                try:
                    code = f"print(json.dumps(ticks({arm!r}, {seconds * HZ})))"
                    code = f"import json\nfrom benchmarks.edge_latency.jitter import ticks\n{code}"
                    argv = [sys.executable, "-c", code]
                    said = subprocess.run(argv, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
                finally:
                    for process in load:
                        process.kill()
                        process.wait()
                found.setdefault((busy, arm), []).extend(json.loads(said.stdout))
    rows = [
        {
            "beside": "two busy processes" if busy else "nothing of ours",
            "control is": arm,
            "periods": len(late),
            **{f"late {name}, ms": 1e3 * float(np.quantile(late, at)) for name, at in _QUANTILES.items()},
        }
        for (busy, arm), late in found.items()
    ]
    worst = {arm: float(np.quantile(found[True, arm], 0.99)) for arm in ARMS}
    goal = worst["real time"] / worst["ordinary"]
    note = f"load of the machine at the end, with whatever else ran on it: {os.getloadavg()[1]:.1f}"
    return Result("Jitter", rows, [Goal("late p99 beside a load, to ordinary", goal, "below 1", goal < 1)], [note])


if __name__ == "__main__":
    sys.exit(run("edge_latency.jitter", measure))
