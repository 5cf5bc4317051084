"""Bad versions in a real fleet: where each is stopped, how many robots act by it, and how soon all are back.

    python -m benchmarks.rollout.drill [--quick] [--json FILE] [--write]

A gateway process as shipped (`--canary 0.2`), over ZeroMQ ten robots with the real weight client and the trainer's own
publisher. Weights are those of a real training run (`training.py`); how often an episode succeeds is a table by version
number, looked up by the version that the robot has and was told to act by. Episodes are a hundredth as long as those of
`benchmarks.rollout`: a second here is 100 there.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common.table import Goal, Result, end_in_order, require_simulation, run
from benchmarks.rollout.drill_fleet import ROBOTS, DrillFleet
from benchmarks.rollout.drill_robot import SPEED
from benchmarks.rollout.training import TrainedPolicy, changed, nearly, scores, shuffled, train
from cloud_learner.rollout.config import RolloutConfig
from wire.messages.fleet import VersionAction

_CANARY, _GATE = 0.2, 0.2
_GOOD, _BAD = 0.8, 0.6
_DRIFT_FIRST, _DRIFT, _DRIFT_EVERY_S = 0.9, 0.01, 600.0 / SPEED
_BEFORE_S, _DECIDED_S = 6.0, 120.0
_NOBODY = "nobody: promoted"


@dataclass(slots=True)
class BadVersionOutcome:
    """What became of one bad version."""

    stopped_by: str
    why: str
    at_once: int = 0
    """robots that acted by it, at most"""
    episodes: int = 0
    seconds: float | None = None
    """from its publication until the last robot was back, or it was refused; None: nobody ever heard of it"""
    back: int = ROBOTS
    """robots that act by the good version afterwards"""


def _other_shape(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    name, values = max(other.named_parameters(), key=lambda one: one[1].numel())
    owner, _, last = name.rpartition(".")
    setattr(other.get_submodule(owner), last, nn.Parameter(torch.zeros(values.numel() // 2, 2)))
    return other


def _damaged(module: nn.Module) -> dict[str, nn.Module]:
    return {
        "NaN in one tensor": changed(module, lambda values, _: values, 0),
        "a tensor of another shape": _other_shape(module),
        "another dtype": copy.deepcopy(module).half(),
    }


def _with_nan(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    with torch.no_grad():
        next(modules["NaN in one tensor"].parameters()).view(-1)[0] = torch.nan
    return modules


class Drill:
    """Publishes bad versions to a fleet that acts by version `good`."""

    def __init__(self, fleet: DrillFleet, trained: TrainedPolicy) -> None:
        self.fleet, self.trained, self.good = fleet, trained, 1
        assert not fleet.publish(trained.module, _GOOD)
        fleet.wait("all act by the first version", lambda: fleet.all_act_by(1))
        fleet.run(_BEFORE_S)

    def by_publisher(self, module: nn.Module) -> BadVersionOutcome:
        """As the trainer would."""
        return self._outcome("trainer", lambda: self.fleet.publish(module, 0.0))

    def unchecked(self, module: nn.Module, chance: float) -> BadVersionOutcome:
        """By a trainer that looks at nothing."""
        return self._outcome("gateway", lambda: self.fleet.upload(self.trained.policy.save(module), chance))

    def alike(self, seed: int, chance: float) -> BadVersionOutcome:
        """By the publisher: weights that no check can tell from good ones."""
        return self._outcome("trainer", lambda: self.fleet.publish(changed(self.trained.module, nearly, seed), chance))

    def _outcome(self, first: str, publish: Callable[[], str]) -> BadVersionOutcome:
        fleet, began_s = self.fleet, time.monotonic()
        number = fleet.trainer.newest + 1
        if why := publish():
            fleet.run(1.0)
            return BadVersionOutcome(first, why, back=self._back())
        fleet.wait("it is tried or refused", lambda: fleet.acted.get(number) or self._state(number) == "refused")
        fleet.wait("it is decided", lambda: self._state(number) not in ("canary", "candidate"), _DECIDED_S)
        found = fleet.versions()[number]
        at_once = fleet.most_at_once.get(number, 0)
        if found.state == "promoted":
            fleet.versions(VersionAction.rollback, self.good)
            fleet.versions(VersionAction.thaw)
        fleet.wait("all are back", lambda: fleet.all_act_by(self.good))
        ended_s = fleet.last_s.get(number, time.monotonic())
        fleet.run(1.0)
        by = {"refused": "held-out success", "rolled_back": "canary"}.get(found.state, _NOBODY)
        return BadVersionOutcome(by, found.note, at_once, fleet.episodes(number), ended_s - began_s, self._back())

    def _state(self, number: int) -> str:
        self.fleet.run(0.2)
        return self.fleet.versions()[number].state

    def _back(self) -> int:
        return sum(robot.version == self.good for robot in self.fleet.robots)


def _row(kind: str, published: str, outcomes: list[BadVersionOutcome]) -> dict[str, Any]:
    took = [one.seconds for one in outcomes if one.seconds is not None]
    episodes = [one.episodes for one in outcomes]
    return {
        "bad version": kind,
        "published by": published,
        "times": len(outcomes),
        "stopped by": ", ".join(sorted({one.stopped_by for one in outcomes})),
        "because (the first time)": textwrap.shorten(outcomes[0].why, 200, placeholder=" ..."),
        "robots that acted by it at once, at most": max(one.at_once for one in outcomes),
        "its episodes: median; most": f"{np.median(episodes):.0f}; {max(episodes)}",
        "s until all were back: median; most": f"{np.median(took):.1f}; {max(took):.1f}" if took else None,
        "robots on the good version then": min(one.back for one in outcomes),
    }


def _goals(all_of: list[tuple[str, float, list[BadVersionOutcome]]]) -> list[Goal]:
    """`all_of`: what is published, the share of robots that may act by it, and what became of it."""
    goals = []
    for allowed in sorted({allowed for _, allowed, _ in all_of}):
        found = [one for _, most, outcomes in all_of if most == allowed for one in outcomes]
        share = max(one.at_once for one in found if one.stopped_by != _NOBODY) / ROBOTS
        name = "what is to be tried" if allowed else "what is to be refused"
        goals.append(Goal(f"{name}: share of robots that acted by it", share, f"at most {allowed:g}", share <= allowed))
    for name, _, outcomes in all_of:
        # one of ten may be promoted: beta is 0.05
        promoted, most = sum(one.stopped_by == _NOBODY for one in outcomes), int("down" in name and len(outcomes) > 1)
        if promoted or most:
            goals.append(Goal(f"{name}: promoted", promoted, f"at most {most} of {len(outcomes)}", promoted <= most))
    back = min(one.back for _, _, outcomes in all_of for one in outcomes)
    return [*goals, Goal("robots on the good version after each", back, f"all {ROBOTS}", back == ROBOTS)]


@contextmanager
def _fleet(trained: TrainedPolicy, gate: float = 0.0) -> Iterator[DrillFleet]:
    with tempfile.TemporaryDirectory(prefix="drill-") as name, DrillFleet(Path(name), trained, _CANARY, gate) as fleet:
        yield fleet


def _stopped(trained: TrainedPolicy, times: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    rows, found = [], list[tuple[str, float, list[BadVersionOutcome]]]()

    def add(kind: str, published: str, outcomes: list[BadVersionOutcome], most: float) -> None:
        rows.append(_row(kind, published, outcomes))
        found.append((f"{kind}, {published}", most, outcomes))

    module = trained.module
    by_trainer, by_other, alike = "trainer", "a trainer without checks", "trainer"
    with _fleet(trained) as fleet:
        drill = Drill(fleet, trained)
        for kind, bad in _with_nan(_damaged(module)).items():
            add(kind, by_trainer, [drill.by_publisher(bad)], 0.0)
            add(kind, by_other, [drill.unchecked(bad, 0.0)], 0.0)
        random = [changed(module, shuffled, seed) for seed in range(times)]
        add("random weights", by_trainer, [drill.by_publisher(bad) for bad in random], 0.0)
        add("random weights", by_other, [drill.unchecked(bad, 0.0) for bad in random], _CANARY)
        down = [drill.alike(seed, _BAD) for seed in range(times)]
        add("success down by 20 points", alike, down, _CANARY)
    with _fleet(trained, _GATE) as fleet:
        drill = Drill(fleet, trained)
        evaluated = f"{by_other}, with an evaluator"
        add("random weights", evaluated, [drill.unchecked(bad, 0.0) for bad in random], 0.0)
        down = [drill.alike(100 + seed, _BAD) for seed in range(times)]
        add("success down by 20 points", f"{alike}, with an evaluator", down, _CANARY)
    return rows, _goals(found)


def _drift(trained: TrainedPolicy, versions: int) -> tuple[dict[str, Any], list[Goal]]:
    """A point less with each version, and a version every so often whatever became of those before."""
    with _fleet(trained) as fleet:
        began_s, largest, current, found = time.monotonic(), 0.0, 1, ""
        for number in range(1, versions + 1):
            chance = _DRIFT_FIRST - _DRIFT * (number - 1)
            assert not fleet.publish(changed(trained.module, nearly, number), chance)
            fleet.run(_DRIFT_EVERY_S)
            states = fleet.versions()
            found = next((one.note for one in states.values() if "versions since" in one.note), "")
            if found:
                break
            current = next(number for number, one in states.items() if one.current)
            largest = max(largest, _DRIFT_FIRST - fleet.chances[current])
        took_s, loss = time.monotonic() - began_s, _DRIFT_FIRST - fleet.chances[current]
        fleet.versions(VersionAction.freeze)
        # what is on trial now is decided first
        deadline_s = time.monotonic() + _DECIDED_S
        while not fleet.all_act_by(1) and time.monotonic() < deadline_s:
            fleet.run(0.5)
        back = sum(robot.version == 1 for robot in fleet.robots)
        tried = max((count for number, count in fleet.most_at_once.items() if number > current), default=0)
    row = {
        "versions": number,
        "a version every, s": _DRIFT_EVERY_S,
        "stopped by": "the comparison with the reference" if found else "nobody",
        "because": found,
        "loss of current then, points": round(100 * loss),
        "largest loss of current, points": round(100 * largest),
        "s until it was found": round(took_s, 1),
        "robots on the first version in the end": back,
        "robots that tried what was never promoted, at most": tried,
    }
    margin = RolloutConfig().margin
    goals = [
        Goal("drift: largest loss of current", largest, f"at most the margin, {margin}", largest <= margin),
        Goal("drift: robots on the first version in the end", back, f"all {ROBOTS}", back == ROBOTS),
    ]
    return row, goals


def measure(quick: bool) -> Result:
    """One training run, then each bad version against a fleet."""
    require_simulation("fastapi")
    end_in_order()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="drill-training-") as name,
        train(Path(name), 1 if quick else 16) as trained,
    ):
        found = scores(trained, 1 if quick else 8)
        rows, goals = _stopped(trained, 1 if quick else 10)
        more = {"What the trainer's check on actions makes of versions": found}
        if not quick:
            row, drift_goals = _drift(trained, 60)
            goals += drift_goals
            more = {"Success down by 1 point with each version": [row]} | more
    for row in found:
        refused = row["refused"]
        target = 0 if row["is to"] == "pass" else row["count"]
        goals.append(Goal(f"refused: {row['version']}", refused, f"{target} of {row['count']}", refused == target))
    notes = [
        f"{ROBOTS} robots, canary {_CANARY:g}; success of the good version {_GOOD:g}, 'down by 20 points' {_BAD:g}, "
        f"random weights 0, the drift's first {_DRIFT_FIRST:g}. The evaluator's margin is {_GATE:g}.",
        f"A robot's 20 to 45 s are 0.2 to 0.45 s here: on real robots times are {SPEED:g} times as long, but for those "
        "of an evaluator, which takes no time at all here.",
        "A trainer without checks uploads whatever it has: what the trainer's own checks stop, the gateway or the "
        "canary has to stop again.",
        "The check on actions: root mean square in ranges of the dimensions, on 16 recorded observations. What is more "
        "than max_change away from its parent is refused unless it is no farther from what people did there.",
    ]
    return Result("Bad versions in a real fleet", rows, goals, notes, more)


if __name__ == "__main__":
    sys.exit(run("rollout.drill", measure))
