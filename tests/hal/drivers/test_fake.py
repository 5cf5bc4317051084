from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.drivers.fake import FAKE_TASKS, FakeConfig, FakeExpert, FakeRobot, Faults
from hal.interfaces.robot import ROBOT
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError


def check(config: FakeConfig):
    clock = ManualClock(10**10)
    return check_robot(lambda: FakeRobot(config, clock), "go-left", clock=clock)


def test_it_keeps_the_contract() -> None:
    report = check(FakeConfig())
    assert report.passed, str(report)
    assert str(report).endswith("14 of 14 checks passed")


@pytest.mark.parametrize(
    ("fault", "rule", "words"),
    [
        ("raise_on_read", "read", "does not answer"),
        ("nan_state", "read", "not finite in x, y, z"),
        ("wrong_shape", "read", "the spec has 4"),
        ("frozen_camera", "cameras", "frozen"),
        ("future_frame", "cameras", "newer than its observation"),
        ("clock_back", "time", "time went back"),
        ("ignore_limits", "write_limits", "use limit_action"),
        ("forget_seed", "deterministic", "another trajectory"),
    ],
)
def test_each_fault_fails_the_right_check(fault: str, rule: str, words: str) -> None:
    report = check(FakeConfig(faults=Faults(**{fault: True})))
    failed = {c.name: c.message for c in report.checks if not c.passed}
    assert rule in failed
    assert words in failed[rule]
    assert f"FAIL {rule}: " in str(report)


def test_a_fault_begins_at_its_tick() -> None:
    robot = FakeRobot(FakeConfig(faults=Faults(nan_state=True, from_tick=3)))
    robot.connect()
    robot.reset("go-up", 0)
    finite = []
    for _ in range(6):
        finite.append(bool(np.isfinite(robot.read().state).all()))
        robot.write(np.zeros(4, np.float32))
    assert finite == [True] * 3 + [False] * 3


@pytest.mark.parametrize("task", FAKE_TASKS)
@pytest.mark.parametrize("seed", [0, 7])
def test_its_expert_succeeds_and_progress_shrinks(task: str, seed: int) -> None:
    robot = FakeRobot()
    expert = FakeExpert(robot)
    assert expert.progress() == float("inf")
    robot.connect()
    robot.reset(task, seed)
    before = expert.progress()
    for tick in range(100):
        action = expert.propose(robot.read())
        assert action is not None
        done = robot.write(action).success
        assert expert.progress() <= before
        before = expert.progress()
        if done:
            break
    assert done and tick > 3


def test_the_camera_shows_the_point() -> None:
    robot = FakeRobot(FakeConfig(preview_px=96))
    robot.connect()
    robot.reset("go-right", 1)

    def column() -> float:
        frame = robot.read().images["front"]
        assert frame.preview is not None and frame.preview.shape == (96, 96, 3)
        return float(np.flatnonzero((frame.image[:, :, 0] == 255).any(0)).mean())

    before = column()
    for _ in range(12):
        robot.write(np.array([1, 0, 0, 0], np.float32))
    assert column() > before + 5


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'go-left'"):
        FakeConfig(tasks=("go-lefd",))
    robot = FakeRobot(FakeConfig(tasks=("go-left",)))
    with pytest.raises(RobotError, match=r"connect\(\)"):
        robot.reset("go-left", 0)
    robot.connect()
    with pytest.raises(ConfigError, match="go-up"):
        robot.reset("go-up", 0)


@pytest.mark.parametrize("call", ["connect", "reset", "read", "write"])
def test_an_unplugged_robot_fails_in_every_call_until_it_is_connected_again(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROBOT, "robot-3")
    robot = FakeRobot(FakeConfig(faults=Faults(unplugged=True, only_while=str(tmp_path / "{robot}"))))
    calls = {
        "connect": robot.connect,
        "reset": lambda: robot.reset("go-up", 0),
        "read": robot.read,
        "write": lambda: robot.write(np.zeros(4, np.float32)),
    }
    for each in calls.values():
        each()
    (tmp_path / "robot-3").touch()
    with pytest.raises(RobotError, match="check its cable"):
        calls[call]()
    (tmp_path / "robot-3").unlink()
    with pytest.raises(RobotError, match=r"call connect\(\) first"):
        calls["reset"]()
    for each in calls.values():
        each()


@pytest.mark.parametrize("call", ["connect", "reset", "read", "write"])
@pytest.mark.parametrize("how", ["raise_on", "block_in"])
def test_one_call_fails_while_its_fault_is_there(call: str, how: str, tmp_path: Path) -> None:
    switch = tmp_path / "fault"
    robot = FakeRobot(FakeConfig(faults=Faults(**{f"{how}_{call}": True}, only_while=str(switch))))
    robot.connect()
    robot.reset("go-up", 0)
    calls = {
        "connect": robot.connect,
        "reset": lambda: robot.reset("go-up", 0),
        "read": robot.read,
        "write": lambda: robot.write(np.zeros(4, np.float32)),
    }
    switch.touch()
    if how == "raise_on":
        with pytest.raises(RobotError, match="does not answer"):
            calls[call]()
        switch.unlink()
        calls[call]()
        return
    came_back = threading.Event()
    thread = threading.Thread(target=lambda: (calls[call](), came_back.set()))
    thread.start()
    assert not came_back.wait(0.1)
    switch.unlink()
    thread.join(60)
    assert came_back.is_set()
