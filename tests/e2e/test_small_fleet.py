"""One small fleet of real processes and all who deal with it: consoles, a keyboard, a page, a stranger, and kill -9.

A fleet takes long to start and two cores to run, so all of these tests share one. Each leaves it at work; the last one
leaves nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.config.data_directory import DataDirectory
from tests.command_line import vla_fleet
from tests.e2e.test_processes import ROOT, Job, robot
from wire.messages.gateway import ACTORS
from wire.transport.keys import make_keys

pytestmark = pytest.mark.slow

SPEED = (0.21, 0.37)
"""shares of full speed that nobody else here would command"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    data = tmp_path_factory.mktemp("small") / "fleet"
    made = Job(data, "--no-operator", recipe="tests.e2e.small_recipes:fake", robots=2)
    try:
        made.wait("two robots practise", practise, 180)
        yield made
    finally:
        made.end()


def practise(snapshot: dict[str, Any]) -> bool:
    """Whether both robots work for the job, on a version that was learned."""
    return bool(snapshot["version"]) and [r["job"] for r in snapshot["robots"]] == ["main"] * 2


def start(fleet: Job, log: Path, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    """`vla-fleet words ...` on the fleet's data directory, in a process of its own."""
    command = [sys.executable, "-m", "fleet.cli", *words, "--data", str(fleet.data.root)]
    with log.open("w") as output:
        return subprocess.Popen(
            command, **{"cwd": ROOT, "stdout": output, "stderr": output, "start_new_session": True, **options}
        )


def run(fleet: Job, *words: str) -> str:
    """What the same says here."""
    done = vla_fleet(*words, "--data", str(fleet.data.root))
    assert done.returncode == 0, done.stderr
    return done.stdout


def robots(fleet: Job) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(run(fleet, "robots", "--json"))["robots"]}


def jobs(fleet: Job) -> dict[str, dict[str, Any]]:
    return {one["request"]["id"]: one for one in json.loads(run(fleet, "jobs", "--json"))}


def until(what: str, holds: Callable[[], object], said: Callable[[], str] = str, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{said()[-3000:]}"
        time.sleep(0.05)


def human_rows(data: DataDirectory, actions: int = 4) -> np.ndarray:
    """float32[n, da]: what people made robots execute, as it is stored."""
    ledger, store = data.buffer.open_reader()
    everything = ledger.segments_after(0, limit=1_000_000)
    rows = [row.row for row in everything if row.source == "online"]
    segments = store.read(rows).segments.values() if rows else ()
    found = [s.executed[s.actor == ACTORS.index("human")] for s in segments]
    ledger.close()
    return np.concatenate(found) if found else np.zeros((0, actions), np.float32)


# --- teleoperation ----------------------------------------------------------------------------------------------------


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


def test_a_keyboard_drives_a_robot_and_what_it_did_is_stored(fleet: Job, tmp_path: Path) -> None:
    typist = Typist()
    config = {"terminal": typist.name, "speeds": SPEED, "speed": 0}
    words = ("teleop", "robot-0", "--device-config", json.dumps(config))
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), typist.slave)
    person = start(fleet, tmp_path / "teleop.log", *words, **terminal)
    try:
        until("the robot is ours", lambda: "robot-0 is yours." in typist.look() or person.poll() is not None)
        assert person.poll() is None, typist.seen
        typist.type("\r", 0.02)
        until("the person drives", lambda: "You drive robot-0." in typist.look(), typist.look)
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
    assert re.search(r"robot-0   human   correction +go-\w+   DRIVING   speed 21%   d/a move_x", shown), shown[-3000:]
    assert "speed 37%" in shown
    until("its steps are stored", lambda: len(human_rows(fleet.data)) > 100, fleet.log.read_text)
    rows = human_rows(fleet.data)
    sideways = np.isclose(rows[:, 0], SPEED[0], atol=1e-3).sum()
    upwards = np.isclose(rows[:, 2], SPEED[1], atol=1e-3).sum()
    assert sideways > 40
    assert upwards > 40
    assert sideways + upwards > 0.8 * len(rows), "what people did is what was typed"
    assert fleet.process.poll() is None


