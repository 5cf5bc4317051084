from __future__ import annotations

import json
import math
import threading

import numpy as np

from cloud_learner.operator import view as view_module
from cloud_learner.operator.command_queue import MAX_COMMANDS, MAX_REJECTIONS, MAX_VERSION_CHANGES, VersionChange
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import MAX_VERSIONS, not_drivable
from tests.cloud_learner.operator.fakes import arm_spec, edge_status, job_state, robot_state, version_status
from wire.clock import ManualClock
from wire.messages.gateway import Evaluation, OperatorCommand, Preview, TrainerStatus
from wire.stop_state import StopState
from wire.types import CommandType, Dimension, PolicyVersion

SECOND_NS = 1_000_000_000


def evaluation(number: int, rate: float, label: str = "cadence", duration_s: float = 0.0) -> Evaluation:
    return Evaluation(number, {"b": rate, "a": rate / 2}, 10, 0, label, 0, duration_s)


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number, "ab" * 32, 10, number - 1, 100 * number, 0, 0)


def test_snapshot_of_an_empty_fleet_is_json():
    snapshot = FleetView(ManualClock()).snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert snapshot["robots"] == []
    assert snapshot["trainer"] is None
    assert snapshot["version"] is None


def test_a_card_says_each_word_of_a_status_once():
    view = FleetView(ManualClock())
    view.add_robot("r1", arm_spec())
    view.update_status(edge_status("r1", mode="hold", reason="no action", detail="no version is loaded"))
    assert view.snapshot()["robots"][0]["detail"] == "no version is loaded"
    view.update_status(edge_status("r1", mode="hold", reason="it is gone", detail="no cable", fault="no cable"))
    assert (view.snapshot()["robots"][0]["detail"], view.snapshot()["robots"][0]["fault"]) == ("", "no cable")


def test_a_robot_is_shown_as_its_status_says():
    view = FleetView(ManualClock(), instructions={"drawer-open": "open the drawer"})
    view.add_robot("r1", arm_spec())
    assert view.snapshot()["robots"][0]["link"] == "waiting"
    view.update_status(edge_status("r1", mode="hold", reason="no fresh chunk", late_p99_s=math.nan))
    view.add_episode("r1", "drawer-open", "success", 30)
    robot = view.snapshot()["robots"][0]
    json.dumps(robot, allow_nan=False)
    assert (robot["mode"], robot["reason"], robot["link"]) == ("hold", "no fresh chunk", "ok")
    assert (robot["task"], robot["instruction"]) == ("drawer-open", "open the drawer")
    assert (robot["version"], robot["episodes"], robot["interventions"]) == (3, 12, 2)
    assert robot["missed_percent"] == 0.5
    assert robot["recent"] == [{"task": "drawer-open", "outcome": "success", "human_steps": 30}]
    assert robot["spec"]["cameras"] == ["front"]


def test_a_card_says_who_slows_a_robot():
    view = FleetView(ManualClock())
    view.add_robot("r1", arm_spec())
    assert view.snapshot()["robots"][0]["speed_limits"] == {}
    view.update_status(edge_status("r1", stop=StopState(speed_limits={"cli": 0.25})))
    assert view.snapshot()["robots"][0]["speed_limits"] == {"cli": 0.25}


def test_a_silent_robot_is_lost_once_and_comes_back():
    clock = ManualClock()
    view = FleetView(clock)
    view.add_robot("r1", arm_spec())
    view.update_status(edge_status("r1"))
    clock.advance(2 * SECOND_NS)
    assert view.snapshot()["robots"][0]["link"] == "ok"
    clock.advance(1)
    assert view.snapshot()["robots"][0]["link"] == "lost"
    assert view.is_lost("r1")
    view.snapshot()
    view.update_status(edge_status("r1"))
    assert view.snapshot()["robots"][0]["link"] == "ok"
    assert [e["text"] for e in view.snapshot()["events"]] == ["connected", "no word for 2 s", "back after 2.0 s"]


