"""What a robot is up against: how late answers come, what limits its motion, and whether its goal turns round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from cloud_learner.buffer.control import SCRIPT
from cloud_learner.buffer.location import BufferLocation
from hal.safety.limits import SafetyLimits
from wire.types import CommandType, RobotSpec

_SPEED_PERCENTILE, _CHANGE_PERCENTILE = 90, 98


@dataclass(frozen=True, slots=True)
class Condition:
    """A column of a table."""

    usual: int
    """ticks an answer takes"""
    longest: int = 0
    """0 where every answer takes the same"""
    burst_share: float = 0.0
    """so many of the answers take `longest`; 0 where they take anything from `usual` to `longest`, drawn evenly"""
    limited: bool = False
    """velocity and acceleration are limited, see `limits_of`"""

    @property
    def name(self) -> str:
        late = f"delay {self.usual}"
        if self.burst_share:
            late = f"bursts {self.usual}/{self.longest}"
        elif self.longest:
            late = f"random {self.usual}-{self.longest}"
        return late + (", limits" if self.limited else "")

    def delays(self, seed: int) -> Iterator[int]:
        """Ticks that each answer of an episode takes."""
        if not self.longest:
            return repeat(self.usual)
        return self._drawn(np.random.default_rng(seed))

    def _drawn(self, rng: np.random.Generator) -> Iterator[int]:
        while True:
            if self.burst_share:
                yield self.longest if rng.random() < self.burst_share else self.usual
            else:
                yield int(rng.integers(self.usual, self.longest, endpoint=True))


FIXED = tuple(Condition(delay) for delay in (0, 2, 4, 8, 12))
RANDOM, BURSTS = Condition(2, 8), Condition(2, 12, 0.15)
LIMITED = (Condition(2, 8, limited=True), Condition(2, 12, 0.15, limited=True))


def limits_of(place: BufferLocation, spec: RobotSpec) -> SafetyLimits:
    """Limits that bind now and then: what the operator's speed exceeds in 10 % of the numbers recorded in `place`, and
    its change from tick to tick in 2 %. Dimensions of one unit have one limit; none where hardly anything moves."""
    ledger, store = place.open_reader()
    try:
        index = ledger.index(0, spec.data_hash)
        segments = list(store.read(index.row.tolist()).segments.values())
    finally:
        store.close()
        ledger.close()
    period_s = spec.period_ns / 1e9
    scale = np.array([1.0 if d.meaning is CommandType.velocity else period_s for d in spec.action])
    chosen = [segment.actor == SCRIPT for segment in segments]
    speeds = [np.abs(each.executed / scale)[by] for each, by in zip(segments, chosen, strict=True)]
    changes = [
        np.abs(np.diff(each.executed / scale, axis=0))[by[1:] & by[:-1]] / period_s
        for each, by in zip(segments, chosen, strict=True)
    ]
    units = [d.unit for d in spec.action]

    def limits(recorded: list[np.ndarray], percentile: float) -> dict[str, float]:
        numbers = np.concatenate(recorded)
        of = {unit: float(np.percentile(numbers[:, [u == unit for u in units]], percentile)) for unit in set(units)}
        return {d.name: of[d.unit] for d in spec.action if of[d.unit] > 0}

    return SafetyLimits(limits(speeds, _SPEED_PERCENTILE), limits(changes, _CHANGE_PERCENTILE))
