"""A person with a keyboard drives a robot of a fleet: real processes, CURVE, a pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fleet.paths import DataDirectory
from wire.messages import ACTORS

ROOT = Path(__file__).resolve().parents[2]
SPEED = (0.21, 0.37)
"""shares of full speed that nobody else here would command"""


def start(log: Path, *words: str, **options: object) -> subprocess.Popen:
    with log.open("w") as output:
        given = {"stdout": output, "stderr": output, **options}
        return subprocess.Popen([sys.executable, "-m", "fleet.cli", *words], cwd=ROOT, start_new_session=True, **given)  # type: ignore[call-overload, no-any-return]


def wait(what: str, until: Callable[[], object], log: Path, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"not in time: {what}\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


class Typist:
    """A terminal with somebody at it."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.name = os.ttyname(self.slave)
        termios.tcsetwinsize(self.slave, (24, 200))
        self.seen = ""

    def type(self, keys: str, seconds: float, pause_s: float = 0.03) -> None:
        """The same keys again and again, as a terminal repeats those that are held."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.write(self.master, keys.encode())
            time.sleep(pause_s)
            self.look()

    def look(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        return self.seen


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataDirectory, Path, subprocess.Popen]]:
    place = tmp_path_factory.mktemp("teleop")
    data, log = DataDirectory(place / "fleet"), place / "up.log"
    up = start(
        log,
        *("up", "--recipe", "fake", "--robots", "1", "--no-operator", "--headless"),
        *("--data", str(data.root), "--port", "0", "--web-port", "0"),
    )
    try:
        # The first version has to be trained before robots get to work.
        wait("robots at work", lambda: " online: " in log.read_text() or up.poll() is not None, log, 240)
        yield data, log, up
    finally:
        up.terminate()
        try:
            up.wait(60)
        except subprocess.TimeoutExpired:
            up.kill()
            raise


def human_rows(data: DataDirectory) -> np.ndarray:
    """float32[n, da]: what people made the robot execute, as it is stored."""
    ledger, store = data.buffer.open_reader()
    rows = [row.row for row in ledger.segments_after(0) if row.source == "online"]
    segments = store.read(rows).segments.values() if rows else ()
    found = [s.executed[s.actor == ACTORS.index("human")] for s in segments]
    ledger.close()
    return np.concatenate(found) if found else np.zeros((0, 4), np.float32)


@pytest.mark.slow
def test_a_keyboard_drives_a_robot_and_what_it_did_is_stored(
    fleet: tuple[DataDirectory, Path, subprocess.Popen], tmp_path: Path
) -> None:
    data, log, up = fleet
    typist = Typist()
    config = {"terminal": typist.name, "speeds": SPEED, "speed": 0}
    person = start(
        tmp_path / "teleop.log",
        *("teleop", "robot-0", "--data", str(data.root), "--device-config", json.dumps(config)),
        stdin=typist.slave,
        stdout=typist.slave,
        stderr=typist.slave,
    )
    try:
        wait("the robot is ours", lambda: "robot-0 is yours." in typist.look() or person.poll() is not None, log)
        assert person.poll() is None, typist.seen
        typist.type("\r", 0.02)
        wait("the person drives", lambda: "You drive robot-0." in typist.look(), log, 180)
        typist.type("d", 4.0)
        typist.type("+", 0.02)
        typist.type("r", 4.0)
        typist.type("q", 0.02)
        assert person.wait(60) == 0, typist.look()
    finally:
        if person.poll() is None:
            person.kill()
            person.wait()
    shown = re.sub(r"\x1b\[2K|\r", "\n", typist.look())
    assert re.search(r"robot-0   human +go-\w+   link \d+ ms   DRIVING   speed 21%   d/a move_x", shown), shown[-3000:]
    assert "speed 37%" in shown
    wait("its steps are stored", lambda: len(human_rows(data)) > 100, log, 180)
    rows = human_rows(data)
    sideways = np.isclose(rows[:, 0], SPEED[0], atol=1e-3).sum()
    upwards = np.isclose(rows[:, 2], SPEED[1], atol=1e-3).sum()
    assert sideways > 40
    assert upwards > 40
    assert sideways + upwards > 0.8 * len(rows), "what people did is what was typed"
    assert up.poll() is None


@pytest.mark.slow
def test_a_script_drives_and_a_wrong_robot_is_named(
    fleet: tuple[DataDirectory, Path, subprocess.Popen], tmp_path: Path
) -> None:
    data, log, _ = fleet
    rows = [{"time_s": 0, "action": [0.13, 0, 0, 0]}, {"time_s": 2.0}]
    (tmp_path / "way.json").write_text(json.dumps(rows))
    (tmp_path / "script.json").write_text(json.dumps({"path": str(tmp_path / "way.json")}))
    common = ("--data", str(data.root), "--device", "script", "--device-config", str(tmp_path / "script.json"))
    said = tmp_path / "teleop.log"
    for _ in range(40):
        # A robot that has not come yet is not there to be driven.
        person = start(said, "teleop", "robot-0", *common, stdin=subprocess.DEVNULL)
        if person.wait(60) == 0:
            break
        assert "no robot 'robot-0'" in said.read_text() or "gateway" in said.read_text(), said.read_text()
        time.sleep(0.5)
    assert said.read_text().split("\n")[:2] == ["robot-0 is yours.", "You drive robot-0."]
    wrong = start(tmp_path / "wrong.log", "teleop", "robot-9", *common, stdin=subprocess.DEVNULL)
    assert wrong.wait(60) == 1
    assert "the fleet has no robot 'robot-9'. Did you mean 'robot-0'?" in (tmp_path / "wrong.log").read_text()
    wait("its steps are stored", lambda: np.isclose(human_rows(data)[:, 0], 0.13, atol=1e-3).sum() > 60, log, 180)
