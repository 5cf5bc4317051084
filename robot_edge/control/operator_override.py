"""A person's hands on one robot, through the operator page."""

from __future__ import annotations

import logging

import numpy as np

from wire.clock import Clock
from wire.messages.gateway import OperatorCommand
from wire.types import RobotSpec

log = logging.getLogger(__name__)

COMMAND_FRESH_S = 0.3
"""a command older than this is a released key or a lost link: the robot holds"""


class OperatorOverride:
    """Remembers whether a person has taken over and what the person's last command was."""

    def __init__(self, spec: RobotSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self.in_control = False
        self.linked = True
        self.operator = ""
        self._absolute = np.array([dimension.meaning == "absolute" for dimension in spec.action])
        self._forget()

    def _forget(self) -> None:
        self._command: np.ndarray | None = None
        self._last: np.ndarray | None = None
        self._keeps = self._absolute.copy()
        self._captured_ns = 0

    def handle_command(self, command: OperatorCommand) -> bool:
        """True when it is a new takeover."""
        match command.kind:
            case "take_over" if self.in_control and self.linked and command.operator == self.operator:
                # Said again, as to a control process that might be new: what the person commands goes on.
                return False
            case "take_over":
                new = not self.in_control
                self.in_control, self.linked, self.operator = True, True, command.operator
                self._forget()
                return new
            case "hand_back":
                self.in_control, self.linked, self.operator = False, True, ""
                self._forget()
            case "drop_link":
                self.linked, self._command = False, None
            case "command" if self.in_control:
                self._set_command(command)
            case _:
                log.warning("command '%s' for robot '%s' ignored.", command.kind, command.robot)
        return False

    def new_scene(self) -> None:
        """The robot was reset: what was commanded before is for where it was."""
        self._forget()

    def action(self, executed: np.ndarray) -> np.ndarray | None:
        """float32[da] while a key is down and its command is fresh, else None.

        `executed`, float32[da], is what the robot did last: dimensions that are set rather than moved (a gripper) keep
        it until the person changes them.
        """
        if self._command is None or self._clock.now_ns() - self._captured_ns > COMMAND_FRESH_S * 1e9:
            return None
        return np.where(self._keeps, executed, self._command)

    def _set_command(self, command: OperatorCommand) -> None:
        action = np.asarray(command.action, np.float32)
        if action.shape != (self._spec.action_dim,) or not np.isfinite(action).all():
            log.warning(
                "robot '%s': command %s ignored: not %d finite numbers.",
                command.robot,
                command.action,
                self._spec.action_dim,
            )
            return
        now_ns = self._clock.now_ns()
        captured_ns = min(command.captured_ns or now_ns, now_ns)
        if captured_ns < self._captured_ns:
            # It was overtaken on its way.
            return
        self.linked = True
        set_by_person = self._absolute & (action != self._last) if self._last is not None else self._absolute & False
        self._keeps = self._keeps & ~set_by_person
        # A released key comes as zeros in the moving dimensions: that is a hold, not something to imitate.
        acts = np.any(action[~self._absolute] != 0) or np.any(set_by_person)
        self._command = action if acts else None
        self._last = action
        self._captured_ns = captured_ns
