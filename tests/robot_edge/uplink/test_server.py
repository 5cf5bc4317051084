"""The uplink: durable before sent, resent until acknowledged, weights and wishes passed on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hal.driver_host.stop_line import StopOrder
from hal.safety.stop_latch import StopLatch
from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.stop_link import StopLink
from robot_edge.uplink.stop_orders import StopOrders
from tests import samples
from tests.people import Person
from wire.clock import ManualClock, clock_name
from wire.errors import DiskFullError
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    EdgeStatus,
    FetchWeights,
    Hello,
    HelloAck,
    Job,
    Nack,
    OperatorCommand,
    Preview,
    ReintroduceRequest,
    Segment,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.messages.local import (
    EpisodeEnded,
    EpisodeStarted,
    FrameRecorded,
    LoadWeights,
    OperatorState,
    RequestPreviews,
    StepRecorded,
)
from wire.stop_state import StopState
from wire.transport.memory_channel import MemoryServer, memory_pair
from wire.types import Frame, Mode, PolicyVersion

SECOND = 1_000_000_000


class Desk:
    """An uplink with a test at the other end of each of its lines."""

    def __init__(
        self, root: Path, segment_steps: int = 10, host: Callable[[StopOrder], StopState] | None = None
    ) -> None:
        self.clock = ManualClock(SECOND)
        self.server = MemoryServer()
        self.control, control = memory_pair()
        self.inference, inference = memory_pair()
        line = self.server.connect("robot-0")
        stops = StopLink("robot-0", StopOrders("robot-0", host, self.clock)) if host is not None else None
        self.stops = stops
        self.uplink = Uplink("robot-0", root / "edge", line, control, inference, self.clock, segment_steps, stops)

    def hello(self) -> None:
        self.control.send(Hello("robot-0", "edge", "c", 1, 77, samples.spec(), ("reach",)))
        self.uplink.poll()
        self.server.send("robot-0", HelloAck(clock_name(), 1, 1))
        self.uplink.poll()

    def pass_time(self, seconds: float) -> None:
        """The gateway answers a heartbeat after so long."""
        self.clock.advance(round(seconds * SECOND))
        self.server.send("robot-0", HelloAck(clock_name(), self.clock.now_ns(), self.clock.now_ns()))
        self.uplink.poll()

    def record(self, steps: int, number: int = 0, end: bool = True) -> None:
        episode = samples.episode(number=number)
        self.control.send(EpisodeStarted(episode))
        for tick in range(steps):
            if tick % 4 == 0:
                self.control.send(FrameRecorded(episode.id, "front", Frame(10 * tick + 1, samples.image(tick))))
            self.control.send(StepRecorded(episode.id, samples.step(tick, frame_ns=10 * (tick - tick % 4) + 1)))
        if end:
            self.control.send(EpisodeEnded(episode.id, "success", 5))
        self.uplink.poll()

    def received(self, kind: type | None = None) -> list[Message]:
        found = []
        while (item := self.server.recv()) is not None:
            if kind is None or isinstance(item[1], kind):
                found.append(item[1])
        return found

    def to_control(self) -> list[Message]:
        return self.heard(self.control)

    def heard(self, channel) -> list[Message]:
        found = []
        while (message := channel.recv()) is not None:
            found.append(message)
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.uplink.close()


def segments(messages: list[Message]) -> list[Segment]:
    return [message for message in messages if isinstance(message, Segment)]


def test_steps_become_segments_that_are_sent_once_and_forgotten_when_acknowledged(desk: Desk) -> None:
    desk.hello()
    desk.record(25)
    sent = segments(desk.received())
    assert [s.steps for s in sent] == [10, 10, 5]
    assert [s.last for s in sent] == [False, False, True]
    assert [s.outcome for s in sent] == ["", "", "success"]
    assert [s.first_tick for s in sent] == [0, 10, 20]
    desk.uplink.poll()
    assert segments(desk.received()) == []
    desk.server.send("robot-0", Ack(tuple(s.id for s in sent)))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 0
    assert desk.uplink.spool.steps_recorded == 25


def test_each_frame_travels_once_with_the_first_segment_that_saw_it(desk: Desk) -> None:
    desk.hello()
    desk.record(25)
    sent = segments(desk.received())
    times = [t for s in sent for t in s.frames["front"].times_ns.tolist()]
    assert times == [10 * t + 1 for t in range(0, 25, 4)]
    known: set[int] = set()
    for s in sent:
        known |= set(s.frames["front"].times_ns.tolist())
        assert set(s.frame_times_ns["front"].tolist()) <= known


def test_nothing_leaves_before_the_gateway_knows_the_robot(desk: Desk) -> None:
    desk.record(5)
    assert segments(desk.received()) == []
    assert len(desk.uplink.spool) == 1
    desk.hello()
    assert len(segments(desk.received())) == 1


def test_what_is_not_acknowledged_is_sent_again(desk: Desk) -> None:
    desk.hello()
    desk.record(5)
    first = segments(desk.received())
    for _ in range(4):
        desk.pass_time(1)
    assert segments(desk.received()) == []
    for _ in range(2):
        desk.pass_time(1)
    again = segments(desk.received())
    assert [s.id for s in again] == [s.id for s in first]


def test_a_gateway_that_cannot_store_is_asked_again_later(desk: Desk) -> None:
    desk.hello()
    desk.record(5)
    desk.received()
    desk.server.send("robot-0", Nack("the disk is full"))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 1
    for _ in range(6):
        desk.pass_time(1)
    assert len(segments(desk.received())) == 1


def test_a_gateway_that_restarted_is_told_who_this_is_and_gets_everything_again(desk: Desk) -> None:
    desk.hello()
    desk.record(5)
    desk.received()
    desk.server.send("robot-0", ReintroduceRequest())
    desk.uplink.poll()
    assert any(isinstance(m, Hello) for m in desk.received())
    desk.server.send("robot-0", HelloAck(clock_name(), 1, 1))
    desk.uplink.poll()
    assert len(segments(desk.received())) == 1


def test_a_spool_survives_the_process(desk: Desk, tmp_path: Path) -> None:
    desk.hello()
    desk.record(5)
    again = Desk(tmp_path)
    again.hello()
    assert len(segments(again.received())) == 1
    again.uplink.close()


def test_quarantined_segments_are_forgotten_with_a_word(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.hello()
    desk.record(5)
    sent = segments(desk.received())
    desk.server.send("robot-0", Ack((), (sent[0].id,)))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 0
    assert "not valid" in caplog.text


def test_a_full_disk_holds_the_robot_and_drops_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.hello()
    desk.to_control()
    put = desk.uplink.spool.put

    def full(segment: Segment, ending: Segment | None) -> None:
        raise DiskFullError("the disk is full")

    monkeypatch.setattr(desk.uplink.spool, "put", full)
    desk.record(5)
    told = desk.to_control()
    assert [m.reason for m in told if isinstance(m, Nack)] == ["the disk is full"]
    monkeypatch.setattr(desk.uplink.spool, "put", put)
    desk.uplink.poll()
    assert [m.reason for m in desk.to_control() if isinstance(m, Nack)] == [""]
    assert len(segments(desk.received())) == 1


def test_a_full_disk_takes_practice_that_the_gateway_has_nothing_of_before_the_robot_holds(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        desk.record(5, number)
    put, tries = desk.uplink.spool.put, [True, False]

    def full(segment: Segment, ending: Segment | None) -> None:
        if tries.pop(0):
            raise DiskFullError("the disk is full")
        put(segment, ending)

    monkeypatch.setattr(desk.uplink.spool, "put", full)
    desk.record(5, 3)
    assert not any(isinstance(message, Nack) and message.reason for message in desk.to_control())
    desk.hello()
    received = desk.received()
    assert sorted(segment.episode.seed % 10 for segment in segments(received)) == [1, 2, 3]
    desk.uplink.poll()
    (event,) = [m for m in [*received, *desk.received()] if isinstance(m, EdgeEvent)]
    assert event.kind == "dropped" and "1 episodes of the policy alone, 5 steps" in event.detail


def test_a_new_uplink_takes_back_what_an_earlier_one_said_of_the_disk(desk: Desk) -> None:
    inbox = CommandInbox("robot-0", OperatorOverride(samples.spec(), desk.clock))
    inbox.handle_message(Nack("the disk is full"))
    assert not inbox.storage_ok
    desk.hello()
    for message in desk.to_control():
        inbox.handle_message(message)
    assert inbox.storage_ok


def test_an_episode_that_control_never_ended_is_closed_as_aborted(desk: Desk) -> None:
    desk.hello()
    desk.record(5, end=False)
    desk.record(5, number=1, end=False)
    desk.uplink.control_gone()
    desk.uplink.poll()
    sent = segments(desk.received())
    assert [s.outcome for s in sent] == ["aborted", "aborted"]
    assert not desk.uplink.drained
    desk.server.send("robot-0", Ack(tuple(s.id for s in sent)))
    desk.uplink.poll()
    assert desk.uplink.drained


def version(number: int, data: bytes) -> PolicyVersion:
    return PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), number - 1, 10, 10, 1)


def test_weights_are_fetched_in_parts_checked_and_offered_whole(desk: Desk) -> None:
    desk.hello()
    data = bytes(range(256)) * 2000
    desk.server.send("robot-0", VersionAvailable(version(1, data), 5))
    offered: list[Message] = []
    for _ in range(10):
        desk.uplink.poll()
        for request in desk.received(FetchWeights):
            assert isinstance(request, FetchWeights)
            part = data[request.offset : request.offset + request.size]
            desk.server.send("robot-0", WeightBytes(1, request.offset, part))
        offered += desk.heard(desk.inference)
    assert len(offered) == 1
    assert isinstance(offered[0], LoadWeights)
    assert Path(offered[0].path).read_bytes() == data
    # a new inference process is offered them again, and what it applied is passed on
    desk.inference.send(Hello("robot-0", "inference", "", 1, 42))
    desk.inference.send(VersionActivated("robot-0", 1, 9))
    desk.uplink.poll()
    assert any(isinstance(m, LoadWeights) for m in desk.heard(desk.inference))
    assert any(isinstance(m, VersionActivated) for m in desk.to_control())
    assert len(desk.received(VersionActivated)) == 1


def test_weights_with_a_wrong_hash_are_never_offered(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.hello()
    good, bad = b"good" * 100, b"evil" * 100
    desk.server.send("robot-0", VersionAvailable(version(1, good), 5))
    desk.uplink.poll()
    desk.server.send("robot-0", WeightBytes(1, 0, bad))
    desk.uplink.poll()
    assert desk.heard(desk.inference) == []
    assert "wrong hash" in caplog.text
    desk.server.send("robot-0", WeightBytes(1, 0, good))
    desk.uplink.poll()
    assert len(desk.heard(desk.inference)) == 1


def fetch(desk: Desk, number: int, data: bytes) -> list[int]:
    """Announce and bring; the numbers that inference is offered."""
    desk.server.send("robot-0", VersionAvailable(version(number, data), 5))
    desk.uplink.poll()
    if desk.received(FetchWeights):
        desk.server.send("robot-0", WeightBytes(number, 0, data))
        desk.uplink.poll()
    return [m.version.number for m in desk.heard(desk.inference) if isinstance(m, LoadWeights)]


def test_a_measurement_goes_back_to_an_older_version_and_on_to_the_newest(desk: Desk) -> None:
    desk.hello()
    for number in range(4, 9):
        assert fetch(desk, number, b"%d" % number) == [number]
    assert fetch(desk, 2, b"2") == [2], "fetched, though three newer ones are kept"
    ready = desk.uplink.weights.ready
    assert ready is not None and ready[1].read_bytes() == b"2"
    assert fetch(desk, 8, b"8") == [8], "it is still here"
    assert fetch(desk, 8, b"8") == []


def test_a_version_that_is_called_back_before_the_next_one_was_here_stays(desk: Desk) -> None:
    desk.hello()
    assert fetch(desk, 3, b"3") == [3]
    desk.server.send("robot-0", VersionAvailable(version(4, b"4"), 5))
    desk.server.send("robot-0", VersionAvailable(version(3, b"3"), 5))
    desk.server.send("robot-0", WeightBytes(4, 0, b"4"))
    desk.uplink.poll()
    assert desk.heard(desk.inference) == []
    assert desk.uplink.weights.ready is not None and desk.uplink.weights.ready[0].number == 3


def test_a_desk_beside_the_robot_hears_it_and_stops_it_without_a_gateway(desk: Desk) -> None:
    beside, line = memory_pair()
    desk.uplink.operator = line
    desk.control.send(Hello("robot-0", "edge", "c", 1, 77, samples.spec(), ("reach",)))
    state = samples.step(0).state
    desk.control.send(EdgeStatus("robot-0", 1, "policy", "", "reach", "e", 1, state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0))
    desk.control.send(EdgeEvent("robot-0", 1, "hold", "the arm does not answer"))
    desk.inference.send(EdgeEvent("robot-0", 1, "refused", "version 3"))
    desk.uplink.poll()
    heard = desk.heard(beside)
    assert [m.control_pid for m in heard if isinstance(m, EdgeStatus)] == [77]
    assert [m.kind for m in heard if isinstance(m, EdgeEvent)] == ["hold", "refused"]
    beside.send(OperatorCommand("robot-1", "release_estop"))
    beside.send(Hello("desk", "console", "c", 1))
    beside.send(OperatorCommand("robot-0", "estop"))
    desk.uplink.poll()
    assert [m.kind for m in desk.to_control() if isinstance(m, OperatorCommand)] == ["estop"]


def test_a_key_beside_the_robot_commands_it_as_a_desk_does(desk: Desk) -> None:
    key, desk.uplink.keys = memory_pair()
    key.send(OperatorCommand("robot-0", "take_over", operator="keys"))
    key.send(OperatorCommand("robot-1", "take_over", operator="keys"))
    desk.uplink.poll()
    assert [m.operator for m in desk.to_control() if isinstance(m, OperatorCommand)] == ["keys"]


def test_a_lost_part_is_asked_for_again_and_a_newer_version_replaces_the_fetch(desk: Desk) -> None:
    desk.hello()
    desk.server.send("robot-0", VersionAvailable(version(1, b"old"), 5))
    desk.uplink.poll()
    assert len(desk.received(FetchWeights)) == 1
    desk.clock.advance(3 * SECOND)
    desk.uplink.poll()
    assert len(desk.received(FetchWeights)) == 1
    desk.server.send("robot-0", VersionAvailable(version(2, b"new"), 5))
    desk.server.send("robot-0", WeightBytes(1, 0, b"old"))
    desk.server.send("robot-0", WeightBytes(2, 0, b"new"))
    desk.uplink.poll()
    offered = desk.heard(desk.inference)
    assert [m.version.number for m in offered if isinstance(m, LoadWeights)] == [2]


def test_jobs_and_wishes_reach_control_and_a_new_control_hears_the_job_again(desk: Desk) -> None:
    desk.hello()
    desk.server.send("robot-0", Job("j", ("reach",), 5))
    desk.server.send("robot-0", OperatorCommand("robot-0", "take_over"))
    desk.uplink.poll()
    kinds = [type(m) for m in desk.to_control()]
    assert Job in kinds
    assert OperatorCommand in kinds
    desk.control.send(Hello("robot-0", "edge", "c", 1, 78, samples.spec(), ("reach",)))
    desk.uplink.poll()
    assert any(isinstance(m, Job) for m in desk.to_control())


def test_control_that_says_hello_again_still_knows_who_drives_and_what_has_been_passed_on(desk: Desk) -> None:
    anna = Person(desk.clock, lease=5)

    def told(*commands: OperatorCommand) -> OperatorState:
        for command in commands:
            desk.server.send("robot-0", command)
        desk.uplink.poll()
        desk.to_control()
        desk.control.send(Hello("robot-0", "edge", "c", 1, 77, samples.spec(), ("reach",)))
        desk.uplink.poll()
        (state,) = [m for m in desk.to_control() if isinstance(m, OperatorState)]
        return state

    desk.hello()
    assert told(anna("drop_link")).taken_over is None
    state = told(anna("take_over"), anna("command", 0))
    assert state.taken_over is not None and state.taken_over.operator == "web-1"
    assert state.linked and state.seen == (5, 3)
    state = told(anna("drop_link"))
    assert state.taken_over is not None and not state.linked
    assert told(anna("command", 0)).linked
    state = told(anna("hand_back"))
    assert state.taken_over is None and state.seen == (5, 6), "what comes late does not take it over again"


def test_status_carries_the_spool_and_previews_are_thinned(desk: Desk) -> None:
    desk.hello()
    desk.record(5)
    desk.control.send(
        EdgeStatus("robot-0", 1, "policy", "", "reach", "e", 1, samples.step(0).state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0)
    )
    for n in range(6):
        desk.control.send(FrameRecorded("e", "front", Frame(SECOND + n * 20_000_000, samples.image(n))))
    desk.uplink.poll()
    received = desk.received()
    status = next(m for m in received if isinstance(m, EdgeStatus))
    assert (status.steps_recorded, status.spooled, status.control_pid) == (5, 1, 77)
    assert len([m for m in received if isinstance(m, Preview) and m.time_ns >= SECOND]) == 1


def test_a_stop_is_told_to_no_second_control_process(desk: Desk) -> None:
    desk.hello()
    desk.server.send("robot-0", OperatorCommand("robot-0", "estop"))
    desk.uplink.poll()
    desk.to_control()
    desk.control.send(Hello("robot-0", "edge", "c", 1, 78, samples.spec(), ("reach",)))
    desk.uplink.poll()
    # whoever touches the driver keeps it
    assert [m for m in desk.to_control() if isinstance(m, OperatorCommand)] == []


def test_times_are_carried_over_and_who_is_beside_the_robot_is_for_the_uplink_to_say(desk: Desk) -> None:
    beside, desk.uplink.operator = memory_pair()
    desk.hello()
    ahead_ns, now_ns = -SECOND // 2, desk.clock.now_ns()
    desk.server.send("robot-0", HelloAck("monotonic:elsewhere", now_ns + ahead_ns, now_ns))
    person = Person(desk.clock)
    desk.server.send("robot-0", person("command", 1, captured_ns=now_ns + ahead_ns - 100, beside=True))
    beside.send(person("command", 1, captured_ns=now_ns))
    desk.uplink.poll()
    found = [(m.captured_ns, m.beside) for m in desk.to_control() if isinstance(m, OperatorCommand)]
    assert found == [(now_ns - 100, False), (now_ns, True)]


def test_stops_go_to_the_host_and_past_control(tmp_path: Path) -> None:
    latch, heard = StopLatch(), []

    def host(order: StopOrder) -> StopState:
        heard.append(order)
        match order.kind:
            case "stop":
                latch.stop(order.stop, order.who)
            case "release":
                latch.release(order.stop)
            case "start":
                latch.start()
            case "slow":
                latch.limit_speed(order.who, order.share)
        return latch.state

    desk = Desk(tmp_path, host=host)
    beside, desk.uplink.operator = memory_pair()
    desk.hello()
    desk.server.send("robot-0", OperatorCommand("robot-0", "estop", operator="web-1", stop="web-1-a"))
    desk.server.send("robot-0", OperatorCommand("robot-0", "take_over", operator="web-1"))
    beside.send(OperatorCommand("robot-0", "estop", operator="ros", stop="ros-b"))
    desk.uplink.poll()
    desk.stops.poll()
    assert latch.state == StopState({"web-1-a": "web-1", "ros-b": "ros"}, last="ros-b")
    for stop in ("web-1-a", "ros-b"):
        beside.send(OperatorCommand("robot-0", "release_estop", operator="ros", stop=stop))
    desk.uplink.poll()
    desk.stops.poll()
    assert latch.state == StopState(ready=True, last="ros-b")
    start = Person(desk.clock)("start")
    desk.clock.advance(3 * SECOND)
    desk.server.send("robot-0", start)
    desk.uplink.poll()
    desk.stops.poll()
    assert latch.state == StopState(ready=True, last="ros-b"), "it came too late"
    desk.uplink.poll()
    events = []
    while (message := beside.recv()) is not None:
        events += [message.detail] if isinstance(message, EdgeEvent) else []
    assert events == ["start of 'web-1': it was not made in the last 1 s. Look at the robot and start it again."]
    start = Person(desk.clock)("start")
    desk.server.send("robot-0", start)
    desk.uplink.poll()
    desk.stops.poll()
    assert latch.state.free
    beside.send(OperatorCommand("robot-0", "speed_limit", (0.5,), operator="ros"))
    desk.server.send("robot-0", OperatorCommand("robot-0", "speed_limit", (1.0,), operator="ros"))
    desk.uplink.poll()
    desk.stops.poll()
    assert latch.state == StopState(speed_limits={"ros": 0.5}), "only who is beside it says how fast it is"
    latch.stop("again", "anna")
    latch.release("again")
    desk.server.send("robot-0", start)
    desk.uplink.poll()
    desk.stops.poll()
    assert latch.state.ready, "it has been here before"
    assert [m.kind for m in desk.to_control() if isinstance(m, OperatorCommand)] == ["take_over"]
    desk.hello()  # another control process
    desk.clock.advance(10 * SECOND)
    desk.uplink.poll()
    desk.stops.poll()
    assert [order.kind for order in heard] == ["stop", "stop", "release", "release", "start", "slow"]
    desk.uplink.close()


def test_a_full_disk_that_cannot_even_forget_keeps_what_is_acknowledged(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.hello()
    desk.record(25)
    ids = tuple(s.id for s in segments(desk.received()))
    forget = desk.uplink.spool.forget

    def full(some: tuple[str, ...]) -> None:
        raise DiskFullError("the disk is full")

    monkeypatch.setattr(desk.uplink.spool, "forget", full)
    desk.server.send("robot-0", Ack(ids[:2]))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 3
    monkeypatch.setattr(desk.uplink.spool, "forget", forget)
    desk.server.send("robot-0", Ack(ids[2:]))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 0


def test_pictures_for_people_follow_whether_somebody_looks(desk: Desk) -> None:
    def shown(at_s: float, preview: bool = False) -> list[Preview]:
        for n in range(20):
            larger = samples.image(n) if preview and n % 2 == 0 else None
            time_ns = int(at_s * SECOND) + n * 50_000_000
            desk.control.send(FrameRecorded("e", "front", Frame(time_ns, samples.image(n), larger)))
        desk.uplink.poll()
        return [m for m in desk.received() if isinstance(m, Preview)]

    def asked() -> list[bool]:
        return [m.wanted for m in desk.to_control() if isinstance(m, RequestPreviews)]

    desk.hello()
    assert asked() == [False]
    assert len(shown(10)) == 1
    desk.server.send("robot-0", HelloAck(clock_name(), 1, 1, watched=True, preview_s=0.1))
    desk.uplink.poll()
    assert asked() == [True]
    # small pictures until the first larger one; then only those, until they have been gone for a second
    assert len(shown(11)) == 10
    assert len(shown(12, preview=True)) == 10
    assert len(shown(13)) == 1
    # a control process that is started again is told
    desk.control.send(Hello("robot-0", "edge", "c", 1, 78, samples.spec(), ("reach",)))
    desk.uplink.poll()
    assert asked() == [True]
    # in a large fleet there are fewer, but of a robot that somebody drives
    desk.server.send("robot-0", HelloAck(clock_name(), 1, 1, watched=True, preview_s=0.5))
    desk.uplink.poll()
    assert len(shown(14)) == 2
    state = samples.step(0).state
    desk.control.send(EdgeStatus("robot-0", 1, Mode.human, "", "reach", "e", 1, state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0))
    desk.uplink.poll()
    assert len(shown(15)) == 10
    desk.server.send("robot-0", HelloAck(clock_name(), 1, 1))
    desk.uplink.poll()
    assert asked() == [False]
    assert len(shown(16)) == 1
    # however few they are, no small one comes in between larger ones
    desk.server.send("robot-0", HelloAck(clock_name(), 1, 1, preview_s=1.55))
    desk.uplink.poll()
    few = [*shown(20, preview=True), *shown(21, preview=True)]
    assert [one.time_ns % 100_000_000 for one in few] == [0, 0]


def test_versions_and_parts_that_cannot_be_change_nothing(desk: Desk) -> None:
    desk.hello()
    assert fetch(desk, 1, b"one") == [1]
    sound = version(2, b"two")
    for wrong in ({"sha256": "\0" * 64}, {"sha256": "../" * 30}, {"number": -1}, {"size_bytes": 0}):
        desk.server.send("robot-0", VersionAvailable(msgspec.structs.replace(sound, **wrong), 5))
        desk.uplink.poll()
    assert desk.received(FetchWeights) == []
    assert desk.uplink.weights.refused == {"impossible_version": 4}
    desk.server.send("robot-0", VersionAvailable(sound, 5))
    desk.server.send("robot-0", WeightBytes(2, 0, b"more than was announced"))
    desk.uplink.poll()
    assert desk.uplink.weights.refused["impossible_part"] == 1
    assert fetch(desk, 2, b"two") == [2]
