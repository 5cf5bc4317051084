"""A controller that hears its commands and does not follow them: not active, or refusing what it hears.

Nobody says so over topics, so that is told by what is measured: the command is elsewhere and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hal.drivers.ros2.output_config import Field, Output
from wire.types import RobotSpec

_AWAY = 0.02
"""of a dimension's range: less is what a controller leaves over"""
_MOVED = 0.002
"""of a dimension's range: less is noise"""


class StallMonitor:
    """The dimensions of one output that are measured."""

    def __init__(
        self, spec: RobotSpec, output: Output, measured: Mapping[str, str], fields: Mapping[str, Field]
    ) -> None:
        """`measured`: state dimensions of those whose name is another; `fields`: what state dimensions read."""
        actions, states = [d.name for d in spec.action], [d.name for d in spec.state]
        pairs = [(name, measured.get(name, name)) for name in output.dimensions]
        self._names = [name for name, state in pairs if state in states]
        self._action = np.array([actions.index(name) for name, state in pairs if state in states], int)
        self._state = np.array([states.index(state) for _, state in pairs if state in states], int)
        self._rates = np.array([fields.get(state) == "velocity" for _, state in pairs if state in states], bool)
        ranges = np.array([spec.state[i].high - spec.state[i].low for i in self._state])
        drives = output.moves != "position"
        largest = [max(abs(spec.action[i].low), abs(spec.action[i].high)) for i in self._action]
        self._drives = drives
        self._away = _AWAY * (np.array(largest) if drives else ranges)
        self._moved = _MOVED * ranges
        self._stall_ns = int(output.stall_s * 1e9)
        self._since: tuple[int, np.ndarray] | None = None
        self._fault = ""

    def restart(self) -> None:
        """What was seen before says nothing any more."""
        self._since, self._fault = None, ""

    def note(self, sent: np.ndarray, measured: np.ndarray, now_ns: int) -> str:
        """'' or what does not move; then until `restart`, for a target that has run away must not be followed later.

        `sent`: float32[da], the newest command; `measured`: float32[ds] since.
        """
        if self._fault or not self._names:
            return self._fault
        now = measured[self._state].astype(np.float64)
        gap = sent[self._action] - (0.0 if self._drives else now)
        away = np.abs(gap) > self._away
        if not away.any() or self._since is None:
            self._since = (now_ns, now) if away.any() else None
            return ""
        begun_ns, begin = self._since
        if (np.abs(np.where(self._rates, now, now - begin)) > self._moved).any():
            self._since = now_ns, now
        elif now_ns - begun_ns >= self._stall_ns:
            names = ", ".join(name for name, far in zip(self._names, away, strict=True) if far)
            self._fault = (
                f"nothing has moved for {self._stall_ns / 1e9:g} s although {names} should. Is its controller active "
                "(`ros2 control list_controllers`), and does its log refuse the commands? An output that may be "
                "blocked has stall_s: 0."
            )
        return self._fault
