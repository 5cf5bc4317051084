"""Stops on their own way to the robot's host: a connection and a thread that no disk, picture or weight stands before.

    gateway, a stop's own port ──┐
    gateway, over the uplink ────┼──► a thread of the uplink's process ──► the host's stop line
    operator beside the robot ───┘

A stop may come by two ways: its id makes it one. While the connection is down the uplink's does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TypeGuard

import msgspec

from robot_edge.uplink.stop_orders import KINDS, StopOrders
from wire.messages import Message
from wire.messages.gateway import HelloAck, OperatorCommand, StopShown
from wire.transport.channel import Channel
from wire.transport.peer_clock import PeerClock
from wire.transport.shared_channel import SharedChannel
from wire.transport.stop_connection import StopConnection
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import OperatorCommandKind

log = logging.getLogger(__name__)

_WAIT_S = 0.1
_FAILED_S = 0.1
_LEFT = 1000
"""commands of a local operator that wait for an uplink which writes to a disk"""


class OperatorInbox:
    """Keeps the `Channel` protocol: the local operator's channel as the uplink has it, which only sends on it."""

    def __init__(self, channel: SharedChannel) -> None:
        self.channel = channel
        self._left: deque[Message] = deque(maxlen=_LEFT)
        self.socket = os.eventfd(0, os.EFD_NONBLOCK)
        """file descriptor that can be read when there may be a message; for `wait_any`"""

    def put(self, message: Message) -> None:
        """It is for the uplink."""
        self._left.append(message)
        os.eventfd_write(self.socket, 1)

    def send(self, message: Message) -> bool:
        return self.channel.send(message)

    def recv(self) -> Message | None:
        if self._left:
            return self._left.popleft()
        try:
            os.eventfd_read(self.socket)
        except BlockingIOError:
            return None
        return self._left.popleft() if self._left else None

    def close(self) -> None:
        os.close(self.socket)
        self.channel.close()


class StopLink:
    """`start` its thread, or call `poll` again and again. `take` and `follow` are the uplink's, from its own thread."""

    def __init__(
        self, robot: str, orders: StopOrders, gateway: Channel | None = None, operator: OperatorInbox | None = None
    ) -> None:
        """`gateway`: for stops alone. `operator`: of a process beside the robot; the uplink gets from it what is no
        matter of stopping."""
        self._robot, self._orders, self._gateway = robot, orders, gateway
        self._handed: deque[OperatorCommand] = deque()
        self._gateway_clock = PeerClock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread: threading.Thread | None = None
        self.operator = operator

    def take(self, command: OperatorCommand) -> bool:
        """As `StopOrders.take`, of a command that came by another way; the host is told soon."""
        if command.kind not in KINDS and command.kind != OperatorCommandKind.speed_limit:
            return False
        self._handed.append(command)
        os.eventfd_write(self._wake, 1)
        return True

    def pop_refused(self) -> list[str]:
        """As `StopOrders.pop_refused`."""
        return self._orders.pop_refused()

    def follow(self, port: int) -> None:
        """The gateway says where it hears stops."""
        if isinstance(self._gateway, StopConnection):
            self._gateway.follow(port)

    def poll(self) -> None:
        """Give the host what came."""
        while self._handed:
            self._orders.take(self._handed.popleft())
        if self._gateway is not None:
            self._poll_gateway(self._gateway)
        if self.operator is not None:
            while (message := self.operator.channel.recv()) is not None:
                if isinstance(message, OperatorCommand):
                    message = msgspec.structs.replace(message, beside=True)
                if not (self._is_mine(message) and self._orders.take(message)):
                    self.operator.put(message)
        self._orders.poll()
        # Last: until somebody hears it, the stop is sent again.
        if (answer := self._orders.pop_answer()) is not None and self._gateway is not None:
            self._gateway.send(StopShown(answer))

    def start(self) -> None:
        """Do so in a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="stops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        if self._gateway is not None:
            self._gateway.close()
        os.close(self._wake)

    def _poll_gateway(self, gateway: Channel) -> None:
        if isinstance(gateway, StopConnection):
            gateway.poll()
        while (message := gateway.recv()) is not None:
            if isinstance(message, HelloAck):
                self._gateway_clock.on_answer(message, self._orders.clock.now_ns())
            elif self._is_mine(message):
                at_ns = self._gateway_clock.ours(message.captured_ns) if message.captured_ns else 0
                self._orders.take(msgspec.structs.replace(message, captured_ns=at_ns, beside=False))
            else:
                log.warning("robot '%s': on the way of stops came %r.", self._robot, message)

    def _is_mine(self, message: Message) -> TypeGuard[OperatorCommand]:
        return isinstance(message, OperatorCommand) and message.robot == self._robot

    def _run(self) -> None:
        while not self._closing:
            try:
                self._wait()
                self.poll()
            except Exception:
                # Whatever it is: the next stop must be heard.
                log.exception("robot '%s': the way of stops failed; it goes on.", self._robot)
                time.sleep(_FAILED_S)

    def _wait(self) -> None:
        client = self._gateway.client if isinstance(self._gateway, StopConnection) else None
        channels: list[ZmqClient | SharedChannel | int] = [self._wake]
        channels += [] if client is None else [client]
        channels += [] if self.operator is None else [self.operator.channel]
        wait_any(channels, _WAIT_S)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
