"""The robots of `benchmarks.wire` send what a gateway takes, under the rules of an edge."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq

from benchmarks.wire import robots
from benchmarks.wire.fleet import RawServer, make_fleet_keys
from benchmarks.wire.robots import WINDOW, LoadRobot, LoadRobots, Phase, RobotSettings
from benchmarks.wire.samples import SEGMENTS, SPEC, robot_names, segments_of, status
from cloud_learner.buffer.check import CommittedHistory, check_frames, check_names, check_order, check_steps
from wire.codec import decode
from wire.messages.gateway import Ack, EdgeStatus, HelloAck, Segment

NAME = robot_names(1)[0]


def test_its_segments_are_valid_and_each_its_own() -> None:
    ids = set()
    for episode in range(2):
        history = CommittedHistory()
        for encoded in segments_of(NAME, "a" * 8, episode):
            segment = decode(encoded.data)
            assert isinstance(segment, Segment)
            assert segment.id == encoded.id
            check_names(segment, NAME)
            check_steps(segment, SPEC)
            check_order(segment, history)
            check_frames(segment, SPEC, history.frames_until(segment.index))
            history.add(segment)
            ids.add(segment.id)
        assert history.ended_at == SEGMENTS - 1
    assert len(ids) == 2 * SEGMENTS
    assert isinstance(decode(status(NAME)), EdgeStatus)


class _Line:
    """Both ends of a robot's connection."""

    def __init__(self, *_: object) -> None:
        self.socket, self.sent, self.answers = self, list[str](), list[object]()

    def send(self, data: object, *_: object) -> bool:
        if isinstance(data, bytes) and isinstance(message := decode(data), Segment):
            self.sent.append(message.id)
        return True

    def recv(self) -> object:
        return self.answers.pop(0) if self.answers else None


def test_a_robot_keeps_to_its_window_and_to_the_credit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(robots, "ZmqClient", _Line)
    robot = LoadRobot(RobotSettings("tcp://127.0.0.1:1", str(tmp_path), [NAME]), NAME)
    line, now_ns = robot.client, time.monotonic_ns()
    assert isinstance(line, _Line)
    robot.begin(0, now_ns)
    robot.fill(now_ns)
    assert line.sent == []  # nobody has let it in
    size = len(segments_of(NAME, "a" * 8, 0)[0].data)
    line.answers.append(HelloAck("", 0, 0, credit_bytes=int(2.5 * size)))
    robot.read()
    robot.fill(now_ns)
    assert len(line.sent) == 2
    line.answers.append(Ack((line.sent[0],), credit_bytes=100 * size))
    robot.read()
    robot.fill(now_ns)
    assert len(line.sent) == 1 + WINDOW
    assert robot.result.segments == 1
    line.answers.append(Ack((), credit_bytes=0))
    robot.read()
    robot.fill(now_ns + 6_000_000_000)
    assert robot.result.resent == WINDOW
    assert len(line.sent) == 1 + WINDOW  # they wait for credit again


def test_a_plain_router_gets_what_robots_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "Context", zmq.Context)  # as it was, afterwards
    names = robot_names(2)
    make_fleet_keys(tmp_path / "keys", names)
    server = RawServer(tmp_path, tmp_path / "keys", disk=True)
    try:
        load = LoadRobots(RobotSettings(server.endpoint, str(tmp_path / "keys"), names, raw=True))
        load.connect()
        found = load.run(Phase(0.5, 0.5))
        assert found.segments > 2
        assert len(found.latencies_ms) == found.segments
        load.close()
    finally:
        server.end()
