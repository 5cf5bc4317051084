"""`sim_robot_node` as a ROS user sees it, and the wrapper it stands on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, FakeRobot, fake_spec
from hal.registry import make_camera, read_config
from tests.ros import needs_ros, sim_node, wait_until
from tests.ros import ros as ros
from wire.errors import ConfigError, RobotError

pytestmark = needs_ros

from hal.drivers.ros2 import wrapper as ros2  # noqa: E402
from hal.drivers.ros2.camera import Ros2Camera, Ros2CameraConfig  # noqa: E402
from hal.drivers.ros2.messages import FLAGS, JOINT_STATE, TRIGGER, command, stamp_ns  # noqa: E402
from hal.drivers.ros2.sim_node import SimRobotNode  # noqa: E402
from hal.drivers.ros2.wrapper import RosNode, interface  # noqa: E402

SPEC = fake_spec(FakeConfig())


@contextlib.contextmanager
def opened(name: str, namespace: str = "") -> Iterator[RosNode]:
    node = RosNode(name, namespace)
    node.open()
    try:
        yield node
    finally:
        node.close()


class Running:
    """A sim node in this process, in a thread that owns its robot, and a person's node beside it."""

    def __init__(self, *arguments: str, robot: FakeRobot | None = None) -> None:
        self.robot = robot or FakeRobot()
        self.sim = SimRobotNode(self.robot, ["--ros-args", *arguments])
        self.person = RosNode("person")
        self.states: list[Any] = []
        self.executed: list[Any] = []
        self.reports: list[Any] = []
        self._stop, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Running:
        self.person.open()
        self.person.subscribe(JOINT_STATE, "joint_states", self.states.append)
        self.person.subscribe(JOINT_STATE, "executed", self.executed.append)
        self.person.subscribe("diagnostic_msgs/msg/DiagnosticArray", "diagnostics", self.reports.append)
        self.commands = self.person.publisher("trajectory_msgs/msg/JointTrajectory", "joint_trajectory")
        self._thread.start()
        assert self._ready.wait(60)
        wait_until(lambda: self.commands.subscriptions and self.states)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self.person.close()

    def _run(self) -> None:
        self.sim.open()
        self._ready.set()
        self.sim.run(self._stop.is_set)
        self.sim.close()

    def send(self, stamp: int, *action: float) -> None:
        self.commands.send(command(SPEC, {}, np.array(action, np.float32), stamp))

    def call(self, name: str) -> Any:
        return self.person.client(TRIGGER, name).call(10.0)


@pytest.fixture
def stepped(ros: Mapping[str, str]) -> Iterator[Running]:
    with Running("-p", "pacing:=stepped", "-p", "task:=go-left", "-p", "seed:=4") as running:
        yield running


def test_a_stepped_robot_moves_by_commands_only(stepped: Running) -> None:
    before = stamp_ns(stepped.states[-1])
    wait_until(lambda: len(stepped.states) > 3)
    assert {stamp_ns(state) for state in stepped.states} == {before}, "it says that it is alive, and nothing new"
    same = FakeRobot()
    same.connect()
    same.reset("go-left", 4)
    assert np.array_equal(np.array(stepped.states[-1].position, np.float32), same.read().state)
    sent = stepped.person.now_ns()
    stepped.send(sent, 1.0, 0.0, 0.0, 0.0)
    wait_until(lambda: stepped.executed)
    said = dict(zip(stepped.executed[0].name, stepped.executed[0].position, strict=True))
    assert stamp_ns(stepped.executed[0]) == sent
    feedback = same.write(np.array([1.0, 0.0, 0.0, 0.0], np.float32))
    assert (said["move_x"], said["reward"]) == (1.0, feedback.reward)
    assert [said[flag] for flag in FLAGS] == [0.0, 0.0, 0.0]
    wait_until(lambda: stamp_ns(stepped.states[-1]) == sent + int(said["joint_states"]))
    assert np.array_equal(np.array(stepped.states[-1].position, np.float32), same.read().state)


def test_a_command_that_does_not_fit_is_refused_and_reported(stepped: Running) -> None:
    wrong = command(SPEC, {"move_x": "wheel"}, np.zeros(4, np.float32), 5)
    stepped.commands.send(wrong)
    wait_until(lambda: stepped.sim.counts.refused == 1)
    assert "this robot has move_x" in stepped.sim.counts.fault
    nan = command(SPEC, {}, np.array([np.nan, 0, 0, 0], np.float32), 6)
    stepped.commands.send(nan)
    wait_until(lambda: stepped.sim.counts.refused == 2)
    assert stepped.sim.counts.steps == 0
    stepped.reports.clear()
    wait_until(lambda: stepped.reports)
    status = stepped.reports[-1].status[0]
    assert "not finite in move_x" in status.message
    assert {pair.key: pair.value for pair in status.values}["refused"] == "2"


