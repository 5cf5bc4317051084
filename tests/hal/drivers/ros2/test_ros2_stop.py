"""A stop service that refuses or is stuck: its answer decides, and what can be stopped by another way is."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ros import needs_ros, wait_until
from tests.ros import ros as ros
from wire.errors import RobotError
from wire.types import CommandType, Dimension, RobotSpec

pytestmark = [needs_ros, pytest.mark.slow]

from hal.driver_host.proxy import RobotProxy  # noqa: E402
from hal.driver_host.server import run_driver_server  # noqa: E402
from hal.driver_host.stop_line import StopOrder, send_order  # noqa: E402
from hal.drivers.ros2 import robot as robot_module  # noqa: E402
from hal.drivers.ros2.config import Ros2Config  # noqa: E402
from hal.drivers.ros2.messages import JOINT_STATE, TRIGGER  # noqa: E402
from hal.drivers.ros2.output_config import Output, OutputKind  # noqa: E402
from hal.drivers.ros2.robot import Ros2Robot  # noqa: E402
from hal.drivers.ros2.wrapper import RosNode, interface  # noqa: E402
from hal.safety.limited_robot import LimitedRobot  # noqa: E402

LONG_S = 60.0
SPEC = RobotSpec(
    "base",
    (Dimension("left", "rad/s", -20, 20),),
    (Dimension("ahead", "m/s", -0.5, 0.5, CommandType.velocity),),
    (),
    20.0,
)
TWIST = Output(
    kind=OutputKind.twist, topic="cmd_vel", dimensions=("ahead",), axes=("linear.x",), stall_s=0, timeout_s=0.5
)
CONFIG = Ros2Config(
    SPEC, outputs=(TWIST,), fields={"left": "velocity"}, stop=True, max_age_s=LONG_S, connect_timeout_s=LONG_S
)


class Base:
    """A base that was left moving; `stop` answers as `answers` say, and refuses from then on."""

    def __init__(self) -> None:
        # Each answers while the others do.
        self.node, self.brake, self.mover = self.nodes = RosNode("base"), RosNode("base_brake"), RosNode("base_mover")
        self.velocities: list[float] = []
        self.answers: list[Callable[[Any], Any]] = []
        self.asked = 0
        self.resets, self.halted, self.free = threading.Event(), threading.Event(), threading.Event()
        for node in self.nodes:
            node.open()
        self.node.subscribe(OutputKind.twist.type, "cmd_vel", lambda twist: self.velocities.append(twist.linear.x))
        states = self.node.publisher(JOINT_STATE, "joint_states")
        self.brake.serve(TRIGGER, "stop", self._stop)
        self.mover.serve(TRIGGER, "reset", self._reset)
        self.node.every(0.03, lambda: states.send(self._state()))

    def _state(self) -> Any:
        message = interface(JOINT_STATE)()
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(self.node.now_ns(), 10**9)
        message.name, message.velocity, message.position = ["left"], [8.0], [0.0]
        return message

    def _stop(self, _: Any, answer: Any) -> Any:
        self.asked += 1
        answer.success, answer.message = False, "the motor driver is in fault"
        return self.answers.pop(0)(answer) if self.answers else answer

    def _reset(self, _: Any, answer: Any) -> Any:
        self.resets.set()
        answer.success = self.halted.wait(LONG_S)
        return answer

    def refuse(self, answer: Any) -> Any:
        return answer

    def take(self, answer: Any) -> Any:
        self.halted.set()
        answer.success = True
        return answer

    def wait(self, answer: Any) -> Any:
        self.free.wait(LONG_S)
        return self.take(answer)

    def close(self) -> None:
        self.free.set()
        self.halted.set()
        for node in self.nodes:
            node.close()


@pytest.fixture
def base(ros: Mapping[str, str]) -> Iterator[Base]:
    made = Base()
    yield made
    made.close()


def test_where_its_stop_refuses_it_is_told_to_stand_when_it_is_connected(base: Base) -> None:
    robot = LimitedRobot(Ros2Robot(CONFIG))
    robot.connect()
    assert base.asked == 1
    wait_until(lambda: base.velocities == [0.0])
    robot.close()


def test_where_its_stop_refuses_it_is_told_to_stand_when_it_is_closed(base: Base) -> None:
    robot = Ros2Robot(CONFIG)
    robot.connect()
    robot.reset("drive", 0)
    robot.write(np.array([0.4], np.float32))
    wait_until(lambda: base.velocities and base.velocities[-1] > 0.3)
    robot.close()
    wait_until(lambda: base.velocities[-1] == 0.0)
    assert base.asked == 1


def test_it_is_stopped_when_the_service_says_so(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = Ros2Robot(CONFIG)
    robot.connect()
    base.answers = [base.refuse, base.wait]
    with pytest.raises(RobotError, match="the motor driver is in fault"):
        robot.stop_motion()
    monkeypatch.setattr(robot_module, "_STOP_S", 0.2)
    for _ in range(2):
        with pytest.raises(RobotError, match="has not answered"):
            robot.stop_motion()
    base.free.set()
    monkeypatch.setattr(robot_module, "_STOP_S", LONG_S)
    robot.stop_motion()
    assert base.asked == 2, "no stop is left under way that would come later"
    base.answers = [base.take]
    robot.stop_motion()
    assert base.asked == 3
    robot.close()


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="host-"))
    yield directory / "socket"
    shutil.rmtree(directory)


def test_one_press_stops_a_reset_though_its_service_refuses_at_first(base: Base, place: Path) -> None:
    over = threading.Event()
    config = Ros2Config(
        SPEC,
        outputs=(TWIST,),
        fields={"left": "velocity"},
        reset=True,
        stop=True,
        max_age_s=LONG_S,
        connect_timeout_s=LONG_S,
        reset_timeout_s=LONG_S,
    )
    host = threading.Thread(target=run_driver_server, args=(Ros2Robot(config), place, over.is_set))
    host.start()
    robot = RobotProxy(SPEC, place, attach_s=LONG_S)
    robot.connect()
    asked, base.answers = base.asked, [base.refuse, base.refuse, base.take]

    def reset() -> None:
        with contextlib.suppress(RobotError):
            robot.reset("drive", 0)

    control = threading.Thread(target=reset)
    control.start()
    assert base.resets.wait(LONG_S)
    assert send_order(place, StopOrder("stop", "a", "anna"), LONG_S).stops
    assert base.halted.wait(LONG_S), "nobody pressed again"
    assert base.asked >= asked + 3
    control.join(LONG_S)
    with contextlib.suppress(RobotError):
        robot.close()
    over.set()
    host.join(LONG_S)
    assert not host.is_alive()
