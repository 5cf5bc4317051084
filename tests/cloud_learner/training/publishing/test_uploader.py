"""A version goes to the gateway a few megabytes ahead of what is stored, over lines that are slow, full or cut."""

import hashlib
import time

import numpy as np
import pytest

from cloud_learner.training.publishing import uploader as upload
from cloud_learner.training.publishing.uploader import WeightUploader
from wire.clock import ManualClock, MonotonicClock
from wire.messages.gateway import Heartbeat, HelloAck, Publish, WeightBytes
from wire.transport.keys import make_keys
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any
from wire.types import PolicyVersion


class Line:
    """A channel with room for `room` messages. `pump` is the gateway: it stores and answers."""

    def __init__(self, room=10**9):
        self.room = room
        self.queue = []
        self.stored = b""
        self.offers = []
        self.most_bytes = 0

    def send(self, message):
        if len(self.queue) >= self.room:
            return False
        self.queue.append(message)
        self.most_bytes = max(self.most_bytes, sum(len(m.data) for m in self.queue if isinstance(m, WeightBytes)))
        return True

    def pump(self, uploading, count=10**9):
        taken, self.queue = self.queue[:count], self.queue[count:]
        for message in taken:
            match message:
                case Publish():
                    self.offers.append(message)
                    self.stored = b""
                case WeightBytes():
                    assert message.offset == len(self.stored), "a part is missing"
                    assert message.number == uploading.version.number
                    self.stored += message.data
                case Heartbeat(sent_ns=sent_ns):
                    uploading.on_heartbeat_answered(sent_ns)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(upload, "PART_BYTES", 1000)
    monkeypatch.setattr(upload, "WINDOW_BYTES", 2000)
    monkeypatch.setattr(upload, "MAX_UNANSWERED", 3)


def start(size, line, clock=None):
    weights = np.random.default_rng(0).bytes(size)
    version = PolicyVersion(4, hashlib.sha256(weights).hexdigest(), size, 3, 7, 0, 0, 0)
    return weights, WeightUploader(version, weights, frozenset({9, 2}), line, clock or ManualClock())


@pytest.mark.parametrize("size", [1, 999, 2000, 8000])
def test_what_is_small_goes_at_once_as_it_always_did(size):
    line = Line()
    weights, sending = start(size, line)
    sending.poll()
    line.pump(sending)
    assert line.stored == weights
    assert line.offers[0].trained == (2, 9)
    sending.poll()
    assert not line.queue


@pytest.mark.parametrize("size", [8001, 20_000, 20_001])
@pytest.mark.parametrize(("room", "taken"), [(10**9, 10**9), (10**9, 2), (5, 3), (1, 1)])
def test_all_of_it_arrives_and_little_is_under_way(size, room, taken):
    line = Line(room)
    weights, sending = start(size, line)
    turns = 0
    while line.stored != weights:
        sending.poll()
        line.pump(sending, taken)
        turns += 1
        assert turns < 200
    assert line.most_bytes <= 4 * 2000
    assert len(line.offers) == 1
    assert turns >= 2


def test_without_answers_nothing_more_is_sent_and_after_a_while_everything_again():
    clock, line = ManualClock(), Line()
    weights, sending = start(20_000, line, clock)
    sending.poll()
    under_way = len(line.queue)
    sending.poll()
    assert len(line.queue) == under_way
    line.queue.clear()
    clock.advance(int(upload.TIMEOUT_S * 1e9))
    sending.poll()
    assert not line.queue
    clock.advance(1)
    while line.stored != weights:
        sending.poll()
        line.pump(sending)
    assert len(line.offers) == 1


def test_a_slow_line_that_moves_is_not_given_up():
    clock, line = ManualClock(), Line()
    weights, sending = start(20_000, line, clock)
    while line.stored != weights:
        sending.poll()
        line.pump(sending, 3)
        clock.advance(int(0.9 * upload.TIMEOUT_S * 1e9))
    assert len(line.offers) == 1


def test_a_gateway_that_takes_long_in_the_end_is_asked_and_not_sent_everything_again():
    clock, line = ManualClock(), Line()
    weights, sending = start(5000, line, clock)
    sending.poll()
    line.pump(sending)
    assert line.stored == weights
    for _ in range(10):
        clock.advance(int(upload.ASK_S * 1e9) + 1)
        sending.poll()
    assert [type(one) for one in line.queue] == [Publish, Heartbeat] * 10


def test_a_gateway_that_lost_it_is_sent_everything_again():
    clock, line = ManualClock(), Line()
    weights, sending = start(5000, line, clock)
    sending.poll()
    line.queue.clear()
    for _ in range(2):
        clock.advance(int(upload.ASK_S * 1e9) + 1)
        sending.poll()
    line.pump(sending)
    while line.stored != weights:
        sending.poll()
        line.pump(sending)
    assert not line.queue


def test_a_line_that_is_down_is_tried_again():
    line = Line(0)
    weights, sending = start(500, line)
    sending.poll()
    line.room = 10
    sending.poll()
    line.pump(sending)
    assert line.stored == weights


@pytest.mark.parametrize("queue", [2, 1000])
def test_over_a_real_line_nothing_is_dropped_however_short_its_queue(tmp_path, queue):
    make_keys(tmp_path, ["gateway", "trainer"])
    server = ZmqServer("tcp://127.0.0.1:*", tmp_path, queue=queue)
    client = ZmqClient(server.endpoint, "trainer", tmp_path, queue=queue)
    try:
        weights, sending = start(300_000, client, MonotonicClock())
        stored, offers = bytearray(), 0
        deadline = time.monotonic() + 60
        while len(stored) < len(weights) and time.monotonic() < deadline:
            sending.poll()
            wait_any([server, client], 0.001)
            while (received := server.recv()) is not None:
                match received[1]:
                    case Publish():
                        offers += 1
                    case WeightBytes(offset=offset, data=data):
                        assert offset == len(stored), "a part is missing"
                        stored += data
                    case Heartbeat(sent_ns=sent_ns):
                        server.send("trainer", HelloAck("here", 0, sent_ns))
            while (message := client.recv()) is not None:
                sending.on_heartbeat_answered(message.echo_ns)
        assert (bytes(stored), offers) == (weights, 1)
    finally:
        client.close()
        server.close()
