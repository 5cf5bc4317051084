"""The whole loop in one thread: fake robots, in-memory lines, the real gateway, buffer, trainer and policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import msgspec
import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.in_process_fleet import InProcessFleet, RehearsedRobot
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.step_path import StepPath, follow_step
from cloud_learner.operator.app import serve
from cloud_learner.training.reporting.metrics import TrainerMetrics
from fleet.config.recipes import fake
from fleet.launch import factories, learning
from fleet.tools.report import RunCounters, make_report
from robot_edge.uplink.metrics import UplinkMetrics
from tests.command_line import vla_fleet
from tests.people import Person
from wire.errors import ConfigError
from wire.messages.gateway import ACTORS, OperatorCommand
from wire.metrics import MetricsServer

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
    fleet.robots[0].uplink.link._disconnect()
    fleet.turn(50, 0)
    fleet.drain()
    report = make_report(fleet.data, fleet.recipe, RunCounters(), 1.0)
    assert (report["steps_lost"], report["steps_duplicated"]) == (0, 0)


def test_a_robot_that_starts_while_the_gateway_is_away_has_the_version_that_acted(fleet: InProcessFleet) -> None:
    fleet.turn(150)
    acted = fleet.robots[0].inference._swap.active.version
    assert acted > 0
    fleet.server.cut.add("robot-0")
    fleet.robots[0].uplink.close()
    again = RehearsedRobot(fleet.recipe, "robot-0", fleet.data, fleet.server, fleet.clock, 1, operated=False)
    fleet.robots[0] = again
    fleet.turn(100, 0)
    assert not again.uplink.accepted and again.inference._swap.active.version == acted
    assert again.uplink.status is not None and again.uplink.status.version == acted
    fleet.server.cut.clear()
    fleet.turn(300)
    assert again.uplink.accepted and again.inference._swap.active.version > acted


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
    again = learning.make_trainer(fleet.recipe, "trainer", fleet.data, fleet.server.connect("trainer"), 0)
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


# --- what is shown of it ----------------------------------------------------------------------------------------------


def _scraped(fleet: InProcessFleet) -> dict[str, dict[str, Metric]]:
    """By who shows them and by the name in the documents: the figures of the gateway, a trainer and an edge."""
    page = serve(fleet.view, port=0, metrics=fleet.gateway.metrics.text)
    trainer = MetricsServer("127.0.0.1", 0, TrainerMetrics(fleet.trainer, fleet.clock))
    edge = MetricsServer("127.0.0.1", 0, UplinkMetrics(fleet.robots[0].uplink, fleet.clock))
    places = {
        "gateway": f"{page.url}/metrics",
        "trainer": f"http://127.0.0.1:{trainer.port}/metrics",
        "edge": f"http://127.0.0.1:{edge.port}/metrics",
    }
    found = {}
    try:
        for place, url in places.items():
            with urlopen(url, timeout=60) as answer:
                assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
                families = list(text_string_to_metric_families(answer.read().decode()))
            found[place] = {one.name + "_total" * (one.type == "counter"): one for one in families}
    finally:
        for server in (page, trainer, edge):
            server.close()
    return found


def test_every_figure_is_documented_and_every_documented_one_is_shown(worked: InProcessFleet) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?` \| ([a-z, ]+) \| (.+) \|$", text, re.MULTILINE)
    everywhere = "gateway, trainer, edge"
    said = {
        name: (set(labels.split(",")) - {""}, at.replace("all", everywhere).split(", ")) for name, labels, at, _ in rows
    }
    for place, shown in _scraped(worked).items():
        assert set(shown) == {name for name, (_, at) in said.items() if place in at}, place
        for name, family in shown.items():
            assert family.documentation.endswith("."), name
            for sample in family.samples:
                assert sample.labels.keys() - {"le"} == said[name][0], name


def test_the_figures_are_those_of_the_ledger_and_of_one_another(worked: InProcessFleet) -> None:
    shown = _scraped(worked)
    values = {
        (place, sample.name, *sample.labels.values()): sample.value
        for place, families in shown.items()
        for family in families.values()
        for sample in family.samples
    }
    totals = worked.ledger.totals()
    assert (
        values["gateway", "vla_fleet_ingest_steps_total"] == values["gateway", "vla_fleet_buffer_steps"] == totals.steps
    )
    assert values["gateway", "vla_fleet_ingest_segments_total", "stored"] == totals.segments
    newest = worked.ledger.newest_version()
    assert newest is not None
    assert values["gateway", "vla_fleet_policy_version"] == newest.version.number
    assert values["trainer", "vla_fleet_trainer_publish_seconds_count"] == newest.version.number
    steps = values["trainer", "vla_fleet_trainer_gradient_steps_total"]
    assert steps == values["gateway", "vla_fleet_trainer_gradient_steps_total"] > 50
    assert values["trainer", "vla_fleet_trainer_batches_total"] == steps
    assert (
        values["trainer", "vla_fleet_trainer_draws_total"]
        > values["trainer", "vla_fleet_trainer_loaded_segments_total"]
    )
    assert values["edge", "vla_fleet_edge_accepted"] == 1
    own = {key[1:]: value for key, value in values.items() if key[0] == "edge" and "robot-0" in key}
    told = {key[1:]: value for key, value in values.items() if key[0] == "gateway" and "robot-0" in key}
    # each measures by its own clock for how long it has not heard the other
    age = ("vla_fleet_robot_link_age_seconds", "robot-0")
    assert own.pop(age) >= 0
    assert told.pop(age) >= 0
    assert own == told
    recorded = own["vla_fleet_robot_recorded_steps_total", "robot-0"]
    assert 100 < recorded <= worked.ledger.robot_totals()["robot-0"].steps, (
        "the last segment came after the last status"
    )


def _followed(fleet: InProcessFleet, robot: str = "robot-0", episode: str = "", tick: int | None = None) -> StepPath:
    ledger, store = fleet.data.buffer.open_reader()
    try:
        return follow_step(ledger, store, robot, episode, tick)
    finally:
        ledger.close()


_ON_ROBOT = ("capture", "infer", "act", "record")


def test_the_way_of_a_step_is_followed_until_the_robot_acts_by_it(worked: InProcessFleet) -> None:
    path = _followed(worked)
    assert path.ended == ""
    names = [stage.name for stage in path.stages]
    assert names == [*_ON_ROBOT, "send", "commit", "train", "publish", "fetch", "act again"]
    stages = {stage.name: stage for stage in path.stages}
    assert all(stage.began_ns <= stage.ended_ns for stage in path.stages)
    later = [stages[name] for name in names[names.index("record") :]]
    assert all(one.ended_ns == other.began_ns for one, other in pairwise(later)), "nobody has it in between"
    row = worked.ledger.segment(path.segment)
    version = worked.ledger.version(int(stages["train"].facts["version"]))
    assert row is not None and version is not None
    assert path.episode in worked.ledger.episodes_of_version(version.version.number)
    assert version.version.newest_segment >= row.row
    assert stages["commit"].ended_ns == row.committed_ns
    assert stages["act again"].facts["version"] >= version.version.number
    assert stages["infer"].ended_ns - stages["infer"].began_ns == stages["infer"].facts["delay_ticks"] * 12_500_000


def test_clocks_are_brought_together_by_what_was_measured(
    worked: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _followed(worked)
    monkeypatch.setattr(Ledger, "clock_offset_at", lambda self, name, time_ns: 7_000 if name == "robot-0" else 0)
    shifted = _followed(worked)
    for one, other in zip(plain.stages, shifted.stages, strict=True):
        began, ended = other.began_ns - one.began_ns, other.ended_ns - one.ended_ns
        expected = {"send": (7_000, 0), "act again": (0, 7_000)}
        assert (began, ended) == expected.get(one.name, (7_000, 7_000) if one.name in _ON_ROBOT else (0, 0)), one.name


def test_a_step_that_has_not_come_far_is_followed_as_far_as_it_came(worked: InProcessFleet) -> None:
    newest = worked.ledger.episodes("robot-1", 1)[0]
    learned = worked.ledger.versions_of_episode(newest.id)
    path = _followed(worked, "robot-1", newest.id, newest.steps - 1)
    assert path.tick == newest.steps - 1
    assert path.stages[-1].name in ("commit", "train", "fetch")
    assert path.ended
    assert ("no version has learned" in path.ended) is (not learned)


def test_a_step_that_is_not_there_is_named(worked: InProcessFleet) -> None:
    newest = worked.ledger.episodes("robot-0", 1)[0]
    for asked, words in (
        (("robto-0",), "nothing of robot 'robto-0' is stored.*Did you mean 'robot-0'"),
        (("robot-0", "nothing"), "episode 'nothing' of robot 'robot-0' is not stored.*buffer tail"),
        (("robot-1", newest.id), f"episode '{newest.id}' of robot 'robot-1' is not stored"),
        (("robot-0", newest.id, 10_000), f"has no step 10000; it has {newest.steps} steps.*--tick"),
    ):
        with pytest.raises(ConfigError, match=words):
            _followed(worked, *asked)


def test_a_trace_is_one_that_others_read(worked: InProcessFleet, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = vla_fleet("trace", "robot-0", "--data", str(worked.data.root), "--json", str(file))
    assert done.returncode == 0, done.stderr
    path = _followed(worked)
    for stage in path.stages:
        assert stage.name in done.stdout
    trace = msgspec.json.decode(file.read_bytes())
    services, spans = set(), []
    for resource in trace["resourceSpans"]:
        attributes = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
        services.add(attributes["service.name"]["stringValue"])
        spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
    assert services == {
        "robot-0 driver",
        "robot-0 inference",
        "robot-0 control",
        "robot-0 uplink",
        "gateway",
        "trainer",
    }
    assert len(spans) == len(path.stages) + 1
    (root,) = [span for span in spans if "parentSpanId" not in span]
    assert {span["parentSpanId"] for span in spans if span is not root} == {root["spanId"]}
    assert {span["traceId"] for span in spans} == {root["traceId"]}
    assert re.fullmatch("[0-9a-f]{32}", root["traceId"])
    assert len({span["spanId"] for span in spans}) == len(spans)
    for span in spans:
        assert re.fullmatch("[0-9a-f]{16}", span["spanId"])
        began, ended = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert int(root["startTimeUnixNano"]) <= began <= ended <= int(root["endTimeUnixNano"])
        assert all(
            value.keys() <= {"stringValue", "intValue"} for value in (one["value"] for one in span["attributes"])
        )
        assert all(isinstance(value, str) for one in span["attributes"] for value in one["value"].values())
    committed = next(span for span in spans if span["name"] == "commit")
    row = worked.ledger.episode(path.episode)
    assert row is not None
    assert abs(int(committed["endTimeUnixNano"]) - row.wall_ns) < 3600e9, "nanoseconds since 1970"
