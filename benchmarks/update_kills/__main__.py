"""Every process of a fleet is killed with -9 at every stage of an update; by what each robot acts is noted throughout.

    python -m benchmarks.update_kills [--quick] [--json FILE] [--write]

A version is published each second, over lines of 4 Mbit/s. A kill waits for its stage, which is seen from outside: by
the files of the gateway and of the robot, and by what the robot acts by. What was killed is started again at once. Back
means that every robot acts by a version that is newer than all there were at the kill. In the end the trainer stops,
and every robot has to act by the newest version. A note of what acted is of one version, whole, if it has that
version's hash and does what its file does.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.table import Goal, Result, require, run
from benchmarks.update_kills.fleet import RELAY, TRAINER, UpdateFleet
from benchmarks.update_kills.robot import probe, recipe
from wire.transport.keys import GATEWAY

_ROBOTS = 2
_STAGE_S, _BACK_S = 60.0, 120.0
_LOOK_S = 0.0005
_CLOSE = 1e-5
"""of two chunks from the same weights: processes have other numbers of threads"""


class Victim(NamedTuple):
    """What is killed."""

    name: str
    part: str = ""

    def __str__(self) -> str:
        return f"robot's {self.part}" if self.part else "robot" if self.name.startswith("robot") else self.name


_FIRST = "robot-0"
_VICTIMS = (
    Victim(GATEWAY),
    Victim(RELAY),
    Victim(TRAINER),
    Victim(_FIRST),
    Victim(_FIRST, "uplink"),
    Victim(_FIRST, "inference"),
)


def _stages(fleet: UpdateFleet) -> dict[str, Callable[[], bool]]:
    """Whether an update is there, by stage; robot-0 is the one that is watched."""

    def fetched() -> bool:
        return fleet.coming(_FIRST) > fleet.here(_FIRST)

    def loaded() -> bool:
        return fleet.here(_FIRST) > fleet.acting(_FIRST)

    return {
        "trained": lambda: not fleet.is_arriving() and not fetched(),
        "on its way to the gateway": fleet.is_arriving,
        "committed": lambda: fleet.newest() > max(fleet.coming(_FIRST), fleet.here(_FIRST)),
        "on its way to robots": fetched,
        "loaded": loaded,
    }


def measure(quick: bool) -> Result:
    """All kills, then the end."""
    require("torch", "cv2", "fastapi", extra="learner,web")
    rounds, draw = 1 if quick else 3, random.Random(0)
    took_s: dict[tuple[Victim, str], list[float]] = defaultdict(list)
    began_s, stuck = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="update-kills-") as name, UpdateFleet(Path(name), _ROBOTS) as fleet:
        _wait_for(fleet, "robots act", 1)
        stages = _stages(fleet)
        kills = [(victim, stage) for victim in _VICTIMS for stage in stages] * rounds
        draw.shuffle(kills)
        for count, (victim, stage) in enumerate(kills):
            fleet.wait(f"an update is {stage}", stages[stage], _STAGE_S, _LOOK_S)
            if stage == "trained":
                time.sleep(draw.uniform(0.0, 0.3))
            newest = fleet.newest()
            fleet.kill(*victim)
            if not victim.part:
                fleet.start(victim.name)
            try:
                took_s[victim, stage].append(_wait_for(fleet, f"{victim}, {stage}", newest + 1))
                said = f"{took_s[victim, stage][-1]:.1f} s"
            except TimeoutError as error:
                stuck, said = stuck + 1, str(error)
            sys.stderr.write(f"{count + 1} of {len(kills)} kills: {victim}, {stage}: {said}\n")
        fleet.finish_training()
        newest = fleet.newest()
        end_s = _wait_for(fleet, "the end", newest)
        minutes = (time.monotonic() - began_s) / 60
        behind = sum(fleet.acting(robot) != newest for robot in fleet.robots)
        acted, mixed = _mixtures(fleet)
    rows: list[dict[str, Any]] = []
    for victim in _VICTIMS:
        times = {stage: took_s[victim, stage] for stage in stages}
        every = [one for some in times.values() for one in some]
        rows.append(
            {"killed": str(victim)}
            | {stage: median(some or [_BACK_S]) for stage, some in times.items()}
            | {"longest": max(every, default=_BACK_S), "kills": len(every)}
        )
    goals = [
        Goal("robots not on the newest version in the end", behind, "0", not behind),
        Goal("of what acted: not one version, whole", mixed, "0", not mixed),
        Goal("kills after which not all robots came on", stuck, "0", not stuck),
    ]
    notes = [
        "Seconds until all robots act by a version newer than any at the kill: medians, by the stage of an update.",
        f"{_ROBOTS} robots with four processes each, gateway, relay and trainer, {minutes:.0f} minutes; {newest} "
        f"versions. After the last kill and the trainer's end all had the newest within {end_s:.1f} s.",
        f"{acted} times another version, or another process, began to act.",
    ]
    return Result("Updates whose processes are killed", rows, goals, notes)


def _wait_for(fleet: UpdateFleet, what: str, version: int) -> float:
    def there() -> bool:
        return all(fleet.acting(robot) >= version for robot in fleet.robots)

    return fleet.wait(f"{what}: robots act by version {version}", there, _BACK_S)


def _mixtures(fleet: UpdateFleet) -> tuple[int, int]:
    """Notes of what acted, and those that are not of one version, whole."""
    notes = [note for robot in fleet.robots for note in fleet.acts(robot)]
    job = recipe()
    policy = job.make_policy(job.spec, 0)
    files = {int(path.name.partition("-")[0]): path for path in fleet.data.weights.glob("*.safetensors")}
    expected: dict[int, tuple[str, np.ndarray]] = {}
    mixed = 0
    for note in notes:
        if note.version not in expected:
            weights = files[note.version].read_bytes()
            policy.load(weights, note.version)
            expected[note.version] = hashlib.sha256(weights).hexdigest(), np.array(probe(policy))
        sha256, chunk = expected[note.version]
        same = note.sha256 == sha256 and np.abs(chunk - note.chunk).max() < _CLOSE
        mixed += not same
    return len(notes), mixed


if __name__ == "__main__":
    sys.exit(run("update_kills", measure))
