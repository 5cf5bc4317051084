"""A peer's second connection to the gateway, for stops: nothing that is large or has to be stored goes over it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from wire.clock import Clock
from wire.errors import ConfigError
from wire.messages import Message
from wire.messages.gateway import Heartbeat
from wire.transport.zmq_channel import ZmqClient

log = logging.getLogger(__name__)

HEARTBEAT_NS = 500_000_000
"""the gateway sends only to whom it heard of lately"""
_UNCONNECTED_NS = 100_000_000


class StopConnection:
    """Keeps the `Channel` protocol. `poll` several times a second; for one thread, except `follow`.

    Reconnects by itself. Where the gateway hears stops it says itself, on the other connection (`HelloAck.stop_port`).
    """

    def __init__(self, gateway: str, connect: Callable[[str], ZmqClient], clock: Clock) -> None:
        """`gateway`: tcp://HOST:PORT of the other connection; `connect` makes the client of an address."""
        self._host = gateway.rpartition(":")[0]
        self._connect = connect
        self._clock = clock
        self._wanted = self._port = 0
        self._next_ns = 0
        self.client: ZmqClient | None = None

    def follow(self, port: int) -> None:
        """The gateway says where it hears stops, 0: nowhere apart."""
        self._wanted = port

    def poll(self) -> None:
        """Connect where the gateway is now, and say that somebody is there."""
        if (wanted := self._wanted) != self._port:
            self.close()
            self._port, self._next_ns = wanted, 0
            if wanted:
                try:
                    self.client = self._connect(f"{self._host}:{wanted}")
                except ConfigError as error:
                    log.error("no connection for stops; they come by the other one: %s", error)
        now_ns = self._clock.now_ns()
        if self.client is not None and now_ns >= self._next_ns:
            self._next_ns = now_ns + (HEARTBEAT_NS if self.client.send(Heartbeat(now_ns)) else _UNCONNECTED_NS)

    def send(self, message: Message) -> bool:
        return self.client is not None and self.client.send(message)

    def recv(self) -> Message | None:
        return None if self.client is None else self.client.recv()

    def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()
