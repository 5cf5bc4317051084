"""A control process that waits for its driver says so."""

from __future__ import annotations

from robot_edge.uplink.keepalive import StatusKeepalive
from tests import samples
from wire.clock import ManualClock
from wire.messages.gateway import EdgeStatus, Stop
from wire.transport.memory_channel import memory_pair


def test_the_last_status_is_said_again_while_nothing_else_is() -> None:
    clock = ManualClock()
    here, there = memory_pair()
    pulse = StatusKeepalive(there, clock)
    pulse.beat()
    assert here.recv() is None, "there is no status yet"
    state = samples.step(0).state
    assert pulse.send(EdgeStatus("robot-0", 1, "reset", "", "", "", 7, state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0))
    pulse.send(Stop())
    assert [type(here.recv()) for _ in range(3)] == [EdgeStatus, Stop, type(None)]
    for _ in range(20):
        clock.advance(100_000_000)
        pulse.beat()
    said = []
    while (message := here.recv()) is not None:
        assert isinstance(message, EdgeStatus)
        said.append(message)
    assert [message.time_ns for message in said] == [600_000_000, 1_200_000_000, 1_800_000_000]
    assert {(message.mode, message.tick) for message in said} == {("reset", 7)}
    here.send(Stop())
    assert isinstance(pulse.recv(), Stop)
    pulse.close()
