"""Signs of life of a control process that waits for its driver."""

from __future__ import annotations

import msgspec

from wire.clock import Clock
from wire.messages import Message
from wire.messages.gateway import EdgeStatus
from wire.transport.channel import Channel

_EVERY_S = 0.5


class StatusKeepalive:
    """Keeps the `Channel` protocol: the line to the uplink, which also repeats the robot's last status.

    While connecting or a reset takes its time no tick comes, and nobody could tell a slow robot from one that is gone.
    """

    def __init__(self, inner: Channel, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._last: EdgeStatus | None = None
        self._said_ns = 0

    def beat(self) -> None:
        """Say the last status again, with the time it is now, if nothing was said for a while."""
        now_ns = self._clock.now_ns()
        if self._last is not None and now_ns - self._said_ns > _EVERY_S * 1e9:
            self.send(msgspec.structs.replace(self._last, time_ns=now_ns))

    def send(self, message: Message) -> bool:
        if isinstance(message, EdgeStatus):
            self._last, self._said_ns = message, self._clock.now_ns()
        return self._inner.send(message)

    def recv(self, timeout_s: float = 0.0) -> Message | None:
        return self._inner.recv(timeout_s)

    def close(self) -> None:
        self._inner.close()
