"""Who keeps a robot stopped or slow, and how a stop is called."""

from __future__ import annotations

import secrets

import msgspec


class StopState(msgspec.Struct, frozen=True):
    """Who keeps a robot stopped, and who slows it."""

    stops: dict[str, str] = {}
    """who stopped it, by the id of the stop"""
    ready: bool = False
    """all stops were released, and nobody has started it since"""
    speed_limits: dict[str, float] = {}
    """share of its velocity limits that it may use, above 0 and below 1, by who said so; the smallest one counts"""
    last: str = ""
    """id of the newest stop; a start names it, so that one which is late starts nothing after another stop"""

    @property
    def free(self) -> bool:
        """Whether the robot may move."""
        return not (self.stops or self.ready)

    @property
    def speed_limit(self) -> float:
        """Share of its velocity limits that it may use."""
        return min(self.speed_limits.values(), default=1.0)

    def __str__(self) -> str:
        """For people."""
        slow = ", ".join(f"{share:.3g} of its speed by {who}" for who, share in self.speed_limits.items())
        return f"{self._stopped}; slowed to {slow}" if slow else self._stopped

    @property
    def _stopped(self) -> str:
        if self.stops:
            return "stopped by " + ", ".join(f"{who} ({stop})" for stop, who in self.stops.items())
        return "released and waits to be started" if self.ready else "not stopped"


def new_stop_id(who: str) -> str:
    """A name for a stop of `who` that nobody gives twice, also in another process or after a restart."""
    return f"{who}-{secrets.token_hex(4)}"
