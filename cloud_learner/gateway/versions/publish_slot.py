"""Which trainer's version is being taken in: the parts of two would end each other's upload."""

from __future__ import annotations

from wire.clock import Clock

_SILENT_S = 30.0
"""more than a trainer waits without progress before it offers everything again"""


class PublishSlot:
    """One peer's, from its offer until its version is published or refused, or it has been silent. For the gateway's
    loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holder, self._number, self._heard_ns = "", 0, 0
        self._waiting: set[str] = set()
        """peers that are to offer theirs again; what they sent ahead is for nobody"""

    def take(self, peer: str, number: int) -> str:
        """'' when it is `peer`'s now, for version `number`; else why not, and what to do."""
        now_ns = self._clock.now_ns()
        if self._holder not in ("", peer) and now_ns - self._heard_ns < _SILENT_S * 1e9:
            self._waiting.add(peer)
            return (
                f"another trainer ({self._holder}) is publishing version {self._number}; offer yours again when that "
                f"is done, or {_SILENT_S:g} s after it fell silent. If only one is to learn, stop the other."
            )
        self._holder, self._number, self._heard_ns = peer, number, now_ns
        self._waiting.discard(peer)
        return ""

    def accepts(self, peer: str) -> bool:
        """Whether a part that `peer` has sent is to be looked at."""
        if self._holder == peer:
            self._heard_ns = self._clock.now_ns()
        return self._holder == peer or (not self._holder and peer not in self._waiting)

    def release(self, peer: str) -> None:
        """Its version was published or refused."""
        if self._holder == peer:
            self._holder = ""
