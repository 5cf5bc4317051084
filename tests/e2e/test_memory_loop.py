"""The whole loop in one thread: fake robots, in-memory lines, the real gateway, buffer, trainer and policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.recipes import fake
from fleet.launch import factories
from fleet.tools.report import RunCounters, make_report
from tests.people import Person
from wire.messages.gateway import ACTORS, OperatorCommand

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessFleet]:
    """A fleet that has worked for a while and whose robots have sent everything; for tests that only look."""
    rehearsal = InProcessFleet(tmp_path_factory.mktemp("worked"), replace(fake(), checkpoint_every_s=0.0))
    rehearsal.turn(700)
    rehearsal.drain()
    yield rehearsal
    rehearsal.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[InProcessFleet]:
    rehearsal = InProcessFleet(tmp_path, replace(fake(), checkpoint_every_s=0.0))
    yield rehearsal
    rehearsal.close()


def test_data_flows_round_and_nothing_is_lost(worked: InProcessFleet) -> None:
    fleet = worked
    newest = fleet.ledger.newest_version()
    assert newest is not None
    assert newest.version.number >= 2
    assert newest.version.parent == newest.version.number - 1
    assert {row.robot for row in fleet.ledger.applied()} == {"robot-0", "robot-1"}
    report = make_report(fleet.data, fleet.recipe, RunCounters(), 1.0)
    assert report["demonstrations"] == 12
    assert report["episodes"] >= 4
    assert report["steps_lost"] == 0
    assert report["steps_duplicated"] == 0
    assert report["steps_stored"] == report["steps_recorded"] > 1000
    assert report["interventions"] > 0
    assert report["human_steps"] > 0
    assert sum(report["version_lag"].values()) > 100
    assert report["ingest_latency_s"]["count"] > 0


def test_every_stored_step_is_what_the_robot_did(worked: InProcessFleet) -> None:
    fleet = worked
    ledger, store = fleet.data.buffer.open_reader()
    rows = [row for row in fleet.ledger.segments_after(0) if row.source == "online"]
    assert rows
    ends: dict[str, int] = {}
    for row in rows:
        segment = store.read([row.row]).segments[row.row]
        assert segment.first_tick == ends.get(row.episode, 0)
        ends[row.episode] = segment.first_tick + segment.steps
        assert np.abs(segment.executed).max() <= 1.0
        held = segment.actor == ACTORS.index("hold")
        assert not segment.executed[held][:, :3].any()
        assert (segment.version[segment.actor == ACTORS.index("policy")] > 0).all()
        assert (np.diff(segment.times_ns) > 0).all()
    ledger.close()


def test_robots_go_on_while_the_line_is_cut_and_everything_arrives_later(fleet: InProcessFleet) -> None:
    fleet.turn(400)
    fleet.server.cut.add("robot-0")
    before = fleet.ledger.robot_totals()["robot-0"].steps
    episodes = fleet.robots[0].loop.tracker.ended
    fleet.turn(400, 0)
    assert fleet.robots[0].loop.tracker.ended > episodes
    assert len(fleet.robots[0].uplink.spool) > 2
    assert fleet.ledger.robot_totals()["robot-0"].steps == before
    fleet.server.cut.clear()
    # what the robot believed to be under way is sent again when it introduces itself
    fleet.robots[0].uplink._welcomed = False
    fleet.robots[0].uplink._next_heartbeat_ns = 0
    fleet.turn(50, 0)
    fleet.drain()
    report = make_report(fleet.data, fleet.recipe, RunCounters(), 1.0)
    assert (report["steps_lost"], report["steps_duplicated"]) == (0, 0)


def test_a_person_outranks_the_script_and_only_moves_are_recorded_as_human(fleet: InProcessFleet) -> None:
    fleet.turn(300)
    robot = fleet.robots[0]
    person = Person(robot.loop._clock, operator="web")
    fleet.view.submit_command(person("take_over"))
    fleet.turn(5, 0)
    assert (robot.loop.mode, robot.loop.hold.reason) == ("hold", "the operator presses no key")
    fleet.view.submit_command(person("command", 0.5, 0.0, 0.0, 0.0))
    fleet.turn(3, 0)
    assert robot.loop.mode == "human"
    fleet.view.submit_command(person("drop_link"))
    fleet.turn(3, 0)
    assert (robot.loop.mode, robot.loop.hold.reason) == ("hold", "the operator's link is lost")
    fleet.view.submit_command(person("hand_back"))
    _goes_on(fleet)
    fleet.view.submit_command(OperatorCommand("robot-0", "estop", operator="web-1", stop="web-1-a"))
    fleet.turn(3, 0)
    assert robot.loop.mode == "estop"
    fleet.turn(10, 0)
    fleet.view.submit_command(OperatorCommand("robot-0", "release_estop", operator="web-1", stop="web-1-b"))
    fleet.turn(10, 0)
    assert robot.loop.mode == "estop", "it is another stop's release"
    fleet.view.submit_command(OperatorCommand("robot-0", "release_estop", operator="web-1", stop="web-1-a"))
    fleet.turn(40, 0)
    assert (robot.loop.mode, robot.loop.hold.reason) == ("hold", "it was stopped: somebody has to start it")
    fleet.view.submit_command(person("start", operator="web-1"))
    _goes_on(fleet)
    fleet.drain()
    ledger, store = fleet.data.buffer.open_reader()
    rows = [row.row for row in ledger.segments_after(0) if row.robot == "robot-0"]
    actors = np.concatenate([segment.actor for segment in store.read(rows).segments.values()])
    ledger.close()
    assert 1 <= (actors == ACTORS.index("human")).sum() <= 6


def _goes_on(fleet: InProcessFleet) -> None:
    """The first robot acts by itself again: not in the first tick of an episode, which has no chunk yet."""
    fleet.turn(20, 0)
    modes = set()
    for _ in range(10):
        fleet.turn(1, 0)
        modes.add(fleet.robots[0].loop.mode.value)
    assert modes & {"policy", "script"}, modes


def test_a_new_gateway_on_the_same_data_goes_on(fleet: InProcessFleet) -> None:
    fleet.turn(300)
    stored = fleet.ledger.totals().steps
    version = fleet.ledger.newest_version()
    assert version is not None
    fleet.ledger.close()
    fleet.gateway, fleet.view, fleet.ledger, _ = factories.make_gateway(
        fleet.recipe, fleet.data, fleet.server, fleet.clock
    )
    assert fleet.ledger.totals().steps == stored
    fleet.turn(300)
    fleet.drain()
    report = make_report(fleet.data, fleet.recipe, RunCounters(), 1.0)
    assert (report["steps_lost"], report["steps_duplicated"]) == (0, 0)
    newest = fleet.ledger.newest_version()
    assert newest is not None
    assert newest.version.number > version.version.number


def test_the_trainer_resumes_where_it_was(worked: InProcessFleet) -> None:
    fleet = worked
    fleet.trainer.save()
    steps = fleet.trainer.learner.gradient_steps
    again = factories.make_trainer(fleet.recipe, "trainer", fleet.data, fleet.server.connect("trainer"), 0)
    assert again.learner.gradient_steps == steps
    assert again.phase == "online"
    assert again.learner.weights() == fleet.trainer.learner.weights()


def test_the_share_of_online_data_can_follow_the_losses(tmp_path: Path) -> None:
    recipe = fake()
    adaptive = replace(recipe, algorithm=replace(recipe.algorithm, adaptive_share=True))
    rehearsal = InProcessFleet(tmp_path, adaptive)
    rehearsal.turn(400)
    noted = rehearsal.trainer.save
    noted()
    losses = rehearsal.trainer._source.state()["sampler"]["losses"]
    assert any(online and offline for offline, online in losses.values())
    rehearsal.close()
