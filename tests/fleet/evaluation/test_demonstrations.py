"""Demonstrations, recorded whole by a robot's own loop and spool."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fleet.config.recipes import get_recipe
from fleet.evaluation.demonstrations import demonstrate
from wire.clock import clock_name
from wire.messages.gateway import Ack, Hello, HelloAck, Segment
from wire.transport.memory_channel import MemoryServer


def test_each_demonstration_ends_with_what_its_last_action_led_to_and_none_is_left_half_done(tmp_path: Path) -> None:
    server, stored = MemoryServer(), []

    def acknowledge() -> None:
        while (item := server.recv()) is not None:
            if isinstance(item[1], Hello):
                server.send("demo", HelloAck(clock_name(), 1, 1))
            elif isinstance(item[1], Segment):
                stored.append(item[1])
                server.send("demo", Ack((item[1].id,)))

    demonstrate(get_recipe("fake"), "demo", tmp_path, server.connect("demo"), 3, 0, acknowledge)
    ends = [segment for segment in stored if segment.last]
    assert [end.outcome for end in ends] == ["success"] * 3
    assert len({segment.episode.id for segment in stored}) == 3
    for end in ends:
        assert end.terminated[-1] and not end.truncated.any()
        assert end.terminal is not None and end.terminal.time_ns > end.times_ns[-1]
        moved = end.terminal.state[:3] - end.state[-1, :3]
        np.testing.assert_allclose(moved, 0.01 * end.executed[-1, :3], atol=1e-6)
    assert not any(segment.chunks for segment in stored)
