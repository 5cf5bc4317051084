"""What the slow path left for the fast one: the newest latent of each policy version, with its times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from wire.clock import Clock
from wire.types import Latent, Observation

_VERSIONS = 4
_WINDOW = 512


@dataclass(frozen=True, slots=True)
class StampedLatent:
    """A latent and what it was made from."""

    latent: Latent
    seen_ns: int
    """time of the newest frame it saw; `latent.observed_ns` may be that of the oldest"""
    made_from_ns: int
    """time of the observation"""
    task: str


@dataclass(frozen=True, slots=True)
class LatentStatistics:
    """Pace and age of the slow path, over the last thoughts and their uses."""

    thoughts: int
    """since the start"""
    hz: float
    """thoughts per second, 0 when there were fewer than two"""
    age_p50_s: float
    age_p99_s: float
    """how much older what the latent saw was than the moment it was used for, 0 when none was used"""


class LatentBuffer:
    """Versioned and stamped. A latent is only ever given to the policy version that made it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[int, StampedLatent] = {}
        self._count = 0
        self._arrived_ns: deque[int] = deque(maxlen=_WINDOW)
        self._ages_ns: deque[int] = deque(maxlen=_WINDOW)

    def put(self, thought: StampedLatent) -> None:
        """Thoughts come in the order in which they were asked for: a later one is the newer one."""
        version = thought.latent.version
        self._newest.pop(version, None)
        self._newest[version] = thought
        while len(self._newest) > _VERSIONS:
            del self._newest[next(iter(self._newest))]
        self._count += 1
        self._arrived_ns.append(self._clock.now_ns())

    def newest(self, version: int, task: str) -> StampedLatent | None:
        """The newest thought of this version about this instruction; None when there is none."""
        thought = self._newest.get(version)
        return thought if thought is not None and thought.task == task else None

    def used(self, thought: StampedLatent, moment_ns: int) -> None:
        """Note that `thought` was acted on, for a moment of the robot's clock."""
        self._ages_ns.append(max(0, moment_ns - thought.latent.observed_ns))

    def clear(self) -> None:
        """Forget all thoughts: what they saw is no longer so."""
        self._newest.clear()

    def statistics(self) -> LatentStatistics:
        arrived = self._arrived_ns
        span_s = (arrived[-1] - arrived[0]) / 1e9 if len(arrived) > 1 else 0.0
        p50, p99 = np.percentile(self._ages_ns, (50, 99)) / 1e9 if self._ages_ns else (0.0, 0.0)
        return LatentStatistics(
            thoughts=self._count,
            hz=(len(arrived) - 1) / span_s if span_s > 0 else 0.0,
            age_p50_s=float(p50),
            age_p99_s=float(p99),
        )


def seen_ns(observation: Observation) -> int:
    """Time of the newest frame of `observation`; its own when it has no cameras."""
    return max((frame.time_ns for frame in observation.images.values()), default=observation.time_ns)
