"""What goes first to the gateway, and what a slow or silent one is spared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from robot_edge.uplink.gateway_link import GatewayLink
from tests import samples
from tests.robot_edge.uplink.test_server import SECOND, Desk, segments
from wire.clock import ManualClock, clock_name
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    EdgeStatus,
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    Preview,
)
from wire.messages.local import EpisodeStarted, FrameRecorded
from wire.transport.memory_channel import memory_pair
from wire.transport.session import BEAT_S, SILENT_AFTER_S
from wire.types import Frame

STATUS = EdgeStatus("robot-0", 1, "policy", "", "reach", "e", 1, samples.step(0).state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0)


class Scene:
    """A link to a gateway that a test plays."""

    def __init__(self) -> None:
        self.clock = ManualClock(5 * SECOND)
        self.gateway, channel = memory_pair()
        self.link = GatewayLink("robot-0", channel, self.clock)
        self.link.introduce(Hello("robot-0", "edge", clock_name(), 1))
        self.link.poll()
        self.heard()
        self.answer()

    def heard(self, kind: type = Message) -> list:
        found = []
        while (message := self.gateway.recv()) is not None:
            found.append(message)
        return [message for message in found if isinstance(message, kind)]

    def answer(self, took_s: float = 0.0) -> bool:
        now_ns = self.clock.now_ns()
        self.link.on_message()
        return self.link.handle_message(HelloAck("elsewhere", now_ns + 7, now_ns - round(took_s * 1e9)))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * SECOND))
        self.link.poll()


def test_each_heartbeat_names_the_answer_before_it_for_a_round_trip_of_the_gateway() -> None:
    scene = Scene()
    scene.pass_time(BEAT_S)
    (beat,) = scene.heard(Heartbeat)
    assert (beat.echo_ns, beat.echoed_ns) == (5 * SECOND + 7, 5 * SECOND)
    scene.answer(0.25)
    scene.pass_time(BEAT_S)
    (beat,) = scene.heard(Heartbeat)
    assert (beat.sent_ns, beat.echo_ns, beat.echoed_ns) == (7 * SECOND, 6 * SECOND + 7, 6 * SECOND)


def test_a_hello_says_the_time_of_day() -> None:
    scene = Scene()
    scene.link.introduce(Hello("robot-0", "edge", clock_name(), 1, pid=2))
    scene.link.poll()
    (hello,) = scene.heard(Hello)
    assert hello.wall_ns > 1_500_000_000 * SECOND


def test_silent_within_two_beats_and_then_heartbeats_alone() -> None:
    scene = Scene()
    scene.pass_time(SILENT_AFTER_S)
    assert not scene.link.silent
    scene.pass_time(0.01)
    assert scene.link.silent and not scene.link.open
    scene.heard()
    for number in range(600):
        scene.link.show_status(msgspec.structs.replace(STATUS, tick=number))
        scene.link.add_event(EdgeEvent("robot-0", number, "hold", str(number)))
        scene.pass_time(1.0)
    assert {type(message) for message in scene.heard()} == {Heartbeat}
    scene.answer()
    scene.link.poll()
    heard = scene.heard()
    assert [message.tick for message in heard if isinstance(message, EdgeStatus)] == [599], "the newest alone"
    events = [message for message in heard if isinstance(message, EdgeEvent)]
    assert [event.detail for event in events[:-1]] == [str(number) for number in range(500, 600)]
    assert events[-1].detail.startswith("500 older events")
    scene.link.poll()
    assert scene.heard() == [], "once"


def test_a_heartbeat_that_waits_makes_the_connection_a_slow_one() -> None:
    scene = Scene()
    assert not scene.link.slow
    scene.pass_time(BEAT_S)
    assert not scene.link.slow
    scene.pass_time(0.6)
    assert scene.link.slow
    scene.answer(0.6)
    assert scene.link.slow
    scene.pass_time(BEAT_S)
    scene.answer()
    assert not scene.link.slow


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.uplink.close()


def test_of_statuses_that_waited_for_a_stopped_uplink_the_newest_is_news(desk: Desk) -> None:
    desk.hello()
    for tick in range(50):
        desk.control.send(msgspec.structs.replace(STATUS, tick=tick))
    desk.uplink.poll()
    assert [message.tick for message in desk.received(EdgeStatus)] == [49]


def test_pictures_for_people_are_left_out_where_heartbeats_wait(desk: Desk) -> None:
    desk.hello()
    episode = samples.episode()
    desk.control.send(EpisodeStarted(episode))
    seen = []
    for second in range(1, 6):
        now_ns = desk.clock.now_ns() + SECOND
        desk.clock.advance(SECOND)
        took_ns = SECOND if second in (2, 3) else 0
        desk.server.send("robot-0", HelloAck(clock_name(), now_ns, now_ns - took_ns))
        desk.uplink.poll()
        desk.control.send(FrameRecorded(episode.id, "front", Frame(now_ns, samples.image(second))))
        desk.uplink.poll()
        seen.append(len(desk.received(Preview)))
    assert seen == [1, 0, 0, 1, 1]


def test_a_local_operator_sees_that_the_gateway_is_silent(desk: Desk) -> None:
    beside, desk.uplink.operator = memory_pair()
    desk.hello()
    desk.clock.advance(round((SILENT_AFTER_S + 0.1) * SECOND))
    desk.control.send(msgspec.structs.replace(STATUS, detail="the arm is warm"))
    desk.uplink.poll()
    assert [m.detail for m in desk.heard(beside) if isinstance(m, EdgeStatus)] == [
        "the arm is warm; the gateway is silent"
    ]


def test_what_cannot_be_stored_is_logged_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.hello()
    desk.record(5)
    (segment,) = segments(desk.received())
    for _ in range(5):
        desk.server.send("robot-0", Nack("the disk is full"))
    desk.uplink.poll()
    assert caplog.text.count("the disk is full") == 1
    desk.server.send("robot-0", Ack((segment.id,)))
    desk.server.send("robot-0", Nack("the disk is full"))
    desk.uplink.poll()
    assert caplog.text.count("the disk is full") == 2


def test_what_control_repeats_of_itself_is_no_new_introduction() -> None:
    """It says hello every two seconds; what is under way would be sent again each time."""
    scene = Scene()
    scene.link.introduce(Hello("robot-0", "edge", clock_name(), 1))
    scene.pass_time(BEAT_S)
    assert scene.link.accepted and not scene.heard(Hello)
    scene.link.introduce(Hello("robot-0", "edge", clock_name(), 1, pid=2))
    scene.link.poll()
    assert not scene.link.accepted and len(scene.heard(Hello)) == 1
