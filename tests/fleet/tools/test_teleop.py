"""Teleoperation over the gateway: the real gateway on a line in memory, and a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from fleet.cli.teleop import make_device
from fleet.tools.teleop import FIRST_WORD_S, SILENT_S, TTL_S, Teleop
from hal.interfaces.teleop import TeleopCommand
from hal.resource.admitted_robots import AdmittedRobots
from hal.teleop.script import ScriptedDevice
from robot_edge.control.operator_override import OperatorOverride
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from wire.clock import ManualClock, MonotonicClock
from wire.errors import ConfigError, RejectedError, RobotError, WireError
from wire.messages.fleet import AcquireLease
from wire.messages.gateway import Hello, OperatorCommand, ReintroduceRequest
from wire.transport.keys import make_keys
from wire.transport.memory_channel import MemoryServer
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any
from wire.types import EPISODE_COMMANDS, OperatorCommandKind, RobotSpec

HERE = TeleopCommand()
HOLD = TeleopCommand(engaged=True)


def drive(*action: float) -> TeleopCommand:
    return TeleopCommand(engaged=True, action=np.float32(action))


class Hand:
    """A device that wants what the test says."""

    hint = "a hand"

    def __init__(self) -> None:
        self.wants = HERE
        self.broken = ""
        self.spec: RobotSpec | None = None
        self.pose: np.ndarray | None = None
        self.let_gos = 0

    def connect(self, spec: RobotSpec) -> None:
        self.spec = spec

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        self.pose = pose
        self.let_gos += not driving
        if self.broken:
            raise RobotError(self.broken)
        wants = self.wants
        self.wants = msgspec.structs.replace(wants, estop=False)
        return wants

    def close(self) -> None: ...


class Scene:
    """A gateway, two robots, and somebody with a device."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock(10**9)
        self.server = MemoryServer()
        self._open()
        self.edges = [FakeEdge(f"robot-{n}", self.server.connect(f"robot-{n}"), self.clock) for n in range(2)]
        self.robot = self.edges[0]
        for edge in self.edges:
            edge.hello()
        self.hand = Hand()
        self.said: list[str] = []
        self.person = self.teleop("robot-0", self.hand, self.said.append)
        self.over = self.gone = False
        self.went_ns = 0

    def _open(self) -> None:
        self.ledger, store = BufferLocation(self.root).open_writer()
        ingest = Ingest(self.ledger, store, self.clock)
        ingest.open()
        self.view = FleetView(self.clock)
        weights = WeightStore.open(self.root / "weights", self.ledger)
        self.gateway = Gateway(
            self.server,
            self.ledger,
            ingest,
            weights,
            self.view,
            AdmittedRobots.of_one(SPEC, ("reach", "push")),
            self.clock,
            lambda: self.clock.now_ns(),
        )

    def killed(self) -> None:
        """Another gateway on the same data, as after a kill -9."""
        self.ledger.close()
        self._open()

    def teleop(self, robot: str, hand: Hand, notify=lambda sentence: None, name: str = "teleoperator") -> Teleop:
        return Teleop(self.server.connect(name), hand, robot, name, self.clock, hz=30, notify=notify)

    def run(self, seconds: float, *others: Teleop, gateway: bool = True) -> None:
        """All that happens in so much time, in steps of a teleoperation period."""
        for _ in range(max(1, round(30 * seconds))):
            self.clock.advance(self.person.period_ns)
            for teleop in others if self.gone else (self.person, *others):
                self.over |= not teleop.step()
            if not gateway:
                continue
            self.gateway.poll()
            for edge in self.edges:
                edge.poll()
                edge.between()
                if edge.welcomed and self.clock.now_ns() - self.went_ns > 2e8:
                    edge.status()
            if self.clock.now_ns() - self.went_ns > 2e8:
                self.went_ns = self.clock.now_ns()
            self.gateway.poll()

    @property
    def wishes(self) -> list[OperatorCommand]:
        return [message for message in self.robot.received if isinstance(message, OperatorCommand)]

    @property
    def kinds(self) -> list[str]:
        """What the robot heard, repetitions of one kind left out."""
        kinds = [wish.kind for wish in self.wishes]
        return [kind for n, kind in enumerate(kinds) if n == 0 or kind != kinds[n - 1]]

    @property
    def holder(self) -> str:
        lease = self.gateway._dispatcher.leases.of("robot-0", self.clock.now_ns())
        return lease.holder if lease else ""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.ledger.close()


