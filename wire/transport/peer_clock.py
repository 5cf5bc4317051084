"""Another computer's clock as this one knows it: when was what one of them stamped, by the clock of the other?"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from wire.clock import clock_name
from wire.messages.gateway import Heartbeat, HelloAck

MOST_DRIFT_PPM = 500
"""two clocks drift apart by no more: the kernel slews a monotonic clock that NTP corrects by as much"""
_DRIFT_WINDOW_NS = 60_000_000_000
_DRIFT_WINDOWS = 10
_LATEST_NS = 2**62


class ClockOffset(NamedTuple):
    """By how much another clock is ahead of ours."""

    ns: int
    uncertainty_ns: int | None
    """it is right within so much: half of the shortest round trip, and what the clocks may have drifted since; None:
    only one way was measured, and `ns` is too small by what that took"""


class PeerClock:
    """Bounds from both sides on how far the other clock is ahead, by round trips of messages.

    The way there took some time, so the other clock is at most so far ahead; the way back too, so it is at least so
    far. The closest bounds are those of the messages that waited least. They widen by `MOST_DRIFT_PPM` as they grow
    old; so the truth stays within them however the clocks drift. Bounds that exclude each other mean that one of the
    clocks jumped: then they begin anew. Answers may come late, twice and out of order.
    """

    def __init__(self) -> None:
        self._name = ""
        self._same = False
        self._most: int | None = None
        self._least: int | None = None
        """that the peer is ahead, ns, at `_at_ns` of our clock"""
        self._at_ns = self._begun_ns = 0
        self._anchors: deque[tuple[int, int, int]] = deque(maxlen=_DRIFT_WINDOWS)
        """(our time, offset, uncertainty), about one a minute"""

    # --- what was measured --------------------------------------------------------------------------------------

    def on_answer(self, answer: HelloAck, now_ns: int) -> int:
        """Our heartbeat was answered: a round trip. By how much the gateway's clock jumped, 0: it did not."""
        self._know(answer.clock)
        return self._measure(answer.received_ns - answer.echo_ns, answer.received_ns - now_ns, answer.echo_ns, now_ns)

    def on_heartbeat(self, clock: str, heartbeat: Heartbeat, now_ns: int) -> int:
        """A peer with that clock sent a heartbeat: with the answer that it names a round trip, else one way. By how
        much its clock jumped, 0: it did not."""
        self._know(clock)
        if not heartbeat.echo_ns:
            self.on_sent(clock, heartbeat.sent_ns, now_ns)
            return 0
        # it has drifted on between the answer and the heartbeat
        rest_ns = max(0, heartbeat.sent_ns - heartbeat.echoed_ns)
        most_ns = heartbeat.echoed_ns - heartbeat.echo_ns + _drift(rest_ns)
        return self._measure(most_ns, heartbeat.sent_ns - now_ns, heartbeat.echo_ns, now_ns)

    def on_sent(self, clock: str, sent_ns: int, now_ns: int) -> None:
        """A peer with that clock sent something, one way: of use while there is no round trip."""
        self._know(clock)
        if self._most is None:
            least_ns = sent_ns - now_ns
            self._least = least_ns if self._least is None else max(least_ns, self._least)
            self._at_ns = now_ns

    # --- what is known ------------------------------------------------------------------------------------------

    def offset(self, now_ns: int) -> ClockOffset | None:
        """By how much the peer's clock is ahead at `now_ns` of ours; None while nothing was measured."""
        if self._same:
            return ClockOffset(0, 0)
        if self._least is None:
            return None
        if self._most is None:
            return ClockOffset(self._least, None)
        age_ns = _drift(now_ns - self._at_ns)
        return ClockOffset((self._least + self._most) // 2, (self._most - self._least + 1) // 2 + age_ns)

    def drift_ppm(self, now_ns: int) -> tuple[float, float] | None:
        """How much faster the peer's clock runs, and within what that is right; None before a minute has passed."""
        known = self.offset(now_ns)
        if not self._anchors or known is None or known.uncertainty_ns is None:
            return None
        then_ns, before_ns, uncertainty_ns = self._anchors[0]
        if now_ns - then_ns < _DRIFT_WINDOW_NS:
            return None
        per_ppm = (now_ns - then_ns) / 1e6
        return (known.ns - before_ns) / per_ppm, (known.uncertainty_ns + uncertainty_ns) / per_ppm

    def ours(self, time_ns: int) -> int:
        """A time of the peer by our clock, never later than it was; 0 while no round trip was measured."""
        if self._same:
            return _bounded(time_ns)
        if self._most is None:
            return 0
        return _bounded(time_ns - self._most - _drift(time_ns - self._most - self._at_ns))

    def theirs(self, time_ns: int) -> int:
        """A time of ours by the peer's clock, never later than it was; 0 while no round trip was measured."""
        if self._same:
            return _bounded(time_ns)
        if self._least is None or self._most is None:
            return 0
        return _bounded(time_ns + self._least - _drift(time_ns - self._at_ns))

    # --- inside -------------------------------------------------------------------------------------------------

    def _know(self, name: str) -> None:
        """Another computer, or the same one after a restart: what bounded the old clock says nothing of this one."""
        if name != self._name:
            self._name, self._same, self._begun_ns = name, name == clock_name(), 0
            self._forget()

    def _forget(self) -> None:
        self._most = self._least = None
        self._anchors.clear()

    def _measure(self, most_ns: int, least_ns: int, begun_ns: int, now_ns: int) -> int:
        """A round trip that began at `begun_ns` of our clock bounds how far the peer is ahead."""
        if now_ns < self._at_ns:
            # Our own clock went back.
            self._begun_ns = begun_ns
        trip_ns = _drift(now_ns - begun_ns)
        most_ns, least_ns = most_ns + trip_ns, least_ns - trip_ns
        if self._same or most_ns < least_ns or not self._begun_ns <= begun_ns <= now_ns:
            # One that spans a jump contradicts itself; one from before a jump says nothing of the time after it.
            return 0
        jump_ns = 0
        if self._most is None or self._least is None:
            self._most, self._least, self._begun_ns = most_ns, least_ns, begun_ns
        else:
            age_ns = _drift(now_ns - self._at_ns)
            aged_most, aged_least = self._most + age_ns, self._least - age_ns
            if least_ns > aged_most or most_ns < aged_least:
                jump_ns = (most_ns + least_ns - aged_most - aged_least) // 2
                self._forget()
                self._most, self._least, self._begun_ns = most_ns, least_ns, begun_ns
            else:
                self._most, self._least = min(most_ns, aged_most), max(least_ns, aged_least)
        self._at_ns = now_ns
        if not self._anchors or now_ns - self._anchors[-1][0] >= _DRIFT_WINDOW_NS:
            self._anchors.append((now_ns, (self._most + self._least) // 2, (self._most - self._least + 1) // 2))
        return jump_ns


def _drift(duration_ns: int) -> int:
    """What two clocks drift apart in that time, at most."""
    return abs(duration_ns) * MOST_DRIFT_PPM // 1_000_000


def _bounded(time_ns: int) -> int:
    """A time that a message can carry, whatever a peer said: far away from now if need be."""
    return max(-_LATEST_NS, min(time_ns, _LATEST_NS))
