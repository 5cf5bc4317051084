"""What the gateway counts: messages, who is turned away and why, what is stored; and that peers cannot make it grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import samples
from tests.cloud_learner.gateway.test_server import Hall, valid_segment
from wire.clock import clock_name
from wire.errors import DiskFullError
from wire.messages.gateway import Heartbeat, Hello, TrainerStatus


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


def figures(hall: Hall) -> dict[str, float]:
    """By name and labels, as the page writes them; what is 0 is left out."""
    families = text_string_to_metric_families(hall.gateway.metrics.text().decode())
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name.removeprefix("vla_fleet_"): value for name, value in found.items() if value}


def test_who_is_turned_away_is_counted_by_reason(hall: Hall) -> None:
    robot = hall.robot()
    assert not [name for name in figures(hall) if name.startswith("gateway_refusals")]
    stranger = hall.server.connect("robot-1")
    hall.ask(stranger, Heartbeat(1))
    hall.ask(stranger, Hello("robot-1", "edge", clock_name(), 1, 7, samples.spec(camera=False)))
    hall.ask(stranger, Hello("robot-2", "edge", clock_name(), 1, 7, samples.spec()))
    hall.ask(hall.server.connect("robot-0@2"), Hello("robot-0", "edge", "another computer", 1, 8, samples.spec()))
    hall.ask(robot, TrainerStatus(1, 0.0, 1.0, 1, 1, "online"))
    # a port counts those that it turns away itself
    hall.server.refused.update(wrong_role=2, malformed=1)
    counted = {name: n for name, n in figures(hall).items() if name.startswith("gateway_refusals")}
    assert counted == {
        "gateway_refusals_total{reason=no_hello}": 1,
        "gateway_refusals_total{reason=other_spec}": 1,
        "gateway_refusals_total{reason=wrong_name}": 1,
        "gateway_refusals_total{reason=duplicate_name}": 1,
        "gateway_refusals_total{reason=wrong_role}": 3,
        "gateway_refusals_total{reason=malformed}": 1,
    }


def test_what_is_stored_is_counted_by_what_became_of_it(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = hall.robot()
    before = figures(hall)
    good = valid_segment()
    bad = msgspec.structs.replace(good, id=f"{good.episode.id}/1", first_tick=-5)
    hall.ask(robot, good, bad)
    hall.ask(robot, good)

    other = samples.episode(number=1)

    def full(*args: object) -> None:
        raise DiskFullError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(hall.ingest._store, "append_all", full)
        hall.ask(robot, msgspec.structs.replace(good, id=f"{other.id}/0", episode=other))
    counted = figures(hall)
    for outcome in ("stored", "duplicate", "quarantined", "retry"):
        assert counted[f"ingest_segments_total{{outcome={outcome}}}"] == 1
    assert counted["ingest_steps_total"] == counted["buffer_steps"] == good.steps
    assert counted["storage_faults_total"] == counted["gateway_refusals_total{reason=not_stored}"] == 1
    assert counted["ingest_seconds_count"] == 1
    assert counted["ingest_commit_seconds_count"] == 3
    assert counted["gateway_messages_received_total{type=Segment}"] == 4
    assert counted["gateway_messages_sent_total{type=Ack}"] == 3
    waited = "ledger_write_wait_seconds_count"
    assert counted[waited] > before[waited]


def test_peers_are_those_that_were_heard_lately(hall: Hall) -> None:
    hall.robot()
    hall.trainer()
    assert figures(hall)["gateway_peers{role=edge}"] == 1
    assert figures(hall)["gateway_peers{role=trainer}"] == 1
    hall.clock.advance(11_000_000_000)
    assert not [name for name in figures(hall) if name.startswith("gateway_peers")]


def test_what_peers_make_up_does_not_make_the_page_grow(hall: Hall) -> None:
    trainer, robot = hall.trainer(), hall.robot()
    lines = []
    for n in range(50):
        hall.ask(trainer, TrainerStatus(n, float("nan"), -1.0, -1, -1, f"phase {n}" * 100))
        hall.ask(robot, Hello(f"name-{n}", f"role-{n}", f"clock-{n}", 1, 7, samples.spec()))
        text = hall.gateway.metrics.text()
        list(text_string_to_metric_families(text.decode()))
        lines.append(text.count(b"\n"))
    assert lines[-1] == lines[1]
