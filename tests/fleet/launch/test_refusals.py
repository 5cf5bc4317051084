"""Versions that a robot refuses come to where people look: the lines of `up`, its report, the terminal of `edge`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Self

import pytest

from fleet.config.data_directory import DataDirectory
from fleet.config.process_options import UpOptions
from fleet.config.recipes import get_recipe
from fleet.launch import factories
from fleet.launch.up import Up
from fleet.tools.report import RunCounters, make_report
from robot_edge.runtime import process_group as edge_module
from robot_edge.runtime.process_group import run_edge
from robot_edge.runtime.rejection_log import RejectionLog, RejectionLogTail, not_taken, read_refusal
from wire.transport.memory_channel import MemoryServer

WHY = "these weights are of another network."


def test_a_reason_is_told_once_for_each_robot() -> None:
    refusals = RejectionLog()
    assert refusals.line("left", not_taken(2, WHY)) == f"left refuses version 2: {WHY}"
    assert refusals.line("left", not_taken(3, WHY)) == "", "another version, the same reason"
    assert refusals.line("right", not_taken(3, WHY)) == f"right refuses version 3: {WHY}"
    assert refusals.line("left", not_taken(4, "torn")) == "left refuses version 4: torn"
    assert refusals.line("left", "refused: no key of that name") == ""
    assert read_refusal(not_taken(7, "first line\nsecond line")) == (7, "first line")


def test_up_says_what_a_robot_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = Up(UpOptions(recipe="fake", data=tmp_path, headless=True, port=0, web_port=0))
    said: list[str] = []
    screen = {"say": lambda self, text: said.append(text), "show": lambda self, *shown: None}
    up.dashboard = type("Screen", (), screen)()
    up.backend = type("Backend", (), {"parts": {}})()
    events = [
        {"t_s": 1.0, "kind": "refused", "robot": "robot-0", "text": not_taken(2, WHY)},
        {"t_s": 2.0, "kind": "refused", "robot": "thief", "text": "refused: its key is unknown"},
    ]
    snapshot: dict[str, Any] = {"robots": [], "events": events, "version": None}
    monkeypatch.setattr(up, "snapshot", lambda: snapshot)
    up._refresh()
    events.append({"t_s": 3.0, "kind": "refused", "robot": "robot-0", "text": not_taken(3, WHY)})
    up._refresh()
    assert said == [f"robot-0 refuses version 2: {WHY}"]


def test_the_report_counts_them_by_robot(tmp_path: Path) -> None:
    recipe, data = get_recipe("fake"), DataDirectory(tmp_path)
    gateway, _, ledger, _ = factories.make_gateway(recipe, data, MemoryServer())
    assert make_report(data, recipe, RunCounters(), 1.0)["versions_refused"] == {}
    for number in (2, 2, 3):
        gateway._add_event("robot-0", "refused", not_taken(number, WHY))
    gateway._add_event("robot-1", "refused", "refused: its key is unknown")
    gateway._add_event("robot-0", "hold", not_taken(9, "no refusal"))
    gateway._add_event("robot-0", "refused", not_taken(2, "torn"))
    gateway.poll()
    ledger.close()
    found = make_report(data, recipe, RunCounters(), 1.0)["versions_refused"]
    assert found == {"robot-0": {"versions": 2, "reason": "torn"}}


def test_a_log_is_read_from_where_it_ends_now(tmp_path: Path) -> None:
    log_file = tmp_path / "arm.inference.log"
    assert RejectionLogTail("arm", log_file).lines() == []
    log_file.write_text(f"{not_taken(1, 'of yesterday')}\n")
    tail = RejectionLogTail("arm", log_file)
    with log_file.open("a") as log:
        log.write("12:00 ERROR robot_edge.inference.server: ")
        log.write(f"robot 'arm' stays on version 1: {not_taken(2, WHY)}\nversion 3 is not")
        log.flush()
        assert tail.lines() == [f"arm refuses version 2: {WHY}"]
        log.write(" taken: torn\n")
        log.flush()
        assert tail.lines() == ["arm refuses version 3: torn"]
    assert tail.lines() == []


class TalkingEdge:
    """An edge whose inference process refuses a version in its first turn; it is asked to end in the third."""

    name = "arm"

    def __init__(self, log_file: Path) -> None:
        self._file = log_file
        self.turns = 0

    def log_file(self, role: str) -> Path:
        assert role == "inference"
        return self._file

    def poll(self) -> None:
        self.turns += 1
        if self.turns == 1:
            self._file.write_text(f"{not_taken(2, WHY)}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_the_terminal_of_an_edge_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    edge: Any = TalkingEdge(tmp_path / "log")
    monkeypatch.setattr(
        edge_module, "ShutdownSignal", lambda: type("L", (), {"requested": property(lambda _: edge.turns > 2)})()
    )
    with caplog.at_level(logging.ERROR, "robot_edge.runtime.process_group"):
        run_edge(edge)
    assert [record.getMessage() for record in caplog.records] == [f"arm refuses version 2: {WHY}"]
