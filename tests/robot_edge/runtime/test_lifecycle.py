"""The processes of a robot, kept by whoever wants to."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from robot_edge.runtime.process_group import EdgeProcesses
from wire.errors import RobotError

CODE = """
import os, sys, time
from robot_edge.runtime.lifecycle import ShutdownSignal
role, place = sys.argv[1], sys.argv[3]
print(role, os.environ["VLA_FLEET_ROBOT"], os.path.isdir(place), flush=True)
shutdown = ShutdownSignal()
while not shutdown.requested:
    time.sleep(0.01)
print("ended", time.monotonic_ns(), flush=True)
"""
ROLES = ("uplink", "control")


def edge(tmp_path: Path) -> EdgeProcesses:
    return EdgeProcesses("robot-7", {role: [sys.executable, "-c", CODE, role] for role in ROLES}, tmp_path)


def until(kept: EdgeProcesses, true: Callable[[], object]) -> list[str]:
    died: list[str] = []
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen"
        died += kept.poll()
        time.sleep(0.01)
    return died


def said(tmp_path: Path, role: str) -> str:
    path = tmp_path / f"robot-7.{role}.log"
    return path.read_text() if path.exists() else ""


def test_they_share_a_directory_come_back_and_end_in_order(tmp_path: Path) -> None:
    kept = edge(tmp_path)
    with pytest.raises(RobotError, match="'robot-7': its processes do not run"):
        _ = kept.directory
    with kept:
        place = kept.directory
        until(kept, lambda: all("True" in said(tmp_path, role) for role in ROLES))
        assert said(tmp_path, "control") == "control robot-7 True\n"
        kept.start()
        assert kept.directory == place, "started already"
        first = kept.supervisor.children["robot-7.control"].pid
        os.kill(first, signal.SIGKILL)
        assert until(kept, lambda: said(tmp_path, "control").count("True") == 2) == ["control"]
        assert not any(child.failed for child in kept.supervisor.children.values())
        assert "signal SIGKILL" in kept.fault
    assert not place.exists()
    ended = {role: int(said(tmp_path, role).split()[-1]) for role in ROLES}
    assert ended["control"] < ended["uplink"], "its last words go through the uplink"
    kept.stop()
    with kept:
        assert kept.directory != place
        until(kept, lambda: said(tmp_path, "control").count("True") == 3)


def test_one_that_cannot_start_is_named_and_tried_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such arm')"]
    with EdgeProcesses("robot-7", {"robot": command}, tmp_path) as kept:
        until(kept, lambda: kept.supervisor.children["robot-7.robot"].starts == 3)
        assert not any(child.failed for child in kept.supervisor.children.values())
        assert "robot-7.robot ended with exit status 1: no such arm" in kept.fault
