"""How late what robots recorded was acknowledged, and how soon after a fault that was as usual again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.soak.robot import SpoolNote

TOLERANCE_S = 0.5
"""above the usual delay, and it is not usual"""
_OF = 3
"""successive segments of a robot, of whose delays the median counts"""


class Delay(NamedTuple):
    """Of one segment, in ns of the machine's clock."""

    closed_ns: int
    """its last step was recorded"""
    acknowledged_ns: int
    """the robot heard that it is stored; 0: it has not"""

    @property
    def seconds(self) -> float:
        return (self.acknowledged_ns - self.closed_ns) / 1e9 if self.acknowledged_ns else math.inf


def delays_of(notes: Sequence[SpoolNote]) -> list[Delay]:
    """Of one robot, in the order in which they were acknowledged; those that were not last."""
    acknowledged = {note.id: note.time_ns for note in notes if not note.steps}
    found = [Delay(note.closed_ns, acknowledged.get(note.id, 0)) for note in notes if note.steps]
    return sorted(found, key=lambda one: one.acknowledged_ns or math.inf)


def median_s(delays: Mapping[str, Sequence[Delay]], begin_ns: int, end_ns: int) -> float:
    """Of all segments that were recorded in between; nan for none."""
    found = [one.seconds for each in delays.values() for one in each if begin_ns <= one.closed_ns < end_ns]
    return statistics.median(found) if found else math.nan


def recovery_s(delays: Sequence[Delay], usual_s: float, over_ns: int, next_ns: int) -> float:
    """Seconds from `over_ns`, when a fault was over, until the delays of one robot were usual again, 0 when they never
    ceased to be; infinity when they were not at `next_ns`, when the next fault began.
    """
    limit_s = usual_s + TOLERANCE_S
    seen = [one for one in delays if over_ns <= (one.acknowledged_ns or math.inf) and one.closed_ns < next_ns]
    within = [one for one in seen if 0 < one.acknowledged_ns < next_ns]
    # What waits since long and does not come before the next fault is not as usual either.
    waiting = [one for one in seen if one not in within and next_ns - one.closed_ns > limit_s * 1e9]
    if len(waiting) >= _OF:
        return math.inf
    runs = [within[n : n + _OF] for n in range(max(1, len(within) - _OF + 1))]
    late = [run for run in runs if run and statistics.median(one.seconds for one in run) > limit_s]
    if late and late[-1] is runs[-1]:
        # How it goes on, the next fault says.
        return (late[-1][-1].acknowledged_ns - over_ns) / 1e9 if late[-1][-1].seconds <= limit_s else math.inf
    return (late[-1][-1].acknowledged_ns - over_ns) / 1e9 if late else 0.0


def silence_s(delays: Sequence[Delay], over_ns: int) -> float:
    """Seconds from then until the robot had recorded a segment; infinity for never."""
    after = [one.closed_ns for one in delays if one.closed_ns >= over_ns]
    return (min(after) - over_ns) / 1e9 if after else math.inf
