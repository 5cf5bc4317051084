"""The page that a process shows to Prometheus: whatever statuses say can be read, and a port that is taken is named."""

from __future__ import annotations

import math
import socket
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.cloud_learner.operator.fakes import edge_status
from wire.errors import ConfigError
from wire.metrics import MetricsServer, RobotSample, make_registry, robot_metrics


class Fleet:
    """Shows some robots."""

    def __init__(self, *samples: RobotSample) -> None:
        self._samples = samples

    def collect(self) -> list[Metric]:
        return list(robot_metrics(self._samples))


def page(*samples: RobotSample) -> dict[tuple[str, str], float]:
    """By name and the label that is not the robot's."""
    text = generate_latest(make_registry(Fleet(*samples))).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    mine = [sample for sample in found if sample.labels.get("robot") == samples[0].status.robot]
    return {(s.name, s.labels.get("mode") or s.labels.get("reason") or ""): s.value for s in mine}


def test_a_robot_that_holds_says_why() -> None:
    holding = page(RobotSample(edge_status("r", mode="hold", reason="the state is old"), 0.5, 7))
    assert holding["vla_fleet_robot_mode", "hold"] == 1
    assert holding["vla_fleet_robot_mode", "policy"] == 0
    assert holding["vla_fleet_robot_hold", "the state is old"] == 1
    assert holding["vla_fleet_robot_policy_version_lag", ""] == 4
    assert holding["vla_fleet_robot_link_age_seconds", ""] == 0.5
    working = page(RobotSample(edge_status("r"), 0.0, 2))
    assert not [name for name, _ in working if name == "vla_fleet_robot_hold"]
    assert working["vla_fleet_robot_policy_version_lag", ""] == 0, "called back: nothing newer is to act"


def test_what_a_robot_says_stays_one_line_of_the_page() -> None:
    reason = 'a "quoted"\nline \\ ' + "x" * 500
    found = page(RobotSample(edge_status('r"\n0', mode="hold", reason=reason, late_p99_s=math.inf), math.nan, 0))
    assert found["vla_fleet_robot_hold", reason[:100]] == 1
    assert found["vla_fleet_robot_late_p99_seconds", ""] == math.inf
    assert math.isnan(found["vla_fleet_robot_link_age_seconds", ""])


def test_a_page_is_served_and_its_port_given_back() -> None:
    server = MetricsServer("127.0.0.1", 0, Fleet(RobotSample(edge_status("r"), 0.0, 3)))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            assert b'vla_fleet_robot_ticks_total{robot="r"} 1000.0' in answer.read()
        with pytest.raises(ConfigError, match=f"port {server.port} on 127.0.0.1 is used by another .*--metrics-port"):
            MetricsServer("127.0.0.1", server.port)
    finally:
        server.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", server.port))


def test_an_address_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"port 0 on 203\.0\.113\.9 cannot be opened.*--metrics-host"):
        MetricsServer("203.0.113.9", 0)
