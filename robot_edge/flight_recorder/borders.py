"""Transparent wrappers of a control loop's borders: its clock, its two lines, its robot and its scripted operator.

Each hands every call on and returns what came of it, so the loop does behind them what it does without them; on the way
the call is noted. In a replay nothing is wrapped: what was noted answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hal.interfaces.robot import Feedback, Robot
from wire.messages import Message
from wire.types import Observation


class CallLog(Protocol):
    """Where calls are noted, or come from."""

    def call(self, name: str, perform: Callable[[], Any], *given: Any) -> Any:
        """What `perform` returns or raises. `given`: its arguments, as far as they are noted."""
        ...


class RecordedBoundary:
    """What a subclass does not name is reached too, and not noted. Snapshots of a loop end here."""

    def __init__(self, name: str, inner: Any, log: CallLog) -> None:
        self._name = name
        self._inner = inner
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordedClock(RecordedBoundary):
    """Keeps the `Clock` protocol."""

    def now_ns(self) -> int:
        return self._log.call("clock.now_ns", lambda: self._inner.now_ns())

    def sleep_until(self, deadline_ns: int) -> None:
        self._log.call("clock.sleep_until", lambda: self._inner.sleep_until(deadline_ns), deadline_ns)


class RecordedChannel(RecordedBoundary):
    """Keeps the `Channel` protocol."""

    def send(self, message: Message) -> bool:
        return self._log.call(f"{self._name}.send", lambda: self._inner.send(message), message)

    def recv(self) -> Message | None:
        return self._log.call(f"{self._name}.recv", lambda: self._inner.recv())

    def close(self) -> None:
        self._log.call(f"{self._name}.close", lambda: self._inner.close())


class RecordedRobot(RecordedBoundary):
    """Keeps the `Robot` protocol."""

    def __init__(self, name: str, inner: Robot, log: CallLog) -> None:
        super().__init__(name, inner, log)
        self.spec = inner.spec

    def connect(self) -> None:
        self._log.call("robot.connect", lambda: self._inner.connect())

    def reset(self, task: str, seed: int) -> None:
        self._log.call("robot.reset", lambda: self._inner.reset(task, seed), task, seed)

    def read(self) -> Observation:
        return self._log.call("robot.read", lambda: self._inner.read())

    def write(self, action: np.ndarray) -> Feedback:
        return self._log.call("robot.write", lambda: self._inner.write(action), action)

    def close(self) -> None:
        self._log.call("robot.close", lambda: self._inner.close())


class RecordedOperator(RecordedBoundary):
    """Keeps the `Teleoperator` protocol."""

    def propose(self, observation: Observation) -> np.ndarray | None:
        return self._log.call("operator.propose", lambda: self._inner.propose(observation))

    def progress(self) -> float:
        return self._log.call("operator.progress", lambda: self._inner.progress())
