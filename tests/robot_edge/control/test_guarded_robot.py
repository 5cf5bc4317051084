"""Drivers that raise, block or answer nonsense: the robot holds, says why, and is back when its driver is."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hal.drivers.fake import FAKE_LIMITS, FakeConfig, FakeRobot, Faults
from hal.interfaces.robot import Feedback, validate_feedback, validate_observation
from hal.safety.limited_robot import LimitedRobot
from robot_edge.control.config import ObservationLimits, RobotTimeouts
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import HoldReason, Mode
from tests import samples
from tests.robot_edge.control.test_loop import Bench
from wire.clock import ManualClock
from wire.errors import ConfigError, InvalidDataError, RobotDisconnectedError, RobotError
from wire.messages.gateway import EdgeEvent, EdgeStatus, Job, OperatorCommand
from wire.messages.local import RequestPreviews
from wire.types import Frame, Observation

SECOND = 80
"""ticks"""


def events(bench: Bench) -> list[tuple[str, str]]:
    return [(m.kind, m.detail) for m in bench.said if isinstance(m, EdgeEvent)]


def status_fault(bench: Bench) -> str:
    return [m for m in bench.said if isinstance(m, EdgeStatus)][-1].fault


def faulty(switch: Path, **faults: bool) -> Bench:
    config = replace(FakeConfig(), faults=Faults(only_while=str(switch), **faults))
    return Bench(config, max_ticks=10_000, status_every_ticks=1)


@pytest.mark.parametrize(
    ("fault", "first", "then", "words"),
    [
        ("unplugged", HoldReason.bad_observation, HoldReason.no_robot, "check its cable"),
        ("raise_on_read", HoldReason.bad_observation, None, "check its cable"),
        ("nan_state", HoldReason.bad_observation, None, "not finite"),
        ("wrong_shape", HoldReason.bad_observation, None, r"shape \(5,\)"),
        ("raise_on_write", HoldReason.safety, None, "does not take a command"),
        ("wrong_feedback", HoldReason.safety, None, r"as what it executed; float32\[4\]"),
    ],
)
@pytest.mark.slow
def test_in_the_middle_of_an_episode_it_is_told_once_and_over_by_itself(
    tmp_path: Path, fault: str, first: HoldReason, then: HoldReason | None, words: str
) -> None:
    switch = tmp_path / "unplugged"
    bench = faulty(switch, **{fault: True}).ready().tick(20)
    assert bench.loop.mode is Mode.policy
    switch.touch()
    bench.tick(3)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, first)
    bench.tick(8 * SECOND)
    assert bench.loop.mode is Mode.hold
    assert bench.loop.hold.reason in ({then} if then else {HoldReason.no_robot, first})
    assert status_fault(bench)
    assert bench.outcomes()[0] == "aborted"
    assert [kind for kind, detail in events(bench) if re.search(words, detail)] == ["hold"]
    switch.unlink()
    bench.tick(40 * SECOND)
    assert bench.loop.mode is Mode.policy
    assert (status_fault(bench), bench.loop.driver.fault.detail) == ("", "")
    kinds = [kind for kind, _ in events(bench)]
    assert kinds.count("hold") == kinds.count("recovered")
    assert kinds[-1] == "recovered"
    assert bench.outcomes() == ["aborted"] * len(bench.outcomes())


@pytest.mark.parametrize(
    ("fault", "reason"), [("raise_on_connect", HoldReason.no_robot), ("raise_on_reset", HoldReason.no_reset)]
)
def test_before_an_episode_it_is_tried_again_after_ever_longer_pauses(
    tmp_path: Path, fault: str, reason: HoldReason
) -> None:
    switch = tmp_path / "unplugged"
    bench = faulty(switch, **{fault: True}).ready()
    switch.touch()
    bench.loop.driver.start_disconnected()
    call = "connect" if fault == "raise_on_connect" else "reset"
    works, tries = getattr(bench.robot, call), []

    def counted(*given: Any) -> None:
        tries.append(bench.clock.now_ns() / 1e9)
        works(*given)

    setattr(bench.robot, call, counted)
    bench.tick(70 * SECOND)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, reason)
    assert np.diff(tries).round().tolist() == [1, 2, 4, 8, 16, 30]
    assert "check its cable" in status_fault(bench)
    assert [kind for kind, _ in events(bench)] == ["hold"]
    bench.uplink.send(OperatorCommand("robot-0", "estop"))
    assert bench.tick().loop.mode is Mode.estop
    bench.uplink.send(OperatorCommand("robot-0", "release_estop", stop="web"))
    bench.uplink.send(OperatorCommand("robot-0", "start"))
    switch.unlink()
    bench.tick(31 * SECOND)
    assert (bench.loop.mode, status_fault(bench)) == (Mode.policy, "")
    assert [kind for kind, _ in events(bench)] == ["hold", "recovered"]


def test_a_driver_whose_process_is_gone_is_connected_again_and_the_episode_ended() -> None:
    bench = Bench(max_ticks=10_000).ready().tick(20)
    read, connect = bench.robot.read, bench.robot.connect
    calls: list[str] = []
    bench.robot.read = lambda: (_ for _ in ()).throw(RobotDisconnectedError("its host ended"))  # type: ignore[method-assign]
    bench.robot.connect = lambda: (calls.append("connect"), connect())[1]  # type: ignore[method-assign,func-returns-value]
    bench.tick(2)
    assert (bench.loop.mode, bench.loop.hold.reason, bench.outcomes()) == (Mode.hold, HoldReason.no_robot, ["aborted"])
    bench.robot.read = read  # type: ignore[method-assign]
    bench.tick(2 * SECOND)
    assert (calls, bench.loop.mode) == (["connect"], Mode.policy)


def test_a_task_the_robot_has_not_does_not_stop_the_others() -> None:
    bench = Bench(max_ticks=10, status_every_ticks=1).ready()
    bench.uplink.send(Job("j", ("fly", "go-left"), 500))
    bench.tick(2)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_reset)
    assert "no task 'fly'" in status_fault(bench)
    bench.tick(2 * SECOND)
    assert bench.outcomes()[0] == "failure"


def test_at_rest_a_robot_is_still_watched(tmp_path: Path) -> None:
    switch = tmp_path / "unplugged"
    bench = faulty(switch, unplugged=True).ready().tick(3)
    bench.uplink.send(Job("rest", (), 0))
    bench.lose_episode()
    bench.tick(SECOND)
    assert (bench.loop.hold.reason, status_fault(bench)) == (HoldReason.no_job, "")
    switch.touch()
    bench.tick(SECOND)
    assert "check its cable" in status_fault(bench)
    bench.tick(4 * SECOND)
    assert bench.loop.hold.reason is HoldReason.no_robot
    switch.unlink()
    bench.tick(10 * SECOND)
    assert (bench.loop.hold.reason, status_fault(bench)) == (HoldReason.no_job, "")
    assert [kind for kind, _ in events(bench)] == ["hold", "recovered"]


def test_a_scripted_operator_that_raises_is_told_of_once_and_the_policy_acts_alone() -> None:
    bench = Bench(operated=True, max_ticks=10_000).ready()

    def broken(observation: Observation) -> np.ndarray:
        raise ZeroDivisionError("oh")

    bench.loop._scripted._operator.propose = broken  # type: ignore[union-attr,method-assign]
    bench.tick(20)
    assert bench.loop.mode is Mode.policy
    assert events(bench) == [("operator_failed", "the scripted operator: ZeroDivisionError: oh")]


def test_what_a_driver_cannot_be_closed_with_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench().ready().tick(5)
    bench.robot.close = lambda: 1 / 0  # type: ignore[method-assign,assign,return-value]
    bench.loop.close()
    assert bench.outcomes() == []
    assert "could not be closed" in caplog.text and "ZeroDivisionError" in caplog.text


GOOD = Observation(1, np.zeros(3, np.float32), {"front": Frame(1, np.zeros((2, 2, 3), np.uint8))}, "reach")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": [0.0, 1.0]}, "a state of list"),
        ({"state": np.zeros(3, np.int64)}, "a state of int64"),
        ({"time_ns": 1.5}, "time_ns 1.5"),
        ({"task": None}, "task None"),
        ({"images": {"front": np.zeros(3)}}, "for camera 'front'"),
        ({"images": {"front": Frame(1, None)}}, "for camera 'front'"),  # type: ignore[arg-type]
    ],
)
def test_an_observation_of_other_kinds_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    fields = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__}
    with pytest.raises(InvalidDataError, match=words):
        validate_observation(samples.spec(), Observation(**{**fields, **change}))


def test_numbers_of_another_width_become_float32() -> None:
    assert validate_observation(samples.spec(), GOOD) is GOOD
    wide = Observation(1, np.zeros(3), GOOD.images, "reach")
    assert validate_observation(samples.spec(), wide).state.dtype == np.float32
    stamped = Observation(np.int64(7), GOOD.state, GOOD.images, "reach")  # type: ignore[arg-type]
    assert type(validate_observation(samples.spec(), stamped).time_ns) is int
    feedback = validate_feedback(samples.spec(), Feedback(np.zeros(samples.spec().action_dim), reward=np.float64(2)))  # type: ignore[arg-type]
    assert (feedback.executed.dtype, type(feedback.reward), type(feedback.success)) == (np.float32, float, bool)


@pytest.mark.parametrize("nothing", [None, SimpleNamespace(state=np.zeros(3))])
def test_what_is_no_observation_or_feedback_is_refused(nothing: Any) -> None:
    with pytest.raises(InvalidDataError, match="not an Observation"):
        validate_observation(samples.spec(), nothing)
    with pytest.raises(InvalidDataError, match="not a Feedback"):
        validate_feedback(samples.spec(), nothing)
    with pytest.raises(InvalidDataError, match="reward"):
        validate_feedback(
            samples.spec(), Feedback(np.zeros(samples.spec().action_dim, np.float32), reward=float("nan"))
        )


def test_timeouts_that_cannot_be_are_refused() -> None:
    for wrong, words in (({"give_up_s": 0}, "give_up_s"), ({"longest_pause_s": 0.5}, "less than first_pause_s")):
        with pytest.raises(ConfigError, match=words):
            RobotTimeouts(**wrong)


def test_errors_of_any_kind_name_the_call_and_the_robot() -> None:
    bench = Bench(max_ticks=100).ready().tick(5)
    bench.robot.read = lambda: {}["joint"]  # type: ignore[method-assign]
    with pytest.raises(RobotError, match=r"'robot-0': its driver failed in read\(\): KeyError: 'joint'"):
        bench.loop.driver.read()


def test_larger_pictures_are_asked_for_once_and_a_driver_that_fails_at_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(max_ticks=10_000).ready().tick(10)
    asked: list[bool] = []

    def request_previews(wanted: bool) -> None:
        asked.append(wanted)
        if not wanted:
            raise ValueError("no such camera")

    bench.robot.request_previews = request_previews  # type: ignore[attr-defined]
    bench.uplink.send(RequestPreviews(True))
    bench.tick(5)
    bench.uplink.send(RequestPreviews(True))
    bench.tick(5)
    bench.uplink.send(RequestPreviews(False))
    bench.tick(5)
    assert asked == [True, False]
    assert "no such camera" in caplog.text
    assert bench.loop.mode is Mode.policy


def test_a_start_that_is_old_starts_nothing() -> None:
    clock = ManualClock(3600 * 10**9)
    robot = LimitedRobot(FakeRobot(), FAKE_LIMITS)
    driver = GuardedRobot("arm", robot, RobotTimeouts(), ObservationLimits(), clock, lambda kind, detail: None)
    robot.stop("a", "anna")
    robot.release("a")
    for made_ns, free in ((10**9, False), (clock.now_ns() - 2 * 10**9, False), (clock.now_ns() - 10**8, True)):
        orders = deque([OperatorCommand("arm", "start", captured_ns=made_ns)])
        driver.give_orders(orders)
        assert not orders and robot.stop_state().free == free
