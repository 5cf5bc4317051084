"""Weights come in parts that no heartbeat waits behind, and a large file keeps nothing else waiting."""

from __future__ import annotations

import hashlib
from pathlib import Path

from robot_edge.uplink.weight_client import WeightClient
from wire.clock import ManualClock
from wire.messages.gateway import FetchWeights, WeightBytes
from wire.transport.memory_channel import memory_pair
from wire.types import PolicyVersion

SECOND = 1_000_000_000


class Line:
    """A weight client behind a line that brings so many bytes a second."""

    def __init__(self, root: Path, bytes_per_s: float) -> None:
        self.clock, self.bytes_per_s = ManualClock(SECOND), bytes_per_s
        self.gateway, channel = memory_pair()
        self.client = WeightClient(root, channel, self.clock)
        self.asked: list[int] = []
        """sizes of parts"""

    def fetch(self, data: bytes, number: int = 1, most_s: float = 60.0) -> float:
        """How long it took until the version was ready."""
        began_ns = self.clock.now_ns()
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 1, 1, 1)
        self.client.fetch(version)
        free_ns = began_ns
        coming: list[tuple[int, WeightBytes]] = []
        while self.client.ready is None or self.client.ready[0].number != number:
            while isinstance(message := self.gateway.recv(), FetchWeights):
                self.asked.append(message.size)
                part = data[message.offset : message.offset + message.size]
                free_ns = max(free_ns, self.clock.now_ns()) + round(len(part) / self.bytes_per_s * 1e9)
                coming.append((free_ns, WeightBytes(number, message.offset, part)))
            while coming and coming[0][0] <= self.clock.now_ns():
                self.client.add_part(coming.pop(0)[1])
            self.client.poll()
            self.clock.advance(SECOND // 100)
            assert self.clock.now_ns() - began_ns < most_s * SECOND
        return (self.clock.now_ns() - began_ns) / SECOND


def test_on_a_slow_line_parts_are_small_and_none_is_asked_for_twice(tmp_path: Path) -> None:
    line = Line(tmp_path, 60_000)
    data = bytes(range(256)) * 4_000
    took_s = line.fetch(data)
    assert took_s < 1.3 * len(data) / 60_000 + 5
    # the first ones show how slow it is; then a heartbeat's answer waits for less than half a second
    assert max(line.asked[5:]) / 60_000 < 0.5
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == data


def test_on_a_fast_line_parts_are_as_large_as_they_may_be(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    line.fetch(bytes(4_000_000))
    assert set(line.asked) == {256 * 1024}


def test_a_large_version_that_is_here_is_checked_in_pieces(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e12)
    large, small = bytes(20 * 1024 * 1024), b"small"
    line.fetch(large)
    line.fetch(small, number=2)
    line.asked.clear()
    version = PolicyVersion(1, hashlib.sha256(large).hexdigest(), len(large), 0, 1, 1, 1)
    line.client.fetch(version)
    assert [line.client.poll() for _ in range(4)] == [False, False, True, False]
    assert line.client.ready == (version, line.client.ready[1] if line.client.ready else None)
    assert line.asked == []


def test_a_file_that_is_damaged_is_fetched_again(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    first, second = b"first" * 100, b"second"
    line.fetch(first)
    line.fetch(second, number=2)
    (path,) = (one for one in tmp_path.iterdir() if one.name.startswith("00000001"))
    path.write_bytes(b"worst" * 100)
    line.fetch(first, number=1)
    assert path.read_bytes() == first
    assert len(line.asked) == 3


def test_a_version_that_replaces_one_under_way_leaves_nothing_of_it(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    first, second = b"first" * 100_000, b"second"
    line.client.fetch(PolicyVersion(1, hashlib.sha256(first).hexdigest(), len(first), 0, 1, 1, 1))
    line.client.add_part(WeightBytes(1, 0, first[: 256 * 1024]))
    line.fetch(second, number=2)
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == second
    assert line.client._file is None and not list(tmp_path.glob("*.tmp"))
