"""One version on its way from the trainer to the gateway, a few megabytes ahead of what has been taken in.

All parts at once would fill the queue of the line (a thousand messages), and what does not fit there is dropped. So the
parts go in windows with a heartbeat behind each: a line keeps its order, and the answer to the heartbeat says that the
window before it was stored. The trainer trains between two calls of `turn`.
"""

from __future__ import annotations

from collections import deque

from wire.clock import Clock
from wire.messages.gateway import Heartbeat, Publish, WeightBytes
from wire.transport.channel import Channel
from wire.types import PolicyVersion

PART = 1024**2
WINDOW = 2 * PART
"""small, because each answer counts as progress: a line of half a megabyte per second is still one that moves"""
AHEAD = 15
"""windows that may be unanswered before the next one, so 32 MiB under way: more than a gateway takes in meanwhile"""
PATIENCE_S = 5.0
"""without progress for so long, everything is sent again"""


class WeightUploader:
    """Offers `version`, then sends its bytes. It is done when the gateway says `Published`, which its owner hears."""

    def __init__(
        self, version: PolicyVersion, weights: bytes, trained: frozenset[int], gateway: Channel, clock: Clock
    ) -> None:
        """`trained`: episodes that were first trained on since the version's parent. Sends nothing before `turn`."""
        self.version = version
        self.trained = trained
        self._weights = memoryview(weights)
        self._gateway = gateway
        self._clock = clock
        self._offered = False
        self._sent, self._until = 0, WINDOW
        self._unanswered: deque[int] = deque()
        self._moved_ns = clock.now_ns()

    def turn(self) -> None:
        """Send what may go now; it never waits."""
        now_ns = self._clock.now_ns()
        if now_ns - self._moved_ns > PATIENCE_S * 1e9:
            self._begin()
        if not self._offered:
            if not self._gateway.send(Publish(self.version, tuple(sorted(self.trained)))):
                return
            self._offered, self._moved_ns = True, now_ns
        while self._sent < len(self._weights):
            if self._sent == self._until:
                if len(self._unanswered) >= AHEAD or not self._gateway.send(Heartbeat(now_ns)):
                    return
                self._unanswered.append(now_ns)
                self._until += WINDOW
            part = bytes(self._weights[self._sent : self._sent + PART])
            if not self._gateway.send(WeightBytes(self.version.number, self._sent, part)):
                return
            self._sent += len(part)
            self._moved_ns = now_ns

    def answered(self, echo_ns: int) -> None:
        """The gateway answered what was sent at `echo_ns`: all that went before it is there."""
        if echo_ns in self._unanswered:
            while self._unanswered.popleft() != echo_ns:
                pass
            self._moved_ns = self._clock.now_ns()

    def rest(self) -> None:
        """The gateway could not take it now: nothing more is sent until everything is sent again."""
        self._sent = len(self._weights)

    def _begin(self) -> None:
        self._offered = False
        self._sent, self._until = 0, WINDOW
        self._unanswered.clear()
        self._moved_ns = self._clock.now_ns()
