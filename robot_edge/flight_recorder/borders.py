"""The borders of a control loop: its clock, its two channels, its robot and its scripted operator.

The loop does behind a `RecordedBoundary` what it does without one; on the way each call is noted. In a replay nothing
is behind it: what was noted answers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hal.interfaces.robot import Feedback, RestPose
from wire.codec import AnyMessage
from wire.stop_state import StopState
from wire.types import Observation

CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "clock.now_ns": ((), int),
    "clock.sleep_until": ((int,), None),
    "uplink.send": ((AnyMessage,), bool),
    "uplink.recv": ((), AnyMessage),
    "inference.send": ((AnyMessage,), bool),
    "inference.recv": ((), AnyMessage),
    "robot.connect": ((), None),
    "robot.reset": ((str, int), RestPose),
    "robot.read": ((), Observation),
    "robot.write": ((np.ndarray,), Feedback),
    "robot.hold": ((), Feedback),
    "robot.stop_state": ((), StopState),
    "robot.stop": ((str, str), StopState),
    "robot.release": ((str,), StopState),
    "robot.start": ((), StopState),
    "robot.close": ((), None),
    "operator.propose": ((), np.ndarray),
    "operator.progress": ((), float),
}
"""by BORDER.METHOD, types of the arguments that are noted, and of what comes back if anything does"""


class CallLog(Protocol):
    """Where calls are noted, or come from."""

    def call(self, name: str, perform: Callable[[], Any], *given: Any) -> Any:
        """What `perform` returns or raises. `given`: its arguments, as far as they are noted."""
        ...


class RecordedBoundary:
    """One border. What `CALLS` does not name is reached too, and not noted. Snapshots of a loop end here."""

    def __init__(self, border: str, inner: Any, log: CallLog) -> None:
        self._inner = inner
        for name, (noted, _) in CALLS.items():
            of, _, method = name.partition(".")
            if of == border:
                setattr(self, method, _recorded(name, inner, method, len(noted), log))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _recorded(name: str, inner: Any, method: str, noted: int, log: CallLog) -> Callable[..., Any]:
    plainly = functools.partial(operator.methodcaller(method), inner)

    def recorded(*given: Any) -> Any:
        if not given:
            # Most calls, a dozen in every tick.
            return log.call(name, plainly)
        return log.call(name, lambda: getattr(inner, method)(*given), *given[:noted])

    return recorded