def test_a_person_takes_drives_and_gives_back(scene: Scene) -> None:
    scene.run(0.5)
    assert scene.hand.spec is not None
    assert scene.hand.spec.hash == SPEC.hash
    assert scene.holder == "teleoperator"
    assert scene.said == ["robot-0 is yours."]
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(1.0)
    scene.hand.wants = HERE
    scene.run(0.1)
    assert scene.kinds == ["take_over", "command", "hand_back"]
    commands = [wish for wish in scene.wishes if wish.kind == "command"]
    assert 27 <= len(commands) <= 30, "thirty a second"
    assert [wish.sequence for wish in commands] == list(range(2, len(commands) + 2))
    assert {wish.operator for wish in commands} == {"teleoperator"}
    assert commands[5].action == (0.5, 0, 0, 1)
    scene.person.close()
    scene.gone = True
    scene.run(0.1)
    assert scene.holder != "teleoperator"
    assert scene.said == ["robot-0 is yours.", "You drive robot-0.", "robot-0 is handed back."]


def test_whoever_drives_says_that_they_recover_and_then_correct(scene: Scene) -> None:
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(1.0)
    assert scene.person.lease is not None
    for word in (OperatorCommandKind.recover, OperatorCommandKind.correct):
        scene.hand.wants = msgspec.structs.replace(drive(0.5, 0, 0, 1), episode=(word,))
        scene.run(1 / 30)
        scene.hand.wants = drive(0.5, 0, 0, 1)
        scene.run(0.3)
    said = [(wish.kind, wish.lease, wish.captured_ns > 0) for wish in scene.wishes if wish.kind in EPISODE_COMMANDS]
    lease = scene.person.lease.number
    assert said == [("recover", lease, True), ("correct", lease, True)]
    assert scene.person.driving


def test_what_the_robot_makes_of_it(scene: Scene) -> None:
    """The edge's own reading of wishes: the gripper is set, and a released key holds."""
    human, executed = OperatorOverride(SPEC, scene.clock), np.float32([0, 0, 0, -1])
    for wants in (HOLD, drive(0.5, 0, 0, 1), HOLD):
        scene.hand.wants = wants
        scene.robot.received.clear()
        for _ in range(12):
            scene.run(1 / 30)
            for wish in scene.wishes:
                human.handle_command(wish)
            scene.robot.received.clear()
        done = human.action(executed)
        assert human.in_control
        if wants is HOLD:
            assert done is None
        else:
            assert done == pytest.approx([0.5, 0, 0, 1])
            executed = done


def test_a_command_is_as_old_as_what_the_device_said(scene: Scene) -> None:
    scene.run(0.5)
    said_ns = scene.clock.now_ns()
    scene.hand.wants = msgspec.structs.replace(drive(0.5, 0, 0, 1), time_ns=said_ns)
    scene.run(0.5)
    assert {wish.captured_ns for wish in scene.wishes if wish.kind == "command"} == {said_ns}
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(1 / 30)
    assert scene.wishes[-1].captured_ns == scene.clock.now_ns(), "one that does not say when says it now"


def test_the_lease_lives_while_the_program_does_and_ends_without_it(scene: Scene) -> None:
    scene.run(0.3)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(5 * TTL_S)
    assert scene.person.driving
    assert scene.holder == "teleoperator"
    scene.server.cut.add("teleoperator")
    scene.person._channel.send = lambda message: False  # type: ignore[method-assign]
    scene.run(TTL_S + 0.3)
    assert scene.kinds[-1] == "drop_link", "a robot whose driver is gone holds"
    assert scene.robot.mode == "hold"


def test_a_silent_gateway_stops_the_commands_until_the_person_lets_go(scene: Scene) -> None:
    scene.run(0.3)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.5)
    scene.run(SILENT_S + 0.2, gateway=False)
    assert not scene.person.driving
    assert "silent" in scene.said[-1]
    assert "no link" in scene.person.status_line()
    scene.run(2.0)
    heard = len(scene.wishes)
    scene.run(1.0)
    assert not scene.person.driving
    assert len(scene.wishes) == heard, "it was not let go yet"
    scene.hand.wants = HERE
    scene.run(1.5)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.5)
    assert scene.person.driving
    assert scene.robot.mode == "human"


def test_somebody_with_more_to_say_takes_the_robot(scene: Scene) -> None:
    scene.run(0.3)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.5)
    console = scene.server.connect("console")
    console.send(Hello("console", "console", "c", 1))
    scene.run(0.1)
    console.send(AcquireLease(1, "robot-0", "fire drill", 85, 5.0))
    scene.run(0.3)
    assert not scene.person.driving
    assert "robot-0 was taken away: 'console' took it for fire drill" in scene.said[-1]
    sent = len(scene.wishes)
    scene.run(1.0)
    assert len(scene.wishes) == sent, "nothing more is commanded"
    scene.hand.wants = HERE
    scene.run(0.5)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.5)
    assert "cannot be had now: robot 'robot-0' is held by 'console'" in scene.said[-1]
    assert not scene.person.driving


