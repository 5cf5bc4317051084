"""The parts of the ROS 2 edge node that need no ROS 2: parameters, diagnosis, the operator, what a robot must offer."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hal.driver_host.stop_line import StopListener
from hal.drivers.fake import FakeRobot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.stop_latch import StopLatch
from robot_edge.control.mode import HoldReason
from robot_edge.ros2 import operator as operator_module
from robot_edge.ros2.diagnostics import ERROR, OK, STALE, WARN, diagnose
from robot_edge.ros2.operator import Ros2Operator
from robot_edge.ros2.parameters import DEFAULTS, DESCRIPTIONS, EdgeParameters, read_parameters, usage
from robot_edge.ros2.topics import Endpoint, describe_missing
from tests.hal.driver_host.test_proxy import place  # noqa: F401
from wire.errors import ConfigError
from wire.messages.gateway import EdgeEvent, EdgeStatus, OperatorCommand
from wire.stop_state import StopState
from wire.transport.memory_channel import memory_pair

ROOT = Path(__file__).resolve().parents[3]

# --- parameters -------------------------------------------------------------------------------------------------------


def test_every_parameter_is_described_in_order() -> None:
    assert list(DESCRIPTIONS) == list(DEFAULTS)
    text = usage("edge_node")
    for name in DEFAULTS:
        assert f"\n  {name} " in text


def test_defaults_are_a_checked_set() -> None:
    assert read_parameters({}) == EdgeParameters(name="robot-0")


@pytest.mark.parametrize(
    ("given", "namespace", "name"),
    [
        ("", "/", "robot-0"),
        ("", "/left", "left"),
        ("", "/cell/arm_3", "arm_3"),
        ("lab-7", "/left", "lab-7"),
        (7, "/", "7"),
    ],
)
def test_a_robot_is_named_or_called_like_its_namespace(given: Any, namespace: str, name: str) -> None:
    assert read_parameters({"name": given}, namespace).name == name


def test_digits_are_text_where_text_is_wanted_and_whole_seconds_are_seconds() -> None:
    found = read_parameters({"delay": 4, "wait_for_robot_s": 3})
    assert found.delay == "4"
    assert found.wait_for_robot_s == 3.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"operator": "yes"}, "parameter 'operator' is 'yes', of type str; it must be a bool"),
        ({"speed_up": 1.5}, "parameter 'speed_up' is 1.5, of type float; it must be a int"),
        ({"speed_up": True}, "parameter 'speed_up' is True"),
        ({"recipe": True}, "parameter 'recipe' is True"),
        ({"speed_up": -1}, "parameter 'speed_up' is -1; give 0 or more"),
        ({"wait_for_robot_s": float("nan")}, "parameter 'wait_for_robot_s' is nan"),
        ({"gateway": "gateway-host"}, "parameter 'gateway' is 'gateway-host'; give an address as tcp://HOST:PORT"),
        ({"name": "../robot"}, "'../robot' cannot be a name"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_parameters(given)
    assert said in str(refused.value)


def test_no_part_but_the_node_itself_imports_rclpy() -> None:
    modules = "parameters", "diagnostics", "operator", "stops", "topics"
    code = (
        f"import sys; {'; '.join(f'import robot_edge.ros2.{name}' for name in modules)}; print('rclpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_rclpy_is_imported_in_two_files() -> None:
    rooms = ("wire", "hal", "policies", "robot_edge", "cloud_learner", "fleet", "benchmarks")
    found = set()
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(module.split(".")[0] == "rclpy" for module in modules):
                found.add(str(path.relative_to(ROOT)))
    assert found == {"hal/drivers/ros2/wrapper.py", "robot_edge/ros2/node.py"}


# --- diagnosis --------------------------------------------------------------------------------------------------------


STOPPED = StopState({"ros-a": "ros", "web-1-b": "web-1"})


def status(mode: str = "policy", reason: str = "", **more: Any) -> EdgeStatus:
    plain = {
        "robot": "left",
        "time_ns": 1,
        "task": "reach",
        "episode": "left-1",
        "tick": 3,
        "state": np.zeros(2, np.float32),
        "version": 5,
        "ticks": 100,
        "missed_ticks": 2,
        "late_p99_s": 0.0015,
        "starved_ticks": 0,
        "episodes": 4,
        "interventions": 1,
        "steps_recorded": 90,
        "spooled": 6,
    }
    return EdgeStatus(mode=mode, reason=reason, **{**plain, **more})


def test_a_robot_at_work_is_fine_and_says_what_it_does() -> None:
    found = diagnose("active", "", status(), 0.1)
    assert found[:2] == (OK, "policy: reach")
    expected = {"mode": "policy", "version": "5", "missed_ticks": "2", "late_p99_ms": "1.500", "spooled": "6"}
    assert expected.items() <= found.values.items()
    assert all(isinstance(value, str) for value in found.values.values())


@pytest.mark.parametrize("reason", [HoldReason.no_job, HoldReason.no_version, HoldReason.no_action])
def test_a_robot_that_has_nothing_to_do_is_fine(reason: HoldReason) -> None:
    assert diagnose("active", "", status("hold", reason), 0.1)[:2] == (OK, f"the robot holds: {reason}")


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        (diagnose("active", "", status("hold", HoldReason.stale_camera), 0.1), WARN, "a camera stands still"),
        (
            diagnose("active", "", status("estop", stop=STOPPED), 0.1),
            WARN,
            "stopped by ros (ros-a), web-1 (web-1-b); ~/r",
        ),
        (diagnose("active", "", status("hold", stop=StopState(ready=True)), 0.1), WARN, "~/start lets it go on"),
        (diagnose("active", "", status("hold", "x", fault="the arm does not answer"), 0.1), ERROR, "does not answer"),
        (diagnose("active", "", status(), 0.1, "left.uplink ended with signal SIGKILL"), WARN, "left.uplink ended"),
        (diagnose("active", "", None, 1.0), WARN, "starting"),
        (diagnose("active", "", None, 61.0, "left.control ended"), STALE, "61 s since its start: left.control ended"),
        (diagnose("active", "", status(), 9.0), STALE, "nothing for 9 s"),
        (diagnose("active", "", status(), 9.0, "left.uplink ended"), STALE, "left.uplink ended"),
        (diagnose("unconfigured", "cannot configure: no key", None, 0.0), ERROR, "no key"),
        (diagnose("inactive", "", None, 0.0), OK, "inactive"),
    ],
)
def test_what_is_wrong_comes_first(found: Any, level: int, says: str) -> None:
    assert found.level == level
    assert says in found.message


# --- the operator -----------------------------------------------------------------------------------------------------


class Robot:
    """The uplink's end of the operator line, with a control that does what it is told."""

    def __init__(self) -> None:
        ours, self.theirs = memory_pair()
        self.line = ours
        self.latch = StopLatch()
        self.deaf = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.ended.wait(0.01):
            while isinstance(wish := self.line.recv(), OperatorCommand):
                if not self.deaf:
                    match wish.kind:
                        case "estop":
                            self.latch.stop(wish.stop, wish.operator)
                        case "release_estop":
                            self.latch.release(wish.stop)
                        case "start":
                            self.latch.start(wish.stop)
                        case "speed_limit":
                            self.latch.limit_speed(wish.operator, *wish.action)
            mode = "estop" if self.latch.state.stops else "hold" if self.latch.state.ready else "policy"
            self.line.send(status(mode, stop=self.latch.state))

    def __enter__(self) -> Robot:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()


