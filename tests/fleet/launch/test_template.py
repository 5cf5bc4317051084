"""The process that parts are forked from: what is asked of it, and what happens when somebody dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.config.recipes import get_recipe
from fleet.launch import process_specs
from fleet.launch.template import Template
from robot_edge.runtime.forking import Process, forks_here
from robot_edge.runtime.lifecycle import PARENT
from tests.robot_edge.runtime import part

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not forks_here(), reason="no pidfd here")


class House:
    def __init__(self, directory: Path, template: Template) -> None:
        self.log, self.template = directory / "log", template
        self.started: list[Process] = []

    def start(self, *words: str, role: str = "kid", **environment: str) -> Process:
        given = {**os.environ, PARENT: str(os.getpid()), **environment}
        command = [sys.executable, "-m", part.__name__, *words]
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        with self.log.open("ab") as output:
            self.started.append(self.template.starter(role)(command, given, output.fileno(), nice))
        return self.started[-1]

    def said(self, word: str) -> bool:
        for process in self.started:
            process.poll()
        return self.log.exists() and word in self.log.read_text()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.chdir(ROOT)
    with Template({"kid": (part.__name__,)}, tmp_path / "template.log") as template:
        made = House(tmp_path, template)
        yield made
        for process in made.started:
            process.kill()
            process.wait(20.0)


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_parts_are_its_children_and_end_as_programs_would(house: House) -> None:
    assert house.start("exit", "0").wait(30.0) == 0
    assert house.start("exit", "7").wait(30.0) == 7
    stays = house.start("stay")
    until(lambda: house.said("here"))
    assert parent(stays.pid) == house.template.pid
    os.kill(stays.pid, signal.SIGKILL)
    assert stays.wait(30.0) == -signal.SIGKILL
    assert not Path(f"/proc/{stays.pid}").exists(), "it is waited for, and leaves no zombie"


def test_a_part_gets_its_environment_and_its_log(house: House) -> None:
    assert house.start("tell", WORD="handed on").wait(30.0) == 0
    told = json.loads(house.log.read_text().splitlines()[0])
    assert (told["word"], told["shown"]) == ("handed on", ["-m", part.__name__, "tell"])
    assert (told["leads"], told["terminates"], told["open"]) == (True, True, 1)


def test_a_part_is_asked_to_end(house: House) -> None:
    stays = house.start("stay")
    until(lambda: house.said("here"))
    stays.terminate()
    assert (stays.wait(30.0), house.said("cut")) == (0, True)
    stays.terminate()


def test_a_part_may_be_ended_before_it_begins(house: House) -> None:
    stays = house.start("stay")
    stays.kill()
    assert stays.wait(30.0) == -signal.SIGKILL
    assert house.start("exit", "3").wait(30.0) == 3
    until(lambda: not children(house.template.pid))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_template_that_dies_takes_nobody_with_it_and_is_replaced(house: House) -> None:
    stays = house.start("stay")
    until(lambda: house.said("here"))
    first = house.template.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: stays.poll() is None and house.template.pid == 0)
    meanwhile = house.start("exit", "5")
    assert isinstance(meanwhile, subprocess.Popen)
    assert meanwhile.wait(30.0) == 5
    assert house.template.pid not in (0, first)
    until(lambda: not isinstance(house.start("exit", "0"), subprocess.Popen))
    assert house.started[-1].wait(30.0) == 0
    assert stays.poll() is None
    stays.terminate()
    until(lambda: stays.poll() is not None)
    assert house.said("cut")


def test_what_waits_for_a_template_that_dies_is_started_as_a_program(house: House) -> None:
    os.kill(house.template.pid, signal.SIGSTOP)
    waits = house.start("exit", "4")
    assert (waits.pid, waits.poll()) == (0, None)
    os.kill(house.template.pid, signal.SIGKILL)
    assert waits.wait(30.0) == 4


def test_what_a_template_said_before_it_died_is_heard(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as deaf:
        deaf.setattr("fleet.launch.template._TemplateLink.read", lambda line: None)
        stays = house.start("stay")
        until(lambda: house.log.exists() and "here" in house.log.read_text())
        template = house.template.pid
        os.kill(template, signal.SIGSTOP)
        # It never reads this request, so that the line is reset.
        other = house.start("exit", "6")
        os.kill(template, signal.SIGKILL)
        until(lambda: ") Z " in Path(f"/proc/{template}/stat").read_text())
    assert other.wait(30.0) == 6
    assert stays.poll() is None
    assert house.log.read_text().count("here") == 1, "it is not begun a second time"
    assert parent(stays.pid) != os.getpid()


def test_a_fork_nobody_was_told_of_ends_with_its_template(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom tests.robot_edge.runtime import part\nfrom robot_edge.runtime.forking import fork\n"
        "fork([sys.executable, '-m', part.__name__, 'stay'], {}, 1, 0, os.pidfd_open(os.getppid()),\n"
        "     lambda pid: (print(pid, flush=True), os._exit(0)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    pid, *said = done.stdout.splitlines()
    assert said == [], done.stderr
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_roles_it_knows_nothing_of_are_programs(house: House) -> None:
    assert isinstance(house.start("exit", "0", role="stranger"), subprocess.Popen)


def test_template_and_parts_end_when_who_asks_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom fleet.launch.template import Template\n"
        "with Template({'kid': ('tests.robot_edge.runtime.part',)}, Path(sys.argv[1] + '.template')) as template:\n"
        "    output = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "    words = [sys.executable, '-m', 'tests.robot_edge.runtime.part', 'stay']\n"
        "    environment = {**os.environ, 'VLA_FLEET_PARENT': str(os.getpid())}\n"
        "    kid = template.starter('kid')(words, environment, output, 0)\n"
        "    while kid.pid == 0: kid.poll(); time.sleep(0.01)\n"
        "    print(template.pid, kid.pid, flush=True)\n    time.sleep(60)\n"
    )
    log = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(log)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        until(lambda: log.exists() and "here" in log.read_text())
        starter.kill()
    until(lambda: "cut" in log.read_text())
    until(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_roles_that_use_a_gpu_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = get_recipe("pixels")
    monkeypatch.setattr(process_specs, "has_gpu", lambda: False)
    assert "torch" in process_specs.modules_by_role(recipe, "")["edge"]
    assert not any("lerobot" in name for name in process_specs.modules_by_role(recipe, "")["edge"])
    assert any("lerobot" in name for name in process_specs.modules_by_role(recipe, "lerobot:x")["edge"])
    monkeypatch.setattr(process_specs, "has_gpu", lambda: True)
    needs = process_specs.modules_by_role(recipe, "lerobot:x")
    assert set(needs) == {"gateway", "demonstrator", "edge"}
    assert "torch" not in str(needs)
    assert "lerobot" not in str(needs)
