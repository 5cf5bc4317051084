"""Whether the processes of a fleet grow: the proportional set size of each, looked at again and again."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

EVERY_S = 5.0
_YOUNG_S = 20.0
"""a process that has begun lately still fills its caches"""
_SPAN_S = 20.0
"""at both ends of what is looked at; its median counts"""


class _Sample(NamedTuple):
    time_s: float
    mib: float


class ProcessGrowth(NamedTuple):
    """Of the processes of one kind that lived long enough."""

    kind: str
    begin_mib: float
    end_mib: float
    """of the one that grew most"""

    @property
    def mib(self) -> float:
        return self.end_mib - self.begin_mib


class MemoryLog:
    """`look` as often as you like; it looks every `EVERY_S`."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[_Sample]] = {}
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def look(self, processes: dict[str, list[int]]) -> None:
        """`processes`: ids by kind."""
        now_s = time.monotonic()
        self._next_s = now_s + EVERY_S
        for kind, pids in processes.items():
            for pid in pids:
                # it may have ended meanwhile
                with suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                    kib = int(next(line for line in lines if line.startswith("Pss:")).split()[1])
                    self._seen.setdefault((kind, pid), []).append(_Sample(now_s, kib / 1024))

    def growth(self, least_s: float) -> list[ProcessGrowth]:
        """By kind, of processes that were seen for at least so long: the one that grew most."""
        most: dict[str, ProcessGrowth] = {}
        for (kind, _), samples in self._seen.items():
            begin_s, end_s = samples[0].time_s + _YOUNG_S, samples[-1].time_s
            if end_s - begin_s < least_s:
                continue
            first = [one.mib for one in samples if begin_s <= one.time_s < begin_s + _SPAN_S]
            last = [one.mib for one in samples if one.time_s > end_s - _SPAN_S]
            one = ProcessGrowth(kind, statistics.median(first), statistics.median(last))
            if kind not in most or one.mib > most[kind].mib:
                most[kind] = one
        return [most[kind] for kind in sorted(most)]
