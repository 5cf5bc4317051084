"""Who drives a robot, kept for a control process that is started again."""

from __future__ import annotations

from wire.messages.gateway import OperatorCommand


class StickyCommands:
    """What a person said last of driving; a stop is kept by the robot's host."""

    def __init__(self) -> None:
        self._taken_over: OperatorCommand | None = None
        self._unlinked: OperatorCommand | None = None

    def remember(self, command: OperatorCommand) -> None:
        match command.kind:
            case "take_over":
                self._taken_over, self._unlinked = command, None
            case "hand_back":
                self._taken_over = self._unlinked = None
            case "drop_link" if self._taken_over is not None:
                self._unlinked = command
            case "command":
                self._unlinked = None

    def current(self) -> list[OperatorCommand]:
        """What holds now, in the order it must be told: that a driver vanished after who it was."""
        return [command for command in (self._taken_over, self._unlinked) if command is not None]
