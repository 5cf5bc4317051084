"""A line through shared memory: order, fullness, doorbells, and ends that are killed in the middle of anything."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import samples
from wire.errors import ConfigError, MessageTooLargeError, StorageError
from wire.messages.gateway import Heartbeat, WeightBytes
from wire.messages.local import ChunkReply, ChunkRequest
from wire.transport.keys import make_keys
from wire.transport.shared_channel import SharedChannel
from wire.transport.zmq_channel import ZmqServer, wait_any

Pair = tuple[SharedChannel, SharedChannel]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    ends = (
        SharedChannel(tmp_path / "line", bind=True, capacity_bytes=4096),
        SharedChannel(tmp_path / "line", bind=False, capacity_bytes=4096),
    )
    yield ends
    for end in ends:
        end.close()


def numbers(channel: SharedChannel) -> list[int]:
    found = []
    while (message := channel.recv()) is not None:
        assert isinstance(message, Heartbeat)
        found.append(message.sent_ns)
    return found


def test_both_directions_keep_order(pair: Pair) -> None:
    there, back = pair
    for number in range(5):
        assert there.send(Heartbeat(number))
        assert back.send(Heartbeat(10 + number))
    assert numbers(back) == list(range(5))
    assert numbers(there) == list(range(10, 15))
    assert there.recv() is None


def test_whole_observations_cross(tmp_path: Path) -> None:
    there = SharedChannel(tmp_path / "line", bind=True)
    back = SharedChannel(tmp_path / "line", bind=False)
    seen = samples.observation()
    assert there.send(ChunkRequest(3, seen, 4, seen.state))
    came = back.recv()
    assert isinstance(came, ChunkRequest)
    assert came.first_tick == 4
    assert (came.observation.images["front"].image == seen.images["front"].image).all()
    there.close()
    back.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1500), st.booleans()), max_size=60))
def test_any_sizes_around_the_end_of_the_ring(tmp_path_factory: pytest.TempPathFactory, plan: list) -> None:
    """Sizes and reading in any order: what was taken comes out, whole and in order."""
    directory = tmp_path_factory.mktemp("ring")
    there = SharedChannel(directory / "line", bind=True, capacity_bytes=4096)
    back = SharedChannel(directory / "line", bind=False, capacity_bytes=4096)
    waiting: list[tuple[int, int]] = []
    try:
        for number, (size, read) in enumerate(plan):
            if there.send(WeightBytes(number, 0, bytes([number % 251]) * size)):
                waiting.append((number, size))
            else:
                assert sum(n for _, n in waiting) > 4096 - 1500 - 32 - 128 - 192 * len(waiting)
            while read and waiting:
                message = back.recv()
                assert isinstance(message, WeightBytes)
                assert (message.number, len(message.data)) == waiting.pop(0)
                assert message.data == bytes([message.number % 251]) * len(message.data)
        assert back.lost == 0
    finally:
        there.close()
        back.close()


def test_a_full_line_says_no_and_goes_on_when_read(pair: Pair) -> None:
    there, back = pair
    sent = 0
    while there.send(Heartbeat(sent)):
        sent += 1
    assert 10 < sent < 4096 / 64 + 1
    assert numbers(back) == list(range(sent))
    assert there.send(Heartbeat(99))
    assert numbers(back) == [99]


def test_what_can_never_fit_is_an_error(pair: Pair) -> None:
    with pytest.raises(MessageTooLargeError, match="larger capacity_bytes"):
        pair[0].send(WeightBytes(1, 0, bytes(5000)))


def test_with_nobody_there_nothing_is_sent_and_nothing_comes_later(tmp_path: Path) -> None:
    there = SharedChannel(tmp_path / "line", bind=True)
    assert not there.send(Heartbeat(1))
    back = SharedChannel(tmp_path / "line", bind=False)
    assert back.recv() is None
    assert there.send(Heartbeat(2))
    assert numbers(back) == [2]
    back.close()
    assert not there.send(Heartbeat(3))
    there.close()


def test_the_doorbell_is_waited_for_beside_zeromq(pair: Pair, tmp_path: Path) -> None:
    there, back = pair
    make_keys(tmp_path / "keys", ["gateway"])
    other = ZmqServer("tcp://127.0.0.1:*", tmp_path / "keys")
    began = time.monotonic()
    wait_any([back, other], 0.05)
    assert time.monotonic() - began >= 0.04
    for number in range(3):
        there.send(Heartbeat(number))
    assert back.recv() is not None
    # Not all is read: the bell still rings.
    began = time.monotonic()
    wait_any([back, other], 60.0)
    assert time.monotonic() - began < 30.0
    assert numbers(back) == [1, 2]
    began = time.monotonic()
    wait_any([back, other], 0.05)
    assert time.monotonic() - began >= 0.04
    other.close()


def test_a_bell_that_nobody_heard_for_long_does_not_block(pair: Pair) -> None:
    there, back = pair
    for number in range(70_000):
        assert there.send(Heartbeat(number))
        back._header[back._in_tail] = back._header[back._in_head]
    assert numbers(back) == []


def test_another_size_at_the_other_end_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4096 bytes' and this process expects .*8192 bytes"):
        SharedChannel(tmp_path / "line", bind=False, capacity_bytes=8192)


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"making shared memory .*gone/line"):
        SharedChannel(tmp_path / "gone" / "line", bind=True)


def test_a_successor_hears_nothing_that_was_meant_for_its_predecessor(pair: Pair, tmp_path: Path) -> None:
    there, back = pair
    there.send(Heartbeat(1))
    successor = SharedChannel(tmp_path / "line", bind=False, capacity_bytes=4096)
    assert successor.recv() is None
    there.send(Heartbeat(2))
    assert numbers(successor) == [2]
    # The one that was replaced takes nothing away and cannot speak any more.
    assert not back.send(Heartbeat(3))
    assert back.recv() is None
    assert there.recv() is None
    successor.close()


def test_what_a_dead_end_left_is_not_delivered_once_its_successor_is_there(pair: Pair, tmp_path: Path) -> None:
    there, back = pair
    there.send(Heartbeat(1))
    there.send(Heartbeat(2))
    assert isinstance(back.recv(), Heartbeat)
    successor = SharedChannel(tmp_path / "line", bind=True, capacity_bytes=4096)
    successor.send(Heartbeat(3))
    assert numbers(back) == [3]
    assert back.lost == 1
    successor.close()


def test_a_record_that_was_not_finished_is_never_seen(pair: Pair) -> None:
    there, back = pair
    head = there._header[there._out_head]
    there.send(Heartbeat(1))
    # As if the writer had died just before it moved the head: a successor writes over it.
    there._header[there._out_head] = head
    assert back.recv() is None
    there.send(Heartbeat(2))
    assert numbers(back) == [2]


def test_damaged_bytes_are_dropped_with_an_error(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    there, back = pair
    at = there._header[there._out_head] % 4096
    there.send(Heartbeat(1))
    there.send(Heartbeat(2))
    there._out[at + 32] ^= 0xFF
    assert numbers(back) == [2]
    assert back.lost == 1
    assert "its checksum is wrong" in caplog.text


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.integers(0, 600))
def test_no_damage_is_delivered_or_stops_the_line(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    directory = tmp_path_factory.mktemp("ring")
    there = SharedChannel(directory / "line", bind=True, capacity_bytes=4096)
    back = SharedChannel(directory / "line", bind=False, capacity_bytes=4096)
    for number in range(5):
        there.send(Heartbeat(number))
    there._out[at : at + len(noise)] = noise
    assert set(numbers(back)) <= set(range(5))
    assert there.send(Heartbeat(7))
    assert numbers(back) == [7]
    there.close()
    back.close()


TALKER = """
import os, sys
from pathlib import Path
from wire.messages.gateway import WeightBytes
from wire.transport.shared_channel import SharedChannel
line = SharedChannel(Path(sys.argv[1]), bind=True)
start, number, parent = int(sys.argv[2]), 0, os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    # Sizes of their own for each start, so that a mixture would be seen.
    if line.send(WeightBytes(start, number, bytes([number % 251]) * (number * 7919 % 200_000))):
        number += 1
