"""What the uplink shows of its robot: what control said last, what it knows itself, how long the gateway is silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from robot_edge.uplink.metrics import UplinkMetrics
from tests.cloud_learner.operator.fakes import edge_status
from tests.robot_edge.uplink.test_server import SECOND, Desk
from wire.messages.gateway import HelloAck, ReintroduceRequest, VersionAvailable
from wire.messages.local import SwapReverted
from wire.types import PolicyVersion


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.uplink.close()


def figures(desk: Desk) -> dict[str, float]:
    """By name; of the modes the one that it is in."""
    families = UplinkMetrics(desk.uplink, desk.clock).collect()
    samples = (sample for family in families for sample in family.samples)
    return {sample.name.removeprefix("vla_fleet_"): sample.value for sample in samples if sample.value}


def test_before_control_has_reported_there_are_names_and_no_figures(desk: Desk) -> None:
    assert figures(desk) == {}
    assert len(list(UplinkMetrics(desk.uplink, desk.clock).collect())) > 10


def test_a_link_that_is_cut_shows_by_its_age_and_what_waits_for_it(desk: Desk) -> None:
    desk.hello()
    desk.record(25)
    desk.control.send(edge_status("robot-0", version=3))
    desk.server.send("robot-0", VersionAvailable(PolicyVersion(5, "", 1, 4, 1, 1, 1), 1))
    desk.uplink.poll()
    shown = figures(desk)
    assert shown["edge_accepted"] == 1
    assert "robot_link_age_seconds" not in shown
    assert (shown["robot_recorded_steps_total"], shown["robot_spooled_segments"]) == (25, 3)
    assert (shown["robot_policy_version"], shown["robot_policy_version_lag"]) == (3, 2)
    desk.clock.advance(7 * SECOND)
    assert figures(desk)["robot_link_age_seconds"] == 7
    desk.server.send("robot-0", ReintroduceRequest())
    desk.uplink.poll()
    shown = figures(desk)
    assert "edge_accepted" not in shown
    assert "robot_link_age_seconds" not in shown, "it spoke"
    desk.server.send("robot-0", HelloAck("c", 1, 1))
    desk.uplink.poll()
    assert figures(desk)["edge_accepted"] == 1


def test_a_swap_that_was_taken_back_is_counted(desk: Desk) -> None:
    version = PolicyVersion(5, "a" * 64, 1, 4, 1, 1, 1)
    for damaged in (True, True, False):
        desk.inference.send(SwapReverted(version, damaged))
    desk.uplink.poll()
    families = UplinkMetrics(desk.uplink, desk.clock).collect()
    counts = {
        sample.labels["reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vla_fleet_edge_refused_weights_total"
    }
    assert counts == {"damaged_file": 2, "half_loaded": 1}
