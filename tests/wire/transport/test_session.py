"""A process is introduced to its gateway, kept known, and introduced again after a break."""

from __future__ import annotations

import pytest

from wire.clock import ManualClock
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.gateway import Heartbeat, Hello, HelloAck, ReintroduceRequest, Rejection
from wire.transport.memory_channel import MemoryServer
from wire.transport.session import GatewaySession

SECOND = 1_000_000_000


class Scene:
    def __init__(self) -> None:
        self.clock, self.server = ManualClock(), MemoryServer()
        hello = Hello("trainer", "trainer", "c", 0)
        self.session = GatewaySession(self.server.connect("trainer"), hello, self.clock)

    def said(self, seconds: float = 1.0) -> list[Message]:
        """What the gateway hears in so many seconds."""
        for _ in range(round(10 * seconds)):
            self.session.poll()
            self.clock.advance(SECOND // 10)
        return [item[1] for item in iter(self.server.recv, None)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_hello_is_repeated_until_it_is_answered_then_come_heartbeats(scene: Scene) -> None:
    first, second = scene.said(2.0)
    assert isinstance(first, Hello) and isinstance(second, Hello)
    assert second.sent_ns - first.sent_ns == SECOND
    assert scene.session.handle_message(HelloAck("c", 1, 1))
    assert [type(message) for message in scene.said(3.0)] == [Heartbeat] * 3
    assert not scene.session.handle_message(Heartbeat(1))


def test_a_heartbeat_names_the_answer_before_it_and_none_of_a_gateway_that_is_gone(scene: Scene) -> None:
    (hello,) = scene.said(1.0)
    assert isinstance(hello, Hello) and hello.wall_ns > 0
    scene.session.handle_message(HelloAck("c", 77, 1))
    (beat,) = scene.said(1.0)
    assert isinstance(beat, Heartbeat) and (beat.echo_ns, beat.echoed_ns) == (77, SECOND)
    scene.session.handle_message(ReintroduceRequest())
    assert isinstance(scene.said(1.0)[0], Hello)
    scene.session.handle_message(HelloAck("another", 5, 1))
    (beat,) = scene.said(1.0)
    assert isinstance(beat, Heartbeat) and (beat.echo_ns, beat.echoed_ns) == (5, 3 * SECOND)


def test_a_new_gateway_is_told_at_once(scene: Scene) -> None:
    scene.session.handle_message(HelloAck("c", 1, 1))
    scene.said()
    scene.session.handle_message(ReintroduceRequest())
    assert [type(message) for message in scene.said(0.1)] == [Hello]


def test_after_a_cut_it_is_introduced_again(scene: Scene) -> None:
    scene.session.handle_message(HelloAck("c", 1, 1))
    scene.said()
    scene.server.cut.add("trainer")
    assert scene.said() == []
    assert not scene.session.accepted
    scene.server.cut.clear()
    assert [type(message) for message in scene.said(0.1)] == [Hello]


def test_a_rejection_is_raised_when_it_lasts(scene: Scene) -> None:
    scene.session.handle_message(Rejection("no such key"))
    scene.session.raise_if_rejected()
    scene.clock.advance(6 * SECOND)
    with pytest.raises(RejectedError, match="no such key"):
        scene.session.raise_if_rejected()
    scene.session.handle_message(HelloAck("c", 1, 1))
    scene.session.raise_if_rejected()
    assert scene.session.refusal == ""
