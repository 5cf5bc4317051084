"""How urgent a thread is to the operating system. Where a change is not permitted things go on as they are."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)

_REAL_TIME = 10


def real_time() -> bool:
    """Let the calling thread run before everything that is not real-time; whether that was permitted.

    For a loop that sleeps most of the time. Threads it starts later inherit this: they call `ordinary`.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REAL_TIME))
    except (AttributeError, OSError) as error:
        log.info("no real-time priority (%s): ticks may start late on a busy machine.", error)
        return False
    return True


def ordinary() -> None:
    """Give the calling thread back the priority of an ordinary one: for work beside a real-time loop."""
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
    except (AttributeError, OSError) as error:
        log.debug("the priority of this thread stays as it is: %s", error)