def test_a_wish_is_carried_out_and_seen() -> None:
    with Robot() as robot:
        operator = Ros2Operator("left", robot.theirs)
        assert operator.stop(5.0) == ""
        assert operator.status is not None
        assert operator.status.mode == "estop"
        assert list(operator.stop_state.stops.values()) == ["ros"]
        assert operator.release(5.0) == ""
        assert operator.stop_state.ready and not operator.stop_state.stops
        assert operator.start(5.0) == ""
        assert operator.stop_state.free


def test_a_robot_is_slowed_and_that_is_seen() -> None:
    with Robot() as robot:
        robot.latch.limit_speed("cli", 0.5)
        operator = Ros2Operator("left", robot.theirs)
        assert operator.limit_speed(0.25, 5.0) == ""
        assert operator.stop_state.speed_limits == {"cli": 0.5, "ros": 0.25}
        found = diagnose("active", "", operator.status, 0.1)
        assert (found.level, found.message[:32]) == (WARN, "policy: not stopped; slowed to 0")
        assert operator.limit_speed(1.0, 5.0) == ""
        assert operator.stop_state.speed_limits == {"cli": 0.5}


def test_a_release_takes_back_what_was_stopped_through_ros_and_says_what_is_left() -> None:
    with Robot() as robot:
        operator = Ros2Operator("left", robot.theirs)
        robot.latch.stop("web-1-b", "web-1")
        robot.latch.stop("ros-of-a-node-before", "ros")
        assert operator.stop(5.0) == ""
        assert operator.stop(5.0) == ""
        assert len(operator.stop_state.stops) == 4
        assert operator.release(5.0) == ""
        assert str(operator.stop_state) == "stopped by web-1 (web-1-b)"
        assert "none of that was made through ROS" in operator.release(5.0)
        assert operator.start(5.0) == "robot 'left' is stopped by web-1 (web-1-b); release that first."
        robot.latch.release("web-1-b")
        operator.command("hand_back", lambda status: status.stop.ready, 5.0)
        assert operator.release(5.0) == "", "there is nothing to release"
        assert operator.start(5.0) == ""


