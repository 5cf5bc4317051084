"""What people at the page want with policy versions: done by the gateway's loop, or told why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.operator.command_queue import VersionChange
from tests.cloud_learner.gateway.test_server import Hall
from wire.messages.gateway import VersionAvailable


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


def wish(hall: Hall, action: str, number: int = 0, robot: str = "") -> list[str]:
    """Why web-1 did not get it."""
    assert hall.view.submit_version_change(VersionChange("web-1", action, number, robot))
    for _ in range(2):  # what is announced is read from disk in between
        hall.gateway.poll()
    return [reason for _, reason in hall.view.pop_rejections("web-1")]


def shown(hall: Hall) -> dict[int, dict]:
    return {one["number"]: one for one in hall.view.snapshot()["versions"]}


def test_a_page_rolls_back_pins_and_promotes(hall: Hall) -> None:
    robot, trainer = hall.robot(), hall.trainer()
    for number in (1, 2):
        hall.publish(trainer, number)
    hall.received(robot)

    def announced() -> list[int]:
        return [one.version.number for one in hall.received(robot) if isinstance(one, VersionAvailable)]

    assert wish(hall, "rollback", 1) == []
    assert announced() == [1]
    versions = shown(hall)
    assert (versions[1]["current"], versions[2]["state"]) == (True, "rolled_back")
    assert versions[2]["note"] == "rolled back by web-1."
    assert versions[1]["frozen"]

    assert wish(hall, "pin", 2, "robot-0") == []
    assert announced() == [2]
    assert shown(hall)[2]["pinned"] == ["robot-0"]
    assert wish(hall, "pin", 0, "robot-0") == []
    assert announced() == [1]

    assert wish(hall, "promote", 2) == []
    assert announced() == [2]
    assert wish(hall, "thaw") == []
    assert not shown(hall)[2]["frozen"]
    texts = [event["text"] for event in hall.view.snapshot()["events"] if event["kind"] == "rollout"]
    assert "web-1: versions are free" in texts


@pytest.mark.parametrize(
    ("action", "number", "robot", "words"),
    [
        ("promote", 9, "", "there is no policy version 9: there are 1 to 1; `vla-fleet versions list` shows them."),
        ("promote", 0, "", "promote needs the number of a version"),
        ("rollback", 0, "", "there is no earlier promoted version"),
        ("pin", 1, "robot-9", "there is no robot 'robot-9'"),
        ("pin", 0, "robot-9", "robot 'robot-9': no version is pinned to it"),
    ],
)
def test_what_cannot_be_done_is_told_to_that_operator(
    hall: Hall, action: str, number: int, robot: str, words: str
) -> None:
    hall.publish(hall.trainer(), 1)
    (reason,) = wish(hall, action, number, robot)
    assert words in reason
    assert hall.view.snapshot()["events"][-1]["kind"] == "refused"
    assert wish(hall, "freeze") == [], "the gateway goes on"


def test_a_pin_is_taken_from_a_robot_that_is_gone(hall: Hall) -> None:
    hall.publish(hall.trainer(), 1)
    hall.gateway._rollout.controller.pin("robot-7", 1, hall.clock.now_ns())
    assert wish(hall, "pin", 0, "robot-7") == []
    assert shown(hall)[1]["pinned"] == []
