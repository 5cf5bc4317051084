"""People who drive robots of tests: what they send carries lease, number and time, as the page's and devices' does."""

from __future__ import annotations

from typing import Any

import msgspec

from wire.clock import Clock
from wire.messages.gateway import OperatorCommand


class Person:
    """Call it for a message."""

    def __init__(self, clock: Clock, lease: int = 1, operator: str = "web-1", robot: str = "robot-0") -> None:
        self.lease, self.operator, self.sequence = lease, operator, 0
        self._clock, self._robot = clock, robot

    def __call__(self, kind: str, *action: float, **more: Any) -> OperatorCommand:
        """`more`: other fields than usual."""
        self.sequence += 1
        command = OperatorCommand(
            self._robot,
            kind,
            tuple(map(float, action)),
            self.sequence,
            self.operator,
            captured_ns=self._clock.now_ns(),
            lease=self.lease,
        )
        return msgspec.structs.replace(command, **more)
