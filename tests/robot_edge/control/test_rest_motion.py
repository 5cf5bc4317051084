"""A robot that has to move to where its episodes begin is commanded there tick by tick, and can be stopped."""

from __future__ import annotations

from itertools import chain, repeat

import msgspec
import numpy as np
import pytest

from hal.interfaces.dynamics import ActionStateMapping
from hal.interfaces.robot import Feedback, RestPose
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from robot_edge.control.mode import HoldReason, Mode
from robot_edge.control.rest_motion import RestMotion
from tests.robot_edge.control.test_no_jumps import SPEC, START, Bench, acts
from wire.errors import InvalidDataError, RobotError
from wire.messages.gateway import Job, Nack, OperatorCommand
from wire.types import Dimension, Observation

RANGE = SPEC.action[0].high - SPEC.action[0].low
PACE = 1.0
"""m a tick"""


def pose(target: float, pace: float = PACE) -> RestPose:
    return RestPose(np.array([target], np.float32), pace * SPEC.control_hz / RANGE, 0.5 / RANGE)


class TestMotion:
    def test_it_goes_straight_at_the_pace_it_is_told(self) -> None:
        state, seen = np.array([START], np.float32), [START]
        motion = RestMotion(SPEC, pose(80.5), state)
        while (action := motion.next_action(state)) is not None:
            seen.append(float(action[0]))
            motion.on_executed(action)
            state = action
        assert np.allclose(np.diff(seen), [*[PACE] * 30, 0.5], atol=1e-2)

    @pytest.mark.parametrize("pace", [0.2, 1.0, 2.0])
    def test_it_brakes_in_time_and_does_not_pass_its_pose(self, pace: float) -> None:
        limits = SafetyLimits({"x": 3 * SPEC.control_hz}, {"x": 0.1 * SPEC.control_hz**2})
        limiter, state = SafetyLimiter(SPEC, limits), np.array([START], np.float32)
        motion, seen = RestMotion(SPEC, pose(80.0, pace), state, limits), [START]
        while (action := motion.next_action(state)) is not None:
            executed = limiter.limit(action, state)
            limiter.note(executed, state)
            motion.on_executed(executed)
            state = executed
            seen.append(float(state[0]))
        assert max(seen) <= 80.0 and seen[-1] == pytest.approx(80.0, abs=0.2)
        assert np.diff(seen).max() == pytest.approx(min(pace, 1.6), abs=0.1), "as fast as it is told where it can be"

    def test_a_robot_that_does_not_follow_is_named(self) -> None:
        state = np.array([START], np.float32)
        motion = RestMotion(SPEC, pose(80.0), state)
        with pytest.raises(RobotError, match=r"does not reach its rest pose: 'x' is at 50\.0 instead of 80\.0"):
            for _ in range(1000):
                motion.on_executed(motion.next_action(state))

    def test_one_that_is_slowed_on_its_way_may_take_its_time(self) -> None:
        state, share, ticks = np.array([START], np.float32), 1.0, 0
        motion = RestMotion(SPEC, pose(80.0, pace=0.05), state)
        while (action := motion.next_action(state)) is not None and abs(state[0] - 80.0) >= 0.01:
            share, ticks = 1.0 if ticks < 10 else 0.25, ticks + 1
            state = state + share * (action - state)
            motion.on_executed(state, share)
        assert ticks > 2 * (80.0 - START) / 0.05 + 2 * SPEC.control_hz, "longer than at full speed"

    def test_what_it_is_held_for_does_not_count(self) -> None:
        state = np.array([START], np.float32)
        motion = RestMotion(SPEC, pose(80.0), state)
        for _ in range(1000):
            motion.on_executed(state, 0.0)
        assert motion.next_action(state) == pytest.approx(START + PACE)

    def test_a_target_of_another_name_sets_out_from_where_it_is_measured_and_arrives_there(self) -> None:
        spec = msgspec.structs.replace(SPEC, state=(Dimension("seen", "mm", -1e8, 1e8),))
        limits = SafetyLimits(moves=(ActionStateMapping("x", "seen", 1000.0),))
        state = np.array([1000 * START], np.float32)
        motion = RestMotion(spec, pose(START + 2 * PACE), state, limits)
        for target in (START + PACE, START + 2 * PACE):
            action = motion.next_action(state)
            assert action == pytest.approx(target)
            motion.on_executed(action)
        assert motion.next_action(state) is not None, "it was told to, but is not there yet"
        assert motion.next_action(state + 2000 * PACE) is None

    @pytest.mark.parametrize(
        "wrong", [RestPose(np.full(1, np.nan), 1, 1), RestPose(np.zeros(9), 1, 1), pose(0.0, pace=0.0)]
    )
    def test_what_is_no_pose_is_refused(self, wrong: RestPose) -> None:
        with pytest.raises(InvalidDataError, match="rest pose"):
            RestMotion(SPEC, wrong, np.zeros(1, np.float32))


