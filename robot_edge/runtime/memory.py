"""How much memory may still be taken on this computer."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")
"""what a control group has of files and the like, and gives back when it is asked for memory"""


class AvailableMemory(NamedTuple):
    """What can be taken without swapping."""

    size_bytes: int
    where: str
    """the file that says so"""


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """What the system has, or less where the control group (version 2) of this process, or one above it, has a limit.

    `root`: where `proc` and `sys` are. A system that does not say what is available has all that it has.
    """
    found = [AvailableMemory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "all of this computer's")]
    meminfo, top = root / "proc/meminfo", root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(AvailableMemory(1024 * _numbers(meminfo)["MemAvailable:"], str(meminfo)))
    groups: list[str] = []
    with contextlib.suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    for line in groups:
        if line.startswith("0::"):
            group = top / line[3:].strip("/")
            # Within a container the path may be the host's: then what is above it is there all the same.
            found += [limit for one in (group, *group.parents) if one.is_relative_to(top) for limit in _limit(one)]
    return min(found)


def _limit(group: Path) -> list[AvailableMemory]:
    """What one has, where it has a limit."""
    limit = group / "memory.max"
    with contextlib.suppress(OSError, ValueError):
        most, taken = int(limit.read_text()), int((group / "memory.current").read_text())
        stat = _numbers(group / "memory.stat")
        taken -= sum(stat.get(name, 0) for name in _GIVEN_BACK)
        return [AvailableMemory(max(0, most - taken), str(limit))]
    return []


def _numbers(path: Path) -> dict[str, int]:
    """By the word before them. Raises `OSError`."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
