"""The page in a real Chromium, with a thread that plays the gateway."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.operator.app import Server, serve
from cloud_learner.operator.command_queue import VersionChange
from cloud_learner.operator.view import FleetView
from hal.safety.stop_latch import StopLatch
from robot_edge.control.mode import HoldReason
from tests.cloud_learner.operator.fakes import (
    arm_spec,
    edge_status,
    job_state,
    picture,
    robot_state,
    version_status,
)
from wire.messages.fleet import ShadowStatus, VersionStatus
from wire.messages.gateway import Evaluation, OperatorCommand, Preview, TrainerStatus
from wire.types import PolicyVersion

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'vla-fleet[dev]'"
)

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ROBOTS = ("r1", "r2", "r3")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no Chromium at {CHROMIUM}: install the package 'chromium'"),
]


class Gateway:
    """Feeds a view as the gateway's loop does and does what people command."""

    def __init__(self) -> None:
        self.view = FleetView(instructions={"drawer-open": "open the drawer"})
        self.commands: list[OperatorCommand] = []
        self.changes: list[VersionChange] = []
        self.frozen = False
        self.trainer = TrainerStatus(4200, 0.05, 20.0, 900, 12, "online")
        self.states = {name: robot_state(name, "main") for name in ROBOTS}
        self._modes = dict.fromkeys(ROBOTS, "policy")
        self.latches = {name: StopLatch() for name in ROBOTS}
        self.says: dict[str, dict[str, object]] = {name: {} for name in ROBOTS}
        """what else their status says"""
        self._stop = threading.Event()
        for name in ROBOTS:
            self.view.add_robot(name, arm_spec())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pictures = [picture(shade) for shade in (40, 90, 140, 190)]
        self.view.add_version(PolicyVersion(7, "ab" * 32, 10, 6, 4200, 0, 0))
        for i in range(4):
            tasks = {"drawer-open": 0.2 * i, "door-open": 0.25 * i}
            self.view.add_evaluation(Evaluation(i + 1, tasks, 10, 0, "cadence", 0, 0.0), t_s=10.0 * i)
        self.view.add_stored_steps(12_345, 0.08)
        turn = 0
        while not self._stop.wait(0.05):
            for command in self.view.pop_commands():
                self.commands.append(command)
                modes = {"take_over": "human", "hand_back": "policy", "drop_link": "hold"}
                self._modes[command.robot] = modes.get(command.kind, self._modes[command.robot])
                match command.kind:
                    case "estop":
                        self.latches[command.robot].stop(command.stop, command.operator)
                    case "release_estop":
                        self.latches[command.robot].release(command.stop)
                    case "start":
                        self.latches[command.robot].start()
            for change in self.view.pop_version_changes():
                self.changes.append(change)
                self.frozen = {"freeze": True, "thaw": False}.get(change.action, self.frozen)
            self.view.update_trainer(self.trainer)
            self.view.update_versions(self.versions())
            stops = {name: latch.state for name, latch in self.latches.items()}
            self.view.update_fleet(tuple(self.states.values()), (job_state("canary"),), stops)
            for name in ROBOTS:
                mode = "estop" if stops[name].stops else "hold" if stops[name].ready else self._modes[name]
                self.view.update_status(edge_status(name, **({"mode": mode, "stop": stops[name]} | self.says[name])))
                self.view.update_preview(Preview(name, "front", turn, pictures[turn // 4 % 4]))
            turn += 1

    def versions(self) -> tuple[VersionStatus, ...]:
        """One that runs, one that is tried, and more than a page shows before them."""
        last = next((one.number for one in reversed(self.changes) if one.action in ("promote", "rollback")), 20)
        states = {20: "promoted", 21: "canary", 19: "rolled_back"}
        return tuple(
            version_status(
                number,
                state="promoted" if number == last else states.get(number, "candidate"),
                current=number == last,
                reference=number == 18,
                robots={20: ("r1", "r2"), 21: ("r3",)}.get(number, ()),
                pinned=("r2",) if number == 18 else (),
                episodes=40 if number == 20 else 0,
                successes=30 if number == 20 else 0,
                note="it is compared with 20 (robots: r3)" if number == 21 else "",
                frozen=self.frozen,
                shadow=self.shadow() if number == 17 else None,
            )
            for number in range(1, 22)
        )

    def shadow(self) -> ShadowStatus:
        """Until somebody ends it."""
        ended = any(one.action == "shadow" and one.number == 0 for one in self.changes)
        largest = {"dx": 0.02, "grip": 0.34}
        problems = {"r3": "too little memory"}
        return ShadowStatus(() if ended else ("r1", "r3"), 1234, 0.0123, 0.05, 0.34, largest, 2, problems)

    def wait_for_changes(self, *wanted: tuple[str, int, str]) -> None:
        """Exactly these (action, number, robot) have come."""
        deadline_s = time.monotonic() + 60
        while len(self.changes) < len(wanted) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert [change[1:] for change in self.changes] == list(wanted)

    def wait_for(self, kind: str, since: int = 0, action: tuple[float, ...] | None = None) -> OperatorCommand:
        """The first command of `kind` (and `action`) after the first `since` commands."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            for command in self.commands[since:]:
                if command.kind == kind and (action is None or command.action == pytest.approx(action)):
                    return command
            time.sleep(0.02)
        raise AssertionError(f"no {kind} {action} within 30 s, only {self.commands[since:][-5:]}")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def server(gateway: Gateway) -> Iterator[Server]:
    # A crowded test machine may stall a browser for longer than a person's would be.
    server = serve(gateway.view, port=0, heartbeat_s=5.0)
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser, server: Server) -> Iterator[sync_api.Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.goto(server.url)
    page.wait_for_selector(".card >> nth=2")
    yield page
    context.close()
    assert [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text] == []


def shade(page: sync_api.Page, robot: str) -> int:
    """Red value in the middle of the shown picture."""
    return page.evaluate(
        "name => document.querySelector(`[data-robot=${name}] canvas`)"
        ".getContext('2d').getImageData(96, 96, 1, 1).data[0]",
        robot,
    )


def test_the_page_shows_the_fleet(page: sync_api.Page):
    assert page.locator(".card h3").all_inner_texts() == list(ROBOTS)
    sync_api.expect(page.locator("#link")).to_have_text("live")
    sync_api.expect(page.locator("#total-success")).to_have_text("68%")
    sync_api.expect(page.locator("#total-version")).to_have_text("7")
    sync_api.expect(page.locator("#total-gradient")).to_have_text("4,200")
    sync_api.expect(page.locator("#total-stored")).to_have_text("12,345")
    sync_api.expect(page.locator("#total-ingest")).to_have_text("80 ms")
    assert page.locator(".chart path.line").count() == 3
    page.hover("#chart", position={"x": 300, "y": 60})
    sync_api.expect(page.locator(".tooltip")).to_contain_text("version")
    card = page.locator("[data-robot=r2]")
    sync_api.expect(card.locator(".chip")).to_have_text("policy")
    sync_api.expect(card.locator(".task")).to_have_text("open the drawer")
    sync_api.expect(page.locator("#events")).to_contain_text("version 7 published")
    seen = set()
    for _ in range(100):
        seen.add(shade(page, "r2"))
        page.wait_for_timeout(50)
        if len(seen) > 2:
            break
    assert len(seen) > 2, "the camera picture does not change"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_cards_show_health_and_holder_and_the_jobs_are_listed(page: sync_api.Page, gateway: Gateway):
    card = page.locator("[data-robot=r2]")
    sync_api.expect(card.locator(".health")).to_have_text("ready")
    sync_api.expect(card.locator(".holder")).to_have_text("job main · lab")
    sync_api.expect(card.locator(".embodiment")).to_have_text(arm_spec().embodiment)
    sync_api.expect(card.locator(".ailment")).to_be_hidden()
    gateway.states["r2"] = robot_state("r2", health="draining", reason="the driver blocks")
    sync_api.expect(card.locator(".health")).to_have_text("draining")
    sync_api.expect(card.locator(".holder")).to_have_text("free · lab")
    sync_api.expect(card.locator(".ailment")).to_have_text("The driver blocks.")
    gateway.states["r2"] = robot_state("r2", "console", "maintenance")
    sync_api.expect(card.locator(".holder")).to_have_text("held by console for maintenance · lab")
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_enabled()
    gateway.states["r2"] = robot_state("r2", "teleoperator", "teleoperation")
    sync_api.expect(card.locator(".reason")).to_have_text("Held by teleoperator for teleoperation.")
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_disabled()
    job = page.locator("#jobs li")
    sync_api.expect(job).to_contain_text("canary evaluation of version 7")
    sync_api.expect(job).to_contain_text("4 of 10 episodes · 75%")


def test_a_refusal_of_the_gateway_is_shown_and_the_robot_is_not_ours(page: sync_api.Page, gateway: Gateway):
    card = page.locator("[data-robot=r1]")
    card.get_by_role("button", name="Take over").click()
    gateway.view.reject_command(gateway.wait_for("take_over"), "r1 is held by somebody faster.")
    sync_api.expect(page.locator(".toast")).to_have_text("r1 is held by somebody faster.")
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_driving_with_the_keyboard(page: sync_api.Page, gateway: Gateway):
    card = page.locator("[data-robot=r1]")
    card.get_by_role("button", name="Take over").click()
    assert gateway.wait_for("take_over").robot == "r1"
    sync_api.expect(card.locator(".chip")).to_have_text("human drives")
    gateway.wait_for("command", action=(0, 0, 0, -1))  # at rest, gripper open as measured

    for key, moving in (
        ("ArrowUp", (-0.3, 0, 0, -1)),
        ("d", (0, 0.3, 0, -1)),
        ("PageDown", (0, 0, -0.3, -1)),
    ):
        since = len(gateway.commands)
        page.keyboard.down(key)
        assert gateway.wait_for("command", since, moving).robot == "r1"
        since = len(gateway.commands)
        page.keyboard.up(key)
        gateway.wait_for("command", since, (0, 0, 0, -1))

    since = len(gateway.commands)
    page.keyboard.down("ArrowUp")
    page.keyboard.press("Space")
    gateway.wait_for("command", since, (-0.3, 0, 0, 1))
    since = len(gateway.commands)
    page.evaluate("dispatchEvent(new Event('blur'))")
    gateway.wait_for("command", since, (0, 0, 0, 1))
    page.keyboard.up("ArrowUp")

    since = len(gateway.commands)
    card.get_by_role("button", name="Hand back").click()
    gateway.wait_for("hand_back", since)
    sync_api.expect(card.locator(".chip")).to_have_text("policy")
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_visible()
    since = len(gateway.commands)
    page.keyboard.press("ArrowUp")
    page.wait_for_timeout(300)
    assert gateway.commands[since:] == []
    assert page.locator(".toast").count() == 0


def test_stops(page: sync_api.Page, gateway: Gateway):
    card = page.locator("[data-robot=r3]")
    card.get_by_role("button", name="E-stop").click()
    assert gateway.wait_for("estop").robot == "r3"
    sync_api.expect(card.locator(".chip")).to_have_text("estop")
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_disabled()
    gateway.latches["r3"].stop("cli-1", "cli")  # somebody else stops it too
    mine = card.get_by_role("button", name="Release stop of web-")
    other = card.get_by_role("button", name="Release stop of cli")
    sync_api.expect(other).to_be_visible()
    sync_api.expect(card.locator(".reason")).to_have_text(re.compile(r"Stopped by web-\d+, cli\."))
    mine.click()
    released = gateway.wait_for("release_estop")
    assert (released.robot, released.stop) == ("r3", gateway.wait_for("estop").stop)
    sync_api.expect(mine).to_have_count(0)
    start = card.get_by_role("button", name="Start")
    sync_api.expect(start).to_be_hidden()
    other.click()
    sync_api.expect(card.locator(".reason")).to_have_text(re.compile("stands still until somebody starts it"))
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_disabled()
    start.click()
    assert gateway.wait_for("start").robot == "r3"
    sync_api.expect(card.locator(".chip")).to_have_text("policy")
    sync_api.expect(start).to_be_hidden()
    since = len(gateway.commands)
    page.get_by_role("button", name="Stop all robots").click()
    for card in page.locator(".card").all():
        sync_api.expect(card.locator(".chip")).to_have_text("estop")
    assert {command.robot for command in gateway.commands[since:] if command.kind == "estop"} == set(ROBOTS)


def test_a_card_says_who_slows_a_robot(page: sync_api.Page, gateway: Gateway):
    reason = page.locator("[data-robot=r2] .reason")
    gateway.latches["r2"].limit_speed("cli", 0.25)
    gateway.latches["r2"].limit_speed("ros", 0.5)
    sync_api.expect(reason).to_contain_text("Slowed to 25% by cli, ros.")
    for who in ("cli", "ros"):
        gateway.latches["r2"].limit_speed(who, 1.0)
    sync_api.expect(reason).not_to_contain_text("Slowed")


def test_a_waiting_robot_has_large_buttons_for_verdict_and_scene(page: sync_api.Page, gateway: Gateway):
    page.set_viewport_size({"width": 390, "height": 844})  # a phone
    card = page.locator("[data-robot=r1]")
    buttons = card.get_by_role("group", name="Episode of r1").get_by_role("button")
    sync_api.expect(buttons).to_have_count(0)
    gateway.says["r1"] = {"by_person": True}
    sync_api.expect(buttons).to_have_text(["Success", "Failure", "End", "Re-record", "Discard"])
    waits = {"mode": "hold", "reason": HoldReason.scene.value, "episode": ""}
    gateway.says["r1"] = {"by_person": True, **waits, "open_outcome": "unjudged"}
    sync_api.expect(buttons).to_have_text(["Success", "Failure", "Re-record", "Discard", "Scene ready"])
    sync_api.expect(card.locator(".question")).to_have_text("How did it end? Then reset the scene.")
    for name, kind in (
        ("Success", "success"),
        ("Failure", "failure"),
        ("Re-record", "rerecord"),
        ("Discard", "discard"),
        ("Scene ready", "scene_ready"),
    ):
        box = card.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["height"] >= 48 and box["width"] >= 120 and box["x"] + box["width"] <= 390
        since = len(gateway.commands)
        card.get_by_role("button", name=name).click()
        assert gateway.wait_for(kind, since).robot == "r1"
    gateway.says["r1"] = {"by_person": True, **waits, "open_outcome": "success"}
    sync_api.expect(card.locator(".question")).to_have_text("It ended: success. Reset the scene.")
    sync_api.expect(card.get_by_role("button", name="Success")).to_have_attribute("aria-pressed", "true")
    gateway.says["r1"] = {"by_person": True, **waits}
    sync_api.expect(buttons).to_have_text(["Scene ready"])
    assert page.locator(".toast").count() == 0


def test_whoever_drives_says_that_they_recover_and_then_correct(page: sync_api.Page, gateway: Gateway):
    card = page.locator("[data-robot=r1]")
    words = card.get_by_role("group", name="Your part at r1").get_by_role("button")
    gateway.says["r1"] = {"part": "correction"}
    sync_api.expect(words).to_have_count(0)
    card.get_by_role("button", name="Take over").click()
    gateway.wait_for("take_over")
    sync_api.expect(words).to_have_count(2)
    sync_api.expect(card.locator(".chip")).to_have_text("human corrects")
    page.keyboard.press("r")
    assert gateway.wait_for("recover").robot == "r1"
    gateway.says["r1"] = {"part": "recovery"}
    sync_api.expect(card.locator(".chip")).to_have_text("human recovers")
    sync_api.expect(words.nth(0)).to_have_attribute("aria-pressed", "true")
    page.keyboard.down("c")
    page.keyboard.down("c")  # as a key that is held repeats
    page.keyboard.up("c")
    gateway.wait_for("correct")
    words.nth(1).click()
    since = len(gateway.commands)
    gateway.says["r1"] = {}
    sync_api.expect(words).to_have_count(0)
    page.keyboard.press("c")
    card.get_by_role("button", name="Hand back").click()
    gateway.wait_for("hand_back", since)
    assert [command.kind for command in gateway.commands].count("correct") == 2
    assert page.locator(".toast").count() == 0


def test_closing_the_page_drops_its_robot(page: sync_api.Page, gateway: Gateway, browser, server: Server):
    page.locator("[data-robot=r2]").get_by_role("button", name="Take over").click()
    gateway.wait_for("take_over")
    other = browser.new_page()
    other.goto(server.url)
    card = other.locator("[data-robot=r2]")
    sync_api.expect(card.locator(".reason")).to_have_text("Driven from another page.")
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_disabled()
    page.close()
    assert gateway.wait_for("drop_link").robot == "r2"
    sync_api.expect(card.get_by_role("button", name="Take over")).to_be_enabled()
    sync_api.expect(card.get_by_role("button", name="Hand back")).to_be_visible()
    other.close()


def test_a_lost_connection_is_said_and_mended(page: sync_api.Page, gateway: Gateway, server: Server):
    port = int(server.url.rpartition(":")[2])
    server.close()
    sync_api.expect(page.locator("#lost")).to_be_visible()
    sync_api.expect(page.locator("#lost")).to_contain_text("robots under your control hold")
    again = serve(gateway.view, port=port)
    sync_api.expect(page.locator("#link")).to_have_text("live", timeout=20_000)
    sync_api.expect(page.locator("#lost")).to_be_hidden()
    again.close()


def test_a_phone_drives_by_touch(browser: sync_api.Browser, gateway: Gateway, server: Server, tmp_path: Path):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(server.url)
    card = page.locator("[data-robot=r1]")
    card.get_by_role("button", name="Take over").tap()
    gateway.wait_for("take_over")
    key = card.get_by_role("button", name="Away")
    sync_api.expect(key).to_be_visible()
    since = len(gateway.commands)
    key.dispatch_event("pointerdown", {"pointerId": 1})
    gateway.wait_for("command", since, (-0.3, 0, 0, -1))
    since = len(gateway.commands)
    key.dispatch_event("pointerup", {"pointerId": 1})
    gateway.wait_for("command", since, (0, 0, 0, -1))
    shots = Path(os.environ.get("OPERATOR_SHOTS", tmp_path))
    page.screenshot(path=shots / "phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    context.close()


def test_a_phone_releases_and_starts(browser: sync_api.Browser, gateway: Gateway, server: Server):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(server.url)
    card = page.locator("[data-robot=r2]")
    for name in ("ros", "teleoperator-in-the-other-hall", "cli"):
        gateway.latches["r2"].stop(f"{name}-1", name)
    buttons = card.get_by_role("button", name="Release stop of")
    sync_api.expect(buttons).to_have_count(3)
    for button in buttons.all():
        box = button.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 44
    for name in ("ros", "teleoperator-in-the-other-hall", "cli"):
        card.get_by_role("button", name=f"Release stop of {name}").tap()
        sync_api.expect(card.get_by_role("button", name=f"Release stop of {name}")).to_have_count(0)
    card.get_by_role("button", name="Start").tap()
    assert gateway.wait_for("start").robot == "r2"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_versions_are_promoted_pinned_and_frozen(page: sync_api.Page, gateway: Gateway):
    rows = page.locator("#versions > li")
    sync_api.expect(rows).to_have_count(12)
    assert rows.locator(".version-head b").all_inner_texts() == [str(number) for number in range(21, 9, -1)]
    canary, running, pinned = rows.nth(0), rows.nth(1), rows.nth(3)
    sync_api.expect(canary).to_contain_text("canary")
    sync_api.expect(canary).to_contain_text("it is compared with 20 (robots: r3)")
    sync_api.expect(running).to_contain_text("40 episodes · 75% success · runs on r1, r2")
    sync_api.expect(running.locator(".tag")).to_have_text(["current"])
    sync_api.expect(pinned.locator(".tag")).to_have_text(["reference"])
    sync_api.expect(pinned).to_contain_text("pinned: r2")

    canary.locator(".version-head").click()
    sync_api.expect(canary.get_by_role("button", name="Roll back", exact=True)).to_be_hidden()
    canary.get_by_role("button", name="Promote", exact=True).click()
    sync_api.expect(canary.locator(".question")).to_contain_text("run version 21 from now on")
    canary.get_by_role("button", name="Cancel").click()
    canary.get_by_role("button", name="Promote", exact=True).click()
    canary.get_by_role("button", name="Promote 21").click()
    gateway.wait_for_changes(promoted := ("promote", 21, ""))
    sync_api.expect(canary.locator(".tag")).to_have_text(["current"])
    sync_api.expect(canary.get_by_role("button", name="Promote", exact=True)).to_be_hidden()

    pinned.locator(".version-head").click()
    sync_api.expect(canary.get_by_role("combobox")).to_be_hidden()
    pinned.get_by_role("combobox").select_option("r3")
    pinned.get_by_role("button", name="Pin", exact=True).click()
    pinned.get_by_role("combobox").select_option("all robots")
    pinned.get_by_role("button", name="Pin", exact=True).click()
    pinned.get_by_role("button", name="Pin all to 18").click()
    pinned.get_by_role("button", name="Unpin r2").click()
    pinned.get_by_role("button", name="Roll back", exact=True).click()
    pinned.get_by_role("button", name="Roll back to 18").click()
    page.get_by_role("button", name="Freeze", exact=True).click()
    changes = [("pin", 18, "r3"), ("pin", 18, ""), ("pin", 0, "r2"), ("rollback", 18, ""), ("freeze", 0, "")]
    gateway.wait_for_changes(promoted, *changes)
    page.get_by_role("button", name="Unfreeze").click()
    gateway.wait_for_changes(promoted, *changes, ("thaw", 0, ""))
    sync_api.expect(page.get_by_role("button", name="Freeze", exact=True)).to_be_visible()
    gateway.view.reject_version_change(gateway.changes[0], "there is no policy version 21.")
    sync_api.expect(page.locator(".toast")).to_have_text("there is no policy version 21.")


def test_the_page_says_what_the_trainer_did_not_let_out(page: sync_api.Page, gateway: Gateway):
    refusal = page.locator("#trainer-refusal")
    sync_api.expect(refusal).to_be_hidden()
    gateway.trainer = TrainerStatus(4200, 0.05, 20.0, 900, 12, "online", refused=2, refusal="weights are not finite.")
    sync_api.expect(refusal).to_have_text("Not published (2 versions so far): weights are not finite.")


def test_the_run_is_drawn_while_somebody_looks(page: sync_api.Page, gateway: Gateway):
    sync_api.expect(page.locator("#run")).to_be_hidden()
    gateway.trainer = TrainerStatus(
        4300, 0.05, 20.0, 900, 12, "online", curves={"drawn/reach": 0.25, "drawn/push": 0.75}
    )
    page.get_by_role("button", name="Show the run").click()
    charts = page.locator("#run .figure")
    sync_api.expect(charts.filter(has_text="Loss")).to_contain_text("0.05")
    success = charts.filter(has_text="Held-out success")
    sync_api.expect(success.locator("path.band")).to_have_count(2)
    sync_api.expect(success).to_contain_text("door open 75%")
    lost = "points => import('/static/run.js').then(module => module.lostFrom(points))"
    assert page.evaluate(lost, [[0.9, 20], [0.7, 20], [0.3, 20]]) == 0.9
    assert page.evaluate(lost, [[0.9, 20], [0.3, 20], [0.7, 20]]) is None, "within what chance does"
    sync_api.expect(charts.filter(has_text="Shares drawn")).to_contain_text("push 75%", timeout=10_000)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Hide the run").click()
    sync_api.expect(page.locator("#run")).to_be_hidden()


def test_a_shadow_is_shown_begun_and_ended(page: sync_api.Page, gateway: Gateway):
    def row(number: int) -> sync_api.Locator:
        return page.locator(f'#versions > li[data-version="{number}"]')

    shown = row(17).locator(".shadow")
    sync_api.expect(shown).to_have_text(
        "shadow on r1, r3 · 1,234 chunks differ by 1.2% of the range on average, p95 5.0%, most 34% (grip) · "
        "2 chunks failed · r3: too little memory"
    )
    row(17).locator(".version-head").click()
    row(17).get_by_role("button", name="End shadow").click()
    gateway.wait_for_changes(("shadow", 0, ""))
    sync_api.expect(shown).to_contain_text("was a shadow")
    row(21).locator(".version-head").click()
    row(21).locator("select").select_option("r2")
    row(21).get_by_role("button", name="Shadow").click()
    gateway.wait_for_changes(("shadow", 0, ""), ("shadow", 21, "r2"))


def test_a_phone_shows_and_changes_versions(
    browser: sync_api.Browser, gateway: Gateway, server: Server, tmp_path: Path
):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(server.url)
    row = page.locator("#versions > li").nth(3)
    row.locator(".version-head").tap()
    row.get_by_role("button", name="Roll back", exact=True).tap()
    button = row.get_by_role("button", name="Roll back to 18")
    box = button.bounding_box()
    assert box is not None and box["height"] >= 44 and box["x"] + box["width"] <= 390
    row.screenshot(path=Path(os.environ.get("OPERATOR_SHOTS", tmp_path)) / "versions-phone.png")
    button.tap()
    gateway.wait_for_changes(("rollback", 18, ""))
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    context.close()
