"""Which parts of a version are asked for, of whom, and how far they have come."""

from __future__ import annotations

from collections import deque

from robot_edge.uplink.weights.plan import FetchPlan, Part
from robot_edge.uplink.weights.relay_source import RelaySource
from robot_edge.uplink.weights.window import MOST_PART, MOST_UNDER_WAY, Asked, RequestWindow
from wire.clock import Clock
from wire.messages.gateway import FetchWeights, WeightBytes
from wire.transport.channel import Channel

_TIMEOUT_S = 2.0
"""of the gateway"""
_REFUSED_NS = 10_000_000_000
"""what a relay cannot have now it may have later: its line was cut for a moment, say, in a version that takes long"""


class PartRequests:
    """All that is under way is from one of the two: the relay while that may be asked, or the gateway."""

    def __init__(self, channel: Channel, clock: Clock, relay: RelaySource | None) -> None:
        """`channel`: to the gateway."""
        self.relay = relay
        self.window = RequestWindow()
        self.received = self.written = 0
        """bytes of the plan"""
        self.under_way: deque[Asked] = deque()
        self.progress_ns = 0
        """when something was asked for, or came, last"""
        self._channel, self._clock = channel, clock
        self._source: RelaySource | None = None
        """who is asked now; None: the gateway"""
        self._asked = self._relayed = 0
        """bytes that were asked for, and of this plan that came from the relay"""
        self._relay_end = 0
        """where in the plan the last bytes end that came from it"""
        self._refused_ns = 0
        """until then the relay is not asked again: it said that it cannot have what this plan is about"""

    @property
    def late(self) -> bool:
        """Whether something should have come by now."""
        timeout_s = self._source.patience_s if self._source is not None and self.under_way else _TIMEOUT_S
        return self._clock.now_ns() - self.progress_ns > timeout_s * 1e9

    def begin(self, position: int) -> None:
        """Another plan, of which so much is here."""
        self._refused_ns = self._relayed = 0
        self.set_position(position)

    def set_position(self, position: int) -> None:
        """Go on from there; what is under way is not waited for."""
        self._asked = self.received = self.written = position
        self._relay_end = min(self._relay_end, position)
        self.under_way.clear()

    def touch(self) -> None:
        """Nothing could have come before now."""
        self.progress_ns = self._clock.now_ns()

    def ask(self, plan: FetchPlan) -> None:
        """Ask for as much as may be under way, for one part at least."""
        self.progress_ns = now_ns = self._clock.now_ns()
        while self._asked < plan.size_bytes and len(self.under_way) < MOST_UNDER_WAY:
            part = plan.part(self._asked, self.window.part_bytes)
            if self.under_way and self._asked + part.size - self.written > self.window.size_bytes:
                break
            has_it = bool(part.chunk) and now_ns >= self._refused_ns
            usable = self.relay is not None and has_it and not self.relay.rests
            # A relay that has nothing of a chunk would fetch all that is before this first.
            begins = self._source is not None or plan.chunk_begin(self._asked) == self._asked
            if not self.under_way:
                # Nothing is waited for from either: this may be asked of the other.
                self._source = self.relay if usable and begins else None
            elif self._refused_ns and self._source is None and usable and begins:
                # The relay is asked once what is under way has come.
                break
            chunk_bytes = part.chunk_bytes if part.chunk else 0
            request = FetchWeights(part.number, part.offset, part.size, part.delta, part.chunk, chunk_bytes)
            if self._source is None:
                self._channel.send(request)
            elif not self._source.send(request):
                self._leave_relay()
                continue
            self._asked += part.size
            self.under_way.append(Asked(part, now_ns))

    def find(self, message: WeightBytes, by_relay: bool) -> Part | None:
        """The part that is waited for next, if this is about it."""
        if not self.under_way or by_relay != (self._source is not None):
            return None
        part = self.under_way[0].part
        place = message.number, message.delta, message.offset
        return part if place == (part.number, part.delta, part.offset) else None

    def is_possible(self, message: WeightBytes, plan: FetchPlan) -> bool:
        """Whether the part that is waited for next may be so large."""
        if self._source is not None and not self._source.was_asked(message):
            return False
        return 0 < len(message.data) <= plan.part(self.received, MOST_PART).size

    def on_part(self, size: int) -> int:
        """So much of the part that was waited for has come; where in the plan it begins."""
        asked, now_ns = self.under_way.popleft(), self._clock.now_ns()
        if self._source is not None:
            self._source.on_waited((now_ns - self.progress_ns) / 1e9, size)
            self._relayed += size
            self._relay_end = self.received + size
        self.progress_ns = now_ns
        self.window.adapt(asked.at_ns, now_ns, size)
        position, self.received = self.received, self.received + size
        if size != asked.part.size:
            # It was asked for before, or the gateway sends smaller ones: what is behind it begins elsewhere.
            self._drop_under_way()
        return position

    def on_ready(self, plan: FetchPlan) -> None:
        """What came by `plan` is right."""
        if self.relay is not None and self._relayed == plan.size_bytes:
            self.relay.on_version()

    def blame_relay(self, what: str, since: int | None = None) -> bool:
        """Whether it was asked, or some of what came from place `since` on is from it; from now on the gateway is."""
        relay = self._source
        if relay is None and since is not None and self._relay_end > since:
            # it sent some of it, and left the rest to the gateway
            relay = self.relay
        if relay is None:
            return False
        self._leave_relay()
        self._relay_end = 0
        relay.blame(what)
        return True

    def leave_lost_relay(self) -> bool:
        """Whether it was asked, and is not there any more; from now on the gateway is."""
        if self._source is None or not self.under_way or not self._source.is_lost():
            return False
        self._leave_relay()
        return True

    def on_relay_refused(self, request: FetchWeights) -> bool:
        """Whether the relay was asked for that; the gateway is then, for a while or until there is another plan."""
        if self._source is None or not self._is_under_way(request):
            return False
        self._leave_relay()
        self._refused_ns = self._clock.now_ns() + _REFUSED_NS
        return True

    def was_asked_of_gateway(self, request: FetchWeights) -> bool:
        """Whether that is waited for from it."""
        return self._source is None and self._is_under_way(request)

    def _is_under_way(self, request: FetchWeights) -> bool:
        place = request.number, request.delta, request.offset
        return place in [(part.number, part.delta, part.offset) for part, _ in self.under_way]

    def _leave_relay(self) -> None:
        """What it was asked for is asked of the gateway; that it was waited for in vain is kept in mind."""
        if self._source is not None and self.under_way:
            self._source.on_waited((self._clock.now_ns() - self.progress_ns) / 1e9, 0)
        self._source = None
        self._drop_under_way()

    def _drop_under_way(self) -> None:
        self._asked = self.received
        self.under_way.clear()
