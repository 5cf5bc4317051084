"""What a port refuses: counted by reason without end, told to people only as often as people can read.

Nothing here grows with what strangers send.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

log = logging.getLogger(__name__)

_ADDRESSES = 1000
_UNREAD = 1000


class RefusalReason(StrEnum):
    """Why something was refused."""

    unknown_key = "unknown_key"
    too_many_unknown = "too_many_unknown"
    """unknown keys from one address, faster than they are looked at"""
    revoked_key = "revoked_key"
    no_handshake = "no_handshake"
    """no CURVE key, or the key of another gateway"""
    bad_token = "bad_token"
    """not one of this gateway's"""
    used_token = "used_token"
    expired_token = "expired_token"
    wrong_name = "wrong_name"
    wrong_role = "wrong_role"
    """a message, or a `Hello`, that the role of the key may not send"""
    wrong_seal = "wrong_seal"
    """a segment that a relay brought, and that no robot of this fleet sealed for this gateway"""
    version = "version"
    """of another protocol version"""
    malformed = "malformed"
    too_large = "too_large"
    no_hello = "no_hello"
    """it has to say hello first: so do all after each start of the gateway"""
    duplicate_name = "duplicate_name"
    """another robot has it"""
    other_spec = "other_spec"
    """another kind of robot than this fleet's policy is made for"""
    too_often = "too_often"
    """more of it than one peer may send"""
    not_stored = "not_stored"
    """it has to come again later"""
    rejected = "rejected"
    """what it says cannot be; whoever said it was told why"""
    failed = "failed"
    """nobody thought of it, the log says what it was"""


class AddressLimit:
    """So many at once from one address, then one every so often; of the addresses that were seen last."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._free_s: OrderedDict[str, float] = OrderedDict()
        """by address: when all that it took is given back"""

    def take(self, address: str) -> bool:
        """Whether one more from `address` is within the limit."""
        now_s = self._clock()
        free_s = max(self._free_s.pop(address, now_s), now_s)
        granted = free_s - now_s <= (self._burst - 1) * self._every_s
        self._free_s[address] = free_s + self._every_s * granted
        if len(self._free_s) > _ADDRESSES:
            self._free_s.popitem(last=False)
        return granted


@dataclass
class Refusals:
    """Of one port."""

    counts: Counter[str] = field(default_factory=Counter)
    """since the port was opened"""
    limit: AddressLimit = field(default_factory=lambda: AddressLimit(20, 10.0))
    """of what is told"""
    _news: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_UNREAD))

    def note(
        self, reason: RefusalReason, name: str, text: str, source: str = "", limit: AddressLimit | None = None
    ) -> None:
        """Count it, and tell people of it if that is within the limit, the usual one or another: in the log, and to
        whoever asks `pop_news`. `source`: the address, or the name of a key that is known."""
        self.counts[reason] += 1
        if (limit or self.limit).take(source):
            log.error("refused '%s' %s", name, text)
            self._news.append((name, text))

    def pop_news(self) -> list[tuple[str, str]]:
        """(name, why) of what was refused since the last call."""
        news = list(self._news)
        self._news.clear()
        return news