def test_a_script_drives_and_a_wrong_robot_is_named(fleet: Job, tmp_path: Path) -> None:
    rows = [{"time_s": 0, "action": [0.13, 0, 0, 0]}, {"time_s": 2.0}]
    (tmp_path / "way.json").write_text(json.dumps(rows))
    (tmp_path / "script.json").write_text(json.dumps({"path": str(tmp_path / "way.json")}))
    common = ("--device", "script", "--device-config", str(tmp_path / "script.json"))
    said = tmp_path / "teleop.log"
    person = start(fleet, said, "teleop", "robot-0", *common, stdin=subprocess.DEVNULL)
    assert person.wait(60) == 0, said.read_text()
    assert said.read_text().split("\n")[:2] == ["robot-0 is yours.", "You drive robot-0."]
    wrong = vla_fleet("teleop", "robot-9", *common, "--data", str(fleet.data.root))
    assert wrong.returncode == 1
    assert "the fleet has no robot 'robot-9'. Did you mean 'robot-" in wrong.stderr

    def stored() -> int:
        return np.isclose(human_rows(fleet.data)[:, 0], 0.13, atol=1e-3).sum()

    until("its steps are stored", lambda: stored() > 60, fleet.log.read_text)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_robots_are_listed_leased_examined_and_go_on_after_a_kill(fleet: Job, tmp_path: Path) -> None:
    fleet.wait("two robots practise", practise)
    until("both are ready", lambda: [one["health"] for one in robots(fleet).values()] == ["ready"] * 2)
    assert "main (rollout, priority 10)" in run(fleet, "robots")

    # a lease keeps one robot at rest while the other one works, also over a gateway that is killed
    options = ("--ttl", "60", "--purpose", "cleaning")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    held = start(fleet, tmp_path / "lease.log", "lease", "robot-0", *options, **pipes)
    try:
        until("it is held", lambda: (robots(fleet)["robot-0"]["lease"] or {}).get("purpose") == "cleaning")
        fleet.wait("it rests", lambda s: robot(s, "robot-0")["reason"] == "no job yet")
        number = robots(fleet)["robot-0"]["lease"]["number"]
        fleet.kill(fleet.pid("gateway"))
        fleet.page = ""
        until("another gateway answers", lambda: _answers(fleet))
        fleet.wait("both robots are back", lambda s: len(s["robots"]) == 2)
        assert robots(fleet)["robot-0"]["lease"]["number"] == number
        before = robot(fleet.snapshot(), "robot-1")["episodes"]
        fleet.wait("the other one works on", lambda s: robot(s, "robot-1")["episodes"] > before + 1)
        held.send_signal(signal.SIGINT)
        output, errors = held.communicate(timeout=120)
    finally:
        held.kill()
    assert held.returncode == 0, errors
    assert "robot-0 is given back" in output
    fleet.wait("it works again", lambda s: robot(s, "robot-0")["job"] == "main")

    # the newest version is examined on one robot, on held-out seeds, and measured
    run(fleet, "submit", "--kind", "evaluation", "--episodes", "2", "--id", "check")
    until("it is done", lambda: jobs(fleet)["check"]["phase"] == "done")
    state = jobs(fleet)["check"]
    assert state["episodes"] == 2 * len(state["request"]["tasks"])
    measured = fleet.wait("it is shown", lambda s: "canary" in s["measured"])["measured"]["canary"]
    assert measured["version"] == state["request"]["version"] > 0
    fleet.wait("all practise again", practise)


def _answers(fleet: Job) -> bool:
    try:
        fleet.snapshot()
    except OSError:
        return False
    return True


# --- keys -------------------------------------------------------------------------------------------------------------


def test_robots_compute_a_version_that_never_acts(fleet: Job) -> None:
    """All of the way by real processes: fetched, computed beside what acts, measured, shown, executed by nobody."""

    def versions() -> dict[int, dict[str, Any]]:
        return {one["version"]["number"]: one for one in json.loads(run(fleet, "versions", "list", "--json"))}

    until("three versions are there", lambda: len(versions()) > 2)
    run(fleet, "versions", "freeze")
    current = next(number for number, one in versions().items() if one["current"])
    until("both act by one version", lambda: len(versions()[current]["robots"]) == 2)
    ledger, store = fleet.data.buffer.open_reader()

    def sent(after: int) -> list[str]:
        return [row.robot for row in ledger.segments_after(after, 100_000) if row.source == "online"]

    # what was open when they switched is of both versions
    began = ledger.newest_row()
    until(
        "each has sent two segments since",
        lambda: all(sent(began).count(name) >= 2 for name in ("robot-0", "robot-1")),
    )
    since = ledger.newest_row()
    assert "computed by robot-0, robot-1" in run(fleet, "versions", "shadow", str(current - 1))

    def compared() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(fleet, "versions", "show", str(current - 1)))["shadow"]
        return found

    until("chunks were compared", lambda: compared()["chunks"] >= 6, lambda: str(compared()))
    found = compared()
    assert (found["faults"], found["problems"]) == (0, {})
    assert 0 < found["mean"] <= found["p95"] <= found["most"] <= 1
    # whoever kills a shadow process ends nothing
    run(fleet, "versions", "shadow", str(current - 1), "--robot", "robot-0")
    until("robot-0 compares", lambda: compared()["chunks"] >= 2, lambda: str(compared()))
    before = compared()["chunks"]
    fleet.kill(fleet.pid("edge-part", "shadow", "robot-0"))
    until("it compares again", lambda: compared()["chunks"] >= before + 3, lambda: str(compared()))
    assert compared()["robots"] == ["robot-0"]
    ended = run(fleet, "versions", "shadow", "0")
    assert "no version is computed" in ended

    def acted() -> set[int]:
        rows = [row.row for row in ledger.segments_after(since, 100_000) if row.source == "online"]
        segments = store.read(rows).segments.values() if rows else ()
        return {int(number) for one in segments for number in one.version[one.actor == ACTORS.index("policy")]}

    until("what the robots did meanwhile is stored", lambda: len(sent(since)) > 4)
    assert acted() == {current}
    run(fleet, "versions", "freeze", "--off")
    ledger.close()


