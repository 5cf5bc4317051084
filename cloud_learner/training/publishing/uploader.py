"""The weights of a version on their way to the gateway."""

from __future__ import annotations

from collections import deque

from wire.clock import Clock
from wire.messages.gateway import Heartbeat, Publish, WeightBytes
from wire.transport.channel import Channel
from wire.types import PolicyVersion

PART_BYTES = 1024**2
WINDOW_BYTES = 2 * PART_BYTES
"""small, because each answer counts as progress: half a megabyte per second still does"""
MAX_UNANSWERED = 15
"""windows under way before the next one waits, so 32 MiB: more than a gateway takes in meanwhile"""
TIMEOUT_S = 20.0
"""without progress for so long, everything is sent again: a disk may be busy for a while"""
ASK_S = 5.0
"""after everything was sent: how often the gateway is asked whether it has it, for to rebuild a large version, hash it
and look at it takes longer than that; also until it is offered again what it could not take"""


class WeightUploader:
    """Sends one version, until its owner receives `Published`.

    All parts at once would overflow the connection's queue (a thousand messages), which drops what does not fit. So the
    parts go in windows with a heartbeat behind each: messages keep their order, and the answer to the heartbeat says
    that the window before it was stored.
    """

    def __init__(
        self,
        version: PolicyVersion,
        weights: bytes | bytearray | memoryview,
        trained: frozenset[int],
        gateway: Channel,
        clock: Clock,
        base: int = 0,
    ) -> None:
        """`weights`: of the version, or the delta from version `base`. `trained`: episodes that were first trained on
        since the version's parent. Sends nothing before `poll`."""
        self.version = version
        self.trained = trained
        self._weights = memoryview(weights)
        self._offer = Publish(version, tuple(sorted(trained)), base, len(weights) if base else 0)
        self._gateway = gateway
        self._clock = clock
        self._submitted = False
        self._sent, self._window_end = 0, WINDOW_BYTES
        self._unanswered: deque[int] = deque()
        self._asked: set[int] = set()
        """heartbeats behind questions whether the gateway has it: one is answered, and nothing was said: it has not"""
        self._progress_ns = clock.now_ns()

    def poll(self) -> None:
        """Send what may go now; it never waits."""
        now_ns = self._clock.now_ns()
        silent_s = (now_ns - self._progress_ns) / 1e9
        if self._submitted and self._sent == len(self._weights):
            if silent_s > ASK_S and self._gateway.send(self._offer):
                self._progress_ns = now_ns
                if self._gateway.send(Heartbeat(now_ns)):
                    self._asked.add(now_ns)
            return
        if silent_s > TIMEOUT_S:
            self._restart()
        if not self._submitted:
            if not self._gateway.send(self._offer):
                return
            self._submitted, self._progress_ns = True, now_ns
        while self._sent < len(self._weights):
            if self._sent == self._window_end:
                if len(self._unanswered) >= MAX_UNANSWERED or not self._gateway.send(Heartbeat(now_ns)):
                    return
                self._unanswered.append(now_ns)
                self._window_end += WINDOW_BYTES
            part = bytes(self._weights[self._sent : self._sent + PART_BYTES])
            if not self._gateway.send(WeightBytes(self.version.number, self._sent, part, bool(self._offer.base))):
                return
            self._sent += len(part)
            self._progress_ns = now_ns

    def on_heartbeat_answered(self, echo_ns: int) -> None:
        """All that was sent before the heartbeat of `echo_ns` is stored."""
        if echo_ns in self._asked:
            self._restart()
        elif echo_ns in self._unanswered:
            while self._unanswered.popleft() != echo_ns:
                pass
            self._progress_ns = self._clock.now_ns()

    def _restart(self) -> None:
        self._submitted = False
        self._sent, self._window_end = 0, WINDOW_BYTES
        self._unanswered.clear()
        self._asked.clear()
        self._progress_ns = self._clock.now_ns()