"""


@pytest.mark.slow
def test_a_writer_killed_in_full_speech_leaves_nothing_torn(tmp_path: Path) -> None:
    back = SharedChannel(tmp_path / "line", bind=False)
    for start in (1, 2, 3):
        process = subprocess.Popen(
            [sys.executable, "-c", TALKER, str(tmp_path / "line"), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        expected, until = 0, time.monotonic() + 0.3 + 0.013 * start
        while time.monotonic() < until:
            wait_any([back], 0.1)
            message = back.recv()
            if message is None:
                continue
            assert isinstance(message, WeightBytes)
            assert (message.number, message.offset) == (start, expected)
            assert message.data == bytes([expected % 251]) * (expected * 7919 % 200_000)
            expected += 1
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
        assert expected > 10
        assert not back.send(Heartbeat(1)), "nobody is there"
        if start == 3:
            # Without a successor, what was said whole before the end is still good.
            while (message := back.recv()) is not None:
                assert isinstance(message, WeightBytes)
                assert message.data == bytes([expected % 251]) * (expected * 7919 % 200_000)
                expected += 1
    back.close()


ECHO = """
import sys
from pathlib import Path
from wire.messages.local import ChunkReply
from wire.transport.shared_channel import SharedChannel
from wire.transport.zmq_channel import wait_any
line = SharedChannel(Path(sys.argv[1]), bind=True)
while True:
    wait_any([line], 1.0)
    message = line.recv()
    if message is not None:
        line.send(ChunkReply(None, "", message.sent_ns))
