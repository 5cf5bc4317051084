"""From what a robot recorded to figures, the same way for every edge of `benchmarks.edge_latency`.

The ideal grid has a slot every 20 ms. Its phase is the one the edge keeps best: that of its earliest actions. The
lateness of a slot is the time from its beginning until the next action comes; a loop that sleeps a whole period after
its work drifts through the grid. A slot is

- *missed* when the robot was neither read nor written to in it: the loop stood still,
- *starved* when no action came that the policy had made for it: none at all, or a hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.edge_latency.arm import PERIOD_NS, ArmRecord

_EARLY_NS = PERIOD_NS // 4
"""an action that comes this little before its slot still belongs to it"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One edge under one condition."""

    seconds: float
    lateness_ms: np.ndarray
    """float64[slots]: from the beginning of each slot to the next action"""
    interval_ms: np.ndarray
    """float64[n-1]: between actions, less the period: knows no grid, so drifting costs nothing"""
    slots: int
    missed: int
    starved: int
    touch_ms: np.ndarray
    """float64[m]: from a switch of the lamp to the first action made from a state that shows it"""
    light_ms: np.ndarray
    """float64[m]: the same by camera image"""
    unanswered: int
    """switches after which no action showed it before the next switch; they count as that long"""

    def row(self, edge: str, condition: str) -> dict[str, Any]:
        """A line of the table."""
        late = self.lateness_ms
        return {
            "edge": edge,
            "condition": condition,
            "s": round(self.seconds),
            "late p50 ms": _at(late, 50),
            "late p99 ms": _at(late, 99),
            "late max ms": _at(late, 100),
            "uneven p99 ms": _at(np.abs(self.interval_ms), 99),
            "missed ticks": f"{self.missed} of {self.slots}",
            "starved ticks": f"{self.starved} of {self.slots}",
            "reaction touch p50 ms": _at(self.touch_ms, 50),
            "touch p95 ms": _at(self.touch_ms, 95),
            "reaction light p50 ms": _at(self.light_ms, 50),
            "light p95 ms": _at(self.light_ms, 95),
            "stimuli": len(self.touch_ms),
        }


def measure(record: ArmRecord, warm_s: float = 2.0) -> Measured:
    """Figures of `record` from `warm_s` after the policy's first action on. Raises `ValueError` when it never acted."""
    writes, marks = np.array(record.writes_ns, np.int64), np.array(record.marks, np.float64).reshape(-1, 2)
    # a weighted mean of several chunks leans to the newest; a hold says 0
    fresh = np.abs(marks).min(1) > 1e-3
    if not fresh.any() or writes[-1] - writes[fresh][0] < warm_s * 1e9 + 2 * PERIOD_NS:
        raise ValueError(f"the robot was given {fresh.sum()} actions of the policy, which is too short to measure.")
    begin = writes[fresh][0] + round(warm_s * 1e9)
    kept = writes >= begin
    writes, marks, fresh = writes[kept], marks[kept], fresh[kept]
    reads = np.array(record.reads_ns, np.int64)
    reads = reads[(reads >= writes[0]) & (reads <= writes[-1])]

    origin = writes[0] + phase_ns(writes - writes[0])
    slot = slots(writes, origin)
    last = int(slot[-1])
    begins = origin + PERIOD_NS * np.arange(last + 1)
    following = writes[np.searchsorted(writes, begins - _EARLY_NS)]
    active = np.union1d(slot, slots(reads, origin))
    acted = np.unique(slot[fresh])
    touch, unanswered = reactions(record.switches_ns, writes, marks[:, 0])
    light, _ = reactions(record.switches_ns, writes, marks[:, 1])
    return Measured(
        seconds=(writes[-1] - writes[0]) / 1e9,
        lateness_ms=np.maximum(0, following - begins) / 1e6,
        interval_ms=(np.diff(writes) - PERIOD_NS) / 1e6,
        slots=last + 1,
        missed=last + 1 - np.count_nonzero(active >= 0),
        starved=last + 1 - np.count_nonzero(acted >= 0),
        touch_ms=touch / 1e6,
        light_ms=light / 1e6,
        unanswered=unanswered,
    )


def phase_ns(offsets: np.ndarray) -> int:
    """Where in the period the slots begin: before that is the longest stretch in which hardly an action came.

    `offsets`: int64[n], ns. The 1% of actions that fit the phase worst have no say.
    """
    within = np.sort(offsets % PERIOD_NS)
    n = len(within)
    # the shortest arc that holds 99% of the actions; it may run over the end of the period
    most = max(1, int(np.ceil(0.99 * n)))
    twice = np.concatenate([within, within + PERIOD_NS])
    widths = twice[most - 1 : most - 1 + n] - twice[:n]
    return int(twice[int(np.argmin(widths))] % PERIOD_NS)


def slots(times: np.ndarray, origin: int) -> np.ndarray:
    """int64[n]: the slot of each time, the first beginning at `origin`."""
    return (times - origin + _EARLY_NS) // PERIOD_NS


def reactions(switches_ns: np.ndarray, writes_ns: np.ndarray, mark: np.ndarray) -> tuple[np.ndarray, int]:
    """(ns from each switch to the first action that shows it, how many never did before the next switch).

    The lamp is on after the 1st switch, off after the 2nd, and so on. Switches before the first action, and one whose
    successor lies behind the last action, do not count. A switch that finds the actions already on its side (the one
    before was never answered) counts as unanswered.
    """
    took, unanswered = [], 0
    for k in range(len(switches_ns) - 1):
        at, until = switches_ns[k], switches_ns[k + 1]
        if at < writes_ns[0] or until > writes_ns[-1]:
            continue
        first, end = np.searchsorted(writes_ns, [at, until])
        sign = 1.0 if k % 2 == 0 else -1.0
        before = mark[:first][np.abs(mark[:first]) > 1e-3]
        stale = len(before) > 0 and before[-1] * sign < 0
        shown = np.flatnonzero(mark[first:end] * sign > 1e-3)
        if stale and len(shown):
            took.append(writes_ns[first + shown[0]] - at)
        else:
            took.append(until - at)
            unanswered += 1
    return np.array(took, np.float64), unanswered


def _at(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")
