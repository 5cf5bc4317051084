"""What a control tick costs on a robot's computer, process by process, and beside another checkout of this program.

    python -m benchmarks.edge_cost [--before DIR] [--seconds S] [--quick] [--json FILE] [--write]

A fleet of the recipe `pixels` runs as a user would start it: gateway, trainer, and robots with their drivers, control,
inference and uplink. Once the robots act, the processor time of each of their processes is counted, all threads of it,
and divided by the control ticks of the same time. With `--before DIR` the program in DIR runs too, in turn with this
one. What a real robot would not pay is taken off the driver's process: the simulated physics and the scripted operator,
which are timed where they are called, and the drawing, which is all that its other threads do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import Goal, Result, end_in_order, run
from fleet.backend import free_port

PARTS = ("robot", "control", "inference", "uplink")
SIMULATED = ("physics", "drawing", "operator")
ROBOTS = 2
_HERE = Path(__file__).resolve().parent.parent
_READY_S = 300.0
_EPISODES = 4
"""of each robot before anything is counted: one of each task, whose scene is made and prepared for drawing only once"""
_GOALS = {"control": 0.4, "driver without physics and drawing": 0.4, "uplink": 0.5}
"""processor time of a tick, as a share of what it was before"""

_COUNTERS = "VLA_FLEET_EDGE_COST"
"""environment variable: the directory where a driver's process counts what is simulated"""

# Python runs it in each process of either checkout. Timed alone, in a loop with warm caches, a step costs half as much.
_COUNTING = f"""
import json, os, time
from hal.drivers import metaworld_expert, metaworld_sim

spent, calls = {{"physics": 0.0, "operator": 0.0}}, 0

def counted(kind, name, what):
    inner = getattr(kind, name)
    def method(self, *values):
        global calls
        begin = time.thread_time()
        try:
            return inner(self, *values)
        finally:
            spent[what] += time.thread_time() - begin
            calls += 1
            if calls % 160 == 0:
                place = os.path.join(os.environ["{_COUNTERS}"], str(os.getpid()))
                with open(place + ".new", "w") as file:
                    json.dump(spent, file)
                os.replace(place + ".new", place)
    setattr(kind, name, method)

counted(metaworld_sim.Simulation, "step", "physics")
counted(metaworld_sim.Simulation, "reset", "physics")
counted(metaworld_expert.MetaWorldExpert, "propose", "operator")
counted(metaworld_expert.MetaWorldExpert, "progress", "operator")
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time per control tick."""

    parts: dict[str, float]
    """by process"""
    simulated: dict[str, float]
    """physics, drawing and operator, part of what `robot` takes"""

    def rows(self) -> dict[str, float]:
        """By what is reported."""
        physics, drawing, operator = (self.simulated[name] for name in ("physics", "drawing", "operator"))
        own = self.parts["robot"] - physics - drawing
        return {
            "driver": self.parts["robot"],
            "of it physics": physics,
            "of it drawing": drawing,
            "driver without physics and drawing": own,
            "and without the scripted operator": own - operator,
            **{part: self.parts[part] for part in PARTS[1:]},
            "a robot's computer, without physics and drawing": sum(self.parts.values()) - physics - drawing,
        }


def fleet_cost(checkout: Path, seconds: float, port: int) -> dict[str, float]:
    """Microseconds per tick by process, mean of the robots of a fleet of the program in `checkout`."""
    with tempfile.TemporaryDirectory(prefix="edge-cost-") as data:
        log = Path(data) / "up.log"
        command = [sys.executable, "-m", "fleet.cli", "up", "--recipe", "pixels", "--robots", str(ROBOTS)]
        command += ["--headless", "--port", "0", "--web-port", str(port), "--data", f"{data}/run", "--seed", "0"]
        counters = Path(data) / "counters"
        counters.mkdir()
        (counters / "sitecustomize.py").write_text(_COUNTING)
        environment = os.environ | {"PYTHONPATH": f"{counters}:{checkout}", _COUNTERS: str(counters)}
        with log.open("wb") as output:
            up = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                _wait_until_acting(up, port, log)
                before = _sample(Path(data), port)
                time.sleep(seconds)
                after = _sample(Path(data), port)
            finally:
                up.send_signal(signal.SIGINT)
                try:
                    up.wait(60)
                except subprocess.TimeoutExpired:
                    up.kill()
    costs: dict[str, list[float]] = {part: [] for part in (*PARTS, *SIMULATED)}
    for name, (pids, spent_s, ticks) in after.items():
        if name not in before or before[name][0] != pids or ticks <= before[name][2]:
            raise RuntimeError(
                f"{name} of {checkout} did not run through the measurement; its logs are gone, try again."
            )
        for part in costs:
            costs[part].append(1e6 * (spent_s[part] - before[name][1][part]) / (ticks - before[name][2]))
    return {part: float(np.mean(each)) for part, each in costs.items()}


