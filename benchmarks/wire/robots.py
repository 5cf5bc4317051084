"""Simulated robots in one process: to the gateway they are robots, with a key and two connections each.

    python -m benchmarks.wire.robots SETTINGS

They say hello, send statuses, heartbeats and pictures for people at the rates of an edge, and segments under an edge's
rules: eight under way at most, and no more bytes than the gateway gives credit for. Once all are let in the process
says `ready`; what they are to do comes as a line of JSON (`Phase`) and is answered by one (`PhaseResult`). One thread
sees all messages go and come.
"""

from __future__ import annotations

import heapq
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.wire.samples import SPEC, STATUS_S, TASKS, EncodedSegment, previews, segments_of, status
from wire.clock import MonotonicClock, clock_name
from wire.errors import RejectedError
from wire.messages.gateway import Ack, Heartbeat, Hello, HelloAck, Nack, OperatorCommand, ReintroduceRequest, Rejection
from wire.transport.stop_connection import StopConnection
from wire.transport.zmq_channel import ZmqClient
from wire.types import OperatorCommandKind, Role

WINDOW = 8
_RESEND_NS = 5_000_000_000
_HEARTBEAT_NS, _STATUS_NS = 1_000_000_000, round(STATUS_S * 1e9)
_DRIVEN_PREVIEW_NS = 100_000_000
_AGAIN_NS = 5_000_000
_CONNECT_S = 120.0


class RobotSettings(msgspec.Struct, frozen=True):
    """What the process is told."""

    endpoint: str
    keys: str
    names: list[str]
    raw: bool = False
    """to a plain ROUTER socket, which answers each segment with an empty message; nothing but segments"""
    nice: int = 0
    """robots have computers of their own: those who only make load stand behind on this one"""


class Phase(msgspec.Struct, frozen=True):
    """What the robots do for a while."""

    seconds: float
    warm_s: float
    """before that, not counted"""
    period_s: float = 0.0
    """between two segments of a robot; 0: as fast as they are acknowledged"""


class PhaseResult(msgspec.Struct):
    """What came of it."""

    seconds: float = 0.0
    segments: int = 0
    """acknowledged"""
    bytes: int = 0
    resent: int = 0
    nacked: int = 0
    refused: int = 0
    waiting: int = 0
    """segments not acknowledged at the end"""
    latencies_ms: list[float] = []
    """of segments, from when each was recorded until it was acknowledged"""
    commands_ms: dict[str, list[float]] = {}
    """by operator: from when each was sent until it came to the robot"""


