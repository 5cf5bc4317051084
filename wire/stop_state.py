"""Who keeps a robot stopped."""

from __future__ import annotations

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