def test_tasks_and_seeds_are_parameters_and_reset_is_a_service(stepped: Running) -> None:
    refused = stepped.person.set_parameters("sim_robot", {"task": "go-upp", "seed": -1}, 10.0)
    assert "Did you mean 'go-up'" in refused["task"]
    assert refused["seed"] == "seed -1 is negative."
    assert "start the node" in stepped.person.set_parameters("sim_robot", {"raw": False}, 10.0)["raw"]
    assert stepped.person.set_parameters("sim_robot", {"task": "go-up", "seed": 9}, 10.0) == {}
    assert stepped.call("reset").success
    assert stepped.robot.task == "go-up"
    same = FakeRobot()
    same.connect()
    same.reset("go-up", 9)
    wait_until(lambda: np.array_equal(np.array(stepped.states[-1].position, np.float32), same.read().state))
    assert stepped.call("stop").success
    with pytest.raises(RobotError, match=r"no service '/nowhere' within 0.2 s"):
        stepped.person.client(TRIGGER, "nowhere").call(0.2)


def test_a_real_time_robot_holds_when_commands_stop(ros: Mapping[str, str]) -> None:
    with Running() as running:
        # it moves on at its own rate although nobody commands it
        wait_until(lambda: running.sim.counts.holds > 3 and len(running.states) > 3)
        running.send(2000, 1.0, 0.0, 0.0, 0.5)
        wait_until(lambda: running.executed)
        # a delta is not repeated, an absolute dimension stays
        holds = running.sim.counts.holds
        wait_until(lambda: running.sim.counts.holds > holds + 2)
        assert running.sim._executed.tolist() == [0.0, 0.0, 0.0, 0.5]
        stamps = [stamp_ns(state) for state in list(running.states)]
        assert stamps == sorted(set(stamps))
        assert running.call("stop").success


def test_a_command_that_was_overtaken_is_not_executed(ros: Mapping[str, str]) -> None:
    writing, sent = threading.Event(), threading.Event()

    class Slow(FakeRobot):
        def write(self, action: np.ndarray) -> Any:
            writing.set()
            assert sent.wait(60.0)
            return super().write(action)

    with Running("-p", "pacing:=stepped", robot=Slow()) as running:
        # the window in which a commander's stamps must grow is measured in periods
        running.sim._hold_due_s = lambda: time.monotonic() + 60.0  # type: ignore[method-assign]
        running.send(3000, 0.1, 0.0, 0.0, 0.0)
        assert writing.wait(60.0)
        # The robot is busy until all have arrived.
        counts = running.sim.counts
        for stamp, arrived in (
            (3001, lambda: running.sim._last_command == 3001),
            (2999, lambda: counts.late == 1),
            (3002, lambda: counts.replaced == 1),
        ):
            running.send(stamp, 0.1, 0.0, 0.0, 0.0)
            wait_until(arrived)
        sent.set()
        wait_until(lambda: any(stamp_ns(one) == 3002 for one in running.executed))
        assert (counts.late, counts.replaced) == (1, 1)
        assert [stamp_ns(one) for one in running.executed] == [3000, 3002]


@pytest.mark.slow
def test_it_takes_the_usual_arguments_and_shows_pictures_in_both_ways(ros: Mapping[str, str]) -> None:
    arguments = ["-r", "__ns:=/left", "-r", "camera/front/image_raw:=eye", "-p", "compressed:=true"]
    with sim_node("fake", {"image_px": 32}, *arguments):
        eye = make_camera(
            "ros2",
            read_config(
                "ros2",
                {"name": "front", "height": 32, "width": 32, "topic": "/left/eye", "connect_timeout_s": 30.0},
                "vla_fleet.cameras",
            ),
        )
        coded = Ros2Camera(
            Ros2CameraConfig(
                name="front",
                height=16,
                width=16,
                compressed=True,
                resize=True,
                namespace="/left",
                connect_timeout_s=30.0,
            )
        )
        with pytest.raises(RobotError, match="call connect"):
            eye.read()
        eye.connect()
        eye.connect()
        coded.connect()
        raw, small = eye.read(), coded.read()
        assert raw.image.shape == (32, 32, 3)
        assert raw.preview is None
        assert small.image.shape == (16, 16, 3)
        assert small.preview is not None
        assert abs(small.image.astype(int).mean() - raw.image.astype(int).mean()) < 12
        assert 0 <= time.monotonic_ns() - raw.time_ns < 10_000_000_000
        wait_until(lambda: eye.read().time_ns > raw.time_ns)
        wrong = Ros2Camera(Ros2CameraConfig(name="front", height=8, width=8, topic="/left/eye", connect_timeout_s=5.0))
        with pytest.raises(RobotError, match="pictures of 32x32; camera 'front' of the spec has 8x8"):
            wrong.connect()
        eye.close()
        eye.close()
        coded.close()
    silent = Ros2Camera(Ros2CameraConfig(name="front", topic="/nowhere", connect_timeout_s=0.2))
    with pytest.raises(RobotError, match=r"nothing came on '/nowhere' within 0.2 s. It is published by nobody"):
        silent.connect()


