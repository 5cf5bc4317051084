"""Each kind of process of a fleet: how it is found, and how it is seen from outside that it works again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.restart.job import WORKING, FleetUnderTest, connected

ROBOT = "robot-0"
Works = Callable[[FleetUnderTest, int, dict[str, Any]], Callable[[dict[str, Any]], bool]]
"""(job, process id, last snapshot) before the kill to whether a snapshot after it shows the work going on"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of process."""

    name: str
    words: tuple[str, ...]
    """in its command line"""
    works: Works
    means: str
    """what counts as working"""


def _card(snapshot: dict[str, Any]) -> dict[str, Any]:
    return next((one for one in snapshot["robots"] if one["name"] == ROBOT), {"pids": [], "mode": "", "link": ""})


def _part(position: int) -> Works:
    """The robot works with another process of that position among those its status names."""

    def works(job: FleetUnderTest, pid: int, before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
        old = _card(before)["pids"][position]  # of a supervisor's robot this is not the process that is killed

        def check(now: dict[str, Any]) -> bool:
            card = _card(now)
            pids = card["pids"]
            return len(pids) == 3 and pids[position] not in (0, old) and _moves(card)

        return check

    return works


def _acts(job: FleetUnderTest, pid: int, before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """The policy moves the robot, by more than the rest of what the last process had decided."""
    alive = _part(1)(job, pid, before)
    ticks: set[int] = set()

    def check(now: dict[str, Any]) -> bool:
        card = _card(now)
        if alive(now) and card["mode"] == "policy":
            ticks.add(card["ticks"])
        # Two reports: the first may have been on its way already.
        return len(ticks) > 1

    return check


def _moves(card: dict[str, Any]) -> bool:
    return card["mode"] in WORKING and card["link"] == "ok"


def _driver(job: FleetUnderTest, pid: int, before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    def check(now: dict[str, Any]) -> bool:
        new = job.pid("edge-part", "robot", ROBOT)
        return new not in (0, pid) and _moves(_card(now))

    return check


def _gateway(job: FleetUnderTest, pid: int, before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    def check(now: dict[str, Any]) -> bool:
        return job.pid("gateway") not in (0, pid) and _moves(_card(now))

    return check


def _trainer(job: FleetUnderTest, pid: int, before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    seen: set[int] = set()

    def check(now: dict[str, Any]) -> bool:
        if now["trainer"] is not None and job.pid("trainer") not in (0, pid):
            seen.add(now["trainer"]["gradient_steps"])
        # What its predecessor said last, what it began with, and what it has done since.
        return len(seen) > 2

    return check


def _evaluator(job: FleetUnderTest, pid: int, before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    def check(now: dict[str, Any]) -> bool:
        new = job.pid("evaluator")
        return new not in (0, pid) and connected(new)

    return check


KINDS = (
    Kind("trainer", ("trainer",), _trainer, "a gradient step after those of its checkpoint"),
    Kind("inference", ("edge-part", "inference", ROBOT), _acts, "the policy moves the robot again"),
    Kind("control", ("edge-part", "control", ROBOT), _part(0), "the robot moves"),
    Kind("driver", ("edge-part", "robot", ROBOT), _driver, "the robot moves in a new scene"),
    Kind("uplink", ("edge-part", "uplink", ROBOT), _part(2), "the gateway hears the robot move"),
    Kind("robot's supervisor", ("edge", ROBOT), _part(0), "the robot moves with new processes"),
    Kind("gateway", ("gateway",), _gateway, "the page shows the robot move"),
    Kind("evaluator", ("evaluator",), _evaluator, "it is connected to the gateway"),
)
