"""A person's hands on one robot, through the operator page, a device or a program beside the robot."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from robot_edge.control.config import LoopConfig
from robot_edge.operators.blend import HandBackBlend, TakeoverBlend
from robot_edge.operators.lease_fence import LeaseFence, Refusal
from wire.clock import Clock
from wire.messages.gateway import COMMAND_FRESH_S, START_FRESH_S, OperatorCommand
from wire.messages.local import OperatorState
from wire.types import CommandType, Mode, OperatorCommandKind, RobotSpec

log = logging.getLogger(__name__)

CLOCK_ERROR_S = 0.05
"""measured clocks say when a command was made, or earlier; only by their drift, of some milliseconds, later"""
_TOLD = 64
"""reasons that people are told of one robot until somebody takes it over anew"""


def _log_refusal(kind: str, detail: str) -> None:
    log.warning("%s: %s", kind, detail)


class OperatorOverride:
    """Remembers whether a person has taken over and what the person's last command was.

    What it refuses is told once for each reason, lease and operator.
    """

    def __init__(
        self,
        spec: RobotSpec,
        clock: Clock,
        config: LoopConfig | None = None,
        notify: Callable[[str, str], None] = _log_refusal,
    ) -> None:
        """`notify(kind, detail)`: for people."""
        config = config or LoopConfig()
        self._spec = spec
        self._clock = clock
        self._notify = notify
        self.linked = True
        self._low, self._high = spec.action_low(), spec.action_high()
        self._absolute = np.array([dimension.meaning is CommandType.absolute for dimension in spec.action])
        measured = {d.name for d in spec.state} | {mapping.action for mapping in config.safety.moves}
        # What nobody measures (a gripper's effort) is nowhere that it could be approached from.
        self._approached = self._absolute & np.array([d.name in measured for d in spec.action])
        self._fence = LeaseFence()
        self._told: set[tuple[Refusal, int, str]] = set()
        self._takeover = TakeoverBlend(spec.action_dim, round(config.takeover_blend_s * spec.control_hz))
        self._hand_back = HandBackBlend(spec, round(config.hand_back_blend_s * spec.control_hz))
        self._forget()

    def _forget(self) -> None:
        self._command: np.ndarray | None = None
        self._acts = self._released = False
        """by the newest command something moves, or nothing is pressed"""
        self._last: np.ndarray | None = None
        self._keeps = self._absolute.copy()
        self._captured_ns = 0
        self._takeover.forget()

    @property
    def in_control(self) -> bool:
        """Whether a person has taken over."""
        return self._fence.holder is not None

    @property
    def operator(self) -> str:
        """Who has, '' when nobody has."""
        return self._fence.holder.operator if self._fence.holder is not None else ""

    def handle_command(self, command: OperatorCommand) -> bool:
        """True when it is a new takeover."""
        before = self._fence.holder
        if refusal := self._fence.admit(command):
            self._refuse(command, refusal)
            return False
        match command.kind:
            case OperatorCommandKind.take_over:
                same = before is not None and (before.lease, before.operator, before.beside) == (
                    command.lease,
                    command.operator,
                    command.beside,
                )
                if same and self.linked:
                    # Said again: what the person commands goes on.
                    return False
                self.linked = True
                self._told.clear()
                self._forget()
                return before is None
            case OperatorCommandKind.hand_back:
                self.linked = True
                self._forget()
                # Also of one who had the robot only while it held.
                self._hand_back.on_person()
            case OperatorCommandKind.drop_link:
                self.linked, self._command = False, None
            case OperatorCommandKind.command:
                self._set_command(command)
        return False

    def restore(self, state: OperatorState) -> None:
        """Who drives, as the uplink knows it; this control process may be new."""
        if self._fence.restore(state):
            self.linked = state.linked
            self._forget()

    def new_scene(self) -> None:
        """The robot was reset: what was commanded before is for where it was."""
        self._forget()
        self._hand_back.forget()

    def action(self, executed: np.ndarray) -> np.ndarray | None:
        """float32[da]: what the person wants while a key is down and its command is fresh, else None.

        `executed`, float32[da], is what the robot did last: dimensions that are set rather than moved (a gripper) keep
        it until the person changes them.
        """
        command = self._fresh_command()
        if command is None or self._released or not (self._acts or self._takeover.fading):
            return None
        return np.where(self._keeps, executed, command)

    def blend(
        self, mode: Mode, action: np.ndarray | None, executed: np.ndarray, waited: bool = False
    ) -> np.ndarray | None:
        """float32[da] to command: the `action` of whoever is in control, without a jump from `executed`, what the robot
        did last; `waited`: and that was to be held, whatever it was told. Once a tick."""
        if waited:
            self._takeover.on_wait()
            self._hand_back.on_wait()
        if self.in_control:
            self._hand_back.on_person()
            acts = mode is Mode.human and action is not None
            offset = self._takeover.offset(self._fresh_command(), self._approached & ~self._keeps, acts, executed)
            return action if action is None else np.clip(action + offset, self._low, self._high)
        action = self._hand_back.action(mode, action, executed)
        return action if action is None else np.clip(action, self._low, self._high)

    def _fresh_command(self) -> np.ndarray | None:
        late = self._clock.now_ns() - self._captured_ns > COMMAND_FRESH_S * 1e9
        return None if late else self._command

    def _set_command(self, command: OperatorCommand) -> None:
        now_ns = self._clock.now_ns()
        action = np.asarray(command.action, np.float32)
        if not command.captured_ns:
            self._refuse(command, Refusal.untimed)
        elif now_ns - command.captured_ns > COMMAND_FRESH_S * 1e9:
            self._refuse(command, Refusal.stale)
        elif command.captured_ns - now_ns > CLOCK_ERROR_S * 1e9:
            self._refuse(command, Refusal.future)
        elif not command.action:
            self.linked, self._captured_ns = True, min(command.captured_ns, now_ns)
            self._acts, self._released = False, True
        elif action.shape != (self._spec.action_dim,) or not np.isfinite(action).all():
            self._refuse(command, Refusal.invalid)
        else:
            self.linked, self._captured_ns = True, min(command.captured_ns, now_ns)
            changed = self._absolute & (action != self._last) if self._last is not None else self._absolute & False
            self._keeps = self._keeps & ~changed
            # A released key comes as zeros in the moving dimensions: that is a hold, not something to imitate.
            self._acts = bool(np.any(action[~self._absolute] != 0) or np.any(changed))
            self._command = self._last = action
            self._takeover.on_command(action)
            self._released = False

    def is_timely(self, word: OperatorCommand) -> bool:
        """Whether a word about an episode was said just now, and not kept by a link that stalled."""
        late_s = (self._clock.now_ns() - word.captured_ns) / 1e9
        if not word.captured_ns:
            self._refuse(word, Refusal.untimed)
        elif late_s > START_FRESH_S:
            self._refuse(word, Refusal.stale)
        elif late_s < -CLOCK_ERROR_S:
            self._refuse(word, Refusal.future)
        else:
            return True
        return False

    def _refuse(self, command: OperatorCommand, why: Refusal) -> None:
        reason = why, command.lease, command.operator
        if reason not in self._told and len(self._told) < _TOLD:
            self._told.add(reason)
            self._notify("refused", f"{command.kind} of '{command.operator}' (lease {command.lease}): {why}.")
