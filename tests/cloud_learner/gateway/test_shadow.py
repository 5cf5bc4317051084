"""A version that some robots compute without acting by it: who does, what people see, and what survives."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from cloud_learner.rollout.config import RolloutConfig
from tests.cloud_learner.dispatch.hall import SPEC, Hall
from tests.cloud_learner.fake_edge import FakeEdge
from tests.cloud_learner.gateway.versions.test_rollout_service import (
    NAMES,
    acting,
    change,
    fleet,
    hear,
    listed,
    publish,
)
from wire.messages.fleet import ChangeVersions, Response, ShadowStatus
from wire.messages.gateway import Hello, Rejection, ShadowReport, ShadowRequest, ThinkVersions, VersionAvailable
from wire.weights.action_difference import BINS, ActionDifference

ONCE = RolloutConfig(canary=0.2, control=0.0)
DIMENSIONS = len(SPEC.action)
SAME = ActionDifference(1, 0.0, (8, *(0,) * (BINS - 1)), (0.0,) * DIMENSIONS)
FAR = ActionDifference(1, 8.0, (*(0,) * (BINS - 1), 8), (1.0,) * DIMENSIONS)


def requested(edge: FakeEdge) -> list[int]:
    """Which versions it was to compute, 0: none."""
    asked = [message.offer for message in edge.received if isinstance(message, ShadowRequest)]
    return [offer.version.number if offer is not None else 0 for offer in asked]


def report(hall: Hall, edge: FakeEdge, number: int, difference: ActionDifference = SAME, **more: object) -> None:
    edge.channel.send(ShadowReport(edge.name, number, difference, **more))  # type: ignore[arg-type]
    for _ in range(2):
        hall.gateway.poll()
    hear(hall)


def shadow(hall: Hall, number: int, *robots: str) -> Response:
    hall.calls += 1
    answer = hall.ask(hall.peer(f"console@{hall.calls}"), ChangeVersions(1, "shadow", number, "", robots))
    hear(hall)
    return answer


def status(hall: Hall, number: int) -> ShadowStatus | None:
    hall.calls += 1
    return listed(hall, hall.peer(f"console@{hall.calls}"))[number].shadow


def test_a_few_robots_compute_it_and_none_acts_by_it(tmp_path: Path) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    before = acting(hall)
    answer = shadow(hall, 2)
    found = {one.version.number: one.shadow for one in answer.versions}
    assert found[1] is None and found[2] is not None
    chosen = found[2].robots
    assert len(chosen) == 3 and set(chosen) < set(NAMES)
    assert {edge.name for edge in hall.edges if requested(edge) == [2]} == set(chosen)
    assert acting(hall) == before == [1] * 5
    hall.pass_time(20)
    assert {edge.name for edge in hall.edges if requested(edge)} == set(chosen), "asked once"
    # another one takes its place; 0 ends it
    publish(hall, 3)
    shadow(hall, 3, NAMES[0])
    assert [edge.name for edge in hall.edges if requested(edge)[-1:] == [3]] == [NAMES[0]]
    assert all(requested(edge)[-1] == 0 for edge in hall.edges if edge.name in chosen and edge.name != NAMES[0])
    shadow(hall, 0)
    assert all(requested(edge)[-1:] in ([0], []) for edge in hall.edges)
    assert acting(hall) == [1] * 5


def test_differences_are_gathered_over_robots(tmp_path: Path) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    shadow(hall, 2, *NAMES[:2])
    one, other, *rest = hall.edges
    report(hall, one, 2)
    report(hall, other, 2, FAR, faults=2, fault="boom")
    found = status(hall, 2)
    assert found is not None
    assert (found.robots, found.chunks, found.faults) == (NAMES[:2], 2, 2)
    assert (found.mean, found.p95, found.most) == (0.5, 1.0, 1.0)
    assert found.largest == {dimension.name: 1.0 for dimension in SPEC.action}
    assert found.problems == {NAMES[1]: "boom"}
    (shown,) = [row for row in hall.view.snapshot()["versions"] if row["number"] == 2]
    assert shown["shadow"]["chunks"] == 2 and shown["shadow"]["robots"] == NAMES[:2]
    # well again
    report(hall, other, 2)
    found = status(hall, 2)
    assert found is not None and found.problems == {} and found.chunks == 3
    # one that was not asked, or is about another version, is told so and changes nothing
    for edge, number in ((rest[0], 2), (one, 1)):
        edge.received.clear()
        report(hall, edge, number, FAR)
        assert requested(edge) == [0 if edge is rest[0] else 2]
    assert status(hall, 2) == found
    # nor one about another robot
    hall.gateway.refused.clear()
    one.channel.send(ShadowReport(NAMES[1], 2, FAR))
    hear(hall)
    assert hall.gateway.refused == {"wrong_name": 1} and status(hall, 2) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"bins": (1, 2)},
        {"largest": (1.0,)},
        {"largest": (math.nan,) * DIMENSIONS},
        {"largest": (1e9,) * DIMENSIONS},
        {"total": math.inf},
        {"total": 9.0},
        {"total": -1.0},
        {"chunks": 0},
        {"chunks": 2**60},
        {"bins": (*(0,) * (BINS - 2), -8, 16)},
        {"bins": (*(0,) * (BINS - 1), 2**62)},
    ],
)
def test_a_difference_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    shadow(hall, 2, NAMES[0])
    edge = hall.edges[0]
    edge.received.clear()
    report(hall, edge, 2, msgspec.structs.replace(FAR, **wrong))
    assert any("no two chunks can have" in one.reason for one in edge.received if isinstance(one, Rejection))
    found = status(hall, 2)
    assert found is not None and found.chunks == 0


def test_it_is_kept_when_the_gateway_is_killed(tmp_path: Path) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    shadow(hall, 2, NAMES[0], NAMES[3])
    report(hall, hall.edges[0], 2, FAR, fault="boom")
    for edge in hall.edges:
        edge.received.clear()
    hall = hall.killed()
    hall.pass_time(2)
    found = status(hall, 2)
    assert found is not None
    assert (found.robots, found.chunks, found.problems) == ((NAMES[0], NAMES[3]), 1, {NAMES[0]: "boom"})
    assert [edge.name for edge in hall.edges if requested(edge)[-1:] == [2]] == [NAMES[0], NAMES[3]]
    assert acting(hall) == [1] * 5
    # its file stays, whatever else goes
    assert 2 in hall.gateway._rollout.controller.needed


def test_a_shadow_whose_weights_are_gone_is_none(tmp_path: Path) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    shadow(hall, 2, NAMES[0])
    controller = hall.gateway._rollout.controller
    controller.on_weights_gone([2], hall.clock.now_ns())
    assert controller.shadow == 0
    assert "no shadow any more" in controller.pop_decisions()[-1].reason
    hall.pass_time(1)
    assert requested(hall.edges[0])[-1] == 0


@pytest.mark.parametrize(
    ("number", "robots", "words"),
    [
        (9, (), "there is no policy version 9"),
        (0, (), "no version is a shadow"),
        (1, (), "robots act by it. There is nothing to compare it with"),
        (2, ("robot-9",), "there is no robot 'robot-9' here now"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, number: int, robots: tuple[str, ...], words: str) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    assert words in shadow(hall, number, *robots).refused
    assert not any(requested(edge) for edge in hall.edges)


def test_a_think_server_thinks_with_it_too(tmp_path: Path) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    thinker = hall.server.connect("thinker")
    thinker.send(Hello("thinker", "thinker", "c", 1))
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    shadow(hall, 2)
    received = hall.received(thinker)
    assert [one.numbers for one in received if isinstance(one, ThinkVersions)] == [(1,), (1, 2)]
    assert [one.version.number for one in received if isinstance(one, VersionAvailable)] == [1, 2]


def test_a_page_does_the_same(tmp_path: Path) -> None:
    hall = fleet(tmp_path, ONCE, versions=1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    page = hall.desk.join()
    for wish, robots in (({"number": 2, "robot": NAMES[4]}, (NAMES[4],)), ({"number": 2}, None), ({"number": 0}, ())):
        hall.desk.handle_message(page, msgspec.json.encode({"type": "versions", "change": "shadow", **wish}))
        hear(hall)
        hear(hall)
        (shown,) = [row for row in hall.view.snapshot()["versions"] if row["number"] == 2]
        assert shown["shadow"]["robots"] == robots or (robots is None and len(shown["shadow"]["robots"]) == 3)
    texts = [event["text"] for event in hall.view.snapshot()["events"] if event["kind"] == "rollout"]
    assert any("version 2 is a shadow on" in text for text in texts) and any(
        "no version is a shadow" in t for t in texts
    )
