"""How much processor time this benchmark used, and how much somebody else, on a machine that may be shared."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def cpu_seconds() -> float:
    """Processor time that this process and all processes below it have used so far."""
    below: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # what ended meanwhile is counted by its parent
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            below.setdefault(int(fields[1]), []).append(number)
            # user and system, its own and of its children that ended
            used[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    tree = list(below.get(os.getpid(), ()))
    for child in tree:
        tree += below.get(child, ())
    own = os.times()
    return time.process_time() + own.children_user + own.children_system + sum(used[child] for child in tree)


class Others:
    """What the rest of the machine did since this was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._machine, self._mine = _machine_seconds(), cpu_seconds()

    def cores(self) -> float:
        """Processor cores that others kept busy on average; nan where the system does not say."""
        took = time.monotonic() - self._begun
        return max(0.0, (_machine_seconds() - self._machine - (cpu_seconds() - self._mine)) / took)

    def note(self) -> str:
        """For the notes of a table."""
        return f"Meanwhile others kept {self.cores():.1f} of the machine's {os.cpu_count()} cores busy."


def _machine_seconds() -> float:
    """Processor time that anybody used since the machine started, what its host took included."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return float("nan")
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