def test_a_wish_that_control_does_not_hear_is_not_called_done() -> None:
    with Robot() as robot:
        robot.deaf = True
        operator = Ros2Operator("left", robot.theirs)
        problem = operator.stop(0.3)
    assert problem == "robot 'left': 'estop' was sent, but control did not confirm it within 0.3 s"


def test_what_was_so_before_does_not_count_as_the_wish_come_true() -> None:
    ours, theirs = memory_pair()
    ours.send(status("estop"))
    operator = Ros2Operator("left", theirs)
    operator.poll()
    assert "did not confirm" in operator.command("estop", lambda status: status.mode == "estop", 0.2)


class Nobody:
    """An uplink that does not listen."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def send(self, message: object) -> bool:
        self.asked.append(message)
        return False

    def recv(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to go by another way in these tests."""
    monkeypatch.setattr(operator_module, "ANSWER_S", 30.0)


@pytest.mark.usefixtures("slow_host")
def test_without_an_uplink_a_robot_is_stopped_by_its_host(place: Path) -> None:  # noqa: F811
    robot, uplink = LimitedRobot(FakeRobot()), Nobody()
    with contextlib.closing(StopListener(place, robot, lambda: None)):
        operator = Ros2Operator("left", uplink, host=place)
        assert operator.stop(0.1) == ""
        assert uplink.asked == [], "a copy might come after the release"
        assert list(robot.stop_state().stops.values()) == ["ros"]
        assert operator.stop_state == robot.stop_state()
        assert "does not listen" in operator.release(0.1)
        assert robot.stop_state().stops


@pytest.mark.usefixtures("slow_host")
def test_a_stop_at_the_host_is_taken_back_as_any_other(place: Path) -> None:  # noqa: F811
    with Robot() as robot:
        hosted = LimitedRobot(FakeRobot(), latch=robot.latch)
        with contextlib.closing(StopListener(place, hosted, lambda: None)):
            operator = Ros2Operator("left", robot.theirs, host=place)
            assert operator.stop(5.0) == ""
            assert list(operator.stop_state.stops.values()) == ["ros"]
            assert operator.release(5.0) == ""
            assert operator.stop_state.ready and not operator.stop_state.stops


def test_where_no_host_answers_the_uplink_is_told_to_stop(place: Path) -> None:  # noqa: F811
    with Robot() as robot:
        operator = Ros2Operator("left", robot.theirs, host=place)
        assert operator.stop(5.0) == ""
        assert list(robot.latch.state.stops.values()) == ["ros"]
        assert operator.release(5.0) == ""
        assert operator.stop_state.ready


def test_nobody_at_the_other_end_is_said() -> None:
    problem = Ros2Operator("left", Nobody()).command("estop", lambda status: True, 0.1)
    assert "does not listen" in problem


