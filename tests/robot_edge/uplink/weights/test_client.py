"""Weights come in parts that no heartbeat waits behind, and a large file keeps nothing else waiting."""

from __future__ import annotations

import hashlib
from pathlib import Path

from robot_edge.uplink.weights.client import WeightClient
from wire.clock import ManualClock
from wire.messages.gateway import FetchWeights, WeightBytes
from wire.transport.memory_channel import memory_pair
from wire.types import PolicyVersion

SECOND = 1_000_000_000


class Line:
    """A weight client behind a line that brings so many bytes a second."""

    def __init__(self, root: Path, bytes_per_s: float, round_trip_s: float = 0.0) -> None:
        self.clock, self.bytes_per_s, self.round_trip_ns = ManualClock(SECOND), bytes_per_s, round(round_trip_s * 1e9)
        self.gateway, channel = memory_pair()
        self.client = WeightClient(root, channel, self.clock)
        self.asked: list[int] = []
        """sizes of parts"""
        self.queued_s: list[float] = []
        """how long the line was still busy with others when a part was asked for"""
        self.lost: set[int] = set()
        """numbers of parts"""

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
                now_ns = self.clock.now_ns()
                self.queued_s.append(max(0, free_ns - now_ns) / SECOND)
                free_ns = max(free_ns, now_ns) + round(len(part) / self.bytes_per_s * 1e9)
                if len(self.asked) not in self.lost:
                    coming.append((free_ns + self.round_trip_ns, WeightBytes(number, message.offset, part)))
            while coming and coming[0][0] <= self.clock.now_ns():
                self.client.add_part(coming.pop(0)[1])
            self.client.poll()
            self.clock.advance(SECOND // 200)
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
    assert set(line.asked[:-1]) == {256 * 1024}


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


def version_of(number: int, data: bytes) -> PolicyVersion:
    return PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 1, 1, 1)


def test_a_version_that_is_called_back_to_replaces_one_under_way_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    bad, good = b"worst" * 100_000, b"good"
    line.client.fetch(version_of(2, bad))
    line.client.add_part(WeightBytes(2, 0, bad[: 256 * 1024]))
    # announced meanwhile, and not wanted any more either
    line.client.fetch(version_of(3, bad))
    line.fetch(good, number=1)
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == good
    assert line.client._file is None and not list(tmp_path.glob("*.part"))


def test_versions_that_come_faster_than_they_can_be_fetched_arrive_all_the_same(tmp_path: Path) -> None:
    """One takes some 12 s and there is a new one every 5 s: then the newest is at most three behind."""
    line, arrived = Line(tmp_path, 100_000), []
    weights = {number: bytes([number]) * 1_000_000 for number in range(1, 16)}
    coming: list[tuple[int, WeightBytes]] = []
    free_ns = 0
    for hundredth in range(100 * 100):
        if hundredth % 500 == 0 and (number := 1 + hundredth // 500) in weights:
            line.client.fetch(version_of(number, weights[number]))
        now_ns = line.clock.now_ns()
        while isinstance(message := line.gateway.recv(), FetchWeights):
            part = weights[message.number][message.offset : message.offset + message.size]
            free_ns = max(free_ns, now_ns) + round(len(part) / line.bytes_per_s * 1e9)
            coming.append((free_ns, WeightBytes(message.number, message.offset, part)))
        while coming and coming[0][0] <= now_ns:
            line.client.add_part(coming.pop(0)[1])
        if line.client.poll() and line.client.ready is not None:
            arrived.append((1 + hundredth // 500, line.client.ready[0].number))
        line.clock.advance(SECOND // 100)
    assert len(arrived) >= 5
    assert max(announced - here for announced, here in arrived[:-1]) <= 5
    assert arrived[-1][1] == 15


def test_on_a_long_fast_line_many_parts_are_under_way(tmp_path: Path) -> None:
    """Ten megabytes a second over a satellite: one part after the other would bring 256 KiB a round trip."""
    line = Line(tmp_path, 1e7, round_trip_s=0.15)
    data = bytes(range(256)) * 100_000
    assert line.fetch(data) < 8.0
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == data


def test_what_is_under_way_keeps_a_command_waiting_for_a_moment_only(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e7, round_trip_s=0.03)
    line.fetch(bytes(20_000_000))
    assert max(line.queued_s[50:]) < 0.15


def test_a_part_that_is_lost_is_asked_for_again(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e7, round_trip_s=0.03)
    line.lost = {5, 20}
    data = bytes(range(256)) * 40_000
    assert line.fetch(data) < 10.0
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == data


def test_a_version_that_nobody_has_any_more_gives_way_to_the_next(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    lost, good = b"lost" * 100_000, b"good" * 1000
    line.client.fetch(version_of(5, lost))
    line.client.fetch(version_of(6, good))
    # what is asked for of 5 is answered by nobody
    assert line.fetch(good, number=6) < 15.0
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == good


def test_a_wrong_version_gives_way_to_the_next(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    wrong, good = b"wrong" * 100, b"good"
    line.client.fetch(version_of(5, wrong))
    line.client.fetch(version_of(6, good))
    line.client.add_part(WeightBytes(5, 0, b"other" * 100))
    line.fetch(good, number=6)
    assert line.client.ready is not None and line.client.ready[1].read_bytes() == good


def test_what_acts_is_not_fetched_again_when_something_older_was_wanted_for_a_while(tmp_path: Path) -> None:
    line = Line(tmp_path, 1e9)
    newest, older = b"newest", b"older" * 100_000
    line.fetch(newest, number=9)
    line.client.fetch(version_of(4, older))
    line.client.fetch(version_of(9, newest))
    line.asked.clear()
    assert not any(line.client.poll() for _ in range(10))
    assert line.client.ready is not None and line.client.ready[0].number == 9
    assert not list(tmp_path.glob("*.part"))


def test_a_part_that_comes_late_is_taken_all_the_same(tmp_path: Path) -> None:
    line = Line(tmp_path, 50_000)
    data = bytes(range(256)) * 4_000
    line.fetch(data)
    assert line.client.refused == {}
