"""Each guard of the control path taken out, one at a time: the drill has to see it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from hal.driver_host.watchdog import CommandWatchdog
from hal.driver_host.watched_robot import WatchedRobot
from hal.interfaces.robot import Feedback
from hal.safety import limiter
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limiter import SafetyLimiter, limit_action
from hal.safety.stop_latch import StopLatch
from robot_edge.chunking.scheduler import AlignedScheduler, RequestTracker
from robot_edge.control import operator_override
from robot_edge.control.mode import NO_HOLD
from robot_edge.control.observation_checks import ObservationMonitor
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.operators.blend import HandBackBlend, TakeoverBlend
from robot_edge.operators.lease_fence import LeaseFence, Refusal
from wire.messages.gateway import OperatorCommand
from wire.stop_state import StopState
from wire.types import OperatorCommandKind


def _replaced(owner: type, name: str, new: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: patch.object(owner, name, new)


def _wrapped(owner: type, name: str, wrap: Callable[..., Any]) -> Callable[[], Any]:
    """`wrap(original, *arguments)` instead of a method."""
    original = getattr(owner, name)
    return lambda: patch.object(owner, name, lambda *given, **named: wrap(original, *given, **named))


def _void_only_for_a_new_episode(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def void(self: Any) -> None:
        # `reset` voids as well: a scheduler that was never reset has nothing to run on
        if sys._getframe(1).f_code.co_name in ("reset", "void"):
            original(self)

    return void


@contextlib.contextmanager
def _plans_outlive() -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        kinds: list[type[AlignedScheduler]] = [AlignedScheduler, *AlignedScheduler.__subclasses__()]
        for kind in kinds:
            if "void" in vars(kind):
                undo.enter_context(patch.object(kind, "void", _void_only_for_a_new_episode(kind.void)))
        yield


def _never_waits(
    original: Callable[..., Any], self: RequestTracker, tick: int, action: np.ndarray, waited: bool
) -> None:
    original(self, tick, action, False)


def _any_release(self: StopLatch, stop: str) -> None:
    self._state = StopState(ready=not self._state.free)


def _release_starts(original: Callable[..., Any], self: StopLatch, stop: str) -> None:
    original(self, stop)
    if not self._state.stops:
        self._state = StopState()


def _start_after_any(original: Callable[..., Any], self: StopLatch, after: str = "") -> None:
    original(self)


def _comfortable(original: Callable[..., Any], self: SafetyLimiter, *given: Any, **named: Any) -> Any:
    return original(self, *given[:2])


def _no_walls(walls: Any, measured: Any) -> tuple[float, float, bool]:
    return float("inf"), float("inf"), True


def _last_limit_counts(self: StopLatch, who: str, share: float) -> None:
    self._state = msgspec.structs.replace(self._state, speed_limits={who: share})


def _unlimited(self: SafetyLimiter, action: np.ndarray, executed: np.ndarray, state: np.ndarray | None = None) -> Any:
    return limit_action(self.compiled.spec, action)


def _hold_nothing(self: LimitedRobot) -> Feedback:
    return Feedback(self._before())


def _execute_late(
    original: Callable[..., Any], self: WatchedRobot, action: np.ndarray | None, sent_ns: int
) -> Feedback:
    return original(self, action, self._clock.now_ns())


def _nobody_vanishes(original: Callable[..., Any], self: OperatorOverride, command: OperatorCommand) -> bool:
    return command.kind != OperatorCommandKind.drop_link and original(self, command)


def _any_message(*excused: Refusal) -> Callable[..., Any]:
    def admit(original: Callable[..., Refusal], self: LeaseFence, command: OperatorCommand) -> Refusal:
        refusal = original(self, command)
        if refusal not in excused:
            return refusal
        if command.kind == OperatorCommandKind.take_over:
            self.holder = command
        return Refusal.none

    return admit


def _no_offset(self: TakeoverBlend, command: Any, driven: np.ndarray, acts: bool, executed: np.ndarray) -> np.ndarray:
    return np.zeros_like(executed)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "actions are spent while the robot waits": _wrapped(RequestTracker, "on_executed", _never_waits),
    "plans outlive who interrupted them": _plans_outlive,
    "nothing limits what is executed": _replaced(SafetyLimiter, "limit", _unlimited),
    "nobody slows it": _replaced(SafetyLimiter, "slow", lambda self, share: None),
    "whoever slowed it last counts alone": _replaced(StopLatch, "limit_speed", _last_limit_counts),
    "a hold commands nothing": _replaced(LimitedRobot, "hold", _hold_nothing),
    "the host watches nothing": _replaced(CommandWatchdog, "left_s", lambda self, now_ns: float("inf")),
    "the host does not brake at once": _replaced(CommandWatchdog, "on_stop", lambda self, now_ns: self.pause()),
    "a stop is not heard": _replaced(StopLatch, "stop", lambda self, stop, who, lasting: None),
    "a release takes back any stop": _replaced(StopLatch, "release", _any_release),
    "a start follows any stop": _wrapped(StopLatch, "start", _start_after_any),
    "a stop brakes as any hold does": _wrapped(SafetyLimiter, "brake", _comfortable),
    "the workspace has no walls": lambda: patch.object(limiter, "_ways_left", _no_walls),
    "a release starts the robot": _wrapped(StopLatch, "release", _release_starts),
    "a stopped robot is reset": _replaced(LimitedRobot, "_require_free", lambda self, what: None),
    "a robot is reset while it moves": _replaced(LimitedRobot, "still", property(lambda self: True)),  # type: ignore[arg-type]
    "observations are not judged": _replaced(ObservationMonitor, "check", lambda self, seen, now_ns: NO_HOLD),
    "failed readings are overlooked": _replaced(ObservationMonitor, "report_failure", lambda self, why: NO_HOLD),
    "old commands are executed": _wrapped(WatchedRobot, "execute", _execute_late),
    "a silent person drives on": lambda: patch.object(operator_override, "COMMAND_FRESH_S", 1e9),
    "a person's command outlives the scene": _replaced(OperatorOverride, "new_scene", lambda self: None),
    "whoever vanished drives on": _wrapped(OperatorOverride, "handle_command", _nobody_vanishes),
    "an older lease drives": _wrapped(
        LeaseFence, "admit", _any_message(Refusal.old_lease, Refusal.replayed, Refusal.not_taken_over)
    ),
    "another operator drives by the holder's lease": _wrapped(
        LeaseFence, "admit", _any_message(Refusal.other_operator)
    ),
    "what was said before is followed again": _wrapped(LeaseFence, "admit", _any_message(Refusal.replayed)),
    "a command from the future is followed": lambda: patch.object(operator_override, "CLOCK_ERROR_S", 1e9),
    "a new control process knows nobody": _replaced(OperatorOverride, "restore", lambda self, state: None),
    "a leader's pose is taken at once": _replaced(TakeoverBlend, "offset", _no_offset),
    "the policy comes in at once after a person": _replaced(HandBackBlend, "on_person", lambda self: None),
}
"""what is taken out, by what the robot does then"""