def test_a_closed_desk_hears_nothing_and_may_be_closed_again() -> None:
    ours, theirs = memory_pair()
    operator = Ros2Operator("left", theirs)
    operator.close()
    operator.close()
    ours.send(status())
    operator.poll()
    assert operator.status is None


def test_events_are_told_once_and_the_age_is_that_of_the_newest_status() -> None:
    now_s = 10.0
    ours, theirs = memory_pair()
    operator = Ros2Operator("left", theirs, lambda: now_s)
    now_s = 12.0
    assert operator.age_s == 2.0
    ours.send(EdgeEvent("left", 1, "hold", "a camera stands still"))
    ours.send(msgspec.structs.replace(status(), tick=9))
    operator.poll()
    now_s = 13.0
    assert operator.age_s == 1.0
    assert operator.status is not None
    assert operator.status.tick == 9
    assert [event.detail for event in operator.events()] == ["a camera stands still"]
    assert operator.events() == []


def test_threads_may_wish_at_once() -> None:
    with Robot() as robot:
        operator = Ros2Operator("left", robot.theirs)
        problems: list[str] = []

        def wish(kind: str) -> None:
            problems.append(operator.command(kind, lambda status: True, 5.0))

        threads = [threading.Thread(target=wish, args=(kind,)) for kind in ("estop", "take_over", "hand_back")]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    assert problems == ["", "", ""]


# --- what a robot must offer ------------------------------------------------------------------------------------------


@dataclass
class Info:
    topic_type: str


@dataclass
class Graph:
    """What a node sees: names to types."""

    publishers: dict[str, str] = field(default_factory=dict)
    subscriptions: dict[str, str] = field(default_factory=dict)
    services: dict[str, str] = field(default_factory=dict)

    def get_publishers_info_by_topic(self, topic_name: str, no_mangle: bool = False) -> list[Info]:
        return [Info(kind) for name, kind in self.publishers.items() if name == topic_name]

    def get_subscriptions_info_by_topic(self, topic_name: str, no_mangle: bool = False) -> list[Info]:
        return [Info(kind) for name, kind in self.subscriptions.items() if name == topic_name]

    def get_service_names_and_types(self) -> list[tuple[str, list[str]]]:
        return [(name, [kind]) for name, kind in self.services.items()]

    def get_topic_names_and_types(self, no_demangle: bool = False) -> list[tuple[str, list[str]]]:
        return [(name, [kind]) for name, kind in {**self.publishers, **self.subscriptions}.items()]


STATE = Endpoint("publisher", "/left/joint_states", "sensor_msgs/msg/JointState")
COMMAND = Endpoint("subscription", "/left/joint_trajectory", "trajectory_msgs/msg/JointTrajectory")
RESET = Endpoint("service", "/left/reset", "std_srvs/srv/Trigger")
WHOLE = Graph({STATE.name: STATE.type}, {COMMAND.name: COMMAND.type}, {RESET.name: RESET.type})


def test_a_robot_with_everything_lacks_nothing() -> None:
    assert describe_missing((STATE, COMMAND, RESET), WHOLE) == ""
    assert describe_missing((), Graph()) == ""


def test_everything_that_lacks_is_named_with_its_type() -> None:
    said = describe_missing((STATE, COMMAND, RESET), Graph())
    for endpoint in (STATE, COMMAND, RESET):
        assert f"{endpoint.name} ({endpoint.type})" in said
    assert "ROS_DOMAIN_ID" in said


def test_a_robot_in_another_namespace_is_pointed_to() -> None:
    said = describe_missing((STATE,), Graph({"/right/joint_states": STATE.type, "/chatter": "std_msgs/msg/String"}))
    assert "/right/joint_states" in said
    assert "check the namespace" in said
    assert "/chatter" not in said


def test_another_type_is_not_enough() -> None:
    said = describe_missing((STATE,), Graph({STATE.name: "std_msgs/msg/String"}))
    assert "only of type std_msgs/msg/String" in said


def test_a_listener_is_no_publisher() -> None:
    assert "nobody publishes" in describe_missing((STATE,), Graph({}, {STATE.name: STATE.type}))
