"""How urgent a thread is to the operating system. Where a change is not permitted things go on as they are."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_REAL_TIME, _YIELDING = 10, 5
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""that this process may run on"""


def real_time() -> bool:
    """Let the calling thread run before everything that is not real-time; whether that was permitted.

    For a loop that sleeps most of the time. Threads it starts later inherit this: they call `ordinary`. One core is
    left to all others: Linux gives a real-time thread that wakes the core it ran on last, even if another one is idle,
    and whoever is at work there waits.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REAL_TIME))
    except (AttributeError, OSError) as error:
        log.info("no real-time priority (%s): ticks may start late on a busy machine.", error)
        return False
    if len(_CORES) > 1:
        _run_on(sorted(_CORES)[1:])
    return True


@contextlib.contextmanager
def yielding() -> Iterator[None]:
    """While a real-time thread does what takes longer than a tick, the ticks of others come first.

    It still runs before everything that is not real-time. Threads of one priority are not interrupted for each other.
    """
    urgent = getattr(os, "SCHED_FIFO", None) is not None and os.sched_getscheduler(0) == os.SCHED_FIFO
    if urgent:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_YIELDING))
    try:
        yield
    finally:
        if urgent:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REAL_TIME))


def ordinary() -> None:
    """Give the calling thread back the priority of an ordinary one: for work beside a real-time loop."""
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
    except (AttributeError, OSError) as error:
        log.debug("the priority of this thread stays as it is: %s", error)
    if len(_CORES) > 1:
        _run_on(_CORES)


def set_niceness(process: int, niceness: int) -> None:
    """Give process id `process`, which has one thread so far, a niceness from -20 to 19.

    It holds against everything on the machine only if the process leads a session: Linux shares processor time among
    sessions first (autogroup), and within one only by niceness.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, process, niceness)
    except OSError as error:
        log.debug("the priority of process %d stays as it is: %s", process, error)
        return
    _set_session(process, niceness)


def idle() -> bool:
    """Let the calling thread, and those it starts, run only where nobody else wants to; whether that was permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:
        log.info("no idle priority (%s): this process takes its share of a busy machine.", error)
        return False
    _set_session(os.getpid(), 19)
    return True


def _run_on(cores: Iterable[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        log.info("this thread stays on the cores it may run on: %s", error)


def _set_session(process: int, niceness: int) -> None:
    try:
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))
    except OSError as error:
        log.debug("the priority of the session of process %d stays as it is: %s", process, error)
