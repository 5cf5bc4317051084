"""Who keeps a robot stopped, and how a stop is called."""

from __future__ import annotations

import secrets

import msgspec


class StopState(msgspec.Struct, frozen=True):
    """Who keeps a robot stopped."""

    stops: dict[str, str] = {}
    """who stopped it, by the id of the stop"""
    ready: bool = False
    """all stops were released, and nobody has started it since"""

    @property
    def free(self) -> bool:
        """Whether the robot may move."""
        return not (self.stops or self.ready)

    def __str__(self) -> str:
        """For people."""
        if self.stops:
            return "stopped by " + ", ".join(f"{who} ({stop})" for stop, who in self.stops.items())
        return "released and waits to be started" if self.ready else "not stopped"


def new_stop_id(who: str) -> str:
    """A name for a stop of `who` that nobody gives twice, also in another process or after a restart."""
    return f"{who}-{secrets.token_hex(4)}"
