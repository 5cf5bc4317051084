"""Keeps an encoder from making the process real-time.

SVT-AV1, in a process of root, gives the thread that opens it and all threads it starts SCHED_FIFO at the highest
priority. They would then run before every control loop of the machine, and what the thread starts later inherits it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_TASKS = "/proc/self/task"


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Threads of this process that become real-time meanwhile get the calling thread's scheduling back."""
    if not hasattr(os, "sched_getscheduler") or not os.path.isdir(_TASKS):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    already = _real_time()
    try:
        yield
    finally:
        for thread in _real_time() - already:
            # a thread may have ended since it was listed
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, parameters)


def _real_time() -> set[int]:
    """Thread ids."""
    found = set()
    for thread in map(int, os.listdir(_TASKS)):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) in (os.SCHED_FIFO, os.SCHED_RR):
                found.add(thread)
    return found