def test_mode_changes_become_events():
    view = FleetView(ManualClock())
    for mode in ("policy", "human", "hold", "human", "policy", "estop", "hold", "hold"):
        view.update_status(edge_status("r1", mode=mode))
    texts = [event["text"] for event in view.snapshot()["events"]]
    assert texts == ["a person took over", "handed back", "emergency stop", "emergency stop released"]


def test_curve_is_in_order_of_time_and_thinned_at_its_limit():
    clock = ManualClock()
    view = FleetView(clock)
    clock.advance(100 * SECOND_NS)
    view.add_evaluation(evaluation(2, 0.8, duration_s=10.0))
    view.add_evaluation(evaluation(1, 0.4), t_s=50.0)
    curve = view.snapshot()["curve"]
    assert [(p["t_s"], p["version"]) for p in curve] == [(50.0, 1), (90.0, 2)]
    assert curve[1]["tasks"] == {"a": 0.4, "b": 0.8}
    assert math.isclose(curve[1]["mean"], 0.6)
    for i in range(2000):
        view.add_evaluation(evaluation(i + 3, 0.5), t_s=100.0 + i)
    curve = view.snapshot()["curve"]
    assert len(curve) <= view_module.MAX_CURVE_POINTS
    assert (curve[0]["version"], curve[-1]["version"]) == (1, 2002)


def test_before_and_after_stand_beside_the_curve():
    view = FleetView(ManualClock())
    view.add_evaluation(evaluation(1, 0.2, "before"))
    view.add_evaluation(evaluation(9, 1.0, "after"))
    view.add_evaluation(Evaluation(9, {}, 0, 0, "cadence", 0, 0.0))
    snapshot = view.snapshot()
    assert snapshot["curve"] == []
    assert snapshot["measured"]["before"]["version"] == 1
    assert snapshot["measured"]["after"]["mean"] == 0.75


