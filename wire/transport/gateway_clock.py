"""The gateway's clock as another computer knows it: when was what one of them stamped, by the clock of the other?"""

from __future__ import annotations

from wire.clock import clock_name
from wire.messages.gateway import HelloAck

WINDOW_NS = 30_000_000_000
"""measurements older than one to two of these are forgotten: clocks drift apart"""
_LATEST_NS = 2**62


class GatewayClock:
    """Measured by the answers to heartbeats. An answer bounds how far the gateway is ahead from both sides: by what the
    way there took at most, and the way back. The closest bounds are those of the messages that waited least.

    A time that is carried over is never later than it was, but for what the clocks drift apart in `WINDOW_NS` (3 ms at
    100 ppm): a message looks older than it is, by its shortest way, and never fresher.
    """

    def __init__(self) -> None:
        self._bounds: list[tuple[int, int]] = []
        """(most, least) that the gateway is ahead, ns: of this window, and of the one before"""
        self._window_ns = 0
        self._clock = ""

    def measure(self, answer: HelloAck, now_ns: int) -> None:
        """An answer came at `now_ns`; it says when the gateway had what was sent at `echo_ns`."""
        if answer.clock != self._clock:
            # Another computer, or the same one after a restart: what bounded the old clock says nothing of this one.
            self._clock, self._bounds = answer.clock, []
        same = answer.clock == clock_name()
        most = 0 if same else answer.received_ns - answer.echo_ns
        least = 0 if same else answer.received_ns - now_ns
        if not self._bounds or now_ns - self._window_ns >= WINDOW_NS:
            self._bounds, self._window_ns = [(most, least), *self._bounds[:1]], now_ns
        else:
            self._bounds[0] = min(self._bounds[0][0], most), max(self._bounds[0][1], least)

    def ours(self, time_ns: int) -> int:
        """A time of the gateway by our clock; 0 while nothing was measured."""
        return _bounded(time_ns - min(most for most, _ in self._bounds)) if self._bounds else 0

    def theirs(self, time_ns: int) -> int:
        """A time of ours by the gateway's clock; 0 while nothing was measured."""
        return _bounded(time_ns + max(least for _, least in self._bounds)) if self._bounds else 0


def _bounded(time_ns: int) -> int:
    """A time that a message can carry, whatever a gateway said: far away from now if need be."""
    return max(-_LATEST_NS, min(time_ns, _LATEST_NS))
