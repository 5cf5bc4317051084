"""The process that guards a robot: real processes, killed without warning."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.driver_host.proxy import RobotProxy
from hal.driver_host.watchdog import CommandWatchdog
from hal.drivers.fake import FakeConfig, fake_spec
from tests.hal.driver_host.hosting import BLOCK, HZ, LOG, PERIOD_S
from wire.errors import RobotError

ROOT = Path(__file__).resolve().parents[3]
CONFIG = FakeConfig(control_hz=HZ, image_px=16, preview_px=24)
SPEC = fake_spec(CONFIG)
MS = 1_000_000


@pytest.fixture()
def place() -> Iterator[Path]:
    """A short path: those of tmp_path may be too long for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="host-"))
    yield directory / "socket"
    shutil.rmtree(directory)


class Processes:
    """A host of the noting robot and control processes, ended by their own ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = path.with_name("notes")
        self._all: list[subprocess.Popen[bytes]] = []

    def host(self, *more: str) -> subprocess.Popen[bytes]:
        return self.start("tests.hal.driver_host.hosting", "host", str(self.path), *more)

    def blocking(self) -> subprocess.Popen[bytes]:
        return self.start("tests.hal.driver_host.hosting", str(self.path))

    def control(self, value: float, fresh: bool) -> subprocess.Popen[bytes]:
        return self.start("tests.hal.driver_host.hosting", str(self.path), str(value), "fresh" if fresh else "on")

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, LOG: str(self.notes), "OMP_NUM_THREADS": "1"}
        with self.path.with_name("log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", *argv], cwd=ROOT, env=environment, stderr=log)
        self._all.append(process)
        return process

    def said(self) -> str:
        return self.path.with_name("log").read_text()

    def lines(self) -> list[tuple[int, str, list[float]]]:
        """(time, call, executed) of each whole line."""
        if not self.notes.exists():
            return []
        rows = [line.split() for line in self.notes.read_text().split("\n")[:-1]]
        return [(int(row[0]), row[1], [float(x) for x in row[2:]]) for row in rows]

    def until(self, holds: Callable[[list[tuple[int, str, list[float]]]], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not holds(self.lines()):
            assert time.monotonic() < deadline, f"{what}: {self.lines()[-5:]}\n{self.said()}"
            time.sleep(0.01)

    def wait(self) -> None:
        """Until all that were started have ended."""
        for process in self._all:
            process.wait(60)

    def end(self) -> None:
        for process in self._all:
            if process.poll() is None:
                process.kill()
            process.wait(60)


@pytest.fixture()
def processes(place: Path) -> Iterator[Processes]:
    all_of_them = Processes(place)
    yield all_of_them
    all_of_them.end()


def moves(value: float, count: int = 5) -> Callable[[list[tuple[int, str, list[float]]]], bool]:
    """The last `count` calls were writes that moved x by `value`."""
    return lambda lines: (
        len(lines) >= count and all(c == "write" and x[0] == pytest.approx(value) for _, c, x in lines[-count:])
    )


# --- kill -9 --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_control_is_killed_the_robot_holds_and_a_new_control_goes_on(processes: Processes) -> None:
    host = processes.host()
    first = processes.control(0.5, fresh=True)
    processes.until(moves(0.5), "the first control moves it")
    killed_ns = time.monotonic_ns()
    first.send_signal(signal.SIGKILL)
    first.wait()
    processes.until(moves(0.0), "the host holds it")
    lines = processes.lines()
    last = max(i for i, (_, call, x) in enumerate(lines) if call == "write" and x[0] != 0)
    since_last, since_killed = (lines[last + 1][0] - t for t in (lines[last][0], killed_ns))
    # 2 periods is the promise; the rest is this machine, which may let a process wait.
    assert min(since_last, since_killed) < (2 * PERIOD_S + 0.02) * 1e9
    gaps = np.diff([t for t, _, _ in lines[last + 1 :]]) / 1e9
    assert np.median(gaps) == pytest.approx(PERIOD_S, rel=0.2), "hold in every period"
    assert host.poll() is None
    processes.control(-0.25, fresh=False)
    processes.until(moves(-0.25), "the new control moves it")
    assert "is held until one attaches" in processes.said()
    assert [call for _, call, _ in processes.lines()].count("reset") == 1, "the scene went on"


def test_control_is_stopped_the_robot_holds_and_its_old_command_is_not_executed(processes: Processes) -> None:
    processes.host()
    control = processes.control(0.5, fresh=True)
    processes.until(moves(0.5), "control moves it")
    control.send_signal(signal.SIGSTOP)
    processes.until(moves(0.0), "the host holds it")
    control.send_signal(signal.SIGCONT)
    processes.until(moves(0.5), "control goes on")


def test_the_host_is_killed_and_control_says_so(processes: Processes) -> None:
    host = processes.host()
    robot = RobotProxy(SPEC, processes.path)
    robot.connect()
    robot.reset("go-left", 1)
    assert robot.host_pid == host.pid
    host.kill()
    host.wait()
    with pytest.raises(RobotError, match=rf"its host ended during read\(\) \(host process {host.pid}\)"):
        robot.read()
    with pytest.raises(RobotError, match="before connect"):
        robot.write(np.zeros(4, np.float32))
    robot.close()
    processes.host()
    robot.connect()
    robot.reset("go-left", 1)
    assert robot.read().state.shape == (4,)
    robot.close()


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_asked_to_end_the_host_brings_the_robot_to_hold_and_closes_it(
    processes: Processes, asked: signal.Signals
) -> None:
    host = processes.host()
    control = processes.control(0.5, fresh=True)
    processes.until(moves(0.5), "control moves it")
    control.kill()
    host.send_signal(asked)
    assert host.wait(60) == 0
    calls = processes.lines()
    assert calls[-1][1] == "close"
    assert calls[-2][1] == "write"
    assert calls[-2][2][0] == 0
    assert not processes.path.exists(), "a successor finds no socket of a dead host"


def test_control_and_supervisor_gone_the_host_ends(processes: Processes) -> None:
    # Its parent is this process, so 1 is a supervisor that is gone.
    host = processes.host("1")
    assert host.wait(60) == 0
    assert processes.lines()[-1][1] == "close"


# --- when hold is due -----------------------------------------------------------------------------------------------


class TestWatch:
    def test_nothing_is_due_before_the_first_command_and_at_rest(self) -> None:
        watch = CommandWatchdog(20 * MS)
        assert watch.left_s(10**12) == float("inf")
        watch.on_disconnect(0)
        watch.on_hold(0)
        assert watch.left_s(10**12) == float("inf")
        watch.on_command(0)
        watch.pause()
        assert watch.left_s(10**12) == float("inf")

    def test_it_is_due_after_two_periods_to_the_nanosecond(self) -> None:
        watch = CommandWatchdog(20 * MS)
        watch.on_command(7)
        due = 7 + 2 * 20 * MS
        assert watch.left_s(due - 1) == pytest.approx(1e-9)
        assert watch.left_s(due) == 0
        assert watch.left_s(due + 10**9) == 0

    def test_each_command_begins_anew(self) -> None:
        watch = CommandWatchdog(20 * MS)
        for tick in range(100):
            assert watch.left_s(tick * 20 * MS) > 0
            watch.on_command(tick * 20 * MS)

    def test_alone_it_waits_for_no_second_period(self) -> None:
        watch = CommandWatchdog(20 * MS)
        watch.on_command(0)
        watch.on_disconnect(5 * MS)
        assert watch.left_s(5 * MS) == pytest.approx(0.015)
        watch.on_command(0)
        watch.on_disconnect(30 * MS)
        assert watch.left_s(30 * MS) == 0

    def test_hold_comes_in_every_period_and_does_not_catch_up(self) -> None:
        watch = CommandWatchdog(20 * MS)
        watch.on_command(0)
        watch.on_hold(41 * MS)
        assert watch.left_s(41 * MS) == pytest.approx(0.019)
        watch.on_hold(175 * MS)
        assert watch.left_s(175 * MS) == pytest.approx(0.005)


@pytest.mark.parametrize("call", ["connect", "reset", "read", "write"])
@pytest.mark.slow
def test_a_driver_that_blocks_is_named_and_its_process_makes_room_for_a_new_one(
    processes: Processes, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = processes.path.with_name(f"block_in_{call}")
    monkeypatch.setenv(BLOCK, str(fault))
    waited: list[float] = []
    robot = RobotProxy(
        SPEC, processes.path, call_s=0.2, slow_call_s=0.3, meanwhile=lambda: waited.append(time.monotonic())
    )
    calls = {
        "connect": robot.connect,
        "reset": lambda: robot.reset("go-left", 1),
        "read": robot.read,
        "write": lambda: robot.write(np.zeros(4, np.float32)),
    }
    host = processes.blocking()
    for each in calls.values():
        each()
    fault.touch()
    waited.clear()
    with pytest.raises(RobotError, match=rf"driver blocks: no answer to {call}\(\)"):
        calls[call]()
    assert waited or call in ("read", "write"), "somebody could say meanwhile that it lives"
    waited.clear()
    robot.close()
    assert not waited, "nobody waits for it to be closed"
    assert host.wait(60) == 1
    assert "Timeout" in processes.said() and f"in {call}" in processes.said(), "its log says where it blocked"
    fault.unlink()
    processes.blocking()
    for each in calls.values():
        each()
    robot.close()
