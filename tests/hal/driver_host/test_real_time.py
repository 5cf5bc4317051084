"""A process with deadlines: garbage in its slack, memory that stays, a core of its own. What is given up for good is
asked of a process of its own.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.driver_host import real_time
from hal.driver_host.priority import require_cores
from hal.driver_host.real_time import GarbageCollector, memory_permission, priority_permission
from tests.hal.driver_host.test_server import Processes, place, processes  # noqa: F401
from wire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def garbage() -> Iterator[GarbageCollector]:
    collector = GarbageCollector()
    collector.start()
    yield collector
    collector.stop()
    gc.unfreeze()


def left(cycles: list[weakref.ref[Cycle]]) -> int:
    return sum(cycle() is not None for cycle in cycles)


def make(count: int) -> list[weakref.ref[Cycle]]:
    return [weakref.ref(Cycle()) for _ in range(count)]


def test_garbage_waits_for_slack(garbage: GarbageCollector) -> None:
    cycles = make(real_time._YOUNG)
    garbage._cost_s = 0.001
    garbage.poll(0.001)
    assert left(cycles) == len(cycles), "a tick is near"
    garbage.poll(0.003)
    assert left(cycles) == 0 and garbage.collections == 1
    garbage.poll(1.0)
    assert garbage.collections == 1, "there is none yet"


def test_without_any_slack_garbage_is_bounded(garbage: GarbageCollector) -> None:
    most, cycles = 0, []
    garbage._cost_s = 1.0
    for _ in range(120):
        cycles += make(1000)
        garbage.poll(0.0)
        cycles = [cycle for cycle in cycles if cycle() is not None]
        most = max(most, len(cycles))
    assert 10_000 < most <= real_time._MOST, "Python alone would have collected sooner, and in the middle of ticks"
    assert garbage.collections >= 2


def test_one_collection_that_was_interrupted_does_not_keep_all_later_ones_away(
    garbage: GarbageCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_time, "_MOST", real_time._YOUNG)
    garbage._cost_s = 10.0
    for _ in range(100):
        make(real_time._YOUNG + 1)
        garbage.poll(0.0)
    cycles = make(real_time._YOUNG)
    garbage.poll(5.0)
    assert left(cycles) == 0


def said(code: str) -> list[str]:
    begin = "import os, sys, resource\nfrom pathlib import Path\nfrom hal.driver_host import real_time\n"
    locked = "locked = lambda: int(Path('/proc/self/status').read_text().split('VmLck:')[1].split()[0])\n"
    argv = [sys.executable, "-c", begin + locked + code]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_memory_stays_and_the_loop_has_its_core() -> None:
    core = max(os.sched_getaffinity(0))
    code = f"real_time.become_real_time({core}); print(locked(), sys.getswitchinterval(), *os.sched_getaffinity(0))"
    memory_kb, switch_s, *cores = said(code)
    assert (int(memory_kb) > 0) == (memory_permission() == "")
    assert float(switch_s) == pytest.approx(real_time._SWITCH_S) and cores == [str(core)]


def test_memory_that_is_only_mapped_is_not_fetched() -> None:
    code = (
        "import mmap\nreal_time.lock_memory(); before = locked()\n"
        "room = mmap.mmap(-1, 2**28); mapped = locked() - before; room[:2**24] = bytes(2**24)\n"
        "used = int(Path('/proc/self/status').read_text().split('VmRSS:')[1].split()[0]); print(mapped, used)"
    )
    _, used_kb = said(code)
    assert int(used_kb) < 2**17, "of 256 MB 16 were used"


def test_with_a_limit_nothing_is_locked_and_somebody_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "real_time._capable = lambda number: False\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); print(real_time.lock_memory(), locked())"
    )
    assert said(code) == ["False", "0"]
    monkeypatch.setattr(real_time, "_capable", lambda number: False)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, 0))
    for told, word in ((memory_permission(), "LimitMEMLOCK"), (priority_permission(), "LimitRTPRIO")):
        assert "limits.conf" in told and word in told
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(resource, "RLIMIT_RTPRIO", 14)
    assert memory_permission() == ""


def test_a_core_that_there_is_not_is_named() -> None:
    require_cores(cpu_driver=None, cpu_control=min(os.sched_getaffinity(0)))
    with pytest.raises(ConfigError, match=r"--cpu-control 4095: this process may run on cores \d"):
        require_cores(cpu_driver=None, cpu_control=4095)


def test_who_watches_a_driver_runs_before_it_and_on_any_core() -> None:
    core = max(os.sched_getaffinity(0))
    code = (
        "import threading\nfrom hal.driver_host.priority import real_time, watching\n"
        f"own = []\ndone = real_time({core})\n"
        "def run(): watching(); own.extend([os.sched_getparam(0).sched_priority, len(os.sched_getaffinity(0))])\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join()\n"
        "print(done, os.sched_getparam(0).sched_priority, *own)"
    )
    permitted, driver, watcher, cores = said(code)
    assert int(cores) == len(os.sched_getaffinity(0))
    assert int(watcher) > int(driver) if permitted == "True" else watcher == "0"


@pytest.mark.slow
@pytest.mark.skipif(memory_permission() != "", reason="memory may not be locked here")
def test_a_host_locks_its_memory(processes: Processes) -> None:  # noqa: F811
    status = Path(f"/proc/{processes.host().pid}/status")
    deadline_s = time.monotonic() + 60
    while int(status.read_text().split("VmLck:")[1].split()[0]) == 0:
        assert time.monotonic() < deadline_s, processes.said()
        time.sleep(0.02)