def test_totals_and_latencies():
    clock = ManualClock()
    view = FleetView(clock, steps_stored=1000)
    view.add_stored_steps(80, 0.1)
    view.add_stored_steps(80, 0.3)
    view.add_stored_steps(40, math.nan)
    view.add_version(version(4))
    clock.advance(SECOND_NS // 2)
    view.add_activation(0.5)
    totals = view.snapshot()["totals"]
    assert totals == {"steps_stored": 1200, "ingest_p50_s": 0.2, "applied_p50_s": 0.5}
    assert view.snapshot()["version"]["number"] == 4


def test_trainer_with_no_loss_yet_is_json():
    clock = ManualClock()
    view = FleetView(clock)
    view.update_trainer(TrainerStatus(0, math.nan, 0.0, 0, 0, "waiting"))
    view.update_trainer(TrainerStatus(50, 0.25, 12.0, 300, 4, "online"))
    view.update_trainer(TrainerStatus(60, math.inf, 12.0, 300, 4, "online"))
    clock.advance(3 * SECOND_NS)
    trainer = view.snapshot()["trainer"]
    assert (trainer["phase"], trainer["gradient_steps"], trainer["loss"], trainer["age_s"]) == ("online", 60, None, 3.0)
    assert [event["text"] for event in view.snapshot()["events"]] == ["trainer is waiting", "trainer is online"]


def test_the_trainer_says_which_version_it_did_not_let_out():
    view = FleetView(ManualClock())
    view.update_trainer(TrainerStatus(60, 0.1, 12.0, 300, 4, "online", refused=2, refusal="actions are not finite"))
    trainer = view.snapshot()["trainer"]
    assert (trainer["refused"], trainer["refusal"]) == (2, "actions are not finite")


def test_versions_are_shown_newest_first_and_those_in_use_before_others():
    view = FleetView(ManualClock())
    plain = [version_status(number) for number in range(4, 60)]
    used = [version_status(1, reference=True), version_status(2, pinned=("r1",)), version_status(3, current=True)]
    view.update_versions((*used, *plain))
    snapshot = view.snapshot()
    numbers = [one["number"] for one in snapshot["versions"]]
    assert len(numbers) == MAX_VERSIONS
    assert numbers == [*range(59, 50, -1), 3, 2, 1]
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot


def test_changes_of_versions_come_once_in_order_and_are_bounded():
    view, woken = FleetView(ManualClock()), []
    view.on_command = lambda: woken.append(1)
    changes = [VersionChange("web-1", "promote", 3), VersionChange("web-2", "freeze")]
    assert all(view.submit_version_change(change) for change in changes)
    assert view.pop_version_changes() == changes
    assert (view.pop_version_changes(), len(woken)) == ([], 2)
    assert all(view.submit_version_change(changes[0]) for _ in range(MAX_VERSION_CHANGES))
    assert not view.submit_version_change(changes[1])


def test_a_change_that_is_refused_is_told_to_whoever_wanted_it():
    view = FleetView(ManualClock())
    view.reject_version_change(VersionChange("web-1", "promote", 9), "there is no policy version 9")
    assert view.pop_rejections("web-2") == []
    assert view.pop_rejections("web-1") == [("", "there is no policy version 9")]
    assert view.snapshot()["events"][-1]["kind"] == "refused"


def test_events_are_bounded():
    view = FleetView(ManualClock())
    for i in range(10_000):
        view.add_event("refused", "refused: unknown key", f"r{i}")
    events = view.snapshot()["events"]
    assert len(events) == view_module.MAX_EVENTS
    assert events[-1] == {"t_s": 0.0, "kind": "refused", "robot": "r9999", "text": "refused: unknown key"}


def test_only_the_newest_picture_is_kept():
    view = FleetView(ManualClock())
    for data in (b"1", b"2"):
        view.update_preview(Preview("r1", "front", 0, data))
    serial, pictures = view.previews(0)
    assert pictures == [("r1", "front", b"2")]
    assert view.previews(serial) == (serial, [])
    view.update_preview(Preview("r1", "wrist", 0, b"3"))
    assert view.previews(serial)[1] == [("r1", "wrist", b"3")]


def test_commands_come_once_in_order_and_only_the_newest_command_waits():
    view = FleetView(ManualClock())
    for command in (
        OperatorCommand("r1", "take_over"),
        OperatorCommand("r1", "command", (0.1,), 1),
        OperatorCommand("r2", "estop"),
        OperatorCommand("r1", "command", (0.2,), 2),
        OperatorCommand("r1", "hand_back"),
    ):
        assert view.submit_command(command)
    commands = [(w.robot, w.kind, w.sequence) for w in view.pop_commands()]
    assert commands == [("r1", "take_over", 0), ("r2", "estop", 0), ("r1", "command", 2), ("r1", "hand_back", 0)]
    assert view.pop_commands() == []


def test_a_stop_finds_room_in_a_full_queue():
    view = FleetView(ManualClock())
    for i in range(MAX_COMMANDS):
        assert view.submit_command(OperatorCommand("r1" if i < 10 else f"x{i}", ("take_over", "command")[i % 2]))
    assert not view.submit_command(OperatorCommand("r1", "hand_back"))
    assert view.submit_command(OperatorCommand("r1", "estop"))
    assert [w.kind for w in view.pop_commands() if w.robot == "r1"] == ["estop"]


def test_which_robots_keys_can_drive():
    assert not_drivable(arm_spec()) == ""
    assert not_drivable(arm_spec(CommandType.velocity)) == ""
    assert "'dx' is an absolute target" in not_drivable(arm_spec(CommandType.absolute))
    assert "not said" in not_drivable(None)
    low = arm_spec()
    dimension = Dimension("dx", "cm/step", 0.5, 1.0, CommandType.delta)
    assert "no rest" in not_drivable(type(low)("arm", low.state, (dimension,), (), 80.0))


def test_many_threads_may_use_it_at_once():
    view = FleetView()
    errors: list[BaseException] = []

    def feed(name: str) -> None:
        try:
            for i in range(200):
                view.add_robot(f"{name}-{i % 7}", arm_spec())
                view.update_status(edge_status(f"{name}-{i % 7}", state=np.zeros(4, np.float32)))
                view.update_preview(Preview(f"{name}-{i % 7}", "front", 0, b"x"))
                view.snapshot()
                view.previews(0)
                view.submit_command(OperatorCommand(name, "estop"))
                view.pop_commands()
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=feed, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(view.snapshot()["robots"]) == 28


def test_a_robot_is_shown_as_a_resource_with_the_job_it_has():
    view = FleetView(ManualClock())
    view.add_robot("r1", arm_spec())
    assert view.snapshot()["robots"][0]["health"] == "starting"
    well, unwell = robot_state("r1", "main"), robot_state("r2", health="draining", reason="blocks")
    view.update_fleet((well, unwell), (job_state("canary", note="waits"),))
    snapshot = view.snapshot()
    (card,) = snapshot["robots"]  # r2 has not said hello here
    assert (card["health"], card["health_reason"], card["job"], card["site"]) == ("ready", "", "main", "lab")
    assert card["embodiment"] == arm_spec().embodiment
    assert card["lease"] == {"holder": "main", "purpose": "rollout", "priority": 10, "number": 3}
    (job,) = snapshot["jobs"]
    assert (job["id"], job["phase"], job["episodes"], job["wanted"]) == ("canary", "running", 4, 10)
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert view.leases() == {"r1": well.lease}


def test_a_canary_stands_beside_the_curve():
    view = FleetView(ManualClock())
    view.add_evaluation(evaluation(3, 0.8, "canary"))
    assert view.snapshot()["curve"] == []
    assert view.snapshot()["measured"]["canary"]["version"] == 3


def test_a_rejected_command_reaches_only_its_operator():
    view = FleetView(ManualClock())
    view.reject_command(OperatorCommand("r1", "take_over", operator="web-1"), "taken")
    view.reject_command(OperatorCommand("r1", "release_estop", operator="web-2"), "not yours")
    assert view.pop_rejections("web-1") == [("r1", "taken")]
    assert view.pop_rejections("web-2") == [("", "not yours")]
    assert view.pop_rejections("web-1") == []
    for _ in range(1000):
        view.reject_command(OperatorCommand("r1", "take_over", operator="web-3"), "taken")
    assert len(view.pop_rejections("web-3")) == MAX_REJECTIONS


def test_what_robots_do_on_their_own_stands_beside_the_measured_figure():
    view = FleetView(ManualClock())
    assert view.snapshot()["unaided"] is None
    view.add_episode("demonstrator", "drawer-open", "success", 90)
    view.add_episode("r1", "drawer-open", "success", 0, version=3, practised=True)
    view.add_episode("r1", "drawer-open", "success", 20, version=4, practised=True)
    assert view.snapshot()["unaided"] == {"success": 0.5, "episodes": 2, "versions": [3, 4]}
    view.add_evaluation(evaluation(3, 0.8, "minute 4"))
    assert view.snapshot()["curve"] == [], "it has other scenes than the curve"


def test_storage_that_is_away_is_shown_since_when_and_said_once_each_way():
    clock = ManualClock(10**9)
    view = FleetView(clock)
    assert view.snapshot()["storage"] == {"fault": "", "away_s": None}
    for reason in ("no space left.", "no space left.", "nobody answers."):
        view.update_storage(reason)
        clock.advance(2 * 10**9)
    assert view.snapshot()["storage"] == {"fault": "nobody answers.", "away_s": 6.0}
    assert view.observe().storage_away_s == 6.0
    view.update_storage("")
    assert view.observe().storage_away_s is None
    texts = [event["text"] for event in view.snapshot()["events"] if event["kind"] == "storage"]
    assert texts == ["no space left.", "storage is back after 6.0 s"]


def test_a_command_wakes_whoever_pops_it():
    view, woken = FleetView(), []
    view.on_command = lambda: woken.append(len(view.pop_commands()))
    view.submit_command(OperatorCommand("robot-0", "take_over"))
    assert woken == [1]
