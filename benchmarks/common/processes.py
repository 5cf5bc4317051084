"""What the processes of a fleet use, by kind: processor time and memory of everything below one process, from /proc."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COMMAND = re.compile(r"(?:^|[\s/])(?:fleet\.cli|vla-fleet)\s+(\S+)(?:\s+(\S+))?")
_FORKED = {"robot", "control", "inference", "shadow", "thinker", "uplink", "edge", "gateway", "trainer", "evaluator"}
"""names of processes that were forked: their command lines are cut to the length of their parent's"""
_CALLED = {"robot": "driver", "demonstrate": "demonstrator", "edge": "edge (supervisor)", "up": "up"}


class ProcessTree:
    """The processes below `root`, itself included. Call `look` every second or two: what ends is counted as then."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._used: dict[tuple[int, int], tuple[str, float]] = {}
        """(process id, start) to (kind, processor seconds): an id may be given again"""
        self._kinds: dict[int, str] = {}
        """of those there now"""

    def look(self) -> None:
        """Take in what there is now."""
        found: dict[int, tuple[int, int, float]] = {}
        below: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            # it may have ended meanwhile
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                number, parent = int(path.parent.name), int(fields[1])
                found[number] = parent, int(fields[19]), sum(map(int, fields[11:13])) / _TICKS_PER_S
                below.setdefault(parent, []).append(number)
        tree = [self._root] if self._root in found else []
        self._kinds = {}
        for number in tree:
            parent, started, used_s = found[number]
            self._kinds[number] = kind = kind_of(_command(number), _name(number)) or self._kinds.get(parent, "other")
            self._used[number, started] = kind, used_s
            tree += below.get(number, ())

    def cpu_seconds(self) -> dict[str, float]:
        """Processor seconds that each kind has used so far, as of the last look."""
        sums: dict[str, float] = {}
        for kind, used_s in self._used.values():
            sums[kind] = sums.get(kind, 0.0) + used_s
        return sums

    def memory_bytes(self) -> Counter[str]:
        """Memory of each kind now: what is shared by n processes counts for each with an n-th (PSS)."""
        sums: Counter[str] = Counter()
        for number, kind in self._kinds.items():
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
                sums[kind] += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
        return sums


def kind_of(command: str, name: str = "") -> str:
    """What part of a fleet a command line starts: gateway, trainer, control, ...; '' when it is none.

    `name`: of the program, which one that was forked has from its part.
    """
    if name in _FORKED:
        return _CALLED.get(name, name)
    found = _COMMAND.search(command)
    if found is None:
        return ""
    word = found[2] or "" if found[1] == "edge-part" else found[1]
    return _CALLED.get(word, word)


def _name(number: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{number}/comm").read_text().strip()
    return ""


def _command(number: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
