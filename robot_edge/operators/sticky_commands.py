"""Who drives a robot and what was passed on of them, kept for a control process that is started again."""

from __future__ import annotations

from robot_edge.operators.lease_fence import LeaseFence
from wire.messages.gateway import OperatorCommand
from wire.messages.local import OperatorState
from wire.types import EPISODE_COMMANDS, OperatorCommandKind


class StickyCommands:
    """Follows people's messages by the rules that control follows them by, but for how late they are; a stop is kept by
    the robot's host.
    """

    def __init__(self) -> None:
        self._fence = LeaseFence()
        self._linked = True

    def remember(self, command: OperatorCommand) -> None:
        """It is passed on to control."""
        if command.kind not in EPISODE_COMMANDS and not self._fence.admit(command):
            self._linked = command.kind != OperatorCommandKind.drop_link

    def state(self) -> OperatorState:
        """What holds now."""
        return self._fence.state(self._linked)
