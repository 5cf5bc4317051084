"""What a control tick costs on a robot's computer, process by process, and beside another checkout of this program.

    python -m benchmarks.edge_cost [--before DIR] [--seconds S] [--quick] [--json FILE] [--write]

A fleet of the recipe `pixels` runs as a user would start it: gateway, trainer, and robots with their drivers, control,
inference and uplink. Once the robots act, the processor time of each of their processes is counted, all threads of it,
and divided by the control ticks of the same time. With `--before DIR` the program in DIR runs too, in turn with this
one. What a real robot would not pay is taken off the driver's process: the simulated physics and the scripted operator,
which are timed where they are called, and the drawing, which is all that its other threads do. The processes also count
how often each new picture is copied on its way, and how many bytes that moves.
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

from benchmarks.common.machine import commit
from benchmarks.common.table import Goal, Result, end_in_order, require_simulation, run
from benchmarks.edge_cost import counting
from fleet.launch.backend import free_port

PARTS = ("robot", "control", "inference", "uplink")
SIMULATED = ("physics", "drawing", "operator")
ROBOTS = 2
_HERE = Path(__file__).resolve().parents[2]
_READY_S = 300.0
_EPISODES = 4
"""of each robot before anything is counted: one of each task, whose scene is made and prepared for drawing only once"""
_GOALS = {"control": 0.4, "driver without physics and drawing": 0.4, "uplink": 0.5}
"""processor time of a tick, as a share of what it was before"""
_COPIED = {
    "driver: into shared memory": ("robot", ("board", "ring")),
    "control: out of it": ("control", ("reader",)),
    "control: into the ring of frames": ("control", ("ring",)),
    "control: into the durable line to the uplink": ("control", ("send",)),
    "uplink: out of that line": ("uplink", ("recv",)),
}
"""what is reported of a picture: who copies it, and how that is counted (`benchmarks.edge_cost.counting`)"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a robot's computer pays."""

    parts: dict[str, float]
    """microseconds of processor time per control tick, by process"""
    simulated: dict[str, float]
    """physics, drawing and operator, part of what `robot` takes"""
    copies: dict[str, tuple[float, float]]
    """by what is reported: copies and bytes per new picture"""

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


def fleet_cost(checkout: Path, seconds: float, port: int) -> Cost:
    """Of a fleet of the program in `checkout`, mean of its robots."""
    with tempfile.TemporaryDirectory(prefix="edge-cost-") as data:
        log = Path(data) / "up.log"
        command = [sys.executable, "-m", "fleet.cli", "up", "--recipe", "pixels", "--robots", str(ROBOTS)]
        command += ["--headless", "--port", "0", "--web-port", str(port), "--data", f"{data}/run", "--seed", "0"]
        counters = Path(data) / "counters"
        counting.install(counters)
        environment = os.environ | {"PYTHONPATH": f"{counters}:{checkout}", counting.PLACE: str(counters)}
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
    costs = []
    for name, now in after.items():
        if name not in before or before[name].pids != now.pids or now.ticks <= before[name].ticks:
            raise RuntimeError(
                f"{name} of {checkout} did not run through the measurement; its logs are gone, try again."
            )
        costs.append(cost(before[name], now))
    return mean(costs)


@dataclass(frozen=True, slots=True)
class CostSample:
    """What one robot has used up to a moment."""

    pids: dict[str, int]
    """by part"""
    spent_s: dict[str, float]
    """by part, and what is simulated"""
    counted: dict[str, dict[str, float]]
    """by part: `counting.read`"""
    ticks: int


def cost(before: CostSample, now: CostSample) -> Cost:
    """What a robot used between two moments."""
    spent_us = {
        what: 1e6 * (now.spent_s[what] - before.spent_s[what]) / (now.ticks - before.ticks) for what in now.spent_s
    }

    def counted(part: str, *fields: str) -> float:
        return sum(now.counted[part][field] - before.counted[part][field] for field in fields)

    pictures = max(1.0, counted("robot", counting.PICTURES))
    copies = {}
    for what, (part, names) in _COPIED.items():
        calls, size = (counted(part, *(f"{name} {unit}" for name in names)) for unit in ("calls", "bytes"))
        copies[what] = calls / pictures, size / pictures
    return Cost({part: spent_us[part] for part in PARTS}, {what: spent_us[what] for what in SIMULATED}, copies)


def mean(costs: list[Cost]) -> Cost:
    """Of robots, or of runs."""
    first = costs[0]
    copies = {what: np.mean([cost.copies[what] for cost in costs], axis=0).tolist() for what in first.copies}
    return Cost(
        {part: float(np.mean([cost.parts[part] for cost in costs])) for part in first.parts},
        {what: float(np.mean([cost.simulated[what] for cost in costs])) for what in first.simulated},
        {what: (calls, size) for what, (calls, size) in copies.items()},
    )


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


def _sample(data: Path, port: int) -> dict[str, CostSample]:
    """By robot."""
    found = {}
    for card in _cards(port):
        pids = {part: holder(data / "run" / "edges" / card["name"] / f"{part}.lock") for part in PARTS}
        spent = {part: cpu_s(pid) for part, pid in pids.items()}
        counted = {part: counting.read(data / "counters", pid) for part, pid in pids.items()}
        spent |= {what: counted["robot"][what] for what in counting.TIMED}
        spent["drawing"] = cpu_s(pids["robot"], main=False)
        found[card["name"]] = CostSample(pids, spent, counted, card["ticks"])
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
    commits = {name: commit(path) for name, path in checkouts.items()}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            found[name].append(fleet_cost(checkout, seconds, free_port(0, "127.0.0.1")))
    means = {name: mean(costs) for name, costs in found.items()}
    columns = {name: each.rows() for name, each in means.items()}
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
        "Copies: calls in the running processes that move a picture, or the larger one for people, and its bytes; the "
        "page is closed. Not counted: what drawing, encoding and packing for the line to the uplink move.",
        f"Commits: {', before '.join(commits[name] for name in ('now', 'before') if name in commits)}.",
    ]
    more = {"Copies and bytes moved for each new picture": copy_rows(means)}
    return Result("What a control tick costs on a robot's computer", rows, goals, notes, more)


def copy_rows(costs: dict[str, Cost]) -> list[dict[str, Any]]:
    """The table of copies, by column; what nobody does any more stays in it."""
    rows: list[dict[str, Any]] = []
    for what in [*_COPIED, "all"]:
        row: dict[str, Any] = {"per new picture": what}
        for name, each in costs.items():
            many = each.copies.values() if what == "all" else [each.copies[what]]
            row[f"{name} (copies)"] = sum(calls for calls, _ in many)
            row[f"{name} (bytes)"] = round(sum(size for _, size in many))
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation("fastapi")
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
