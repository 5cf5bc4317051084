"""`vla-fleet stop`: robots of this computer, stopped by their hosts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.cli import entry
from hal.driver_host.stop_line import StopListener
from hal.drivers.fake import FakeRobot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from hal.safety.stop_latch import StopLatch
from robot_edge.runtime import lifecycle
from robot_edge.runtime.robot_host import HOST, STOP_FILE, announce_host
from tests.command_line import vla_fleet
from wire.stop_state import StopState

ROOT = Path(__file__).resolve().parents[3]


class Computer:
    """Edges run here."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self.root = root
        self.hosts: dict[str, StopListener] = {}
        self._stack = stack

    def home(self, name: str) -> Path:
        home = self.root / "data" / "fake" / "edges" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def edge(self, name: str, answers: bool = True, limits: SafetyLimits | None = None) -> LimitedRobot:
        """An edge that runs, with its host."""
        directory = self._stack.enter_context(lifecycle.run_directory())
        announce_host(directory, self.home(name))
        latch = StopLatch(self.home(name) / STOP_FILE)
        robot = LimitedRobot(FakeRobot(), limits, latch)
        if answers:
            listener = StopListener(directory / HOST, robot, latch.save)
            self._stack.callback(listener.close)
        return robot

    def stop(self, *words: str) -> tuple[int, str]:
        """(exit status, what was said)"""
        done = vla_fleet("stop", *words, cwd=self.root)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computer]:
    place = tmp_path / "m"
    place.mkdir()
    monkeypatch.setattr(lifecycle, "memory_directory", lambda: place)
    with contextlib.ExitStack() as stack:
        yield Computer(tmp_path, stack)


def test_all_robots_of_this_computer_are_stopped_released_and_started(computer: Computer) -> None:
    left, right = computer.edge("left"), computer.edge("right")
    status, said = computer.stop()
    assert status == 0
    (stop,) = left.stop_state().stops
    assert left.stop_state() == right.stop_state() == StopState({stop: "cli"}, last=stop)
    for name in ("left", "right"):
        assert f"{name}: stopped by cli ({stop}); answered in " in said
        assert f"vla-fleet stop {name} --release {stop}" in said
    assert computer.stop("--start") == (
        1,
        f"left: {left.stop_state()}; not started\nright: {left.stop_state()}; not started\n",
    )
    assert left.stop_state().stops and right.stop_state().stops
    assert computer.stop("left", "--release", stop) == (0, "left: released and waits to be started\n")
    assert left.stop_state() == StopState(ready=True, last=stop)
    assert right.stop_state().stops
    assert computer.stop("left", "--start") == (0, "left: started\n")
    assert left.stop_state().free
    assert computer.stop("right", "--release", "all", "--start")[0] == 0
    assert right.stop_state().free
    assert computer.stop("right", "--start") == (0, "right: not stopped\n")


def test_a_release_takes_back_only_the_stop_that_it_names(computer: Computer) -> None:
    robot = computer.edge("left")
    robot.stop("web-1-a", "web-1")
    robot.stop("ros-b", "ros")
    status, said = computer.stop("--release", "web-9")
    assert status == 1
    assert "nobody has made a stop 'web-9': left is stopped by web-1 (web-1-a), ros (ros-b)" in said
    assert computer.stop("--release", "web-1-a") == (0, "left: stopped by ros (ros-b)\n")
    assert robot.stop_state() == StopState({"ros-b": "ros"}, last="ros-b")


def test_a_stop_whose_pedal_is_down_is_said_to_be_that(computer: Computer) -> None:
    robot = computer.edge("left")
    robot.stop("pedal-a", "pedal foot", lasting=True)
    status, said = computer.stop("left", "--release", "all", "--start")
    assert status == 1
    assert "pedal-a cannot be released while what made it is pressed, open or not there" in said
    robot.end_cause("pedal-a")
    assert computer.stop("left", "--release", "all", "--start")[0] == 0
    assert robot.stop_state().free


def test_a_host_that_does_not_answer_starts_stopped_and_the_others_are_stopped_at_once(computer: Computer) -> None:
    dead, alive = computer.edge("dead", answers=False), computer.edge("live")
    begun_s = time.monotonic()
    status, said = computer.stop()
    assert time.monotonic() - begun_s < 5.0
    assert status == 1
    assert "dead: NOT STOPPED: no host of a robot answers" in said
    assert "IF IT MOVES, CUT ITS POWER." in said
    assert alive.stop_state().stops
    assert dead.stop_state().free
    again = StopLatch(computer.home("dead") / STOP_FILE).state
    assert again == alive.stop_state()


def test_a_robot_whose_edge_does_not_run_starts_stopped(computer: Computer) -> None:
    computer.home("left")
    status, said = computer.stop("left")
    assert status == 1
    assert "no edge of robot 'left' runs on this computer" in said
    assert list(StopLatch(computer.home("left") / STOP_FILE).state.stops.values()) == ["cli"]
    status, said = computer.stop("left", "--release", "all")
    assert status == 1
    assert StopLatch(computer.home("left") / STOP_FILE).state.stops


def test_a_stop_that_cannot_be_noted_either_is_said(computer: Computer) -> None:
    (computer.home("left") / STOP_FILE).mkdir()
    (computer.home("left") / STOP_FILE / "x").touch()
    status, said = computer.stop("left")
    assert status == 1
    assert "could not be noted in" in said


@pytest.mark.parametrize(("words", "said"), [(("lft",), "Did you mean 'left'?"), ((), "no robot's edge runs on this")])
def test_nothing_to_stop_is_an_error(computer: Computer, words: tuple[str, ...], said: str) -> None:
    computer.home("left")
    status, answer = computer.stop(*words)
    assert status == 1
    assert said in answer
    assert not (computer.home("left") / STOP_FILE).exists()


def test_a_stop_imports_little_and_the_other_commands_are_found_as_ever(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['vla-fleet', 'stop', 'nobody']\n"
        "from fleet.cli.entry import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended)\n"
        "print(sorted({'torch', 'zmq', 'rich', 'fleet.launch', 'cloud_learner', 'PIL'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "no robot 'nobody' runs on this computer" in done.stdout, done.stderr
    assert done.stdout.endswith("[]\n")


def test_the_entry_takes_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vla-fleet", "recipes"])
    with pytest.raises(SystemExit):
        entry.main()
    assert "pixels" in capsys.readouterr().out