def test_a_robot_with_an_unknown_key_is_refused_by_name(fleet: Job, tmp_path: Path) -> None:
    """Its key was made elsewhere."""
    elsewhere, gateway_log = tmp_path / "elsewhere", fleet.data.logs / "gateway.log"
    make_keys(elsewhere, ["robot-9"])
    shutil.copy(fleet.data.keys / "public" / "gateway.key", elsewhere / "public" / "gateway.key")
    words = ["edge", "--recipe", "fake", "--name", "robot-9", "--keys", str(elsewhere)]
    edge = start(fleet, tmp_path / "edge.log", *words, "--gateway", fleet.data.gateway)
    try:
        until("the gateway says so", lambda: "refused 'robot-9'" in gateway_log.read_text(), gateway_log.read_text)
        uplink = fleet.data.logs / "robot-9.uplink.log"
        until("its own log says so", lambda: uplink.exists() and "'robot-9' is refused" in uplink.read_text())
        assert "Traceback" not in gateway_log.read_text()
    finally:
        edge.terminate()
        edge.wait(60)


def test_a_robot_joins_by_a_token_and_is_cut_off_when_its_key_is_revoked(fleet: Job, tmp_path: Path) -> None:
    """Its own computer has nothing but the token."""
    token = vla_fleet("keys", "token", "robot-8", "--keys", str(fleet.data.keys)).stdout.strip()
    mine = ["--recipe", "fake", "--gateway", fleet.data.gateway, "--keys", str(tmp_path / "here")]
    there = fleet.data.keys / "public" / "robot-8.key"
    edge = start(fleet, tmp_path / "edge.log", "edge", "--join", token, *mine)
    try:
        until("it is at work", lambda: robots(fleet).get("robot-8", {}).get("health") == "ready")
        assert there.exists() and not (fleet.data.keys / "robot-8.key_secret").exists()
        assert vla_fleet("keys", "revoke", "robot-8", "--keys", str(fleet.data.keys)).returncode == 0
        uplink = fleet.data.logs / "robot-8.uplink.log"
        until("it says that it is out", lambda: "does not let its key in" in uplink.read_text(), uplink.read_text)
        until("the fleet has lost it", lambda: robots(fleet)["robot-8"]["health"] == "lost")
    finally:
        edge.terminate()
        edge.wait(120)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium: install the package 'chromium'")
def test_a_person_takes_a_real_robot_over_in_the_page(fleet: Job) -> None:
    from playwright.sync_api import Error, sync_playwright

    fleet.wait("the robot acts", lambda s: robot(s, "robot-0").get("mode") in ("policy", "script"))
    driven = len(human_rows(fleet.data))

    def mode(snapshot: dict[str, Any]) -> str:
        return robot(snapshot, "robot-0")["mode"]

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page()
        page.goto(fleet.page)
        # The browser's driver must go on working while the test waits.
        fleet.rest = lambda: page.wait_for_timeout(50)
        card = page.locator("[data-robot=robot-0]")
        take_over, pressed = card.get_by_role("button", name="Take over"), False
        take_over.click()
        fleet.wait("it holds until a key is pressed", lambda s: "the operator" in robot(s, "robot-0")["reason"])

        def drives(snapshot: dict[str, Any]) -> bool:
            """The page takes keys while it knows that it is in control. A browser that stalls for seconds has lost the
            robot, which holds, as it should; a person takes it over again."""
            nonlocal pressed
            if take_over.is_visible():
                page.keyboard.up("ArrowUp")
                pressed = False
                with contextlib.suppress(Error):
                    take_over.click(timeout=5000)
            elif not pressed:
                page.keyboard.down("ArrowUp")
                pressed = True
            return mode(snapshot) == "human"

        fleet.wait("the person drives", drives)
        page.keyboard.up("ArrowUp")
        fleet.wait("a released key means hold", lambda s: mode(s) == "hold")
        card.get_by_role("button", name="Hand back").click()
        fleet.wait("the policy goes on", lambda s: mode(s) in ("policy", "script"))
        card.get_by_role("button", name="Take over").click()
        fleet.wait("taken over again", lambda s: mode(s) == "hold")
        page.close()
        fleet.rest = lambda: time.sleep(0.05)
        fleet.wait("a closed page is a lost link", lambda s: "link is lost" in robot(s, "robot-0")["reason"])
        browser.close()
    until("what the person did is stored", lambda: len(human_rows(fleet.data)) > driven, fleet.log.read_text)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_when_up_itself_is_killed_nothing_is_left_running(fleet: Job) -> None:
    assert len(fleet.children()) >= 7
    fleet.process.kill()
    fleet.process.wait()
    until("all have ended", lambda: fleet.children() == [])