"""


def test_an_end_that_is_killed_and_restarted_is_found_again(tmp_path: Path) -> None:
    back = SharedChannel(tmp_path / "line", bind=False)
    for round_ in range(2):
        process = subprocess.Popen([sys.executable, "-c", ECHO, str(tmp_path / "line")])
        try:
            deadline = time.monotonic() + 60
            while not back.send(Heartbeat(round_)) and time.monotonic() < deadline:
                time.sleep(0.01)
            while (reply := back.recv()) is None and time.monotonic() < deadline:
                wait_any([back], 1.0)
            assert isinstance(reply, ChunkReply)
            assert reply.tick == round_
        finally:
            process.kill()
            process.wait(60)
        assert not back.send(Heartbeat(99))
    back.close()


def test_an_end_that_polls_is_not_rung_for_each_message_and_missed_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("wire.transport.shared_channel.time.monotonic", lambda: now_s)
    there = SharedChannel(tmp_path / "line", bind=True)
    assert not there.send(Heartbeat(0)), "nobody has come yet"
    back = SharedChannel(tmp_path / "line", bind=False, polls=True)
    rung: list[int] = []
    ring = there._wake_peer
    monkeypatch.setattr(there, "_wake_peer", lambda: rung.append(1) or ring())
    assert all(there.send(Heartbeat(number)) for number in range(5))
    assert numbers(back) == list(range(5)) and len(rung) == 1
    now_s += 0.06
    assert there.send(Heartbeat(5)) and len(rung) == 2
    back.close()
    now_s += 0.06
    assert not there.send(Heartbeat(6))
    assert not there.send(Heartbeat(7)), "and is asked for again with each message"
    successor = SharedChannel(tmp_path / "line", bind=False, polls=True)
    assert there.send(Heartbeat(8))
    assert numbers(successor) == [8]
    assert successor.send(Heartbeat(9)) and numbers(there) == [9]
    there.close()
    successor.close()
