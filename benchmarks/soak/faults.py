"""What fails in a soak, when and for how long: drawn by a seed, and done by whoever owns what fails."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.soak.fleet import SoakFleet
from benchmarks.soak.services import StorageServices
from wire.errors import ConfigError
from wire.transport.faults import FaultPlan, FaultWindow, LinkState
from wire.transport.keys import GATEWAY

_DROP = 0.3
_SHARE = 0.4
"""of the robots, at least one: those that a partition meets"""


class FaultKind(StrEnum):
    """What fails."""

    loss = "30% of all packets lost, on every line"
    silent = "partition: what is sent vanishes"
    cut = "partition: no connection"
    database = "the database hangs"
    objects = "the object store hangs"
    busy = "a busy process on every core"
    gateway = "gateway killed"
    computer = "a robot's computer killed"
    robot = "a driver killed"
    control = "a control process killed"
    inference = "an inference process killed"
    uplink = "an uplink killed"


LASTING = {
    FaultKind.loss: 20.0,
    FaultKind.silent: 60.0,
    FaultKind.cut: 60.0,
    FaultKind.database: 60.0,
    FaultKind.objects: 60.0,
    FaultKind.busy: 60.0,
}
"""seconds, where there is time for that; the others are over at once"""
SETTLE_S = 30.0
"""before the first fault: what is usual is measured then"""
REST_S = 12.0
"""after each fault, at least"""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One of a schedule."""

    kind: FaultKind
    start_s: float
    seconds: float
    robots: tuple[str, ...]
    """whom it meets, where it does not meet all"""


def plan_faults(
    seconds: float,
    seed: int,
    robots: tuple[str, ...],
    kinds: tuple[FaultKind, ...],
    settle_s: float = SETTLE_S,
    rest_s: float = REST_S,
) -> tuple[PlannedFault, ...]:
    """Each of `kinds` once, in an order that the same seed makes the same, with the same rest of at least `rest_s`
    after each; what lasts is as long as `LASTING` says, or shorter where `seconds`, until the last rest ends, are few.
    """
    draw = random.Random(seed)
    order = list(kinds)
    draw.shuffle(order)
    left_s = seconds - settle_s - rest_s * len(order)
    whole_s = sum(LASTING.get(kind, 0.0) for kind in order)
    share = min(1.0, left_s / whole_s) if whole_s else 0.0
    if left_s < 0:
        raise ConfigError(f"{len(order)} faults need more than {seconds:g} s: {settle_s:g} s, then {rest_s:g} s each.")
    rest_s += (left_s - share * whole_s) / len(order)
    planned, now_s = [], settle_s
    for kind in order:
        met = draw.sample(robots, max(1, round(_SHARE * len(robots))) if kind in LASTING else 1)
        lasts_s = share * LASTING.get(kind, 0.0)
        planned.append(PlannedFault(kind, now_s, lasts_s, tuple(sorted(met))))
        now_s += lasts_s + rest_s
    return tuple(planned)


def begin(fault: PlannedFault, fleet: SoakFleet, services: StorageServices | None, seed: int) -> Callable[[], None]:
    """Have it happen; what is returned has it be over."""
    kind = fault.kind
    met = fleet.robots if kind is FaultKind.loss else fault.robots
    match kind:
        case FaultKind.loss:
            return _on_lines(fleet, met, FaultWindow(drop=_DROP), seed)
        case FaultKind.silent:
            return _on_lines(fleet, met, FaultWindow(link=LinkState.silent), seed)
        case FaultKind.cut:
            return _on_lines(fleet, met, FaultWindow(link=LinkState.cut), seed)
        case FaultKind.database | FaultKind.objects:
            assert services is not None
            return _entered(services.database_away() if kind is FaultKind.database else services.objects_away())
        case FaultKind.busy:
            return _busy()
        case FaultKind.gateway:
            fleet.kill(GATEWAY)
        case FaultKind.computer:
            fleet.kill(met[0])
        case _:
            fleet.kill(met[0], kind.name)
    return lambda: None


def _on_lines(fleet: SoakFleet, robots: tuple[str, ...], window: FaultWindow, seed: int) -> Callable[[], None]:
    for name in robots:
        fleet.lines[name].follow(FaultPlan((window,), seed))

    def mend() -> None:
        for name in robots:
            fleet.lines[name].follow(FaultPlan())

    return mend


def _entered(away: AbstractContextManager[None]) -> Callable[[], None]:
    stack = contextlib.ExitStack()
    stack.enter_context(away)
    return stack.close


def _busy() -> Callable[[], None]:
    """At normal priority, as anything else that somebody runs there."""
    words = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in range(os.cpu_count() or 1)]

    def end() -> None:
        for process in processes:
            process.kill()
            process.wait()

    return end
