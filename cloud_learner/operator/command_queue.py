"""What people at the page want, until the gateway's loop pops it, and why some of it came to nothing.

Every queue is bounded; every method takes one lock for a short while.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from wire.messages.gateway import OperatorCommand
from wire.types import OperatorCommandKind

MAX_COMMANDS = 512
MAX_VERSION_CHANGES = 32
MAX_REJECTIONS = 100
"""of one operator"""


class VersionChange(NamedTuple):
    """What an operator wants with policy versions."""

    operator: str
    action: str
    """a `VersionAction`"""
    number: int = 0
    robot: str = ""
    """to pin; "" for all"""


class CommandQueue:
    """Between the page's thread and the gateway's loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: list[OperatorCommand] = []
        self._changes: list[VersionChange] = []
        self._rejections: dict[str, list[tuple[str, str]]] = {}

    def submit(self, command: OperatorCommand) -> bool:
        """Queue `command`; False when the queue is full because the gateway's loop does not drain it.

        Of several of one kind in a row for one robot only the newest stays, but of each stop, which has a name. A stop
        always finds room: it takes the place of everything but stops that waits for its robot.
        """
        with self._lock:
            mine = [i for i, queued in enumerate(self._commands) if queued.robot == command.robot]
            if mine and _same(self._commands[mine[-1]], command):
                del self._commands[mine[-1]]
            if len(self._commands) >= MAX_COMMANDS:
                if command.kind not in (OperatorCommandKind.estop, OperatorCommandKind.drop_link):
                    return False
                stop = OperatorCommandKind.estop
                self._commands = [one for one in self._commands if one.robot != command.robot or one.kind == stop]
            self._commands.append(command)
        return True

    def pop(self) -> list[OperatorCommand]:
        """Commands since the last call, oldest first."""
        with self._lock:
            commands, self._commands = self._commands, []
            return commands

    def submit_version_change(self, change: VersionChange) -> bool:
        """Queue `change`; False when the queue is full."""
        with self._lock:
            if len(self._changes) >= MAX_VERSION_CHANGES:
                return False
            self._changes.append(change)
        return True

    def pop_version_changes(self) -> list[VersionChange]:
        """Changes since the last call, oldest first."""
        with self._lock:
            changes, self._changes = self._changes, []
            return changes

    def reject(self, operator: str, robot: str, reason: str) -> None:
        """What `operator` wanted was not done; `robot`: which it so did not get, or ''."""
        with self._lock:
            waiting = self._rejections.setdefault(operator, [])
            if len(waiting) < MAX_REJECTIONS:
                waiting.append((robot, reason))

    def pop_rejections(self, operator: str) -> list[tuple[str, str]]:
        """(robot that was not given, or '', and why) for `operator` since the last call."""
        with self._lock:
            return self._rejections.pop(operator, [])


def _same(one: OperatorCommand, other: OperatorCommand) -> bool:
    """Whether two commands for a robot want the same."""
    return (one.kind, one.stop) == (other.kind, other.stop)
