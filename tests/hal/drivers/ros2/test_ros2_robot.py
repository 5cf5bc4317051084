"""The driver `ros2`: the same episode as the direct driver between two processes, silence, return, and bad messages."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.config.overrides import Overrides
from fleet.config.recipes import get_recipe
from fleet.launch.factories import make_control
from hal.conformance import check_robot
from hal.drivers.fake import FakeConfig, FakeRobot, fake_spec
from hal.interfaces.robot import Robot
from hal.registry import make_robot, read_config
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.control.config import GateConfig, LoopConfig, ObservationLimits
from robot_edge.control.loop import ControlLoop
from tests.ros import needs_ros, sim_node, wait_until
from tests.ros import ros as ros
from wire.clock import MonotonicClock
from wire.errors import ConfigError, RobotError
from wire.messages.gateway import Job
from wire.messages.local import EpisodeEnded, FrameRecorded, StepRecorded
from wire.transport.memory_channel import memory_pair
from wire.types import CommandType, Dimension, Frame, Observation, RobotSpec, Step

pytestmark = needs_ros

from hal.drivers.ros2.config import IntegrationTarget, Ros2Config, Topics  # noqa: E402
from hal.drivers.ros2.messages import JOINT_STATE, TRAJECTORY, joint_state, raw_image  # noqa: E402
from hal.drivers.ros2.output_config import Output, OutputKind  # noqa: E402
from hal.drivers.ros2.robot import Ros2Robot  # noqa: E402
from hal.drivers.ros2.sim_node import describe  # noqa: E402
from hal.drivers.ros2.wrapper import RosNode, interface  # noqa: E402
from hal.safety.limited_robot import LimitedRobot  # noqa: E402

SPEC = fake_spec(FakeConfig())
PATIENT = {"max_age_s": 20.0, "confirm_timeout_s": 10.0, "max_skew_s": 20.0, "connect_timeout_s": 40.0}
HEALTH = ObservationLimits(state_stale_s=60, camera_stale_s=60, jump_s=60, repeated_frames=0)
"""a busy machine is no reason to hold in these tests"""


class Seer:
    """A deterministic operator that knows nothing but the observation."""

    def propose(self, observation: Observation) -> np.ndarray | None:
        seen = [frame.image.astype(np.float64).mean() for frame in observation.images.values()]
        waves = np.sin(37.0 * observation.state[:4].astype(np.float64) + sum(seen) + len(observation.task))
        return waves.astype(np.float32)

    def progress(self) -> float:
        return 0.0


def recorded(robot: Robot, task: str, seed: int, episodes: int, ticks: int) -> tuple[list[Step], list[Frame]]:
    """What the control loop records of `robot` under `Seer`."""
    ours, uplink = memory_pair()
    _, inference = memory_pair()
    config = LoopConfig(
        max_ticks=ticks,
        tail_ticks=1,
        needs_policy=False,
        source="demonstration",
        observation_limits=HEALTH,
        gate=GateConfig(stall_ticks=0),
    )
    clock = MonotonicClock()
    loop = ControlLoop(
        "r",
        "b",
        LimitedRobot(robot),
        uplink,
        inference,
        lambda trained: make_scheduler(ChunkingConfig("aligned"), robot.spec, trained),
        clock,
        config,
        Seer(),
    )
    robot.connect()
    steps: list[Step] = []
    frames: list[Frame] = []
    ended = 0
    ours.send(Job("j", (task,), seed))
    deadline = time.monotonic() + 60
    while ended < episodes and time.monotonic() < deadline:
        loop.tick()
        while (message := ours.recv()) is not None:
            if isinstance(message, StepRecorded):
                steps.append(message.step)
            elif isinstance(message, FrameRecorded):
                frames.append(message.frame)
            ended += isinstance(message, EpisodeEnded)
    loop.close()
    assert ended == episodes
    return steps, frames


def assert_same(one: tuple[list[Step], list[Frame]], other: tuple[list[Step], list[Frame]]) -> None:
    assert len(one[0]) == len(other[0])
    for a, b in zip(one[0], other[0], strict=True):
        # not by their ticks: periods that a busy machine skipped are counted
        assert (a.actor, a.reward, a.terminated) == (b.actor, b.reward, b.terminated)
        for name in ("proposed", "executed", "state"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), f"{name} at tick {a.tick}"
    assert len(one[1]) == len(other[1])
    for x, y in zip(one[1], other[1], strict=True):
        assert np.array_equal(x.image, y.image)


def driver(plain: Mapping[str, Any], **more: Any) -> Ros2Robot:
    return Ros2Robot(read_config("ros2", {**PATIENT, **plain, **more}))


@pytest.mark.slow
def test_the_same_episode_through_topics_of_another_process_records_the_same(ros: Mapping[str, str]) -> None:
    direct = recorded(make_robot("fake"), "go-up", 7, episodes=2, ticks=40)
    plain = {**describe(make_robot("fake")), "stepped": True, "namespace": "/left"}
    assert plain["tasks"]["go-up"] == "go up"
    with sim_node("fake", None, "-r", "__ns:=/left", "-p", "pacing:=stepped"):
        over_ros = recorded(driver(plain), "go-up", 7, episodes=2, ticks=40)
    assert len(direct[0]) > 40
    assert_same(direct, over_ros)


@pytest.mark.slow
def test_the_same_metaworld_episode_through_topics_records_the_same(ros: Mapping[str, str]) -> None:
    config = {"tasks": ["drawer-open"], "preview_px": 64}
    direct = recorded(make_robot("metaworld", read_config("metaworld", config)), "drawer-open", 3, 1, 60)
    plain = {**describe(make_robot("metaworld", read_config("metaworld", config))), "stepped": True}
    with sim_node("metaworld", config, "-p", "pacing:=stepped"):
        over_ros = recorded(driver(plain), "drawer-open", 3, 1, 60)
    assert len(direct[1]) > 10
    assert_same(direct, over_ros)


@pytest.mark.slow
def test_a_robot_moves_to_ros_by_configuration_alone(ros: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "robot.json"
    path.write_text(json.dumps({**describe(make_robot("fake")), "stepped": True, **PATIENT}))
    recipe = Overrides(robot="ros2", robot_config=str(path)).applied(get_recipe("fake"))
    assert recipe.robot == "ros2"
    recipe = replace(recipe, loop=replace(recipe.loop, needs_policy=False, max_ticks=10, observation_limits=HEALTH))
    ours, uplink = memory_pair()
    _, inference = memory_pair()
    robot = LimitedRobot(make_robot("ros2", recipe.robot_config), recipe.loop.safety)
    loop = make_control(recipe, "r", uplink, inference, MonotonicClock(), operated=False, robot=robot)
    with sim_node("fake", None, "-p", "pacing:=stepped"):
        loop.robot.connect()
        ours.send(Job("j", ("go-left",), 1))
        steps: list[Step] = []
        deadline = time.monotonic() + 60
        while len(steps) < 5 and time.monotonic() < deadline:
            loop.tick()
            while (message := ours.recv()) is not None:
                steps += [message.step] if isinstance(message, StepRecorded) else []
        loop.close()
    assert len(steps) >= 5
    same = FakeRobot()
    same.connect()
    same.reset("go-left", 1)
    assert np.array_equal(steps[0].state, same.read().state)


@pytest.mark.slow
def test_a_robot_that_is_killed_brings_an_error_that_ends_when_it_returns(ros: Mapping[str, str]) -> None:
    plain = describe(make_robot("fake"))
    robot = driver(plain, max_age_s=1.0, confirm_timeout_s=1.0)
    still = np.zeros(4, np.float32)
    with sim_node("fake") as first:
        robot.connect()
        robot.reset("go-up", 3)
        assert robot.read().task == "go up"
        assert robot.write(still).executed.tolist() == still.tolist()
        first.kill()
        first.wait(60)
        said: list[str] = []

        def lost() -> bool:
            try:
                robot.read()
            except RobotError as error:
                said.append(str(error))
            return bool(said)

        wait_until(lost)
    assert "joint states on '/joint_states' are" in said[0]
    assert "ros2 topic hz /joint_states" in said[0]
    with pytest.raises(RobotError, match=r"'/executed'|nobody listens on '/joint_trajectory'"):
        robot.write(still)

    def works() -> bool:
        try:
            robot.read()
            robot.write(still)
        except RobotError:
            return False
        return True

    with sim_node("fake"):
        wait_until(works, 60)
        robot.close()
        robot.close()
    with pytest.raises(RobotError, match="call reset"):
        robot.read()


@pytest.mark.slow
def test_it_is_stopped_by_its_service_while_another_call_is_under_way(ros: Mapping[str, str]) -> None:
    plain = {**describe(make_robot("fake")), "stepped": True}
    assert not hasattr(driver({**plain, "stop": False}), "stop_motion"), "nobody takes it for stopped"
    robot = driver(plain)
    with pytest.raises(RobotError, match="not connected"):
        robot.stop_motion()
    with sim_node("fake", None, "-p", "pacing:=stepped"):
        robot.connect()
        robot.reset("go-up", 3)
        robot.write(np.array([0, 0, 1, 0], np.float32))
        begun_ns = robot.read().time_ns
        stopper = threading.Thread(target=robot.stop_motion)
        stopper.start()
        # Stepped, it moves by commands alone; its stop is one more, by which it stays.
        wait_until(lambda: robot.read().time_ns > begun_ns)
        stopper.join()
        robot.close()


# --- a robot made of bare messages, in this process -----------------------------------------------------------------


class Bare:
    """Publishes what the test says, on topics of its own node."""

    def __init__(self, simulated: bool = False) -> None:
        self.node = RosNode("bare")
        self.node.open()
        self.simulated_ns = 50_000_000_000 if simulated else None
        """the time of the simulation, which runs at half speed; None: there is none"""
        self.clock = self.node.publisher("rosgraph_msgs/msg/Clock", "/clock") if simulated else None
        self.states = self.node.publisher(JOINT_STATE, "joint_states")
        self.images = self.node.publisher("sensor_msgs/msg/Image", "camera/front/image_raw")
        self.commands: list[Any] = []
        self.node.subscribe(TRAJECTORY, "joint_trajectory", self.commands.append)
        self.shown = True
        self.ahead_ns = 0
        self.names = [d.name for d in SPEC.state]
        self.state = np.array([0.1, 0.2, 0.1, 0.0])
        self.size = 64
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            now_ns = self.node.now_ns() + self.ahead_ns
            if self.simulated_ns is not None:
                self.simulated_ns += 5_000_000
                now_ns = self.simulated_ns
                tick = interface("rosgraph_msgs/msg/Clock")()
                tick.clock.sec, tick.clock.nanosec = divmod(now_ns, 1_000_000_000)
                self.clock.send(tick)
            if self.shown:
                self.images.send(
                    raw_image("front", np.full((self.size, self.size, 3), 9, np.uint8), now_ns - 1_000_000)
                )
                self.states.send(joint_state(self.names, self.state, now_ns))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.node.close()


@pytest.fixture
def bare(ros: Mapping[str, str]) -> Iterator[Bare]:
    made = Bare()
    yield made
    made.close()


@pytest.fixture
def connected(bare: Bare) -> Iterator[Ros2Robot]:
    robot = Ros2Robot(Ros2Config(SPEC, max_age_s=0.5, connect_timeout_s=20.0))
    robot.connect()
    robot.connect()
    robot.reset("anything", 0)
    yield robot
    robot.close()


def test_joint_states_and_trajectories_are_enough(bare: Bare, connected: Ros2Robot) -> None:
    observation = connected.read()
    assert observation.state.tolist() == bare.state.astype(np.float32).tolist()
    assert observation.task == "anything"
    frame = observation.images["front"]
    assert frame.time_ns <= observation.time_ns
    assert 0 <= time.monotonic_ns() - observation.time_ns < 20_000_000_000
    feedback = connected.write(np.array([2.0, 0.5, -0.5, 0.25], np.float32))
    assert feedback.executed.tolist() == [1.0, 0.5, -0.5, 0.25], "what was sent, within the limits"
    wait_until(lambda: bare.commands)
    assert list(bare.commands[0].points[0].positions) == [1.0, 0.5, -0.5, 0.25]
    connected.close()
    wait_until(lambda: len(bare.commands) > 1)
    assert list(bare.commands[-1].points[0].positions) == [0.0, 0.0, 0.0, 0.25], "it is told to hold"


JOINTS = tuple(Dimension(name, "rad", -2.0, 2.0) for name in ("lift", "turn"))


class TestClose:
    """It never sends a target that was neither measured nor sent before."""

    @pytest.fixture
    def arm(self, bare: Bare) -> Iterator[Ros2Robot]:
        bare.names, bare.state = ["lift", "turn"], np.array([0.6, -0.8])
        spec = RobotSpec("two-joints", JOINTS, JOINTS, (), 20.0)
        topics = Topics(executed="executed_by_nobody")
        robot = Ros2Robot(
            Ros2Config(spec, topics=topics, executed=True, confirm_timeout_s=0.2, max_age_s=0.5, connect_timeout_s=20.0)
        )
        robot.connect()
        robot.reset("anything", 0)
        yield robot
        robot.close()

    def test_it_stays_where_it_is_measured_although_nobody_said_what_was_executed(
        self, bare: Bare, arm: Ros2Robot
    ) -> None:
        with pytest.raises(RobotError, match="executed_by_nobody"):
            arm.write(np.array([1.0, -1.0], np.float32))
        arm.close()
        wait_until(lambda: len(bare.commands) > 1)
        assert list(bare.commands[-1].points[0].positions) == pytest.approx([0.6, -0.8])

    def test_what_is_not_measured_keeps_its_target(self, bare: Bare, arm: Ros2Robot) -> None:
        with pytest.raises(RobotError):
            arm.write(np.array([1.0, -1.0], np.float32))
        bare.shown = False
        time.sleep(0.7)
        arm.close()
        wait_until(lambda: len(bare.commands) > 1)
        assert list(bare.commands[-1].points[0].positions) == pytest.approx([1.0, -1.0])

    def test_a_robot_that_was_commanded_nothing_is_left_alone(self, bare: Bare, arm: Ros2Robot) -> None:
        arm.read()
        arm.close()
        time.sleep(0.3)
        assert bare.commands == []


def test_integrated_deltas_are_targets_from_where_the_robot_was(bare: Bare) -> None:
    targets = {f"move_{axis}": IntegrationTarget(axis, 0.01) for axis in "xyz"}
    robot = Ros2Robot(Ros2Config(SPEC, targets=targets, connect_timeout_s=20.0, max_age_s=5.0))
    robot.connect()
    robot.reset("anything", 0)
    for _ in range(2):
        assert robot.write(np.array([1.0, -1.0, 0.5, 0.3], np.float32)).executed == pytest.approx([1, -1, 0.5, 0.3])
    bare.state = np.array([0.3, 0.2, 0.1, 0.0])
    wait_until(lambda: len(bare.commands) == 2)
    assert list(bare.commands[1].points[0].positions) == pytest.approx([0.12, 0.18, 0.11, 0.3])
    wait_until(lambda: robot.read().state[0] > 0.29)
    # a new scene begins from what is measured, and the state's limit is the target's
    robot.reset("anything", 0)
    assert robot.write(np.array([1.0, 0.0, 0.0, 0.0], np.float32)).executed == pytest.approx([0, 0, 0, 0], abs=1e-5)
    robot.close()


@pytest.mark.parametrize("ended", ["by a command", "by its end"])
def test_a_base_is_stopped_when_nobody_knows_where_the_targets_of_its_arm_begin(bare: Bare, ended: str) -> None:
    bare.names, bare.state = ["lift"], np.array([0.5])
    actions = (
        Dimension("move_lift", "rad", -0.05, 0.05, CommandType.delta),
        Dimension("drive", "m/s", -1.0, 1.0, CommandType.velocity),
    )
    outputs = (
        Output(kind=OutputKind.forward, topic="arm", dimensions=("move_lift",)),
        Output(kind=OutputKind.twist, topic="cmd_vel", dimensions=("drive",), axes=("linear.x",)),
    )
    arm: list[Any] = []
    base: list[Any] = []
    bare.node.subscribe(OutputKind.forward.type, "arm", arm.append)
    bare.node.subscribe(OutputKind.twist.type, "cmd_vel", base.append)
    targets = {"move_lift": IntegrationTarget("lift")}
    spec = RobotSpec("mobile-arm", JOINTS[:1], actions, (), 20.0)
    robot = Ros2Robot(Ros2Config(spec, outputs=outputs, targets=targets, max_age_s=0.5, connect_timeout_s=20.0))
    robot.connect()
    robot.reset("anything", 0)
    robot.write(np.array([0.01, 0.5], np.float32))
    wait_until(lambda: base)
    bare.shown = False
    wait_until(lambda: said_by(robot, "joint states on '/joint_states' are"))
    if ended == "by a command":
        with pytest.raises(RobotError, match="joint states on '/joint_states' are"):
            robot.write(np.array([0.0, 0.5], np.float32))
    robot.close()
    wait_until(lambda: len(base) > 1)
    assert [message.linear.x for message in base] == [0.5, 0.0]
    assert len(arm) == 1


def test_silence_is_an_error_and_over_when_it_is_over(bare: Bare, connected: Ros2Robot) -> None:
    connected.read()
    bare.shown = False

    def silent() -> bool:
        try:
            connected.read()
        except RobotError as error:
            return "joint states on '/joint_states' are" in str(error)
        return False

    wait_until(silent)
    bare.shown = True
    seen: list[Observation] = []

    def heard() -> bool:
        # Joint states may be back before the first new picture is.
        with contextlib.suppress(RobotError):
            seen.append(connected.read())
        return bool(seen)

    wait_until(heard)
    assert seen[0].state.tolist() == bare.state.astype(np.float32).tolist()


def said_by(robot: Ros2Robot, words: str) -> bool:
    try:
        robot.read()
    except RobotError as error:
        return words in str(error)
    return False


def test_a_robot_whose_clock_is_ahead_or_jumps_is_named(bare: Bare, connected: Ros2Robot) -> None:
    bare.ahead_ns = 5_000_000_000
    wait_until(lambda: said_by(connected, "ahead of this computer's ROS time. Synchronise"))
    bare.ahead_ns = 0
    wait_until(lambda: not said_by(connected, ""))
    before = connected.read().time_ns
    bare.ahead_ns = -600_000_000
    connected._synchronizer._config = replace(connected.config, max_age_s=5.0)
    wait_until(lambda: said_by(connected, "jumped by -0."))
    wait_until(lambda: not said_by(connected, ""))
    assert connected.read().time_ns >= before, "time never goes back"


def test_a_simulation_has_its_own_time(ros: Mapping[str, str]) -> None:
    bare = Bare(simulated=True)
    robot = Ros2Robot(Ros2Config(SPEC, use_sim_time=True, max_age_s=5.0, connect_timeout_s=20.0))
    try:
        robot.connect()
        robot.reset("anything", 0)
        begun = robot.read()
        assert abs(time.monotonic_ns() - begun.time_ns) < 5_000_000_000, "on the machine's clock"
        wait_until(lambda: robot.read().time_ns > begun.time_ns)
        bare.simulated_ns = 1_000_000_000
        wait_until(lambda: said_by(robot, "the ROS clock (/clock) jumped by -"))
        wait_until(lambda: not said_by(robot, ""))
        assert bare.simulated_ns < 40_000_000_000, "it did not wait until the new time had passed the old one"
        robot.reset("anything", 0)
        assert robot.read().time_ns > begun.time_ns
    finally:
        robot.close()
        bare.close()


def test_pictures_of_another_size_are_named(bare: Bare, connected: Ros2Robot) -> None:
    bare.size = 32
    connected._synchronizer._config = replace(connected.config, max_skew_s=0.2)
    wait_until(lambda: said_by(connected, "pictures of 32x32; camera 'front' of the spec has 64x64"))


def test_a_robot_that_is_not_there_is_described(ros: Mapping[str, str]) -> None:
    other = RosNode("other", "/right")
    other.open()
    states = other.publisher(JOINT_STATE, "joint_states")
    robot = Ros2Robot(Ros2Config(SPEC, namespace="/left", connect_timeout_s=4.0))
    with pytest.raises(RobotError, match="nothing came on '/left/joint_states'") as raised:
        robot.connect()
    assert "Nobody publishes '/left/joint_states'" in str(raised.value)
    assert "/right/joint_states. Check the namespace" in str(raised.value)
    assert states.subscriptions == 0
    other.close()


def test_what_it_cannot_be_made_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a configuration"):
        make_robot("ros2")
    with pytest.raises(ConfigError, match=r"has no 'topic'. Did you mean 'topics'"):
        read_config("ros2", {"spec": "x.json", "topic": {}})
    robot = make_robot("ros2", Ros2Config(SPEC, tasks={"go-up": "go up"}))
    assert msgspec.json.encode(robot.spec) == msgspec.json.encode(SPEC)
    with pytest.raises(RobotError, match="call connect"):
        robot.reset("go-up", 0)
    with pytest.raises(ConfigError, match="Did you mean 'go-up'"):
        robot.reset("go-upp", 0)
    robot.close()


@pytest.mark.slow
def test_a_robot_behind_topics_keeps_the_rules_of_every_robot(ros: Mapping[str, str]) -> None:
    plain = {**describe(make_robot("fake")), "stepped": True}
    with sim_node("fake", None, "-p", "pacing:=stepped"):
        report = check_robot(lambda: driver(plain), "go-up")
    assert report.passed, str(report)