def test_two_people_do_not_drive_one_robot(scene: Scene) -> None:
    scene.run(0.5)
    late = scene.teleop("robot-0", Hand(), name="teleoperator-2")
    with pytest.raises(RejectedError, match=r"robot-0 cannot be had: .*held by 'teleoperator' for teleoperation"):
        scene.run(1.0, late)


def test_anybody_may_stop_a_robot_and_driving_ends(scene: Scene) -> None:
    scene.run(0.3)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.3)
    scene.hand.wants = TeleopCommand(estop=True)
    scene.run(0.3)
    assert "estop" in scene.kinds
    assert not scene.person.driving
    (stop,) = scene.robot.latch.state.stops
    assert any(f"`vla-fleet stop robot-0 --release {stop}`" in said for said in scene.said)
    assert "hand_back" not in scene.kinds, "it would go on by itself when the stop is released"
    scene.run(3.0)
    assert scene.kinds.count("estop") == 1
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(1.0)
    assert not scene.person.driving
    assert scene.robot.mode == "estop"
    assert "command" not in scene.kinds[3:]
    assert "is stopped by teleoperator (" in scene.said[-1]
    scene.person.close()
    scene.gone = True
    scene.run(0.5)
    assert scene.kinds[-1] == "hand_back"


def test_a_stop_button_that_is_held_is_one_stop(scene: Scene) -> None:
    scene.run(0.3)
    read = scene.hand.read
    scene.hand.read = lambda *arguments: msgspec.structs.replace(read(*arguments), estop=True)  # type: ignore[method-assign]
    scene.run(1.0)
    assert list(scene.robot.latch.state.stops.values()) == ["teleoperator"]
    scene.hand.read = read  # type: ignore[method-assign]
    scene.run(0.1)
    scene.hand.wants = TeleopCommand(estop=True)
    scene.run(0.3)
    assert len(scene.robot.latch.state.stops) == 2, "a release of the first must not touch the second"


def test_a_stop_that_cannot_leave_is_said_and_sent_later(scene: Scene) -> None:
    scene.run(0.3)
    scene.server.cut.add("teleoperator")
    scene.hand.wants = TeleopCommand(estop=True)
    scene.run(0.2)
    assert "The gateway has not heard the stop yet" in scene.said[-1]
    scene.server.cut.clear()
    scene.run(0.2)
    assert scene.robot.mode == "estop"


def test_a_gateway_that_starts_again_knows_the_lease(scene: Scene) -> None:
    scene.run(0.5)
    number = scene.person.lease and scene.person.lease.number
    scene.killed()
    for edge in scene.edges:
        edge.welcomed = False
        edge.hello()
    scene.run(1.0)
    assert scene.person.lease is not None
    assert scene.person.lease.number == number
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.5)
    assert scene.robot.mode == "human"


def test_where_the_robot_is_and_what_it_does(scene: Scene) -> None:
    scene.run(1.0)
    assert scene.hand.pose == pytest.approx([0, 0, 0, 0]), "grip is measured, the others are deltas"
    assert scene.hand.let_gos > 20
    line = scene.person.status_line()
    assert line.startswith("robot-0   policy")
    assert line.endswith("a hand   link 33 ms")
    scene.hand.wants = HOLD
    scene.run(0.5)
    assert "DRIVING" in scene.person.status_line()
    let_gos = scene.hand.let_gos
    scene.run(0.5)
    assert scene.hand.let_gos == let_gos


def test_a_status_that_is_old_says_nothing_of_the_pose(scene: Scene) -> None:
    scene.run(1.0)
    for edge in scene.edges:
        edge.welcomed = False
    scene.run(1.5)
    assert scene.hand.pose is not None
    assert np.isnan(scene.hand.pose[3])


def test_a_device_that_fails_leaves_the_robot_holding(scene: Scene) -> None:
    scene.run(0.3)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.3)
    scene.hand.broken = "the gamepad was unplugged"
    with pytest.raises(RobotError, match="unplugged"):
        scene.run(0.1)
    scene.gone = True
    scene.run(TTL_S + 0.5)
    assert scene.kinds == ["take_over", "command", "drop_link"]


