"""Recording with a person who resets the scene: the whole way from what they say to the ledger and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.recipes import fake
from robot_edge.control.config import EpisodeRules
from robot_edge.control.mode import HoldReason
from tests.people import Person

pytestmark = pytest.mark.slow

ROBOT = "robot-0"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[InProcessFleet]:
    loop = replace(fake().loop, episodes=EpisodeRules(reset_by_person=True, max_s=2.0))
    made = InProcessFleet(tmp_path, replace(fake(), loop=loop))
    yield made
    made.close()


def test_what_a_person_records_is_in_the_ledger_as_they_meant_it(fleet: InProcessFleet) -> None:
    robot, person = fleet.robots[0], Person(fleet.clock)

    def say(kind: str, rounds: int = 8, *action: float) -> None:
        assert fleet.view.submit_command(person(kind, *action))
        fleet.turn(rounds, 0)

    def drive(rounds: int) -> None:
        for _ in range(rounds):
            say("command", 1, 0.3, 0.0, 0.1, 0.0)

    for _ in range(60):
        fleet.turn(20)
        if robot.loop.hold.reason is HoldReason.scene:
            break
    say("take_over")
    for words in (("success",), ("rerecord",), ("success",), ("discard",), ("end", "success"), ("end",)):
        # the arm may be driven while the scene is reset: that is no part of an episode
        drive(10)
        say("scene_ready")
        drive(30)
        for word in words:
            say(word)
    say("scene_ready")
    drive(5)
    fleet.drain()
    rows = [row for row in fleet.ledger.episodes(ROBOT) if row.source == "online"]
    rows.sort(key=lambda row: row.id)
    first = rows[0].seed
    assert [(row.seed - first, row.outcome) for row in rows] == [
        (0, "success"),
        (1, "discarded"),
        (1, "success"),
        (2, "discarded"),
        (3, "success"),
        (4, "unjudged"),
        (5, "aborted"),
    ]
    assert all(25 <= row.human_steps <= 45 for row in rows[:-1])
    state = next(job for job in fleet.gateway._dispatcher.jobs.states() if job.request.id == "main")
    assert (state.episodes, state.successes, state.unjudged) == (4, 3, 1)
    recent = next(one for one in fleet.view.snapshot()["robots"] if one["name"] == ROBOT)["recent"]
    assert [one["outcome"] for one in recent] == [row.outcome for row in rows]
