"""Children are started again, given up with their last word, and ended in order."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from robot_edge.runtime.lifecycle import instance_lock
from robot_edge.runtime.supervisor import Child, Supervisor
from wire.errors import ConfigError


def child(tmp_path: Path, code: str, **more: object) -> Child:
    return Child("kid", [sys.executable, "-c", code], tmp_path / "kid.log", **more)  # type: ignore[arg-type]


def until(supervisor: Supervisor, true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        supervisor.poll()
        time.sleep(0.01)


FOREVER = "import time\nwhile True: time.sleep(0.05)"


def test_a_killed_child_comes_back(tmp_path: Path) -> None:
    kid = child(tmp_path, FOREVER)
    supervisor = Supervisor([kid])
    supervisor.start("kid")
    first = kid.pid
    os.kill(first, signal.SIGKILL)
    until(supervisor, lambda: kid.pid not in (0, first))
    assert kid.starts == 2
    supervisor.stop(["kid"], 5.0)
    assert not kid.running
    supervisor.poll()
    assert kid.starts == 2


def test_a_child_that_keeps_dying_is_given_up_with_its_last_line(tmp_path: Path) -> None:
    kid = child(tmp_path, "import sys; sys.exit('vla-fleet: the port is taken')", give_up_after=2)
    supervisor = Supervisor([kid])
    supervisor.start("kid")
    until(supervisor, lambda: kid.failed)
    assert "exit status 1" in kid.failed
    assert "the port is taken" in kid.failed


def test_a_child_that_is_never_given_up_is_tried_after_ever_longer_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pause_s = tmp_path / "works"
    code = f"import sys, time, os\nif not os.path.exists({str(pause_s)!r}): sys.exit('vla-fleet: no such recipe')\n"
    kid = child(tmp_path, code + FOREVER, give_up_after=0)
    supervisor = Supervisor([kid])
    supervisor.start("kid")
    until(supervisor, lambda: kid.deaths_in_a_row == 3)
    assert (kid.failed, kid.due_s - kid.started_s > 0.3) == ("", True)
    assert "exit status 1: vla-fleet: no such recipe" in kid.fault
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3, "the same trouble is no new error"
    pause_s.touch()
    until(supervisor, lambda: kid.running)
    kid.started_s -= 100
    until(supervisor, lambda: kid.fault == "")
    assert kid.deaths_in_a_row == 0
    supervisor.stop(["kid"], 5.0)


def test_a_pause_never_grows_beyond_half_a_minute(tmp_path: Path) -> None:
    kid = child(tmp_path, "import sys; sys.exit(1)", give_up_after=0)
    supervisor = Supervisor([kid])
    supervisor.start("kid")
    kid.deaths_in_a_row = 5000
    until(supervisor, lambda: kid.deaths_in_a_row == 5001)
    assert kid.due_s - kid.started_s > 10 and kid.due_s - time.monotonic() <= 30


def test_a_child_that_may_end_is_not_started_again(tmp_path: Path) -> None:
    kid = child(tmp_path, "pass", restart=False)
    supervisor = Supervisor([kid])
    supervisor.start("kid")
    until(supervisor, lambda: kid.process is None)
    assert (kid.failed, kid.starts) == ("", 1)


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    kid = child(tmp_path, f"import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n{FOREVER}")
    supervisor = Supervisor([kid])
    supervisor.start("kid")
    until(supervisor, lambda: "up" in (tmp_path / "kid.log").read_text())
    supervisor.stop(["kid"], 0.2)
    assert not kid.running


def test_a_child_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    orphan = (
        "from robot_edge.runtime.lifecycle import ShutdownSignal; import time, os\n"
        "l = ShutdownSignal(); print(os.getpid(), flush=True)\n"
        "while not l.requested: time.sleep(0.02)\nprint('cut', flush=True)"
    )
    parent = (
        "import sys, time; from pathlib import Path; from robot_edge.runtime.supervisor import *\n"
        f"s = Supervisor([Child('kid', [sys.executable, '-c', {orphan!r}], Path({str(tmp_path / 'kid.log')!r}))])\n"
        "s.start('kid')\nwhile True: time.sleep(0.05)"
    )
    outer = Child("outer", [sys.executable, "-c", parent], tmp_path / "outer.log")
    supervisor = Supervisor([outer])
    supervisor.start("outer")
    log = tmp_path / "kid.log"
    until(supervisor, lambda: log.exists() and log.read_text().strip())
    os.kill(outer.pid, signal.SIGKILL)
    assert outer.process is not None
    outer.process.wait()
    deadline = time.monotonic() + 60
    while "cut" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "cut" in log.read_text()


def test_one_robot_is_started_once(tmp_path: Path) -> None:
    second = instance_lock(tmp_path / "lock", timeout_s=0.1)
    with instance_lock(tmp_path / "lock"), pytest.raises(ConfigError, match="two robots have one name"), second:
        pytest.fail("both hold it")
    with instance_lock(tmp_path / "lock"):
        pass
