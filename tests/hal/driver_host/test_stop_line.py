"""A stop reaches the robot whatever its driver, its control or a disk is doing, and stays until it is taken back."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hal.driver_host.protocol import socket_address
from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import DriverServer, run_driver_server
from hal.driver_host.stop_line import StopListener, StopOrder, send_order, stop_address
from hal.drivers.fake import FAKE_LIMITS, FakeConfig, FakeRobot
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from hal.stop_devices.watch import STARTED, Beside
from tests.hal.driver_host.test_proxy import place, until_held  # noqa: F401
from wire.errors import ConfigError, RejectedError, RobotError, RobotStoppedError
from wire.stop_state import StopState
from wire.types import Observation

HZ = 50.0
MOVE = np.array([0.5, 0, 0, 0], np.float32)


class Arm(FakeRobot):
    """Notes what it executed; blocks in `read` while told to."""

    def __init__(self) -> None:
        super().__init__(FakeConfig(control_hz=HZ, image_px=16))
        self.executed: list[np.ndarray] = []
        self.free = threading.Event()
        self.free.set()

    def read(self) -> Observation:
        self.free.wait(30)
        return super().read()

    def write(self, action: np.ndarray) -> Feedback:
        self.executed.append(action.copy())
        return super().write(action)


@contextlib.contextmanager
def hosted(
    arm: Arm,
    path: Path,
    limits: SafetyLimits = FAKE_LIMITS,
    stop_file: Path | None = None,
    beside: Beside | None = None,
) -> Iterator[RobotProxy]:
    over = threading.Event()
    options = {"safety": limits, "stop_file": stop_file, "beside": beside}
    thread = threading.Thread(target=run_driver_server, args=(arm, path, over.is_set), kwargs=options)
    thread.start()
    robot = RobotProxy(arm.spec, path, attach_s=60.0)
    deadline = time.monotonic() + 60
    while not stop_address(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield robot
    finally:
        arm.free.set()
        with contextlib.suppress(RobotError):
            robot.close()
        over.set()
        thread.join(60)
        assert not thread.is_alive()


def moving(robot: RobotProxy) -> None:
    robot.connect()
    robot.reset("go-left", 1)
    for _ in range(5):
        robot.write(MOVE)


def test_a_stopped_robot_is_braked_by_its_host_whatever_control_commands(place: Path) -> None:  # noqa: F811
    arm = Arm()
    limits = SafetyLimits(
        acceleration={"move_x": 5 * HZ}, stop_deceleration={"move_x": 10 * HZ}, rest={"gripper_effort": 0}
    )
    with hosted(arm, place, limits) as robot:
        moving(robot)
        before = len(arm.executed)
        assert robot.stop("1", "anna").stops == {"1": "anna"}
        told = [robot.write(MOVE) for _ in range(10)]
        assert all(one.stop is not None and one.stop.stops for one in told)
        until_held(arm.executed, before + 4)
        assert robot.write(MOVE).still
    speeds = [float(action[0]) for action in arm.executed[before - 1 :]]
    steps = np.diff(speeds)
    assert np.all(steps <= 1e-6) and steps.min() == pytest.approx(-0.2), "as hard as a stop may"
    assert not any(speeds[5:])


def test_it_takes_the_right_release_and_a_start(place: Path) -> None:  # noqa: F811
    arm = Arm()
    with hosted(arm, place) as robot:
        moving(robot)
        robot.stop("1", "anna")
        robot.stop("2", "the pedal")
        assert robot.release("3") == StopState({"1": "anna", "2": "the pedal"}, last="2")
        assert robot.start() == robot.release("") == robot.stop_state()
        assert robot.release("1").stops == {"2": "the pedal"}
        with pytest.raises(RobotStoppedError, match="stopped by the pedal"):
            robot.reset("go-left", 2)
        assert robot.release("2") == StopState(ready=True, last="2")
        assert robot.write(MOVE).executed[0] == 0, "it stands until it is started"
        assert robot.start().free
        assert robot.write(MOVE).executed[0] == 0.5


def test_no_call_stands_in_front_of_a_stop(place: Path) -> None:  # noqa: F811
    arm = Arm()
    with hosted(arm, place) as robot:
        moving(robot)
        arm.free.clear()
        reading = threading.Thread(target=lambda: contextlib.suppress(RobotError) and robot.read())
        reading.start()
        time.sleep(0.05)
        asked = time.monotonic()
        assert send_order(place, StopOrder("stop", "1", "the pedal"), 5.0).stops
        assert time.monotonic() - asked < 1.0
        arm.free.set()
        reading.join(30)
        assert robot.write(MOVE).executed[0] == 0


def test_it_outlives_the_host_and_nobody_connects_the_robot_meanwhile(place: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "estop"
    with hosted(Arm(), place, stop_file=file) as robot:
        moving(robot)
        robot.stop("1", "anna")
    assert file.exists()
    with hosted(Arm(), place, stop_file=file) as robot:
        assert robot.stop_state().stops == {"1": "anna"}
        with pytest.raises(RobotStoppedError, match="is not connected: it was stopped by anna"):
            robot.connect()
        robot.release("1")
        robot.start()
        moving(robot)
    assert not file.exists()


SLOWABLE = SafetyLimits(
    velocity={f"move_{axis}": HZ for axis in "xyz"} | {"gripper_effort": HZ}, rest={"gripper_effort": 0}
)


def slow(path: Path, share: float) -> StopState:
    return send_order(path, StopOrder("slow", who="cli", share=share), 5.0)


def test_it_is_slowed_past_whatever_it_does_and_stays_so_beyond_its_host(place: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "estop"
    with hosted(Arm(), place, SLOWABLE, file) as robot:
        moving(robot)
        assert slow(place, 0.25) == StopState(speed_limits={"cli": 0.25})
        done = robot.write(MOVE)
        assert done.executed[0] == 0.25, "what is reported is what was executed"
        assert done.stop == robot.stop_state()
    with hosted(Arm(), place, SLOWABLE, file, Beside(speed_limit=0.5)) as robot:
        moving(robot)
        assert robot.write(MOVE).executed[0] == 0.25
        assert slow(place, 1.0) == StopState(speed_limits={STARTED: 0.5})
        assert robot.write(np.array([1, 0, 0, 0], np.float32)).executed[0] == 0.5, "how it was started counts, too"
    with hosted(Arm(), place, SLOWABLE, file) as robot:
        moving(robot)
        assert robot.write(np.array([1, 0, 0, 0], np.float32)).executed[0] == 1.0


def test_a_limit_that_cannot_be_kept_is_refused_with_the_reason(place: Path) -> None:  # noqa: F811
    with hosted(Arm(), place) as robot:
        with pytest.raises(RejectedError, match="no velocity limit of gripper_effort"):
            slow(place, 0.5)
        with pytest.raises(RejectedError, match="above 0 up to 1"):
            slow(place, -1.0)
        assert robot.stop("1", "anna") == StopState({"1": "anna"}, last="1"), "and whoever listens goes on"


def test_a_host_of_a_robot_that_cannot_be_slowed_does_not_start_it_fast(place: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="cannot be slowed"):
        run_driver_server(Arm(), place, lambda: True, safety=FAKE_LIMITS, beside=Beside(speed_limit=0.5))


def test_what_is_no_order_is_passed_over(place: Path) -> None:  # noqa: F811
    with hosted(Arm(), place) as robot:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            for wrong in (b"", b"stop", b"\x93\xa4halt\xa0\xa0"):
                line.sendto(wrong, str(stop_address(place)))
        assert robot.stop_state().free
        assert robot.stop("1", "anna").stops


def test_without_a_host_it_says_so(place: Path) -> None:  # noqa: F811
    with pytest.raises(RobotError, match="no host of a robot answers"):
        send_order(place, StopOrder("stop", "1", "anna"), 0.1)


def test_a_full_disk_keeps_no_order_from_the_host(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    robot = LimitedRobot(Arm(), FAKE_LIMITS)
    listener = StopListener(place, robot, lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self/fdinfo")  # where nobody can make a file
    try:
        assert send_order(place, StopOrder("stop", "a", "anna"), 5.0).stops == {"a": "anna"}
    finally:
        listener.close()


def test_nobody_waits_for_a_host_that_has_not_come_to_its_stops(place: Path) -> None:  # noqa: F811
    server = DriverServer(Arm(), place, FAKE_LIMITS)
    pressed = threading.Thread(target=lambda: [server.robot.on_stop() for _ in range(5000)], daemon=True)
    try:
        pressed.start()
        pressed.join(30)
        assert not pressed.is_alive(), "its main thread may be in a call of the driver"
    finally:
        server.close()


def test_a_start_that_waited_in_the_socket_of_a_host_that_hung_starts_nothing(place: Path) -> None:  # noqa: F811
    hung, free = threading.Event(), threading.Event()
    robot = LimitedRobot(Arm(), FAKE_LIMITS)
    release = robot.release

    def hang(stop: str) -> StopState:
        hung.set()
        assert free.wait(30)
        return release(stop)

    robot.release = hang  # type: ignore[method-assign]
    listener = StopListener(place, robot, lambda: None)
    try:
        robot.stop("a", "anna")
        release("a")
        with pytest.raises(RobotError, match="no host of a robot answers"):
            send_order(place, StopOrder("release", "nothing"), 0.02)
        assert hung.wait(30)
        for kind in ("start", "slow", "stop"):
            with pytest.raises(RobotError, match="no host of a robot answers"):
                send_order(place, StopOrder(kind, "b" if kind == "stop" else "a", "anna", 0.5), 0.02)
        assert robot.stop_state().ready, "nobody has heard it"
        free.set()
        state = send_order(place, StopOrder("ask"), 5.0)
        assert state.stops == {"b": "anna"} and state.last == "b" and not state.speed_limits
        release("b")
        assert send_order(place, StopOrder("start", "a", "anna"), 5.0).ready, "it was given after another stop"
        assert send_order(place, StopOrder("start", "b", "anna"), 5.0).free
    finally:
        free.set()
        listener.close()


def test_a_disk_that_does_not_answer_keeps_no_order_waiting(place: Path) -> None:  # noqa: F811
    saving, free, saved = threading.Event(), threading.Event(), []
    robot = LimitedRobot(Arm(), FAKE_LIMITS)

    def save() -> None:
        state = robot.stop_state()
        saving.set()
        assert free.wait(30)
        saved.append(state)

    listener = StopListener(place, robot, save)
    try:
        send_order(place, StopOrder("stop", "a", "anna"), 5.0)
        assert saving.wait(30)
        assert send_order(place, StopOrder("release", "a", "anna"), 5.0).ready
        assert send_order(place, StopOrder("stop", "b", "anna"), 5.0).stops == {"b": "anna"}
    finally:
        free.set()
        listener.close()
    assert saved[-1].stops == {"b": "anna"}, "what came last is kept before the host ends"


def test_a_start_without_a_time_starts_nothing(place: Path) -> None:  # noqa: F811
    robot = LimitedRobot(Arm(), FAKE_LIMITS)
    listener = StopListener(place, robot, lambda: None)
    try:
        robot.stop("a", "anna")
        robot.release("a")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            for _ in range(2):
                line.sendto(msgspec.msgpack.encode(StopOrder("start", "a")), socket_address(stop_address(place)))
        assert send_order(place, StopOrder("ask"), 5.0).ready
    finally:
        listener.close()


def test_whatever_else_comes_the_next_stop_is_heard(tmp_path: Path) -> None:
    robot = LimitedRobot(Arm(), FAKE_LIMITS)
    path = tmp_path / "host"
    listener = StopListener(path, robot, lambda: None)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            for data in (b"\x92\xa4stop\xa2\xff\xfe", b"\x91" * 5000, b"", b"\x92\xa4jump\xa1x"):
                line.sendto(data, str(stop_address(path)))
        assert send_order(path, StopOrder("stop", "1", "anna"), 60.0).stops == {"1": "anna"}
        assert listener.refused == {"malformed": 4}
        # as many as are remembered, of names as long as a datagram
        for number in range(40):
            shown = send_order(path, StopOrder("stop", f"{number}-" + "x" * 20_000, "y" * 20_000), 60.0)
        assert len(shown.stops) == 33, "those beyond 32 are one"
    finally:
        listener.close()