def test_quitting_ends_it(scene: Scene) -> None:
    scene.run(0.3)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.3)
    scene.hand.wants = TeleopCommand(quit=True)
    scene.run(0.04)
    assert scene.over
    scene.person.close()
    scene.gone = True
    scene.run(0.1)
    assert scene.kinds[-1] == "hand_back"
    assert scene.holder != "teleoperator"


def test_a_number_at_a_limit_is_within_it(tmp_path: Path) -> None:
    """float32(0.1) is more than 0.1: the gateway would refuse it."""
    sent: list[OperatorCommand] = []

    class Line:
        def recv(self) -> None: ...

        def send(self, message: object) -> bool:
            sent.append(message)  # type: ignore[arg-type]
            return True

        def close(self) -> None: ...

    person = Teleop(Line(), Hand(), "robot-0", "teleoperator", ManualClock())
    dimension = msgspec.structs.replace(SPEC.action[0], low=-0.1, high=0.1)
    person._spec = msgspec.structs.replace(SPEC, state=(), action=(dimension,))
    person._commanded = np.zeros(1, np.float32)
    person._command(np.float32([0.1]))
    assert sent[-1].action == (0.1,)


def test_what_is_not_there_is_named(scene: Scene) -> None:
    with pytest.raises(ConfigError, match=r"no robot 'robot_1'\. Did you mean 'robot-1'"):
        scene.run(1.0, scene.teleop("robot_1", Hand(), name="teleoperator-2"))
    with pytest.raises(ConfigError, match=r"'anna' cannot teleoperate.*vla-fleet keys teleoperator-anna"):
        scene.teleop("robot-0", Hand(), name="anna")
    with pytest.raises(ConfigError, match="--hz 2: give 5 to 200"):
        Teleop(scene.server.connect("teleoperator"), Hand(), "robot-0", "teleoperator", scene.clock, hz=2)


def test_no_gateway_is_named(scene: Scene) -> None:
    with pytest.raises(WireError, match="no gateway has answered in 10 s"):
        scene.run(FIRST_WORD_S + 1, gateway=False)


def test_an_unknown_gateway_is_greeted_again(scene: Scene) -> None:
    scene.run(0.5)
    scene.server.send("teleoperator", ReintroduceRequest())
    scene.run(0.5)
    scene.hand.wants = drive(0.5, 0, 0, 1)
    scene.run(0.3)
    assert scene.person.driving


def test_another_gateways_key_is_named_at_once(tmp_path: Path) -> None:
    """Over real ZeroMQ with CURVE."""
    make_keys(tmp_path / "keys", ["gateway", "teleoperator"])
    make_keys(tmp_path / "other", ["gateway"])
    server = ZmqServer("tcp://127.0.0.1:*", tmp_path / "other")
    line = ZmqClient(server.endpoint, "teleoperator", tmp_path / "keys")
    person = Teleop(line, Hand(), "robot-0", "teleoperator", MonotonicClock())
    end = time.monotonic() + 60
    with pytest.raises(RejectedError, match="its gateway has another key"):
        while time.monotonic() < end:
            wait_any([server], 0.01)
            server.recv()
            person.step()
    line.close()
    server.close()


def test_devices_are_made_by_name_and_configuration() -> None:
    with pytest.raises(ConfigError, match=r"no teleoperator 'keybord'.*Did you mean 'keyboard'"):
        make_device("keybord", "", False)
    with pytest.raises(ConfigError, match="Did you mean 'path'"):
        make_device("script", '{"pathh": "a.csv"}', False)
    assert isinstance(make_device("script", '{"path": "a.csv"}', False), ScriptedDevice)


class StopWay:
    """A connection for stops, as the test sees it."""

    def __init__(self) -> None:
        self.port, self.sent = 0, []

    def follow(self, port: int) -> None:
        self.port = port

    def poll(self) -> None:
        return None

    def recv(self) -> None:
        return None

    def send(self, message: OperatorCommand) -> bool:
        self.sent.append(message)
        return True


def test_a_stop_goes_by_the_way_of_stops_too_and_nothing_else_does(scene: Scene) -> None:
    way = StopWay()
    scene.person._stops = way  # type: ignore[assignment]
    scene.hand.wants = TeleopCommand(engaged=True, action=np.zeros(4, np.float32))
    scene.run(1.0)
    assert scene.person.driving and not way.sent
    scene.hand.wants = TeleopCommand(estop=True)
    scene.run(0.5)
    (stop,) = way.sent
    assert (stop.kind, stop.stop) == ("estop", next(wish.stop for wish in scene.wishes if wish.kind == "estop"))
