"""A slow path of a given pace, for what the pace of thinking is worth."""

from __future__ import annotations

from collections import deque

from policies.interface.policy import Policy
from robot_edge.inference.slow_path import SlowPath, StampedLatent
from wire.clock import Clock
from wire.errors import ConfigError
from wire.types import Observation, PolicyVersion


class PacedSlowPath(SlowPath):
    """Makes another slow path slow: at most `hz` thoughts a second, each visible `latency_s` after it was asked for.

    Time is the given clock's, so it can be simulated; whoever acts is never stopped for it.
    """

    def __init__(self, inner: SlowPath, clock: Clock, hz: float, latency_s: float | None = None) -> None:
        """`latency_s`: a whole period when it is not given, as of a model that does nothing else."""
        if not hz > 0 or (latency_s is not None and latency_s < 0):
            raise ConfigError(f"a slow path of {hz:g} Hz and {latency_s} s: give a positive pace and no negative time.")
        super().__init__()
        self._inner = inner
        self._clock = clock
        self._period_ns = round(1e9 / hz)
        self._latency_ns = self._period_ns if latency_s is None else round(latency_s * 1e9)
        self._next_ns: int | None = None
        self._asked_ns = 0
        self._coming: deque[tuple[int, StampedLatent]] = deque()

    @property
    def problem(self) -> str:  # type: ignore[override]
        return self._inner.problem

    def adopt(self, policy: Policy, version: PolicyVersion, path: str) -> None:
        self._inner.adopt(policy, version, path)

    def request(self, observation: Observation, versions: tuple[int, ...]) -> None:
        self._collect()
        now_ns = self._clock.now_ns()
        if self._next_ns is not None and now_ns < self._next_ns:
            return
        # On the grid as long as it is asked often enough: the mean pace is what was wanted.
        late_ns = 0 if self._next_ns is None else now_ns - self._next_ns
        self._next_ns = now_ns - (late_ns if late_ns < self._period_ns else 0) + self._period_ns
        self._asked_ns = now_ns
        self._inner.request(observation, versions)
        self._collect()

    def pop(self) -> list[StampedLatent]:
        self._collect()
        taken, now_ns = [], self._clock.now_ns()
        while self._coming and self._coming[0][0] <= now_ns:
            taken.append(self._coming.popleft()[1])
        return taken

    def close(self) -> None:
        self._inner.close()

    def _collect(self) -> None:
        self._coming.extend((self._asked_ns + self._latency_ns, thought) for thought in self._inner.pop())
