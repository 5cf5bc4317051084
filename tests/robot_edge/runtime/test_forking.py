"""Forks of a process that has imported what they need: they are as if they had been started by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from robot_edge.runtime import forking
from tests.robot_edge.runtime import part

ROOT = Path(__file__).resolve().parents[3]
PART = [sys.executable, "-m", part.__name__]
BEGIN = """
import os, sys, time
from robot_edge.runtime.forking import *
preload(["tests.robot_edge.runtime.part", "no.such.module"])
PART = [sys.executable, "-m", "tests.robot_edge.runtime.part"]
output = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
nice = os.getpriority(os.PRIO_PROCESS, 0)
started = []
def start(*words):
    environment = {**os.environ, "VLA_FLEET_PARENT": str(os.getpid())}
    started.append(start_fork([*PART, *words], environment, output, nice))
    return started[-1]
"""

pytestmark = pytest.mark.skipif(not forking.forks_here(), reason="no pidfd here")


def run(code: str, log: Path, **environment: str) -> str:
    """What a process with one thread says that starts parts; what they say is in `log`."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code), str(log), " " * 200, BEGIN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_ends_as_a_program_would(tmp_path: Path) -> None:
    code = """
    for words in (("exit", "0"), ("exit", "7"), ("fail",)):
        print(type(start(*words)).__name__, started[-1].wait(20.0))
    """
    said = run(code, tmp_path / "log").splitlines()
    assert said == ["Forked 0", "Forked 7", "Forked 1"]
    assert (tmp_path / "log").read_text().endswith("RuntimeError: the driver is unwell\n")


def test_it_gets_what_a_program_would(tmp_path: Path) -> None:
    code = """
    import signal
    held = open(sys.argv[1] + ".lock", "w")
    signal.signal(signal.SIGTERM, lambda *a: None)
    os.environ["OTHER"] = "not handed on"
    environment = {"WORD": "handed on", "PATH": os.environ["PATH"]}
    print(start_fork([*PART, "tell"], environment, output, nice + 3).wait(20.0), nice)
    """
    nice = int(run(code, tmp_path / "log").split()[1])
    told, _, end = (tmp_path / "log").read_text().partition("\n")
    assert end == "and at its end\n"
    assert json.loads(told) == {
        "arguments": ["tell"],
        "shown": ["-m", "tests.robot_edge.runtime.part", "tell"],
        "word": "handed on",
        "other": None,
        "leads": True,
        "descriptors": sorted(["/dev/null", str(tmp_path / "log"), str(tmp_path / "log")]),
        "open": 1,  # what it watches its starter with
        "terminates": True,
        "interrupts": True,
        "main": "tests.robot_edge.runtime.part",
        "niceness": min(19, nice + 3),
    }


def test_it_is_ended_and_killed(tmp_path: Path) -> None:
    code = """
    def begun():
        while "here" not in open(sys.argv[1]).read(): time.sleep(0.01)
        os.truncate(sys.argv[1], 0)
    kid = start("stay"); begun()
    kid.terminate(); print(kid.wait(20.0))
    kid = start("stay"); begun()
    print(kid.poll())
    kid.kill(); print(kid.wait(20.0), kid.poll())
    kid.kill(); kid.terminate()
    try: start("stay").wait(0.01)
    except Exception as error: print(type(error).__name__)
    started[-1].kill(); started[-1].wait(20.0)
    try: os.waitpid(-1, os.WNOHANG)
    except Exception as error: print(type(error).__name__)
    """
    assert run(code, tmp_path / "log").split() == ["0", "None", "-9", "-9", "TimeoutExpired", "ChildProcessError"]


def test_it_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = BEGIN + "start('stay')\nprint('on', flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(log)], cwd=ROOT, stdout=subprocess.PIPE) as starter:
        deadline = time.monotonic() + 30
        while not (log.exists() and "here" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        starter.send_signal(signal.SIGKILL)
    while "cut" not in log.read_text():
        assert time.monotonic() < deadline + 30
        time.sleep(0.01)


def test_a_process_with_threads_starts_programs(tmp_path: Path) -> None:
    code = """
    import threading
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    print(type(start("exit", "3")).__name__, started[-1].wait(30.0))
    """
    assert run(code, tmp_path / "log") == "Popen 3\n"


def test_the_pool_of_numpy_is_no_obstacle(tmp_path: Path) -> None:
    code = """
    import subprocess
    begin = "import numpy as np\\n" + sys.argv[3] + "start('exit', '6')\\n" + (
        "print(type(started[-1]).__name__, started[-1].wait(20.0), np.ones((300, 300)).dot(np.ones((300, 300))).sum())")
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    print(subprocess.run([sys.executable, "-c", begin, *sys.argv[1:]], env=environment, capture_output=True, text=True))
    """
    assert "Forked 6 27000000.0" in run(code, tmp_path / "log")


def test_what_is_not_loaded_starts_as_a_program(tmp_path: Path) -> None:
    code = """
    kid = start_fork([sys.executable, "-c", "raise SystemExit(5)"], os.environ, output, nice)
    print(type(kid).__name__, kid.wait(20.0))
    """
    assert run(code, tmp_path / "log") == "Popen 5\n"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_none(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert forking.has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not forking.has_gpu()
