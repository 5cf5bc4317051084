"""What goes wrong with a connection, when, and to which message: by a seed, so that it goes wrong the same way again.

    FaultPlan(windows=(FaultWindow(60, 90, drop=0.3), FaultWindow(120, 180, link=LinkState.cut)), seed=3)

The in-memory channel and the TCP proxy of the benchmarks both follow it. A unit is what they treat as one: a message
there, a packet's worth of the byte stream here.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from wire.clock import Clock
from wire.errors import ConfigError

_REORDER_S = 0.1
"""a unit that is overtaken comes so much later"""


class LinkState(StrEnum):
    """Whether anything passes."""

    up = "up"
    stalled = "stalled"
    """nothing passes; all of it comes when that is over"""
    silent = "silent"
    """what is sent vanishes, and nobody is told"""
    cut = "cut"
    """there is no connection, and none is made"""


@dataclass(frozen=True, slots=True)
class FaultWindow:
    """What is wrong from `start_s` until `end_s`, counted from when the plan began to be followed."""

    start_s: float = 0.0
    end_s: float = math.inf
    link: LinkState = LinkState.up
    drop: float = 0.0
    """share of units that are lost; TCP sends them again, so there they are late"""
    duplicate: float = 0.0
    """share that comes twice; not in a byte stream"""
    reorder: float = 0.0
    """share that later ones overtake; not in a byte stream"""
    corrupt: float = 0.0
    """share with one bit turned"""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """longest further delay"""
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        """Raises `ConfigError` naming the field that cannot be."""
        for name in ("drop", "duplicate", "reorder", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"fault window: {name} is {getattr(self, name)}; give a share, 0 to 1.")
        for name in ("start_s", "delay_s", "jitter_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"fault window: {name} is {getattr(self, name)}; give 0 or more seconds.")
        if not self.end_s > self.start_s:
            raise ConfigError(f"fault window: it ends at {self.end_s:g} s, not after its start at {self.start_s:g} s.")
        if not self.bytes_per_s > 0:
            raise ConfigError(f"fault window: bytes_per_s is {self.bytes_per_s}; give more than 0.")


_NOTHING = FaultWindow()


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Windows over time, of which the first that is open holds; between them nothing is wrong."""

    windows: tuple[FaultWindow, ...] = ()
    seed: int = 0

    def at(self, time_s: float) -> FaultWindow:
        """What is wrong then."""
        return next((window for window in self.windows if window.start_s <= time_s < window.end_s), _NOTHING)

    def passes_at_s(self, time_s: float) -> float:
        """When what is ready at `time_s` can pass: then, or at the end of the stall; infinity for never."""
        while time_s < math.inf and (window := self.at(time_s)).link is LinkState.stalled:
            time_s = window.end_s
        return time_s

    def is_cut_between(self, start_s: float, end_s: float) -> bool:
        """Whether the connection is cut at some moment in between."""
        return any(w.link is LinkState.cut and w.start_s <= end_s and start_s < w.end_s for w in self.windows)

    def fates(self, key: str) -> Fates:
        """What happens to the units of one direction of one connection, which `key` names."""
        return Fates(f"{self.seed}/{key}")


class Fate(NamedTuple):
    """Of one unit: numbers from 0 to 1, which a window's shares are held against."""

    drop: float
    duplicate: float
    reorder: float
    corrupt: float
    jitter: float
    place: float
    """where a bit is turned"""


class Fates:
    """Drawn in order: the n-th unit's is the same whatever window it falls into."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def next(self) -> Fate:
        return Fate(*(self._random.random() for _ in Fate._fields))


def turn_bit(data: bytes, place: float) -> bytes:
    """`data` with one bit turned, at `place` of its length."""
    bit = int(place * 8 * len(data))
    turned = bytearray(data)
    turned[bit // 8] ^= 1 << bit % 8
    return bytes(turned)


class FaultyQueue:
    """One direction of a connection within one process: what a deque is to it, but what comes out follows a plan."""

    def __init__(self, plan: FaultPlan, clock: Clock, key: str) -> None:
        """`key`: as of `FaultPlan.fates`."""
        self._plan, self._clock = plan, clock
        self._fates = plan.fates(key)
        self._begun_ns = clock.now_ns()
        self._waiting: list[tuple[float, int, bytes]] = []
        """heap of (when it comes out, number, message)"""
        self._number = 0
        self._ordered_s = self._free_s = 0.0

    @property
    def cut(self) -> bool:
        """Whether there is no connection now."""
        return self._plan.at(self._now_s()).link is LinkState.cut

    def append(self, data: bytes) -> None:
        now_s, fate = self._now_s(), self._fates.next()
        window = self._plan.at(now_s)
        if window.link in (LinkState.silent, LinkState.cut) or fate.drop < window.drop:
            return
        if fate.corrupt < window.corrupt:
            data = turn_bit(data, fate.place)
        self._free_s = max(self._free_s, now_s) + len(data) / window.bytes_per_s
        due_s = self._free_s + window.delay_s + fate.jitter * window.jitter_s
        if fate.reorder < window.reorder:
            due_s += _REORDER_S
        else:
            due_s = self._ordered_s = max(due_s, self._ordered_s)
        due_s = self._plan.passes_at_s(due_s)
        if self._plan.is_cut_between(now_s, due_s):
            return
        for _ in range(2 if fate.duplicate < window.duplicate else 1):
            self._number += 1
            heapq.heappush(self._waiting, (due_s, self._number, data))

    def popleft(self) -> bytes:
        """The next one; `IndexError` when none has come."""
        if not self:
            raise IndexError("nothing has come")
        return heapq.heappop(self._waiting)[2]

    def clear(self) -> None:
        self._waiting.clear()

    def __bool__(self) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= self._now_s()

    def _now_s(self) -> float:
        return (self._clock.now_ns() - self._begun_ns) / 1e9
