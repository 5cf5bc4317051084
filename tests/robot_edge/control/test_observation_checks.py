"""What a robot reports, spoilt in every way it happens, tick by tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, FakeRobot, Faults
from robot_edge.control.config import ObservationLimits, RobotTimeouts
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import NO_HOLD, Hold, HoldReason
from wire.clock import Clock, ManualClock
from wire.errors import ConfigError, RobotError
from wire.types import CameraSpec, Dimension, Frame, Observation, RobotSpec

MS = 1_000_000
TICK_NS = 20 * MS
SPEC = RobotSpec(
    embodiment="bench",
    state=(Dimension("shoulder", "rad", -2.0, 2.0), Dimension("elbow", "rad", 0.0, 4.0)),
    action=(Dimension("move", "rad", -1.0, 1.0),),
    cameras=(CameraSpec("left", 24, 32, 50.0), CameraSpec("right", 24, 32, 50.0)),
    control_hz=50.0,
)


class Seen(NamedTuple):
    """What became of one reading."""

    fault: Hold = NO_HOLD
    valid: bool = True


class Reported:
    """A robot that reports what it is told to."""

    spec = SPEC
    observation: Observation
    error = ""

    def read(self) -> Observation:
        if self.error:
            raise RobotError(self.error)
        return self.observation

    def reset(self, task: str, seed: int) -> None: ...

    def close(self) -> None: ...


def guarded(
    robot: Any, clock: Clock, limits: ObservationLimits | None = None, notify: Callable[[str, str], None] | None = None
) -> GuardedRobot:
    limits, silent = limits or ObservationLimits(), lambda kind, detail: None
    return GuardedRobot("bench", robot, RobotTimeouts(), limits, clock, notify or silent)


def observed(driver: GuardedRobot) -> Seen:
    return Seen(valid=driver.observe() is not None, fault=driver.observation_fault)


class Bench:
    """A robot whose every tick is composed by the test; `origin_ns` of its clock is not control's."""

    def __init__(self, config: ObservationLimits | None = None, origin_ns: int = 10**15) -> None:
        self.events: list[tuple[str, str]] = []
        self.clock = ManualClock(5_000_000_000)
        self.robot = Reported()
        self.health = guarded(self.robot, self.clock, config, self.notify)
        self.origin_ns = origin_ns
        self.rng = np.random.default_rng(0)
        self.images = {camera.name: self.picture() for camera in SPEC.cameras}
        self.state = np.zeros(2, np.float32)

    def notify(self, kind: str, detail: str) -> None:
        self.events.append((kind, detail))

    def picture(self) -> np.ndarray:
        return self.rng.integers(0, 256, (24, 32, 3), np.uint8)

    def tick(
        self,
        *,
        lag_ns: int = 0,
        frame_ns: dict[str, int] | None = None,
        still: tuple[str, ...] = (),
        state: np.ndarray | None = None,
        images: dict[str, np.ndarray] | None = None,
        took_ns: int = TICK_NS,
    ) -> Seen:
        """One tick: `frame_ns` is when each frame was made, relative to the observation; `still` cameras repeat."""
        self.clock.advance(took_ns)
        time_ns = self.clock.now_ns() + self.origin_ns - lag_ns
        for name in self.images:
            if name not in still:
                self.images[name] = self.picture()
        frames = {
            name: Frame(time_ns + (frame_ns or {}).get(name, -MS), image)
            for name, image in (self.images if images is None else images).items()
        }
        self.robot.observation = Observation(time_ns, self.state if state is None else state, frames, "x")
        return observed(self.health)

    def well(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            verdict = self.tick()
            assert (verdict.fault.reason, verdict.fault.detail, verdict.valid) == (HoldReason.none, "", True)

    def recovers(self, ticks: int = 3) -> None:
        """It holds for `ticks` healthy ticks and moves at the next, and says so once."""
        said = len(self.events)
        for _ in range(ticks):
            assert self.tick().fault.reason is not HoldReason.none
        self.well(5)
        assert [kind for kind, _ in self.events[said:]] == ["recovered"]


def test_a_healthy_robot_moves_and_nothing_is_said() -> None:
    bench = Bench()
    bench.well(200)
    assert bench.events == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_joint_that_is_no_number_is_named(bad: float) -> None:
    bench = Bench()
    bench.well(3)
    verdict = bench.tick(state=np.array([0.1, bad], np.float32))
    assert verdict.fault.reason is HoldReason.bad_observation
    assert not verdict.valid
    assert "elbow" in verdict.fault.detail
    assert "shoulder" not in verdict.fault.detail
    assert bench.events == [("hold", verdict.fault.detail)]
    bench.recovers()
    assert "elbow" in bench.events[-1][1]


def test_another_shape_and_a_missing_camera_are_named() -> None:
    bench = Bench()
    assert "(3,)" in bench.tick(state=np.zeros(3, np.float32)).fault.detail
    assert "'right'" in bench.tick(images={"left": bench.picture()}).fault.detail
    wrong = {"left": bench.picture(), "right": np.zeros((24, 33, 3), np.uint8)}
    assert "uint8[24, 33, 3]" in bench.tick(images=wrong).fault.detail


def test_a_robot_that_cannot_be_read() -> None:
    bench = Bench()
    bench.well(2)
    bench.robot.error = "the arm does not answer"
    verdict = observed(bench.health)
    assert (verdict.fault.reason, verdict.valid) == (HoldReason.bad_observation, False)
    for _ in range(5):
        observed(bench.health)
    assert bench.events == [("hold", "the arm does not answer")]
    bench.robot.error = ""
    bench.recovers()


def test_a_camera_whose_frames_stop() -> None:
    bench = Bench()
    bench.well(3)
    verdicts = [bench.tick(frame_ns={"right": -MS - tick * TICK_NS}) for tick in range(1, 40)]
    # 24 ticks make 481 ms, 25 make 501
    assert [verdict.fault.reason for verdict in verdicts] == [HoldReason.none] * 24 + [HoldReason.stale_camera] * 15
    assert verdicts[-1].valid
    assert "'right'" in verdicts[-1].fault.detail
    assert len(bench.events) == 1, "its growing age is no event"
    # the other camera is one
    bench.tick(frame_ns={"right": -2 * MS, "left": -42 * MS})
    assert [("'left'" in detail) for _, detail in bench.events] == [False, True]
    bench.recovers()


def test_a_frame_that_does_not_change_grows_old_whatever_time_its_robot_says_it_is() -> None:
    """The clock of the robot goes back with each reset, and so the one frame that there is looks young again."""
    bench = Bench()
    bench.well(3)
    frame_ns = bench.robot.observation.images["right"].time_ns
    for _ in range(4):
        bench.health._monitor.reset()
        bench.origin_ns = frame_ns - bench.clock.now_ns()
        verdicts = [bench.tick(frame_ns={"right": -tick * TICK_NS}) for tick in range(1, 12)]
    assert {verdict.fault.reason for verdict in verdicts} == {HoldReason.stale_camera}


@pytest.mark.parametrize(("age_ns", "stale"), [(500 * MS - 1, False), (500 * MS, False), (500 * MS + 1, True)])
def test_the_age_of_a_frame_at_its_bound(age_ns: int, stale: bool) -> None:
    assert (Bench().tick(frame_ns={"left": -age_ns}).fault.reason is HoldReason.stale_camera) == stale


def test_recovery_counts_ticks_in_a_row() -> None:
    bench = Bench()
    nan = np.full(2, np.nan, np.float32)
    for _ in range(10):
        assert bench.tick(state=nan).fault.reason is not HoldReason.none
        for _ in range(3):
            assert bench.tick().fault.reason is HoldReason.bad_observation, "not before the fourth"
    assert [kind for kind, _ in bench.events] == ["hold"]
    assert bench.tick().fault.reason is HoldReason.none
    assert [kind for kind, _ in bench.events] == ["hold", "recovered"]


@pytest.mark.parametrize("limits", [{"camera_stale_s": 0.0}, {"jump_s": float("nan")}, {"recover_ticks": -1}])
def test_limits_that_make_no_sense_are_refused(limits: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        ObservationLimits(**limits)


def test_an_episode_does_not_forgive() -> None:
    bench = Bench()
    bench.tick(state=np.full(2, np.nan, np.float32))
    assert bench.health.reset("x", 0, move=True)
    bench.recovers()


class TestClock:
    @pytest.mark.parametrize("origin_ns", [0, 10**15, -(10**9)])
    def test_the_robots_clock_may_have_another_origin(self, origin_ns: int) -> None:
        Bench(origin_ns=origin_ns).well(50)

    @pytest.mark.parametrize("back_ns", [1, MS, 3600 * 10**9])
    def test_going_back_is_a_jump_and_the_new_time_goes_on(self, back_ns: int) -> None:
        bench = Bench()
        bench.well(5)
        bench.origin_ns -= TICK_NS + back_ns
        verdict = bench.tick()
        assert verdict.fault.reason is HoldReason.clock_jump
        assert "went back" in verdict.fault.detail
        bench.recovers()

    @pytest.mark.parametrize(("ahead_ns", "jump"), [(400 * MS, False), (499 * MS, False), (501 * MS, True)])
    def test_going_ahead_of_control_is_one_beyond_the_limit(self, ahead_ns: int, jump: bool) -> None:
        bench = Bench()
        bench.well(5)
        bench.origin_ns += ahead_ns
        assert (bench.tick().fault.reason is HoldReason.clock_jump) == jump
        if jump:
            bench.recovers()

    def test_a_pause_of_control_is_none(self) -> None:
        bench = Bench()
        bench.well(5)
        assert bench.tick(took_ns=8 * 10**9) == Seen()

    def test_an_observation_that_stands_still_grows_old(self) -> None:
        bench = Bench()
        bench.well(5)
        lag, reasons = 0, []
        for _ in range(40):
            lag += TICK_NS
            reasons.append(bench.tick(lag_ns=lag, frame_ns={"left": 0, "right": 0}).fault.reason)
        # 500 ms are 25 periods
        assert reasons[:25] == [HoldReason.none] * 25
        assert reasons[26:] == [HoldReason.stale_state] * 14
        assert "old" in bench.events[0][1]

    def test_a_slow_clock_does_not_add_up(self) -> None:
        bench = Bench()
        bench.well()
        for _ in range(3_600):
            # 500 ppm slower, seen once a second for an hour: 1.8 s in all
            bench.origin_ns -= 500_000
            assert bench.tick(took_ns=10**9).fault.reason is HoldReason.none

    def test_a_frame_that_goes_back_or_is_of_the_future(self) -> None:
        bench = Bench()
        bench.well(3)
        assert bench.tick(frame_ns={"left": 49 * MS}).fault.reason is HoldReason.none
        assert bench.tick(took_ns=100 * MS).fault.reason is HoldReason.none
        verdict = bench.tick(frame_ns={"left": 51 * MS})
        assert verdict.fault.reason is HoldReason.clock_jump
        assert "'left'" in verdict.fault.detail
        assert "newer" in verdict.fault.detail
        # its next frame is of an earlier time than that one
        bench.tick(took_ns=MS)
        bench.recovers()
        verdict = bench.tick(frame_ns={"right": -100 * MS})
        assert verdict.fault.reason is HoldReason.clock_jump
        assert "older than the one before" in verdict.fault.detail
        bench.recovers()


class TestRepeats:
    def go(self, bench: Bench, ticks: int, step: float, still: tuple[str, ...] = ("right",)) -> list[HoldReason]:
        reasons = []
        for _ in range(ticks):
            bench.state = bench.state + np.array([step, 0], np.float32)
            reasons.append(bench.tick(still=still).fault.reason)
        return reasons

    def test_new_times_with_the_same_picture_while_it_moves(self) -> None:
        bench = Bench()
        bench.state[0] = -1
        bench.well(3)
        reasons = self.go(bench, 60, 0.02)
        # enough frames are there long before the robot has gone through a tenth of its range of 4
        assert 19 <= reasons.index(HoldReason.frozen_camera) <= 21
        assert "'right'" in bench.events[0][1]
        assert [kind for kind, _ in bench.events] == ["hold"]
        bench.recovers()

    def test_a_scene_in_which_nothing_moves_draws_the_same_picture(self) -> None:
        bench = Bench()
        assert set(self.go(bench, 500, 0.0)) == {HoldReason.none}
        assert set(self.go(bench, 500, 0.0, ("left", "right"))) == {HoldReason.none}

    def test_trembling_in_place_is_not_moving_far(self) -> None:
        bench = Bench()
        for tick in range(500):
            bench.state[0] = 0.15 * (tick % 2)
            assert bench.tick(still=("right",)).fault.reason is HoldReason.none

    def test_creeping_is_not_moving(self) -> None:
        assert set(self.go(Bench(), 300, 0.004)) == {HoldReason.none}

    def test_one_other_pixel_is_another_picture(self) -> None:
        bench = Bench()
        for tick in range(300):
            bench.state[0] = -2 + 0.01 * tick
            image = bench.images["right"]
            # beside the sample, so that only the whole comparison sees it
            image[1, 1, 0] = tick % 256
            assert (
                bench.tick(still=("right",), images=bench.images | {"left": bench.picture()}).fault.reason
                is HoldReason.none
            )

    def test_a_driver_that_reuses_its_memory_is_not_frozen(self) -> None:
        bench = Bench()
        memory = {name: np.zeros((24, 32, 3), np.uint8) for name in bench.images}
        for tick in range(200):
            bench.state[0] = -2 + 0.01 * tick
            for image in memory.values():
                image[...] = bench.picture()
            assert bench.tick(images=memory).fault.reason is HoldReason.none

    def test_a_real_camera_may_be_told_by_its_pictures_alone(self) -> None:
        bench = Bench(ObservationLimits(repeats_while_still=True, repeated_frames=10))
        bench.well(3)
        reasons = self.go(bench, 20, 0.0)
        assert reasons.index(HoldReason.frozen_camera) == 10

    def test_it_can_be_left_out(self) -> None:
        assert set(self.go(Bench(ObservationLimits(repeated_frames=0)), 150, 0.02)) == {HoldReason.none}

    def test_the_same_frame_again_is_no_new_frame(self) -> None:
        bench = Bench()
        image, times = bench.picture(), {}
        for tick in range(24):
            bench.state[0] = -1 + 0.05 * tick
            age = (tick + 1) * TICK_NS
            times = {"left": -MS, "right": -age}
            assert (
                bench.tick(frame_ns=times, images={"left": bench.picture(), "right": image}).fault.reason
                is HoldReason.none
            )


class TestWithTheFakeRobot:
    @pytest.mark.parametrize(
        ("fault", "reason", "word"),
        [
            ("nan_state", HoldReason.bad_observation, "x"),
            ("wrong_shape", HoldReason.bad_observation, "shape"),
            ("frozen_camera", HoldReason.stale_camera, "'front'"),
            ("future_frame", HoldReason.clock_jump, "'front'"),
            ("clock_back", HoldReason.clock_jump, "went back"),
        ],
    )
    def test_each_fault_holds_with_its_reason(self, fault: str, reason: HoldReason, word: str) -> None:
        verdicts = self.run(FakeConfig(faults=Faults(**{fault: True, "from_tick": 10})), 80)
        assert all(verdict.fault.reason is HoldReason.none for verdict in verdicts[:10])
        assert verdicts[-1].fault.reason is reason
        assert word in verdicts[-1].fault.detail

    @pytest.mark.parametrize("seed", range(5))
    def test_no_false_alarm_whatever_it_does(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        scale = rng.choice([0.0, 0.02, 0.1, 1.0], 4)
        # motions of a policy: smooth, of any size, some dimensions still
        phase = rng.uniform(0.01, 0.2, 4)
        moves = [scale * np.sin(phase * tick) for tick in range(2_000)]
        assert all(verdict == Seen() for verdict in self.run(FakeConfig(), 2_000, moves))

    def test_a_robot_that_does_not_answer(self) -> None:
        clock = ManualClock()
        robot = FakeRobot(FakeConfig(faults=Faults(raise_on_read=True)), clock)
        robot.connect()
        robot.reset("go-left", 1)
        assert "does not answer" in observed(guarded(robot, clock)).fault.detail

    def run(self, config: FakeConfig, ticks: int, moves: list[np.ndarray] | None = None) -> list[Seen]:
        clock = ManualClock(10**9)
        robot = FakeRobot(config, clock)
        robot.connect()
        robot.reset("go-left", 1)
        driver, verdicts = guarded(robot, clock), []
        for tick in range(ticks):
            clock.advance(robot.spec.period_ns)
            verdicts.append(observed(driver))
            robot.write(np.zeros(4, np.float32) if moves is None else moves[tick].astype(np.float32))
        return verdicts
