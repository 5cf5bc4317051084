"""How urgent a thread is to the operating system. Where a change is not permitted things go on as they are."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wire.errors import ConfigError

log = logging.getLogger(__name__)

_WATCHING, _REAL_TIME, _YIELDING = 11, 10, 5
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""that this process may run on"""


def real_time(cpu: int | None = None) -> bool:
    """Let the calling thread run before everything that is not real-time; whether that was permitted.

    For a loop that sleeps most of the time. Threads it starts later inherit this: they call `ordinary`. `cpu`: the only
    core it runs on, also where the rest is not permitted; None: any but one, which is left to all others: Linux gives
    a real-time thread that wakes the core it ran on last, even if another one is idle, and whoever is at work there
    waits.
    """
    what = "no real-time priority: ticks may start late on a busy machine"
    wanted = os.sched_param(_REAL_TIME)
    permitted = _permitted(what, os.sched_setscheduler, 0, os.SCHED_FIFO, wanted, level=logging.INFO)
    if cpu is not None:
        _permitted("this thread may run on every core", os.sched_setaffinity, 0, {cpu}, level=logging.WARNING)
    elif permitted and len(_CORES) > 1:
        _permitted("this thread may run on every core", os.sched_setaffinity, 0, sorted(_CORES)[1:])
    return permitted


def require_cores(**wanted: int | None) -> None:
    """Raises `ConfigError` for a core, by the option that names it, that this process may not run on."""
    for option, cpu in wanted.items():
        if cpu is not None and cpu not in _CORES:
            known = ", ".join(map(str, sorted(_CORES)))
            raise ConfigError(f"--{option.replace('_', '-')} {cpu}: this process may run on cores {known}.")


def watching() -> None:
    """Let the calling thread, which a real-time thread has started, run before that one, on every core: it would never
    run beside one of its own urgency that does not sleep.
    """
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        _permitted("as urgent as its starter", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(_WATCHING))
    _permitted("this thread stays on its cores", os.sched_setaffinity, 0, _CORES)


@contextlib.contextmanager
def yielding() -> Iterator[None]:
    """While a real-time thread does what takes longer than a tick, the ticks of others come first.

    It still runs before everything that is not real-time. Threads of one priority are not interrupted for each other.
    """
    urgent = os.sched_getscheduler(0) == os.SCHED_FIFO
    if urgent:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_YIELDING))
    try:
        yield
    finally:
        if urgent:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REAL_TIME))


def ordinary() -> None:
    """Give the calling thread back the priority of an ordinary one: for work beside a real-time loop."""
    what = "this thread keeps its priority"
    if _permitted(what, os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)):
        _permitted(what, os.setpriority, os.PRIO_PROCESS, threading.get_native_id(), 0)
    _permitted("this thread stays on its cores", os.sched_setaffinity, 0, _CORES)


def set_niceness(process: int, niceness: int) -> None:
    """Give process id `process`, which has one thread so far, a niceness from -20 to 19.

    It holds against everything on the machine only if the process leads a session: Linux shares processor time among
    sessions first (autogroup), and within one only by niceness.
    """
    what = f"process {process} keeps its priority"
    if _permitted(what, os.setpriority, os.PRIO_PROCESS, process, niceness):
        _permitted(what, _set_session_niceness, process, niceness)


def idle() -> bool:
    """Let the calling thread, and those it starts, run only where nobody else wants to; whether that was permitted."""
    what = "this process takes its share of a busy machine"
    permitted = _permitted(what, os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0), level=logging.INFO)
    if permitted:
        _permitted(what, _set_session_niceness, os.getpid(), 19)
    return permitted


def _set_session_niceness(process: int, niceness: int) -> None:
    """Of its own session alone: another's may be the shell of somebody who works there."""
    if os.getsid(process) == process:
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))


def _permitted(otherwise: str, change: Callable[..., object], *given: Any, level: int = logging.DEBUG) -> bool:
    try:
        change(*given)
    except OSError as error:
        log.log(level, "%s (%s).", otherwise, error)
        return False
    return True
