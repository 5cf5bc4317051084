"""What a control tick costs on a robot's computer, process by process, and beside another checkout of this program.

    python -m benchmarks.edge_cost [--before DIR] [--seconds S] [--quick] [--json FILE] [--write]

A fleet of the recipe `pixels` runs as a user would start it: gateway, trainer, and robots with their drivers, control,
inference and uplink. Once the robots act, the processor time of each of their processes is counted, all threads of it,
and divided by the control ticks of the same time. With `--before DIR` the program in DIR runs too, in turn with this
one. What a real robot would not pay, the simulated physics, the drawing and the scripted operator, is timed alone in
each checkout and taken off the driver's process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
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

from benchmarks.table import Goal, Result, run

PARTS = ("robot", "control", "inference", "uplink")
ROBOTS = 2
_HERE = Path(__file__).resolve().parent.parent
_READY_S = 300.0
_EPISODES = 4
"""of each robot before anything is counted: one of each task, whose scene is made and prepared for drawing only once"""
_GOALS = {"control": 0.4, "driver without physics and drawing": 0.4, "uplink": 0.5}
"""processor time of a tick, as a share of what it was before"""

# Runs in either checkout, so it uses only what both have.
_SIMULATED = """
import json, os, time
import numpy as np
os.environ.setdefault("LP_NUM_THREADS", "1")
from hal.drivers.metaworld import MetaWorldRobot, pixels_config
from hal.drivers.metaworld_camera import InlineCamera
from hal.drivers.metaworld_expert import MetaWorldExpert
from hal.drivers.metaworld_sim import Simulation
from wire.clock import MonotonicClock

config, rng = pixels_config(), np.random.default_rng(0)
spent = {"physics": [], "drawing": [], "operator": []}

def timed(name, call, times):
    begin = time.process_time()
    for _ in range(times):
        call()
    spent[name].append((time.process_time() - begin) / times)

camera = InlineCamera(config.camera, config.image_px, config.preview_px, 1, MonotonicClock())
robot = MetaWorldRobot(config)
robot.connect()
expert = MetaWorldExpert(robot)
for task in config.tasks:
    simulation = Simulation(task)
    simulation.reset(1)
    action = rng.uniform(-1, 1, 4).astype(np.float32)
    timed("physics", lambda: simulation.step(action), TIMES)
    camera.pause()
    camera.start(simulation)
    def draw():
        camera.moved(simulation)
        camera.frame()
    timed("drawing", draw, TIMES // 4)
    robot.reset(task, 1)
    seen = robot.read()
    timed("operator", lambda: (expert.propose(seen), expert.progress()), TIMES)
    camera.pause()
camera.close()
robot.close()
print(json.dumps({name: sum(each) / len(each) for name, each in spent.items()} | {"frames": config.camera_hz / 80.0}))
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
        with log.open("wb") as output:
            up = subprocess.Popen(
                command, cwd=checkout, env=_environment(checkout), stdout=output, stderr=subprocess.STDOUT
            )
            try:
                _wait_until_acting(up, port, log)
                before = _sample(Path(data) / "run", port)
                time.sleep(seconds)
                after = _sample(Path(data) / "run", port)
            finally:
                up.send_signal(signal.SIGINT)
                try:
                    up.wait(60)
                except subprocess.TimeoutExpired:
                    up.kill()
    costs: dict[str, list[float]] = {part: [] for part in PARTS}
    for name, (pids, spent_s, ticks) in after.items():
        if name not in before or before[name][0] != pids or ticks <= before[name][2]:
            raise RuntimeError(
                f"{name} of {checkout} did not run through the measurement; its logs are gone, try again."
            )
        for part in PARTS:
            costs[part].append(1e6 * (spent_s[part] - before[name][1][part]) / (ticks - before[name][2]))
    return {part: float(np.mean(each)) for part, each in costs.items()}


def simulated_cost(checkout: Path, times: int) -> dict[str, float]:
    """Microseconds per tick of physics, drawing and scripted operator of the program in `checkout`, each alone."""
    done = subprocess.run(
        [sys.executable, "-c", _SIMULATED.replace("TIMES", str(times))],
        cwd=checkout,
        env=_environment(checkout),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the simulator of {checkout} cannot be timed: {done.stderr.strip()[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["drawing"] *= found.pop("frames")
    return {name: 1e6 * value for name, value in found.items()}


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far, of those that ended too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with suppress(OSError):
        # To the nanosecond, but only of the threads that live: the coarse sum says if one has ended.
        exact = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
        if abs(exact - ticks) < 0.05 * ticks:
            return exact
    return ticks


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
        pids = {part: holder(data / "edges" / card["name"] / f"{part}.lock") for part in PARTS}
        found[card["name"]] = tuple(pids.values()), {part: cpu_s(pid) for part, pid in pids.items()}, card["ticks"]
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


def _environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure(checkouts: dict[str, Path], seconds: float, rounds: int, times: int) -> Result:
    """`checkouts` by column, `now` among them: each is run `rounds` times, in turn."""
    found: dict[str, list[Cost]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            parts = fleet_cost(checkout, seconds, _free_port())
            found[name].append(Cost(parts, simulated_cost(checkout, times)))
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
        "once they act; a mean over robots and runs. Physics, drawing and operator: each alone, a mean over the tasks.",
        *(f"{name}: {path.name}" for name, path in checkouts.items() if name != "now"),
    ]
    return Result("What a control tick costs on a robot's computer", rows, goals, notes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge_cost", add_help=False)
    parser.add_argument("--before", type=Path, help="another checkout of this program, to compare with")
    parser.add_argument("--seconds", type=float, default=0.0, help="to count in each run; default 60, quick 12")
    options, rest = parser.parse_known_args(arguments)
    checkouts = {"before": options.before.resolve()} if options.before else {}
    checkouts["now"] = _HERE

    def measured(quick: bool) -> Result:
        seconds = options.seconds or (12.0 if quick else 60.0)
        return measure(checkouts, seconds, 1 if quick else 2, 100 if quick else 1000)

    return run("edge_cost", measured, rest)


if __name__ == "__main__":
    sys.exit(main())
