"""Stamps of ROS messages: onto the machine's monotonic clock, and in order.

Knows nothing of ROS: a stamp is a whole number of nanoseconds of ROS time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SLEW_NS = 100_000
"""a system clock that was corrected by less keeps its mapping, so that equal stamps stay equal times"""
_LATE_IN_A_ROW = 5
"""so many older stamps after each other are not late messages but another clock"""
_TOGETHER_NS = 20_000


def read_together(ros_now: Callable[[], int]) -> tuple[int, int]:
    """(ROS time, monotonic time) of one moment, ns: read again when something came in between."""
    for _ in range(4):
        before_ns = time.monotonic_ns()
        ros_ns = ros_now()
        after_ns = time.monotonic_ns()
        if after_ns - before_ns < _TOGETHER_NS:
            break
    return ros_ns, (before_ns + after_ns) // 2


class ClockMap:
    """ROS time against the machine's monotonic clock.

    `note` both clocks, read together, whenever a message comes. The system's clock is mapped by a constant that follows
    its corrections; a simulation's `/clock`, which may be slower or stand still, by its newest value.
    """

    def __init__(self, simulated: bool, jump_s: float) -> None:
        self._simulated = simulated
        self._jump_ns = int(jump_s * 1e9)
        self._offset_ns: int | None = None
        self._last: tuple[int, int] = (0, 0)

    def note(self, ros_ns: int, machine_ns: int) -> str:
        """What has happened to the ROS clock since the note before: '' or how far it jumped."""
        offset_ns = machine_ns - ros_ns
        if self._offset_ns is None:
            self._offset_ns, self._last = offset_ns, (ros_ns, machine_ns)
            return ""
        ahead_ns = (ros_ns - self._last[0]) - (machine_ns - self._last[1])
        back = ros_ns < self._last[0]
        self._last = ros_ns, machine_ns
        # A simulation that is paused, or slower than the machine, falls behind without having jumped.
        jumped = ahead_ns > self._jump_ns or (back if self._simulated else ahead_ns < -self._jump_ns)
        if jumped or self._simulated or abs(offset_ns - self._offset_ns) > _SLEW_NS:
            self._offset_ns = offset_ns
        if not jumped:
            return ""
        what = "the ROS clock (/clock)" if self._simulated else "this computer's system clock"
        return f"{what} jumped by {ahead_ns / 1e9:+.3f} s"

    def to_machine(self, ros_ns: int) -> int:
        """Monotonic time of a stamp."""
        assert self._offset_ns is not None, "note() comes first"
        return ros_ns + self._offset_ns


class StampOrder:
    """Whether a topic's stamps go on, as its messages come.

    Only going back is a jump. A sender's clock that leaps ahead was too old before, or is in the future now: both are
    noticed by age, and messages that were held up somewhere look the same.
    """

    def __init__(self, topic: str, jump_s: float) -> None:
        self._topic = topic
        self._jump_ns = int(jump_s * 1e9)
        self._newest: int | None = None
        self._behind: list[int] = []

    def note(self, stamp_ns: int) -> tuple[bool, str]:
        """Whether it is the newest, neither late nor repeated, and '' or how far the stamps jumped back to it."""
        newest = self._newest
        if stamp_ns == newest:
            return False, ""
        jump = ""
        if newest is not None and stamp_ns < newest:
            # Several in a row that follow each other: the sender was started again with another clock.
            follows = self._behind and stamp_ns > self._behind[-1]
            self._behind = [*self._behind, stamp_ns] if follows else [stamp_ns]
            if newest - stamp_ns < self._jump_ns and len(self._behind) < _LATE_IN_A_ROW:
                return False, ""
            jump = f"the stamps of '{self._topic}' jumped by {(stamp_ns - newest) / 1e9:+.3f} s"
        self._newest, self._behind = stamp_ns, []
        return True, jump
