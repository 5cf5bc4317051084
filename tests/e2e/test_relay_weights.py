"""Versions come by the site's relay, and where that has none, or is gone, from the gateway at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from robot_edge.uplink.metrics import UplinkMetrics
from tests.e2e.relay_site import RELAY, RELAY_TEXT, Site
from wire.messages.gateway import FetchWeights, Rejection

COUNT = 1_000_000
"""of values: four chunks"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    for number in range(3):
        made.robot(f"robot-{number}")
    made.pass_time(2)
    yield made
    made.close()


def faults(site: Site) -> list[int]:
    return [robot.uplink.weights.refused["relay"] for robot in site.robots]


def test_the_gateway_names_what_it_refuses_a_relay(site: Site) -> None:
    stranger = site.relay_port.connect("robot-9", "edge")
    asked = FetchWeights(9, 7, 10, False, bytes(32), 100)
    stranger.send(asked)
    site.publish(1, COUNT)
    site.until_all_have(1, 10)
    (refusal,) = list(iter(stranger.recv, None))
    assert isinstance(refusal, Rejection) and refusal.request is not None
    assert (refusal.request.number, refusal.request.offset, refusal.request.size) == (9, 7, 10)
    assert "there is no policy version 9" in refusal.reason
    assert site.relay.chunks.served_bytes == 3 * site.relay.chunks.fetched_bytes > 12 * COUNT
    assert faults(site) == [0, 0, 0]
    assert site.relay.session.accepted and not site.relay.session.rejection


def test_a_relay_without_a_gateway_says_so(site: Site) -> None:
    site.gateway_port.cut = {RELAY}
    site.publish(1, COUNT)
    site.until_all_have(1, 10)
    site.publish(2, COUNT)
    assert site.until_all_have(2, 3) < 3
    assert faults(site) == [0, 0, 0]
    site.mend_uplink()
    site.pass_time(3)
    site.publish(3, COUNT)
    site.until_all_have(3, 10)
    assert site.relay.chunks.served_bytes == 3 * site.relay.chunks.fetched_bytes > 12 * COUNT


def test_people_hear_which_relay_lied(site: Site) -> None:
    answer = site.relay.chunks._answer
    site.relay.chunks._answer = lambda robot, asked, chunk: answer(robot, asked, bytes(len(chunk)))  # type: ignore[method-assign]
    site.publish(1, COUNT)
    site.until_all_have(1, 10)
    site.pass_time(1)
    told = [event for event in site.view.snapshot()["events"] if event["kind"] == "relay"]
    assert {event["robot"] for event in told} == {robot.name for robot in site.robots}
    assert all(event["text"].startswith(f"{RELAY_TEXT} sent a chunk that is another one") for event in told)
    for robot in site.robots:
        families = UplinkMetrics(robot.uplink, site.clock).collect()
        counted = [one for family in families for one in family.samples if one.name.endswith("relay_faults_total")]
        assert [(one.labels, one.value) for one in counted] == [({"relay": RELAY_TEXT}, 1)]


def test_a_relay_that_is_not_there_yet_is_not_waited_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.relay_port.cut = {"robot-0"}
    site.robot("robot-0")
    site.pass_time(2)
    site.publish(1, COUNT)
    assert site.until_all_have(1, 2) < 2
    site.relay_port.cut = set()
    site.pass_time(2)
    site.publish(2, COUNT)
    site.until_all_have(2, 2)
    assert site.relay.chunks.served_bytes > 4 * COUNT and faults(site) == [0]
    site.close()


def test_a_relay_that_dies_costs_two_seconds_and_is_asked_again_when_it_is_back(site: Site) -> None:
    site.publish(1, 3 * COUNT)
    while not site.relay.chunks.served_bytes > 8 * COUNT:
        site.pass_time(0.05)
    site.cut_relay()
    began_ns = site.clock.now_ns()
    site.until_all_have(1, 10)
    assert (site.clock.now_ns() - began_ns) / 1e9 < 4.5, "two of them until it is missed"
    site.publish(2, 3 * COUNT)
    assert site.until_all_have(2, 2) < 2, "it is known to be gone"
    site.relay_port.cut = set()
    site.pass_time(2)
    before = site.relay.chunks.served_bytes
    site.publish(3, 3 * COUNT)
    site.until_all_have(3, 10)
    assert site.relay.chunks.served_bytes - before > 36 * COUNT
    assert faults(site) == [0, 0, 0]
