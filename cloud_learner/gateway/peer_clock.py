"""The clocks of robots and other peers as the gateway knows them, and what people should hear of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from cloud_learner.gateway.peer_checks import check_time
from wire.messages.gateway import Heartbeat, Hello
from wire.transport.peer_clock import ClockOffset, PeerClock

_JUMP_NS = 100_000_000
"""a clock that jumps by less is not worth a person's attention"""
_WALL_NS = 60_000_000_000
"""a time of day that is off by more is told"""
_STORE_NS, _STORE_LEAST_NS, _URGENT_NS = 10_000_000_000, 100_000, 50_000_000
"""an offset is stored once in so long, and when it changed by more than it was uncertain and than so much; sooner when
it changed by a lot"""
_URGENT_PERIOD_NS = 1_000_000_000
_TOLD_NS = 10_000_000_000
_DAY_S = 86_400


class _Known(msgspec.Struct):
    """A peer's clock."""

    clock: PeerClock
    stored: ClockOffset | None = None
    stored_ns: int = 0
    stored_clock: str = ""
    wall_is_off: bool = False
    told_ns: int | None = None
    """when people heard of a jump last"""


class PeerClocks:
    """Of all peers, by name. A clock that jumps, or whose time of day is wrong, is told once."""

    def __init__(
        self,
        store: Callable[[str, int, int], None],
        tell: Callable[[str, str, str], None],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`store(peer, offset_ns, now_ns)` has an offset stored, sooner or later; `tell` people of an event: peer,
        kind, text."""
        self._store, self._tell, self._wall_ns = store, tell, wall_ns
        self._known: dict[str, _Known] = {}

    def measure(self, peer: str, clock: str, message: Hello | Heartbeat, now_ns: int) -> int | None:
        """A peer with that clock sent this, which came at `now_ns` of ours. Gateway's time - the peer's, None while
        nobody can tell. Raises `RejectedError` for a time that cannot be."""
        check_time(message.sent_ns)
        known = self._known.setdefault(peer, _Known(PeerClock()))
        if isinstance(message, Hello):
            known.clock.on_sent(clock, message.sent_ns, now_ns)
            self._check_wall(peer, known, message.wall_ns)
        else:
            jump_ns = known.clock.on_heartbeat(clock, message, now_ns)
            if abs(jump_ns) > _JUMP_NS and (known.told_ns is None or now_ns - known.told_ns > _TOLD_NS):
                known.told_ns = now_ns
                self._tell(peer, "clock", _jumped(jump_ns))
        offset = self.offset(peer, now_ns)
        if offset is None:
            return None
        stored = known.stored if known.stored_clock == clock else None
        if stored is None or _is_news(offset, stored, now_ns - known.stored_ns):
            self._store(peer, offset.ns, now_ns)
            known.stored, known.stored_ns, known.stored_clock = offset, now_ns, clock
        return offset.ns

    def offset(self, peer: str, now_ns: int) -> ClockOffset | None:
        """Gateway's time - the peer's, in `ns`; None while nothing was measured. Before the first round trip it is too
        large by what the way here took."""
        known = self._known.get(peer)
        found = known.clock.offset(now_ns) if known else None
        return found and found._replace(ns=-found.ns)

    def drift_ppm(self, peer: str, now_ns: int) -> tuple[float, float] | None:
        """How much faster the peer's clock runs than the gateway's, and within what that is right; None while nobody
        can tell."""
        known = self._known.get(peer)
        return known.clock.drift_ppm(now_ns) if known else None

    def forget(self, peer: str) -> None:
        """It is not among the peers any more."""
        self._known.pop(peer, None)

    def _check_wall(self, peer: str, known: _Known, wall_ns: int) -> None:
        off_ns = wall_ns - self._wall_ns() if wall_ns else 0
        was_off, known.wall_is_off = known.wall_is_off, abs(off_ns) > _WALL_NS
        if known.wall_is_off and not was_off:
            way = "ahead of" if off_ns > 0 else "behind"
            text = (
                f"its clock is {_duration(abs(off_ns) / 1e9)} {way} the gateway's: its logs and flights carry wrong "
                "dates, what it records does not. Set it: `sudo timedatectl set-ntp true` on its computer."
            )
            self._tell(peer, "clock", text)


def _is_news(offset: ClockOffset, stored: ClockOffset, age_ns: int) -> bool:
    """Whether an offset is another one than that which is stored, as far as one can tell."""
    change_ns = abs(offset.ns - stored.ns)
    if stored.uncertainty_ns is None and offset.uncertainty_ns is not None:
        return True
    if change_ns > _URGENT_NS:
        return age_ns >= _URGENT_PERIOD_NS
    if stored.uncertainty_ns is None:
        return False
    return age_ns >= _STORE_NS and change_ns > max(stored.uncertainty_ns, _STORE_LEAST_NS)


def _jumped(jump_ns: int) -> str:
    return (
        f"its clock jumped by {jump_ns / 1e9:+.3f} s against the gateway's: one of the computers slept, or its clock "
        "is broken. What it recorded just then may carry wrong times."
    )


def _duration(seconds: float) -> str:
    return f"{seconds / _DAY_S:.1f} days" if seconds >= _DAY_S else f"{seconds:.0f} s"
