"""A device that stops a robot, as whoever watches it sees it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class KeyEvent(NamedTuple):
    """A key went down or up; a line has one key, 0."""

    key: int
    down: bool


class InputDevice(Protocol):
    """An open device. Whatever is wrong with it, also that it was unplugged, is an `OSError`."""

    def fileno(self) -> int:
        """Can be read when there are events."""
        ...

    def read(self) -> list[KeyEvent]:
        """What happened since the last call, in order."""
        ...

    def down(self) -> set[int]:
        """Keys that are down now."""
        ...

    def close(self) -> None: ...