class TestLoop:
    @pytest.fixture
    def bench(self, monkeypatch: pytest.MonkeyPatch) -> Bench:
        made = Bench("aligned")
        monkeypatch.setattr(made.robot, "reset", lambda task, seed: pose(80.0))
        return made

    def test_the_episode_begins_when_it_has_arrived(self, bench: Bench) -> None:
        rows = bench.tick(28)
        assert {row.mode for row in rows} == {Mode.reset}
        assert not bench.steps
        rows = bench.tick(20)
        assert max(row.by for row in rows if row.mode is Mode.reset) == pytest.approx(PACE, abs=1e-2)
        assert bench.steps[0].state[0] == pytest.approx(80, abs=0.5)
        assert any(acts(rows))

    def test_a_stop_on_the_way_stops_it_and_it_goes_on_only_when_it_is_started(self, bench: Bench) -> None:
        bench.tick(10)
        bench.uplink.send(OperatorCommand("robot-0", "estop", stop="1"))
        bench.tick(2)
        assert {(row.mode, row.by) for row in bench.tick(20)} == {(Mode.estop, 0.0)}
        bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop="1"))
        bench.tick(2)
        assert {(row.reason, row.by) for row in bench.tick(20)} == {(HoldReason.not_started, 0.0)}
        bench.uplink.send(OperatorCommand("robot-0", "start"))
        assert any(acts(bench.tick(60)))

    def test_a_person_who_has_taken_over_is_not_moved_away_from(self, bench: Bench) -> None:
        bench.tick(10)
        bench.person("take_over")
        bench.tick(2)
        assert {row.by for row in bench.tick(20)} == {0.0}
        assert bench.loop.tracker.running

    def test_who_takes_over_where_it_was_stopped_on_the_way_begins_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench("aligned", attended=True)
        bench.person("scene_ready")
        bench.tick(20)
        monkeypatch.setattr(bench.robot, "reset", lambda task, seed: pose(bench.robot.x - 30))
        bench.person("end")
        bench.tick(10)
        bench.person("scene_ready")
        assert Mode.reset in {row.mode for row in bench.tick(10)}
        bench.uplink.send(OperatorCommand("robot-0", "estop", stop="1"))
        bench.tick(3)
        bench.person("take_over")
        bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop="1"))
        far = bench.robot.x + 40
        bench.person("command", far)
        bench.tick(3)
        # It holds in no tick in between, which would tell where it is.
        bench.uplink.send(OperatorCommand("robot-0", "start"))
        bench.person("command", far + 0.1)
        rows = bench.tick(10)
        assert {row.mode for row in rows} == {Mode.human}
        assert max(abs(row.by) for row in rows) <= 40 / 25 + 0.2, "it approaches the device"

    def test_commands_that_were_refused_are_not_made_up_for(self, bench: Bench) -> None:
        bench.tick(10)
        bench.robot.refuses = True
        bench.tick(8)
        bench.robot.refuses = False
        assert max(row.by for row in bench.tick(10)) <= PACE * 1.01

    def test_a_robot_that_cannot_be_read_on_the_way_is_held(self, bench: Bench) -> None:
        bench.tick(10)
        bench.robot.unreadable = True
        assert [row.by for row in bench.tick(20)] == [0.0] * 20
        bench.robot.unreadable = False
        assert any(row.by for row in bench.tick(10))

    def test_one_that_was_held_for_long_goes_on_from_there(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench.robot, "reset", lambda task, seed: pose(80.0, pace=0.3))
        bench.tick(10)
        seen = bench.robot.read()
        with monkeypatch.context() as stalled:
            stalled.setattr(bench.robot, "read", lambda: seen)
            assert bench.tick(400)[-1].by == 0.0
        rows = bench.tick(90)
        assert max(row.by for row in rows if row.mode is Mode.reset) == pytest.approx(0.3, abs=1e-2)
        assert any(acts(rows))

    def test_one_that_does_not_arrive_keeps_its_connection_and_is_reset_anew(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[float] = []
        monkeypatch.setattr(bench.robot, "close", lambda: closed.append(bench.robot.x))
        with monkeypatch.context() as blocked:
            blocked.setattr(bench.robot, "write", Feedback)
            rows = bench.tick(250)
        assert HoldReason.no_reset in {row.reason for row in rows}
        assert any(acts(bench.tick(150)))
        assert closed == []

    def test_one_that_was_connected_anew_on_the_way_is_reset_anew(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        resets: list[str] = []
        monkeypatch.setattr(bench.robot, "reset", lambda task, seed: resets.append(task) or pose(80.0))
        bench.tick(10)
        bench.robot.unreadable = True
        bench.tick(200)
        assert len(resets) == 1
        bench.robot.unreadable = False
        assert any(acts(bench.tick(200)))
        assert len(resets) == 2

    def test_it_does_not_set_out_on_a_time_that_jumped_while_it_was_reset(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, jumps = bench.robot.read, chain([0], repeat(-2_000_000_000))

        def jumping() -> Observation:
            seen = read()
            return msgspec.structs.replace(seen, time_ns=seen.time_ns + next(jumps))

        monkeypatch.setattr(bench.robot, "read", jumping)
        assert [row.by for row in bench.tick(3)] == [0.0] * 3, "what was read at the reset is all that can tell"
        assert any(row.by for row in bench.tick(10)), "and it goes on by the new time"

    def test_limits_hold_on_the_way_too(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = LimitedRobot(bench.robot, SafetyLimits(velocity={"x": 0.5 * SPEC.control_hz}))
        for name in ("reset", "read", "write", "hold"):
            monkeypatch.setattr(bench.loop.robot, name, getattr(slow, name))
        assert max(row.by for row in bench.tick(70)) <= 0.5 * 1.001

    @pytest.mark.parametrize("what", ["its plug", "storage", "its job"])
    def test_a_scene_that_was_ready_for_one_moment_is_not_so_for_a_later_one(
        self, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody may have stepped in meanwhile."""
        bench = Bench("aligned", attended=True)
        monkeypatch.setattr(bench.robot, "reset", lambda task, seed: pose(80.0))
        bench.tick(3)
        bench.person("scene_ready")
        assert any(row.by for row in bench.tick(10))
        if what == "its plug":
            with monkeypatch.context() as patch:
                for name in ("connect", "read", "write"):
                    patch.setattr(bench.robot, name, _gone)
                bench.tick(500)
        elif what == "storage":
            bench.uplink.send(Nack("the disk is full"))
            bench.tick(50)
            bench.uplink.send(Nack(""))
        else:
            bench.uplink.send(Job("rest", (), 0))
            bench.tick(50)
            bench.uplink.send(Job("other", ("slide",), 0))
        rows = bench.tick(2000)
        assert not any(row.by for row in rows[20:]) and rows[-1].reason is HoldReason.scene
        bench.person("scene_ready")
        assert any(acts(bench.tick(60)))


def _gone(*given: object) -> None:
    raise RobotError("no answer")
