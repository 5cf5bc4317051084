"""`vla-fleet doctor` as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions
from fleet.launch.robot_builders import edge_processes
from hal import registry
from hal.drivers.fake import FakeRobot
from tests.command_line import vla_fleet
from wire.errors import ConfigError
from wire.transport.keys import make_keys
from wire.types import Observation

ROOT = Path(__file__).resolve().parents[3]

BLOCKED = """
import time
from hal.drivers.fake import FakeRobot
from hal.registry import register
class Blocked(FakeRobot):
    def read(self):
        time.sleep(600)
register("blocked", Blocked)
from fleet.cli.__main__ import main
main()
"""


class Wrong(FakeRobot):
    """A driver with a mistake in it."""

    def read(self) -> Observation:
        raise ValueError("no such register")


def doctor(*options: str) -> subprocess.CompletedProcess[str]:
    return vla_fleet("doctor", *options)


@pytest.mark.slow
def test_a_sound_robot_passes_and_its_report_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = doctor("--recipe", "fake", "--simulated", "--seconds", "1", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout and "deterministic" in done.stdout
    found = json.loads(path.read_text())
    assert found["passed"] is True and found["robot"] == "fake"
    assert {"read p99", "camera front", "stands still after"} <= {figure["name"] for figure in found["figures"]}


@pytest.mark.slow
def test_a_faulty_one_is_named_with_what_to_do(tmp_path: Path) -> None:
    faults = json.dumps({"faults": {"frozen_camera": True}})
    done = doctor("--robot", "fake", "--robot-config", faults, "--simulated", "--seconds", "1")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "FAIL" in text and "frozen" in text


@pytest.mark.slow
def test_hardware_is_not_moved_unasked() -> None:
    done = doctor("--robot", "fake")
    assert done.returncode == 1 and "clear its workspace, then say --yes" in done.stderr
    still = doctor("--robot", "fake", "--no-move")
    assert still.returncode == 0 and "2 of 2 checks passed" in still.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--robot", "fak"), "Did you mean 'fake'"),
        (("--robot", "fake", "--yes", "--robot-config", "[1]"), "must be an object"),
        (("--robot", "fake", "--yes", "--robot-config", '{"control_herz": 3}'), "Did you mean 'control_hz'"),
        (("--robot", "fake", "--yes", "--robot-config", '{"control_hz": "x"}'), "control_hz"),
        (("--robot", "fake", "--yes", "--robot-config", "nowhere.json"), "nowhere.json"),
        (("--robot", "fake", "--yes", "--robot-config", "{"), "not JSON"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_understood_is_said_in_one_line(options: tuple[str, ...], said: str) -> None:
    done = doctor(*options)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_driver_that_blocks_is_given_up() -> None:
    words = ["doctor", "--robot", "blocked", "--simulated", "--timeout", "1"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "check 'unready_is_refused' has not ended" in done.stderr or "driver blocks" in done.stderr


def test_a_driver_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered[registry.ROBOTS], "wrong", Wrong)
    done = doctor("--robot", "wrong", "--simulated", "--seconds", "0.5")
    assert done.returncode == 1 and "ValueError: no such register" in " ".join(done.stdout.split())


class Real(FakeRobot):
    """A driver that says it is one."""

    real = True


def test_limits_of_a_real_robot_are_proposed_and_it_does_not_run_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(registry._registered[registry.ROBOTS], "real", Real)
    done = doctor("--robot", "real", "--no-move", "--simulated")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'safety=SafetyLimits(\n    velocity={"move_x": 80.0, ' in done.stdout
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    options = EdgeOptions(recipe="fake", data=tmp_path, gateway="tcp://x:1", overrides=Overrides(robot="real"))
    with pytest.raises(ConfigError, match=r"no velocity limit of move_x, .*nobody|no acceleration limit of move_x"):
        edge_processes(options)


def test_without_a_robot_it_looks_at_the_computer() -> None:
    done = doctor()
    assert done.returncode == 0
    for line in ("shared memory", "real-time priority", "locked memory", "robots", "fake", "metaworld"):
        assert line in done.stdout
