"""What people want of a robot, kept for a control process that is started again."""

from __future__ import annotations

import logging
from pathlib import Path

from wire.errors import storage_error
from wire.messages.gateway import OperatorCommand

log = logging.getLogger(__name__)


class StickyCommands:
    """The emergency stop, and who drives the robot."""

    def __init__(self, robot: str, directory: Path) -> None:
        """A stop is kept as a file in `directory`, so that it outlives this process too."""
        self._robot = robot
        self._file = directory / "estop"
        self._estop = self._file.exists()
        self._taken_over: OperatorCommand | None = None
        self._unlinked: OperatorCommand | None = None

    def remember(self, command: OperatorCommand) -> None:
        match command.kind:
            case "estop":
                self._estop = True
                self._write_stop()
            case "release_estop":
                self._estop = False
                self._write_stop()
            case "take_over":
                self._taken_over, self._unlinked = command, None
            case "hand_back":
                self._taken_over = self._unlinked = None
            case "drop_link" if self._taken_over is not None:
                self._unlinked = command
            case "command":
                self._unlinked = None

    def current(self) -> list[OperatorCommand]:
        """What holds now, in the order it must be told: the stop first, and that a driver vanished after who it was."""
        stop = [OperatorCommand(self._robot, "estop", operator="before")] if self._estop else []
        return stop + [command for command in (self._taken_over, self._unlinked) if command is not None]

    def _write_stop(self) -> None:
        try:
            if self._estop:
                self._file.touch()
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s", storage_error(error, "remembering the emergency stop", self._file))