class LoadRobot:
    """One robot; `read` what came, `send_due` what is due, `fill` with segments."""

    def __init__(self, settings: RobotSettings, name: str) -> None:
        keys = Path(settings.keys)
        self.name = name
        self.client = ZmqClient(settings.endpoint, name, keys)
        self.accepted = settings.raw
        self.raw = settings.raw
        self.period_ns = -1
        """between two segments; 0: as fast as can be, -1: none"""
        self.result = PhaseResult()
        self._stops = StopConnection(settings.endpoint, lambda at: ZmqClient(at, name, keys), MonotonicClock())
        self._hello = Hello(name, Role.edge, clock_name(), 0, os.getpid(), SPEC, TASKS)
        self._status, self._previews = status(name), previews(name)
        self._echo = Heartbeat(0)
        self._preview_ns, self._driven = 1_000_000_000, False
        self._credit = 2**62 if settings.raw else 0
        self._run, self._episode = secrets.token_hex(4), 0
        self._made: deque[EncodedSegment] = deque()
        self._recorded_ns: deque[int] = deque()
        """of those that wait to be sent"""
        self._resend: deque[tuple[EncodedSegment, int]] = deque()
        self._in_flight: dict[str, tuple[EncodedSegment, int]] = {}
        """by id: with when it was recorded"""
        self._in_flight_bytes = 0
        self._progress_ns = 0
        self._due_ns = dict.fromkeys(("greet", "status", "preview", "stops"), 0)
        self._next_segment_ns = 0

    def begin(self, period_ns: int, first_ns: int) -> None:
        """Send segments from `first_ns` on."""
        self.period_ns, self._next_segment_ns, self.result = period_ns, first_ns, PhaseResult()

    @property
    def waiting(self) -> int:
        """Segments recorded and not acknowledged."""
        return len(self._in_flight) + len(self._resend) + len(self._recorded_ns)

    # --- what comes -----------------------------------------------------------------------------------------------

    def read(self) -> None:
        if self.raw:
            while int(self.client.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.client.socket.recv(zmq.NOBLOCK)
                self._acknowledged(next(iter(self._in_flight)), time.monotonic_ns())
            return
        while (message := self.client.recv()) is not None:
            now_ns = time.monotonic_ns()
            match message:
                case HelloAck():
                    self._echo = Heartbeat(0, message.received_ns, now_ns)
                    self._preview_ns, self._credit = round(1e9 * message.preview_s), message.credit_bytes
                    self._stops.follow(message.stop_port)
                    if not self.accepted:
                        self.accepted = True
                        self._resend_all(now_ns)
                case Ack():
                    self._credit = message.credit_bytes
                    self.result.refused += len(message.quarantined)
                    for segment_id in (*message.segments, *message.quarantined):
                        self._acknowledged(segment_id, now_ns)
                case Nack():
                    self.result.nacked += 1
                    self._progress_ns = now_ns
                case OperatorCommand(kind=OperatorCommandKind.command):
                    self._driven = True
                    took_ms = (now_ns - message.captured_ns) / 1e6
                    self.result.commands_ms.setdefault(message.operator.rstrip("0123456789"), []).append(took_ms)
                case ReintroduceRequest():
                    self.accepted, self._due_ns["greet"] = False, 0
                case Rejection(reason=reason):
                    raise RejectedError(f"{self.name}: {reason}")

    def _acknowledged(self, segment_id: str, now_ns: int) -> None:
        self._progress_ns = now_ns
        if (found := self._in_flight.pop(segment_id, None)) is None:
            return
        segment, recorded_ns = found
        self._in_flight_bytes -= len(segment.data)
        self.result.segments += 1
        self.result.bytes += len(segment.data)
        self.result.latencies_ms.append((now_ns - recorded_ns) / 1e6)

    # --- what goes ------------------------------------------------------------------------------------------------

    def send_due(self, now_ns: int) -> int:
        """Send what is due but for segments; when something is due again."""
        if self.raw:
            return now_ns + _HEARTBEAT_NS
        due = self._due_ns
        if now_ns >= due["greet"]:
            due["greet"] = now_ns + (_HEARTBEAT_NS if self.accepted else _HEARTBEAT_NS // 4)
            hello = msgspec.structs.replace(self._echo if self.accepted else self._hello, sent_ns=now_ns)
            self.accepted &= self.client.send(hello)
        if now_ns >= due["stops"]:
            due["stops"] = now_ns + _HEARTBEAT_NS // 4
            self._stops.poll()
            while self._stops.recv() is not None:
                pass
        if now_ns >= due["status"]:
            due["status"] = now_ns + _STATUS_NS
            if self.accepted:
                self._put(self._status)
        if now_ns >= due["preview"]:
            due["preview"] = now_ns + (_DRIVEN_PREVIEW_NS if self._driven else self._preview_ns)
            for preview in self._previews if self.accepted else ():
                self._put(preview)
        return min(due.values())

    def fill(self, now_ns: int) -> int:
        """Send what segments may go; when the next one is recorded."""
        if self._in_flight and now_ns - self._progress_ns > _RESEND_NS and not self.raw:
            self._resend_all(now_ns)
        while self.period_ns > 0 and now_ns >= self._next_segment_ns:
            self._recorded_ns.append(self._next_segment_ns)
            self._next_segment_ns += self.period_ns
        while self.accepted and len(self._in_flight) < WINDOW:
            if self.period_ns == 0 and not self._recorded_ns:
                self._recorded_ns.append(now_ns)
            if not (self._resend or self._recorded_ns):
                break
            if not self._send_next(now_ns):
                return now_ns + _AGAIN_NS
        return self._next_segment_ns if self.period_ns > 0 else now_ns + _HEARTBEAT_NS

    def _send_next(self, now_ns: int) -> bool:
        if self._resend:
            segment, recorded_ns = self._resend[0]
        else:
            if not self._made:
                self._made.extend(segments_of(self.name, self._run, self._episode))
                self._episode += 1
            segment, recorded_ns = self._made[0], self._recorded_ns[0]
        size = len(segment.data)
        if self._credit < 1 or (self._in_flight and self._in_flight_bytes + size > self._credit):
            return False
        if not self._put(segment.data):
            return False
        if self._resend:
            self._resend.popleft()
        else:
            self._made.popleft()
            self._recorded_ns.popleft()
        if not self._in_flight:
            self._progress_ns = now_ns
        self._in_flight[segment.id] = segment, recorded_ns
        self._in_flight_bytes += size
        return True

    def _resend_all(self, now_ns: int) -> None:
        self.result.resent += len(self._in_flight)
        self._resend.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()
        self._in_flight_bytes, self._progress_ns = 0, now_ns

    def _put(self, data: bytes) -> bool:
        try:
            self.client.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class LoadRobots:
    """All robots of this process."""

    def __init__(self, settings: RobotSettings) -> None:
        # A context for each, as robots on computers of their own have, would be a thousand threads of this one.
        shared = _SharedContext()
        shared.set(zmq.MAX_SOCKETS, 8 * len(settings.names) + 64)
        zmq.Context = lambda: shared  # type: ignore[misc, assignment]
        self._robots = [LoadRobot(settings, name) for name in settings.names]
        self._poller = zmq.Poller()
        for robot in self._robots:
            self._poller.register(robot.client.socket, zmq.POLLIN)
        self._by_socket = {robot.client.socket: robot for robot in self._robots}
        self._due = [(0, number) for number in range(len(self._robots))]

    def connect(self) -> None:
        """Until the gateway has let all of them in."""
        self._until(lambda: all(robot.accepted for robot in self._robots), _CONNECT_S)
        if late := [robot.name for robot in self._robots if not robot.accepted]:
            raise TimeoutError(f"{len(late)} of {len(self._robots)} robots were not let in, such as {late[0]}.")

    def run(self, phase: Phase) -> PhaseResult:
        """Do what `phase` says."""
        period_ns, begun_ns = round(phase.period_s * 1e9), time.monotonic_ns()
        for number, robot in enumerate(self._robots):
            robot.begin(period_ns, begun_ns + period_ns * number // len(self._robots))
        self._due = [(0, number) for number in range(len(self._robots))]
        self._until(lambda: False, phase.warm_s)
        for robot in self._robots:
            robot.result = PhaseResult()
        counted_s = time.monotonic()
        self._until(lambda: False, phase.seconds)
        whole = PhaseResult(time.monotonic() - counted_s)
        for robot in self._robots:
            one, robot.result, robot.period_ns = robot.result, PhaseResult(), -1
            for field in ("segments", "bytes", "resent", "nacked", "refused"):
                setattr(whole, field, getattr(whole, field) + getattr(one, field))
            whole.waiting += robot.waiting
            whole.latencies_ms += one.latencies_ms
            for who, some in one.commands_ms.items():
                whole.commands_ms[who] = whole.commands_ms.get(who, []) + some
        return whole

    def close(self) -> None:
        """With whatever waits to be sent."""
        for robot in self._robots:
            robot.client.socket.setsockopt(zmq.LINGER, 0)
            robot.client.close()

    def _until(self, over: Callable[[], bool], seconds: float) -> None:
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        due = self._due
        while (now_ns := time.monotonic_ns()) < end_ns and not over():
            while due and due[0][0] <= now_ns:
                _, number = heapq.heappop(due)
                robot = self._robots[number]
                heapq.heappush(due, (min(robot.send_due(now_ns), robot.fill(now_ns)), number))
            wait_ms = max(0, min(20, (due[0][0] - now_ns) // 1_000_000))
            for socket, _ in self._poller.poll(wait_ms):
                robot = self._by_socket[socket]
                robot.read()
                robot.fill(time.monotonic_ns())


class _SharedContext(zmq.Context[Any]):
    """Of all clients of this process: none of them ends it."""

    def term(self) -> None:
        """Not before the process ends."""


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=RobotSettings)
    os.nice(settings.nice)
    robots = LoadRobots(settings)
    robots.connect()
    _say("ready")
    result = robots.run(msgspec.json.decode(sys.stdin.readline(), type=Phase))
    _say(msgspec.json.encode(result).decode())
    # Hundreds of sockets with something to send would be waited for.
    os._exit(0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