def cpu_s(pid: int, main: bool = True) -> float:
    """Processor time that the threads of a process have used so far, with the `main` one or without it."""
    spent = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        # a thread may end meanwhile
        with suppress(OSError):
            if main or int(path.name) != pid:
                spent += int((path / "schedstat").read_text().split()[0])
    return spent / 1e9


def holder(lock: Path) -> int:
    """The process that holds the lock file. Raises `RuntimeError` when none does."""
    inode = str(lock.stat().st_ino) if lock.exists() else ""
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if inode and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
            return int(fields[4])
    raise RuntimeError(f"no process holds {lock}: is that robot's part running?")


def _sample(data: Path, port: int) -> dict[str, tuple[tuple[int, ...], dict[str, float], int]]:
    """By robot: its processes, the seconds each has used, its ticks."""
    cards = _cards(port)
    found = {}
    for card in cards:
        pids = {part: holder(data / "run" / "edges" / card["name"] / f"{part}.lock") for part in PARTS}
        spent = {part: cpu_s(pid) for part, pid in pids.items()}
        spent |= json.loads((data / "counters" / str(pids["robot"])).read_text())
        spent["drawing"] = cpu_s(pids["robot"], main=False)
        found[card["name"]] = tuple(pids.values()), spent, card["ticks"]
    return found


def _wait_until_acting(up: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and up.poll() is None:
        with suppress(OSError):
            cards = [card for card in _cards(port) if card["version"] > 0 and card["episodes"] >= _EPISODES]
            if len(cards) == ROBOTS:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the fleet does not act after {_READY_S:.0f} s: {log.read_text(errors='replace')[-2000:]}")


def _cards(port: int) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/fleet", timeout=5) as answer:
        return list(json.load(answer)["robots"])


def measure(checkouts: dict[str, Path], seconds: float, rounds: int) -> Result:
    """`checkouts` by column, `now` among them: each is run `rounds` times, in turn."""
    found: dict[str, list[Cost]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            parts = fleet_cost(checkout, seconds, free_port("127.0.0.1"))
            found[name].append(Cost({part: parts[part] for part in PARTS}, {what: parts[what] for what in SIMULATED}))
    columns = {
        name: {what: float(np.mean([cost.rows()[what] for cost in costs])) for what in costs[0].rows()}
        for name, costs in found.items()
    }
    rows: list[dict[str, Any]] = []
    for what in columns["now"]:
        row: dict[str, Any] = {"per control tick": what}
        row |= {f"{name} (µs)": column[what] for name, column in columns.items()}
        if "before" in columns:
            row["ratio"] = columns["now"][what] / columns["before"][what]
        rows.append(row)
    goals = []
    if "before" in columns:
        for what, most in _GOALS.items():
            ratio = columns["now"][what] / columns["before"][what]
            goals.append(Goal(f"{what}, now / before", ratio, f"at most {most}", ratio <= most))
    notes = [
        f"{ROBOTS} robots of the recipe `pixels` at 80 Hz with all that belongs to a fleet, {rounds} x {seconds:g} s "
        "once they act; a mean over robots and runs. Physics, drawing and operator: in the running driver.",
        *(f"{name}: {path.name}" for name, path in checkouts.items() if name != "now"),
    ]
    return Result("What a control tick costs on a robot's computer", rows, goals, notes)


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge_cost", add_help=False)
    parser.add_argument("--before", type=Path, help="another checkout of this program, to compare with")
    parser.add_argument("--seconds", type=float, default=0.0, help="to count in each run; default 60, quick 12")
    options, rest = parser.parse_known_args(arguments)
    checkouts = {"before": options.before.resolve()} if options.before else {}
    checkouts["now"] = _HERE

    def measured(quick: bool) -> Result:
        seconds = options.seconds or (12.0 if quick else 60.0)
        return measure(checkouts, seconds, 1 if quick else 2)

    return run("edge_cost", measured, rest)


if __name__ == "__main__":
    sys.exit(main())
