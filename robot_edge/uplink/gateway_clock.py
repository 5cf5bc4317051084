"""The gateway's clock as a robot's computer knows it: when was what the gateway stamped?"""

from __future__ import annotations

from wire.clock import clock_name
from wire.messages.gateway import HelloAck


class GatewayClock:
    """Measured by the answers to heartbeats: the smallest difference is that of the message that waited least."""

    def __init__(self) -> None:
        self._ahead_ns: int | None = None

    def measure(self, answer: HelloAck) -> None:
        """An answer came; it says when the gateway had what was sent at `echo_ns`."""
        ahead_ns = 0 if answer.clock == clock_name() else answer.received_ns - answer.echo_ns
        self._ahead_ns = ahead_ns if self._ahead_ns is None else min(self._ahead_ns, ahead_ns)

    def ours(self, time_ns: int) -> int:
        """A time of the gateway by our clock, never later than it was; 0 while nothing was measured."""
        return 0 if self._ahead_ns is None else time_ns - self._ahead_ns
