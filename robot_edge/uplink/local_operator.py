"""An operator beside the robot: another process of its computer that sees what the robot does and may stop or drive it.

It hears every `EdgeStatus` and `EdgeEvent`; its commands reach control also while the gateway is out of reach. One such
process at a time connects to what the uplink binds (`robot_edge.runtime.process_group.lines`, `uplink-desk`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from wire.errors import storage_error
from wire.messages import Message
from wire.messages.gateway import EdgeEvent, EdgeStatus, OperatorCommand
from wire.transport.channel import Channel

log = logging.getLogger(__name__)


class LocalOperatorLink:
    """The uplink's end of the connection; with nobody at the other end, what is told is dropped."""

    def __init__(self, robot: str, channel: Channel) -> None:
        self._robot = robot
        self._channel = channel

    def tell(self, message: EdgeStatus | EdgeEvent) -> None:
        """Never waits: an operator that does not listen misses something."""
        self._channel.send(message)

    def wishes(self) -> Iterable[OperatorCommand]:
        """What the operator commanded since the last call, for this robot."""
        for message in drain(self._channel):
            if isinstance(message, OperatorCommand) and message.robot == self._robot:
                yield message
            else:
                what = (
                    f"a command for '{message.robot}'"
                    if isinstance(message, OperatorCommand)
                    else type(message).__name__
                )
                log.warning("robot '%s': its local operator sent %s, which is ignored.", self._robot, what)


class StickyCommands:
    """What people want of the robot that a control process which is started again must know."""

    def __init__(self, robot: str, directory: Path) -> None:
        """A stop is kept as a file in `directory`, so that it outlives this process too."""
        self._robot = robot
        self._file = directory / "estop"
        self._estop = self._file.exists()
        self._taken_over: OperatorCommand | None = None
        self._dropped: OperatorCommand | None = None

    def remember(self, wish: OperatorCommand) -> None:
        match wish.kind:
            case "estop":
                self._estop = True
                self._mark()
            case "release_estop":
                self._estop = False
                self._mark()
            case "take_over":
                self._taken_over, self._dropped = wish, None
            case "hand_back":
                self._taken_over = self._dropped = None
            case "drop_link" if self._taken_over is not None:
                self._dropped = wish
            case "command":
                self._dropped = None

    def standing(self) -> list[OperatorCommand]:
        """What holds now, in the order it must be told: the stop first, and that a driver vanished after who it was."""
        stop = [OperatorCommand(self._robot, "estop", operator="before")] if self._estop else []
        return stop + [wish for wish in (self._taken_over, self._dropped) if wish is not None]

    def _mark(self) -> None:
        try:
            if self._estop:
                self._file.touch()
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s", storage_error(error, "remembering the emergency stop", self._file))


def drain(channel: Channel, most: int = 500) -> Iterable[Message]:
    """What has come, but no more than `most` at once."""
    for _ in range(most):
        message = channel.recv()
        if message is None:
            return
        yield message
