"""A site's relay, as a robot asks it for chunks: for how long it is waited for, and when it is left out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from wire.clock import Clock
from wire.messages.gateway import FetchWeights, WeightBytes
from wire.transport.channel import Channel

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""a relay may have to fetch the part first, over an uplink that all robots of its site wait for"""
_LEAST_BYTES_PER_S = 25_000
"""what a relay brings earns that back at this rate: a slower one has used it up sooner or later"""
_REST_S, _MOST_REST_S = 60, 3600
"""a relay that was silent, slow, or sent what was wrong, is asked again after so long: twice as long each time"""
_ABSENT_NS = 1_000_000_000
_REQUESTS = 64
"""more than are under way at once"""


class RelaySource:
    """Nothing of it is believed, and it holds no robot up for long."""

    def __init__(
        self,
        channel: Channel,
        clock: Clock,
        name: str = "the relay",
        on_fault: Callable[[str], None] = lambda text: None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """`channel`: to the relay; `name`: by which a person finds it; `on_fault`: hears for what it is left out;
        `is_lost`: whether it was there, and is not any more."""
        self.name = name
        self.faults = 0
        self.patience_s = _PATIENCE_S
        """so long the next part is waited for"""
        self.is_lost = is_lost
        self._channel, self._clock, self._on_fault = channel, clock, on_fault
        self._rest_s, self._rests_ns = _REST_S, 0
        self._requests: deque[tuple[int, bool, int, int]] = deque(maxlen=_REQUESTS)

    @property
    def rests(self) -> bool:
        """Whether it is left out."""
        return self._clock.now_ns() < self._rests_ns or self.is_lost()

    def on_waited(self, waited_s: float, size: int) -> None:
        """It was waited for so long, and has brought so many bytes."""
        left_s = max(0.0, self.patience_s - waited_s)
        self.patience_s = min(_PATIENCE_S, left_s + size / _LEAST_BYTES_PER_S)

    def send(self, request: FetchWeights) -> bool:
        """False when nobody is there: it is left out for a moment then, and that is no fault."""
        if self._channel.send(request):
            self._requests.append((request.number, request.delta, request.offset, request.size))
            return True
        self._rests_ns = max(self._rests_ns, self._clock.now_ns() + _ABSENT_NS)
        return False

    def was_asked(self, part: WeightBytes) -> bool:
        """Whether just that was lately asked for: with a relay that sends less a version would take for ever."""
        return (part.number, part.delta, part.offset, len(part.data)) in self._requests

    def on_version(self) -> None:
        """A whole version came from it alone, and is right."""
        self._rest_s = _REST_S

    def blame(self, what: str) -> None:
        """Leave it out for a while."""
        text = f"{self.name} {what}; for {self._rest_s // 60} min the gateway is asked instead."
        log.error("%s", text)
        self.faults += 1
        self._rests_ns = self._clock.now_ns() + self._rest_s * 1_000_000_000
        self._rest_s = min(_MOST_REST_S, 2 * self._rest_s)
        self.patience_s = _PATIENCE_S
        self._on_fault(text)
