"""A control process that waits for its driver says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from robot_edge.runtime.process_group import StatusKeepalive
from tests import samples
from wire.clock import ManualClock
from wire.messages.gateway import EdgeStatus
from wire.transport.memory_channel import memory_pair


def test_the_last_status_is_said_again_while_nothing_else_is() -> None:
    clock = ManualClock()
    here, there = memory_pair()
    loop: Any = SimpleNamespace(status=None)
    keepalive = StatusKeepalive(loop, there, clock)
    clock.advance(1_000_000_000)
    keepalive.poll()
    assert here.recv() is None, "there is no status yet"
    state = samples.step(0).state
    now_ns = clock.now_ns()
    loop.status = EdgeStatus("robot-0", now_ns, "reset", "", "", "", 7, state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0)
    for _ in range(20):
        clock.advance(100_000_000)
        keepalive.poll()
    said = []
    while (message := here.recv()) is not None:
        assert isinstance(message, EdgeStatus)
        said.append(message)
    assert [message.time_ns - now_ns for message in said] == [600_000_000, 1_200_000_000, 1_800_000_000]
    assert {(message.mode, message.tick) for message in said} == {("reset", 7)}
