"""Which tasks a fleet practises more: the least successful and least sampled first, with a floor for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import msgspec

from wire.errors import ConfigError


class TaskCount(msgspec.Struct, frozen=True):
    """What has been done on one task."""

    episodes: int = 0
    successes: int = 0

    @property
    def rate(self) -> float:
        return self.successes / self.episodes if self.episodes else 0.0


@dataclass(frozen=True, slots=True)
class SpreadConfig:
    """How strongly need pulls."""

    floor: float = 0.25
    """share of an equal share that each task gets whatever its success"""
    recent: int = 50
    """episodes of a task that its success is measured over"""
    slots_per_task: int = 4
    """a cycle has so many slots for each task"""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigError(f"SpreadConfig: floor is {self.floor}; give more than 0 and at most 1.")
        if self.recent < 1 or self.slots_per_task < 1:
            raise ConfigError("SpreadConfig: recent and slots_per_task must be at least 1.")
        if self.floor * self.slots_per_task < 1:
            raise ConfigError(
                f"SpreadConfig: a floor of {self.floor} with {self.slots_per_task} slots a task rounds to no slot. "
                f"Give {1 / self.floor:.0f} slots a task or more."
            )


class TaskBalancer:
    """The counts of a fleet, and the shares and cycles that follow from them.

    The share of task t among the tasks T is

        share(t) = floor/|T| + (1 - floor) u(t) / sum over T of u
        u(t)     = (1 - s(t)) (m + 1) / (n(t) + 1)
        s(t)     = (successes + 1) / (episodes + 2)          of the last `recent` episodes of t (Laplace's rule)
        n(t)     = episodes of t so far, m their mean over T; the second factor is kept between 1/4 and 4

    so a task that has just been added, or that fails, is practised more, and one that always succeeds still is.
    """

    def __init__(self, counts: Mapping[str, TaskCount] | None = None, config: SpreadConfig | None = None) -> None:
        """`counts`: of what was done before."""
        self._config = config or SpreadConfig()
        self._episodes: dict[str, int] = {}
        self._successes: dict[str, int] = {}
        self._recent: dict[str, deque[bool]] = {}
        self.generation = 0
        """grows with every episode"""
        for task, count in (counts or {}).items():
            self._episodes[task], self._successes[task] = count.episodes, count.successes
            # Which of them succeeded is not known any more; spread evenly they have the same rate.
            size = min(count.episodes, self._config.recent)
            won = round(count.rate * size)
            order = [(i + 1) * won // size > i * won // size for i in range(size)]
            self._recent[task] = deque(order, maxlen=self._config.recent)

    def add(self, task: str, success: bool) -> None:
        """One more episode of `task` is done."""
        self._episodes[task] = self._episodes.get(task, 0) + 1
        self._successes[task] = self._successes.get(task, 0) + success
        self._recent.setdefault(task, deque(maxlen=self._config.recent)).append(success)
        self.generation += 1

    def count(self, task: str) -> TaskCount:
        return TaskCount(self._episodes.get(task, 0), self._successes.get(task, 0))

    def shares(self, tasks: Sequence[str]) -> dict[str, float]:
        """The share of each of `tasks`; they sum to 1."""
        if not tasks:
            return {}
        mean = sum(self._episodes.get(task, 0) for task in tasks) / len(tasks)
        needs = {}
        for task in tasks:
            recent = self._recent.get(task, ())
            success = (sum(recent) + 1) / (len(recent) + 2)
            scarcity = min(4.0, max(0.25, (mean + 1) / (self._episodes.get(task, 0) + 1)))
            needs[task] = (1 - success) * scarcity
        total, floor = sum(needs.values()), self._config.floor
        return {task: floor / len(needs) + (1 - floor) * need / total for task, need in needs.items()}

    def cycle(self, tasks: Sequence[str], start: int = 0) -> tuple[str, ...]:
        """Task names in proportion to their shares, each at least once and spread evenly, turned by `start`.

        Robots with other `start`s begin at other tasks, so that a fleet covers all of them from its first episode on.
        """
        tasks = tuple(dict.fromkeys(tasks))
        shares = self.shares(tasks)
        # Equal needs (above all: nothing done yet) make the shortest cycle.
        slots = _apportion(shares, self._config.slots_per_task * len(tasks))
        order = _strides(slots)
        if order:
            start %= len(order)
            order = order[start:] + order[:start]
        return tuple(order)


def _apportion(shares: Mapping[str, float], slots: int) -> dict[str, int]:
    """Whole numbers of slots, at least one each, nearest to the shares (largest remainders), in lowest terms."""
    whole = {task: max(1, int(share * slots)) for task, share in shares.items()}
    order = sorted(shares, key=lambda task: (whole[task] - shares[task] * slots, list(shares).index(task)))
    for task in order[: max(0, slots - sum(whole.values()))]:
        whole[task] += 1
    divisor = gcd(*whole.values()) if whole else 1
    return {task: count // divisor for task, count in whole.items()}


def _strides(slots: Mapping[str, int]) -> list[str]:
    """Each task as often as it has slots, evenly spaced (stride scheduling, Waldspurger and Weihl, 1995)."""
    places = [
        ((turn + 0.5) / count, -count, index, task)
        for index, (task, count) in enumerate(slots.items())
        for turn in range(count)
    ]
    return [task for *_, task in sorted(places)]
