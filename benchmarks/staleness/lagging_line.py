"""What inference hears of its uplink, where weights come so many versions late."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import msgspec

from wire.messages import Message
from wire.messages.local import LoadWeights
from wire.transport.channel import Channel

_KEPT = 4
"""versions that were handed on: one may still be read"""


class LaggingLine:
    """A `Channel` that holds each version back until one `lag` newer has come; the first comes at once.

    Files are linked in `home`, for the uplink keeps the newest ones alone.
    """

    def __init__(self, line: Channel, lag: int, home: Path) -> None:
        self._line, self._lag, self._home = line, lag, home
        self._held: deque[LoadWeights] = deque()
        self._given: deque[Path] = deque()
        home.mkdir(parents=True, exist_ok=True)

    def send(self, message: Message) -> bool:
        return self._line.send(message)

    def recv(self) -> Message | None:
        while (message := self._line.recv()) is not None:
            if not isinstance(message, LoadWeights):
                return message
            link = self._home / f"{message.version.number}.weights"
            if not link.exists():
                os.link(message.path, link)
                self._held.append(msgspec.structs.replace(message, path=str(link)))
        return self._pop_due()

    def close(self) -> None:
        self._line.close()

    def _pop_due(self) -> LoadWeights | None:
        """The newest version that is late enough; those before it are passed over."""
        if not self._held:
            return None
        newest, due = self._held[-1].version.number, None
        while self._held and (not self._given or newest - self._held[0].version.number >= self._lag):
            due = self._held.popleft()
            self._given.append(Path(due.path))
        while len(self._given) > _KEPT:
            self._given.popleft().unlink()
        return due
