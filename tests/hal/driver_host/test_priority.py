"""How urgent a process says it is. Each asks in a process of its own: what is given up is not given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SESSION = Path("/proc/self/autogroup")


def said(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import os\nfrom hal.driver_host.priority import *\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    return done.stdout.split()


def test_an_idle_process_leaves_the_machine_to_others() -> None:
    assert said("print(idle(), os.sched_getscheduler(0) == os.SCHED_IDLE)") == ["True", "True"]


def test_niceness_is_that_of_the_process() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = min(19, mine + 4)
    assert said(f"set_niceness(os.getpid(), {wanted}); print(os.nice(0))") == [str(wanted)]


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel shares processor time among processes, not sessions")
def test_niceness_is_that_of_the_session_too() -> None:
    code = "set_niceness(os.getpid(), 7); print(open('/proc/self/autogroup').read())\n"
    assert said(code)[-2:] == ["nice", "7"]
    assert said("idle(); print(open('/proc/self/autogroup').read())")[-2:] == ["nice", "19"]


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel shares processor time among processes, not sessions")
@pytest.mark.parametrize("said_so", ["idle()", "set_niceness(os.getpid(), 7)"])
def test_the_session_of_somebody_else_keeps_its_share(said_so: str) -> None:
    code = f"if os.fork(): os.wait(); print(open('/proc/self/autogroup').read())\nelse: {said_so}"
    assert said(code)[-2:] == ["nice", "0"]


def test_a_process_that_has_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert said(f"set_niceness({process.pid}, 3); print('on')") == ["on"]


def test_real_time_threads_leave_a_core_to_all_others() -> None:
    cores = len(os.sched_getaffinity(0))
    code = (
        "done = real_time(); print(done, len(os.sched_getaffinity(0))); ordinary(); print(len(os.sched_getaffinity(0)))"
    )
    permitted, during, after = said(code)
    assert int(during) == (max(1, cores - 1) if permitted == "True" else cores) and int(after) == cores


def test_what_takes_long_lets_the_ticks_of_others_go_first() -> None:
    code = (
        "level = lambda: os.sched_getparam(0).sched_priority\n"
        "done, ticking = real_time(), level()\n"
        "with yielding(): between = level()\n"
        "kept = os.sched_getscheduler(0) == (os.SCHED_FIFO if done else os.SCHED_OTHER)\n"
        "print(done, ticking, between, level(), kept)"
    )
    permitted, ticking, between, after, kept = said(code)
    assert kept == "True" and after == ticking
    assert int(between) < int(ticking) if permitted == "True" else ticking == "0"
