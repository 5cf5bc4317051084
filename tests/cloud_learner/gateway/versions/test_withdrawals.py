"""What robots are told of versions that they are not to act by any more, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from cloud_learner.rollout.assignment import split_fleet
from cloud_learner.rollout.config import RolloutConfig
from tests.cloud_learner.dispatch.hall import Hall, canary
from tests.cloud_learner.fake_edge import FakeEdge
from tests.cloud_learner.gateway.versions.test_rollout_service import (
    CANARY,
    NAMES,
    acting,
    change,
    episode,
    fleet,
    hear,
    offers,
    practise,
    publish,
)
from wire.messages.fleet import ChangeVersions, SubmitJob, VersionAction
from wire.messages.gateway import VersionAvailable


def last_offer(edge: FakeEdge) -> VersionAvailable:
    return [message for message in edge.received if isinstance(message, VersionAvailable)][-1]


def rounds(hall: Hall, count: int) -> None:
    for _ in range(count):
        for edge in hall.edges:
            edge.poll()
            edge.status()
        hall.gateway.poll()
    hear(hall)


def test_robots_are_told_which_older_versions_are_withdrawn_and_others_are_not(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=3)
    evaluator, console = hall.peer("evaluator"), hall.peer()
    change(hall, console, VersionAction.rollback)
    assert last_offer(hall.edges[0]).withdrawn == (), "3 is newer than what is announced"
    publish(hall, 4)
    change(hall, console, VersionAction.promote, 4)
    assert [last_offer(edge).withdrawn for edge in hall.edges] == [(3,)] * 5
    told = [message for message in hall.received(evaluator) if isinstance(message, VersionAvailable)]
    assert told and all(message.withdrawn == () for message in told)
    # what a person wants after all
    change(hall, console, VersionAction.promote, 3)
    publish(hall, 5)
    change(hall, console, VersionAction.promote, 5)
    assert [last_offer(edge).withdrawn for edge in hall.edges] == [()] * 5


def test_a_robot_goes_back_before_it_tries_the_next_one(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    (tried,) = (edge for edge in hall.edges if edge.version == 2)
    number = next(n for n in range(3, 100) if tried.name in split_fleet(NAMES, n, 0, 0.2, 0.0).canaries)
    for waiting in range(3, number + 1):
        publish(hall, waiting)
    practise(hall, 60, lambda version: version != 2)
    rounds(hall, 3)
    assert offers(tried)[:4] == [1, 2, 1, number]


def test_an_assignment_that_was_overtaken_is_not_announced_after_the_newer_one(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=2)
    console = hall.peer()
    for number in (1, 0):
        console.send(ChangeVersions(1, VersionAction.pin, number))
    hall.gateway.poll()
    hear(hall)
    assert acting(hall) == [2] * 5


@pytest.mark.parametrize("work", ["nothing", "no job", "stopped", "a job", "other episodes"])
def test_a_single_robot_that_ends_no_episode_by_a_version_goes_back(tmp_path: Path, work: str) -> None:
    hall = Hall(tmp_path, rollout=CANARY)
    edge = hall.edge(NAMES[0])
    publish(hall, 1)
    practise(hall, 64, lambda _: True)
    publish(hall, 2)
    assert acting(hall) == [2]
    if work == "stopped":
        edge.latch.stop("s1", "anna")
    if work == "a job":
        hall.ask(hall.peer(), SubmitJob(1, canary(version=0, episodes=100)))
    for second in range(310):
        for _ in range(5):
            hall.clock.advance(200_000_000)
            edge.poll()
            edge.status("" if work == "no job" else "e")
            hall.gateway.poll()
        if work == "other episodes" and second % 60 == 0:
            for segment in episode(edge, second, (2,)):
                shown = replace(segment, episode=replace(segment.episode, source="demonstration"))
                hall.gateway._rollout.on_segment(shown, 0)
    hear(hall)
    assert hall.gateway._rollout.controller.canary == (0 if work == "nothing" else 2)
    assert acting(hall) == [1 if work == "nothing" else 2]
