"""People at work meanwhile: one drives a robot at the page, another one with a device of their own.

Each commands 20 times a second; the robot notes how long each command took, by the time that stands in it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from benchmarks.wire.samples import SPEC
from wire.clock import MonotonicClock, clock_name
from wire.messages.fleet import AcquireLease, Preempted, RenewLease, Response
from wire.messages.gateway import Hello, OperatorCommand
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient
from wire.types import OperatorCommandKind, Role

TELEOPERATOR = "teleoperator"
COMMAND_S = 0.05
PAGE = "web-"
"""what the page's operators are called at the robot, less their number"""
_ACTION = tuple(0.1 for _ in SPEC.action)
_TTL_S, _RENEW_S, _OPERATOR, _WAIT_S = 1.0, 0.3, 80, 60.0


class Driver(threading.Thread, ABC):
    """Somebody who drives one robot, 20 commands a second, until `over`; a robot that is lost is taken over again."""

    def __init__(self, robot: str) -> None:
        super().__init__(daemon=True)
        self.robot, self.over, self.driving = robot, threading.Event(), threading.Event()
        self.taken_over = 0
        """times: more than once when the robot was lost meanwhile"""
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            self.drive()
        except Exception as error:  # noqa: BLE001 - raised where it is noticed
            self.fault = error

    @abstractmethod
    def drive(self) -> None:
        """Take it over and command it at the moments of `commands`."""

    def commands(self) -> Iterator[None]:
        """One moment for each command."""
        due_s = time.monotonic()
        while not self.over.wait(max(0.0, due_s - time.monotonic())):
            due_s += COMMAND_S
            yield


class PageDriver(Driver):
    """At the operator page: a real websocket."""

    def __init__(self, robot: str, page: str) -> None:
        super().__init__(robot)
        self._page, self._has_it = page, False

    def drive(self) -> None:
        with connect(self._page.replace("http", "ws") + "/ws", origin=Origin(self._page), max_size=None) as socket:
            reader = threading.Thread(target=self._read, args=(socket,), daemon=True)
            reader.start()
            for sequence, _ in enumerate(self.commands(), 1):
                kind = OperatorCommandKind.command if self._has_it else OperatorCommandKind.take_over
                self.taken_over += not self._has_it
                self._has_it = True
                self._say(socket, kind, sequence)
                self.driving.set()

    def _say(self, socket: ClientConnection, kind: str, sequence: int) -> None:
        action = _ACTION if kind == OperatorCommandKind.command else ()
        made_ms = time.monotonic_ns() / 1e6
        told = {"type": kind, "robot": self.robot, "action": action, "sequence": sequence, "captured_ms": made_ms}
        socket.send(msgspec.json.encode(told).decode())

    def _read(self, socket: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            for message in socket:
                # pictures are bytes; the rest is long and none of ours
                if isinstance(message, str) and message.startswith(('{"type":"not_held"', '{"type":"dropped"')):
                    self._has_it = False


class DeviceDriver(Driver):
    """With a device of their own, through a connection to the gateway."""

    def __init__(self, robot: str, gateway: str, keys: Path) -> None:
        super().__init__(robot)
        self._gateway, self._keys = gateway, keys

    def drive(self) -> None:
        with contextlib.closing(ZmqClient(self._gateway, TELEOPERATOR, self._keys)) as channel:
            hello = Hello(TELEOPERATOR, Role.teleoperator, clock_name(), 0, os.getpid())
            session, lease, renewed_s, asked_s = GatewaySession(channel, hello, MonotonicClock()), None, 0.0, 0.0
            kind = OperatorCommandKind.take_over
            for sequence, _ in enumerate(self.commands(), 1):
                session.poll()
                while (message := channel.recv()) is not None:
                    session.handle_message(message)
                    if isinstance(message, Response | Preempted):
                        lease = message.lease if isinstance(message, Response) and not message.refused else None
                        kind = kind if lease else OperatorCommandKind.take_over
                now_s = time.monotonic()
                if lease is None:
                    if session.accepted and now_s - asked_s > _TTL_S:
                        asked_s = now_s
                        channel.send(AcquireLease(1, self.robot, "teleoperation", _OPERATOR, _TTL_S))
                    continue
                if now_s - renewed_s > _RENEW_S:
                    renewed_s = now_s
                    channel.send(RenewLease(2, self.robot, lease.number))
                self.taken_over += kind == OperatorCommandKind.take_over
                action = _ACTION if kind == OperatorCommandKind.command else ()
                made_ns = time.monotonic_ns()
                command = OperatorCommand(self.robot, kind, action, sequence, TELEOPERATOR, "", made_ns, lease.number)
                channel.send(command)
                kind = OperatorCommandKind.command
                self.driving.set()


@contextlib.contextmanager
def people(*drivers: Driver) -> Iterator[None]:
    """They drive until the end. Raises `TimeoutError` when one of them cannot begin, and what ended one."""
    for driver in drivers:
        driver.start()
    try:
        for driver in drivers:
            if not driver.driving.wait(_WAIT_S):
                raise driver.fault or TimeoutError(f"nobody drives {driver.robot}.")
        yield
    finally:
        for driver in drivers:
            driver.over.set()
            driver.join()
    for driver in drivers:
        if driver.fault is not None:
            raise driver.fault