@pytest.mark.slow
def test_it_says_how_to_drive_it_and_what_is_wrong_with_its_options(ros: Mapping[str, str]) -> None:
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hal.drivers.ros2.sim_node", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = said("--robot", "fake", "--robot-config", '{"tasks": ["go-up"]}', "--describe")
    plain = json.loads(done.stdout)
    assert plain["tasks"] == {"go-up": "go up"}
    assert read_config("ros2", plain).spec == SPEC
    wrong = said("--robot", "fake", "--ros-args", "-p", "pacing:=sometimes")
    assert wrong.returncode == 1
    assert "pacing 'sometimes' is none of real_time, stepped" in wrong.stderr
    assert "Traceback" not in wrong.stderr


# --- the wrapper ----------------------------------------------------------------------------------------------------


def test_the_profile_is_used_unless_the_user_has_one(ros: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ros2._NEW_VARIABLE, "")
    monkeypatch.delenv("FASTDDS_BUILTIN_TRANSPORTS", raising=False)
    assert ros2.use_profile()
    assert os.environ[ros2._NEW_VARIABLE] == str(ros2.PROFILE)
    assert ros2.use_profile(), "ours is not the user's"
    for name in ros2._USERS_OWN:
        monkeypatch.setenv(ros2._NEW_VARIABLE, str(ros2.PROFILE))
        monkeypatch.setenv(name, "mine")
        assert not ros2.use_profile()
        assert os.environ[name] == "mine"
        monkeypatch.delenv(name)


def test_the_profile_leaves_room_for_pictures() -> None:
    import xml.etree.ElementTree as ElementTree

    tree = ElementTree.parse(ros2.PROFILE)
    spaces = {"dds": "http://www.eprosima.com"}
    picture = 640 * 480 * 3
    assert int(tree.findtext(".//dds:maxMessageSize", "", spaces)) > 4 * picture
    assert int(tree.findtext(".//dds:segment_size", "", spaces)) > 16 * picture
    assert [one.text for one in tree.findall(".//dds:transport_descriptor/dds:type", spaces)] == ["SHM", "UDPv4"]


def test_a_callback_that_fails_does_not_end_the_node(ros: Mapping[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with opened("one", "/here") as node:
        heard: list[Any] = []

        def hear(message: Any) -> None:
            heard.append(message)
            if len(heard) == 1:
                raise ValueError("the first is too much")

        kind = interface(JOINT_STATE)
        node.subscribe(JOINT_STATE, "talk", hear, "best_effort")
        talk = node.publisher(JOINT_STATE, "talk")
        wait_until(lambda: talk.subscriptions)
        talk.send(kind(name=["a"]))
        wait_until(lambda: heard)
        talk.send(kind(name=["b"]))
        wait_until(lambda: len(heard) == 2)
        assert "ValueError: the first is too much" in node.fault
        assert node.full_name == "/here/one"
        assert node.publishers("talk") == {"/here/one": "reliable"}
        assert node.domain_id == int(ros["ROS_DOMAIN_ID"])
    with pytest.raises(RobotError, match="call open"):
        node.now_ns()


@pytest.mark.filterwarnings("ignore:Failed to fini:RuntimeWarning")
def test_what_ros_does_not_take_is_named(ros: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"node 'no spaces' in namespace '/'"):
        RosNode("no spaces").open()
    with pytest.raises(ConfigError, match="--ros-args"):
        RosNode("fine", arguments=("--ros-args", "-r", "nonsense")).open()
    with pytest.raises(RobotError, match="install `ros-no-such-msgs`"):
        interface("no_such_msgs/msg/Thing")


def test_logs_stay_where_they_belong(ros: Mapping[str, str], tmp_path: Path) -> None:
    with opened("writer"):
        pass
    assert Path(ros["ROS_LOG_DIR"]).parent == tmp_path


def test_a_message_that_cannot_be_sent_is_lost_and_reported_but_ends_nothing(stepped: Running) -> None:
    class Full:
        topic_name = "/joint_states"

        def publish(self, message: Any) -> None:
            raise RuntimeError("Failed to publish: cannot publish data")

    full = ros2.Publisher(Full())
    with pytest.raises(RobotError, match="'/joint_states': a message could not be sent"):
        full.send(None)
    own, stepped.sim._states = stepped.sim._states, full
    wait_until(lambda: stepped.sim.counts.unsent > 1)
    stepped.sim._states = own
    heard = len(stepped.states)
    wait_until(lambda: len(stepped.states) > heard)
    assert "cannot publish data" in stepped.sim.counts.fault
