"""A process with a loop of deadlines: what it asks of the system once, and what it does when it has time.

What the system does not permit is left, and said once: such a process goes on as an ordinary one.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
import time
from pathlib import Path

from hal.driver_host.priority import real_time

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""how long another thread may keep the interpreter from the loop, unless it holds it in C; Python's own is ten times
as long
"""
_YOUNG, _MOST = 2_000, 50_000
"""objects made since the last collection, less those that have gone: looked for cycles when there is time, and at
once"""
_MARGIN = 2.0
"""how much more time there must be than the longest collection of late took"""
_CAP_IPC_LOCK, _CAP_SYS_NICE = 14, 23
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


class GarbageCollector:
    """Python looks for cycles whenever enough objects were made, also in the middle of a tick: from `start` on it does
    so in `poll`, when there is time.
    """

    def __init__(self) -> None:
        self.collections = 0
        self._cost_s = 0.0

    def start(self) -> None:
        """To be called before the loop: what there is by now will not go away, and is never looked at again. Collecting
        all that was imported takes longer than a control period."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def poll(self, left_s: float) -> None:
        """To be called once a period; `left_s`: until the next deadline. Without time for it garbage waits until there
        is too much of it."""
        made = gc.get_count()[0]
        if made > _MOST or (made > _YOUNG and left_s > _MARGIN * self._cost_s):
            begun_s = time.perf_counter()
            gc.collect()
            # One that was interrupted must not keep all later ones away.
            self._cost_s = max(time.perf_counter() - begun_s, 0.9 * self._cost_s)
            self.collections += 1

    @staticmethod
    def stop() -> None:
        """Python collects by itself again."""
        gc.enable()


def become_real_time(cpu: int | None = None) -> None:
    """The calling thread runs a loop with deadlines, and its process nothing else that matters.

    `cpu`: the only core it may run on; None: any but the first. Its memory stays where it is and other threads give the
    interpreter back soon. What is not permitted is logged, with what would permit it.
    """
    sys.setswitchinterval(_SWITCH_S)
    if not real_time(cpu):
        log.warning("no real-time priority: ticks may start late on a busy machine. %s", priority_permission())
    if not lock_memory():
        log.warning("memory may be paged out, and ticks be late for it. %s", memory_permission())


def lock_memory() -> bool:
    """Keep in memory what this process uses, now and from now on; whether that was permitted.

    What it does not use is not fetched (MCL_ONFAULT): a fork shares most of that with others.
    """
    if memory_permission():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT):
        log.warning("mlockall: %s", os.strerror(ctypes.get_errno()))
        return False
    return True


def memory_permission() -> str:
    """What to do that this process may lock its memory, '' when it may.

    A limit that is not unlimited will not do: with it the process could lock what it has and get no more.
    """
    if sys.platform != "linux":
        return "This system is not Linux."
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _capable(_CAP_IPC_LOCK):
        return ""
    return (
        f"RLIMIT_MEMLOCK is {limit // 1024} kB: 'USER - memlock unlimited' in /etc/security/limits.conf, "
        "LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 of a container."
    )


def priority_permission() -> str:
    """What to do that this process may run in real time, '' when it may."""
    if not hasattr(resource, "RLIMIT_RTPRIO"):
        return "This system is not Linux."
    if resource.getrlimit(resource.RLIMIT_RTPRIO)[0] > 0 or _capable(_CAP_SYS_NICE):
        return ""
    return (
        "RLIMIT_RTPRIO is 0: 'USER - rtprio 50' in /etc/security/limits.conf, LimitRTPRIO=50 in a systemd unit, or "
        "--cap-add SYS_NICE of a container."
    )


def _capable(number: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    (line,) = (line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> number & 1)
