"""A robot that has to move to where its episodes begin is commanded there tick by tick, and can be stopped."""

from __future__ import annotations

from itertools import chain, repeat

import msgspec
import numpy as np
import pytest

from hal.interfaces.robot import RestPose
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from robot_edge.control.mode import HoldReason, Mode
from robot_edge.control.rest_motion import RestMotion
from tests.robot_edge.control.test_no_jumps import SPEC, START, Bench, acts
from wire.clock import ManualClock
from wire.errors import InvalidDataError, RobotError
from wire.messages.gateway import Job, Nack, OperatorCommand
from wire.types import Observation

RANGE = SPEC.action[0].high - SPEC.action[0].low
PACE = 1.0
"""m a tick"""


def pose(target: float, pace: float = PACE) -> RestPose:
    return RestPose(np.array([target], np.float32), pace * SPEC.control_hz / RANGE, 0.5 / RANGE)


class TestMotion:
    def test_it_goes_straight_at_the_pace_it_is_told(self) -> None:
        state, seen = np.array([START], np.float32), [START]
        motion = RestMotion(SPEC, pose(80.5), state, ManualClock())
        while (action := motion.next_action(state)) is not None:
            seen.append(float(action[0]))
            motion.on_executed(action)
            state = action
        assert np.allclose(np.diff(seen), [*[PACE] * 30, 0.5], atol=1e-2)

    def test_a_robot_that_does_not_follow_is_named(self) -> None:
        state, clock = np.array([START], np.float32), ManualClock()
        motion = RestMotion(SPEC, pose(80.0), state, clock)
        with pytest.raises(RobotError, match=r"does not reach its rest pose: 'x' is at 50\.0 instead of 80\.0"):
            for _ in range(1000):
                motion.next_action(state)
                clock.advance(SPEC.period_ns)

    def test_one_that_is_slowed_may_take_its_time(self) -> None:
        state, clock = np.array([START], np.float32), ManualClock()
        motion = RestMotion(SPEC, pose(80.0, pace=0.05), state, clock, speed_limit=0.25)
        while (action := motion.next_action(state)) is not None:
            state = state + 0.25 * (action - state)
            motion.on_executed(state)
            clock.advance(SPEC.period_ns)
            if abs(state[0] - 80.0) < 0.01:
                break
        assert clock.now_ns() > 2 * (80.0 - START) / 0.05 * SPEC.period_ns + 2e9, "longer than at full speed"

    @pytest.mark.parametrize(
        "wrong", [RestPose(np.full(1, np.nan), 1, 1), RestPose(np.zeros(9), 1, 1), pose(0.0, pace=0.0)]
    )
    def test_what_is_no_pose_is_refused(self, wrong: RestPose) -> None:
        with pytest.raises(InvalidDataError, match="rest pose"):
            RestMotion(SPEC, wrong, np.zeros(1, np.float32), ManualClock())


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
