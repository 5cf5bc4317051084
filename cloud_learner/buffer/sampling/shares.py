"""How a batch is divided among tasks and their parts, and memory among them: pure functions, and what they go by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from wire.errors import ConfigError, InvalidDataError

OFFLINE, ONLINE = 0, 1
"""column of a stratum in arrays [tasks, 2]"""
_MOST_EXPONENT = 4.0


class OnlineShare(msgspec.Struct, frozen=True):
    """SOP's adaptive share of online data (arXiv 2601.03044): more of what is learned less.

    w_on = e^(a l_on) / (e^(a l_on) + e^(l_off)) with the mean losses of the last `window` updates on either part of the
    task; 0.5 until there are `at_least` losses of each; clipped to [low, high].
    """

    a: float = 1.5
    window: int = 200
    at_least: int = 10
    low: float = 0.2
    high: float = 0.8

    def __post_init__(self) -> None:
        if not (1 <= self.at_least <= self.window and 0 <= self.low <= self.high <= 1 and math.isfinite(self.a)):
            raise ConfigError(f"online share: {self} needs 1 <= at_least <= window and 0 <= low <= high <= 1.")


class Losses:
    """What `OnlineShare` and a mix with `difficulty` look at: the last losses by task and part."""

    def __init__(self, share: OnlineShare) -> None:
        self._share = share
        self._last: dict[str, tuple[deque[float], deque[float]]] = {}

    def note(self, task: str, online: bool, loss: float) -> None:
        """Raises `InvalidDataError` for a loss that is no number, for it would stay in the mean for long."""
        if not math.isfinite(loss):
            raise InvalidDataError(f"the loss {loss} of task '{task}' is no number; leave it out, or find out why.")
        empty: tuple[deque[float], deque[float]] = (deque(maxlen=self._share.window), deque(maxlen=self._share.window))
        self._last.setdefault(task, empty)[ONLINE if online else OFFLINE].append(float(loss))

    def share(self, task: str) -> float:
        """Share of online data in a task that has both."""
        offline, online = self._last.get(task, ((), ()))
        if min(len(offline), len(online)) < self._share.at_least:
            return 0.5
        difference = self._share.a * math.fsum(online) / len(online) - math.fsum(offline) / len(offline)
        adapted = 1 / (1 + math.exp(-difference)) if difference > -700 else 0.0
        return min(self._share.high, max(self._share.low, adapted))

    def difficulty(self, task: str) -> float | None:
        """Mean of the last losses of a task, on either part; None before there are enough."""
        offline, online = self._last.get(task, ((), ()))
        count = len(offline) + len(online)
        return (math.fsum(offline) + math.fsum(online)) / count if count >= self._share.at_least else None

    def state(self) -> dict[str, list[list[float]]]:
        """JSON-able."""
        return {task: [list(part) for part in parts] for task, parts in self._last.items()}

    def restore(self, state: Mapping[str, Sequence[Iterable[float]]]) -> None:
        """Go on from `state`."""
        self._last.clear()
        for task, parts in state.items():
            for online, losses in enumerate(parts):
                for loss in losses:
                    self.note(task, bool(online), loss)


class TaskMix(msgspec.Struct, frozen=True):
    """How much of a batch each task gets, and in it online data. A task without data gives its share to the others.

    Base data is what a policy learned from before, or robots elsewhere recorded: kept in the mix, it is not forgotten
    while few tasks are learned. Its steps count alike, whatever their task.
    """

    shares: Mapping[str, float] | None = None
    """by task, in any scale, 0 for tasks not named; None: evenly"""
    online: float | OnlineShare | None = None
    """share of online data in a task that has both, 0: never, 1: nothing else; None: by the sums of weights"""
    difficulty: float = 0.0
    """tasks that are learned less get more: a share is multiplied with (mean of its last losses in that of all tasks)
    to this power; 0: no task does"""
    floor: float = 0.0
    """of an even share, which each task that has one and data gets, whatever else is set: so none is forgotten"""
    base: frozenset[str] = frozenset()
    """tasks of the base data; `shares`, `difficulty` and `floor` are of the others"""
    base_share: float = 0.0
    """of a batch, for all base data together"""

    def __post_init__(self) -> None:
        for task, share in (self.shares or {}).items():
            if not 0 <= share < math.inf:
                raise ConfigError(f"task mix: shares has {share} for task '{task}'; it must not be negative.")
        if self.shares is not None and not sum(self.shares.values()) > 0:
            raise ConfigError("task mix: no task has a share above 0.")
        if isinstance(self.online, (int, float)) and not 0 <= self.online <= 1:
            raise ConfigError(f"task mix: the online share {self.online} is not within 0 and 1.")
        if not 0 <= self.difficulty <= _MOST_EXPONENT:
            raise ConfigError(f"task mix: difficulty {self.difficulty} is not within 0 and {_MOST_EXPONENT:g}.")
        if not (0 <= self.floor <= 1 and 0 <= self.base_share < 1):
            raise ConfigError(
                f"task mix: the floor {self.floor} is not within 0 and 1, or the base share {self.base_share} not "
                "within 0 and below 1."
            )

    @property
    def follows_losses(self) -> OnlineShare | None:
        """Which losses are remembered; None if none are."""
        if isinstance(self.online, OnlineShare):
            return self.online
        return OnlineShare() if self.difficulty else None


def strata_shares(mix: TaskMix, tasks: tuple[str, ...], mass: np.ndarray, losses: Losses | None) -> np.ndarray:
    """float64[tasks, 2] probability of each stratum from its sum of weights float64[tasks, 2]; all 0 if none has data.

    Without `losses`, an adaptive online share counts as 0.5, and all tasks as equally difficult.
    """
    shares = np.zeros(mass.shape)
    by_task = _task_shares(mix, tasks, mass.sum(1), losses)
    for number, task in enumerate(tasks):
        there = mass[number] > 0
        if mix.online is None:
            inside = mass[number]
        else:
            online = mix.online
            if isinstance(online, OnlineShare):
                online = losses.share(task) if losses else 0.5
            inside = np.array([1 - online, online]) * there
        if (total := inside.sum()) > 0:
            shares[number] = by_task[number] * inside / total
    return shares / (shares.sum() or 1.0)


def _task_shares(mix: TaskMix, tasks: tuple[str, ...], mass: np.ndarray, losses: Losses | None) -> np.ndarray:
    """float64[tasks] in any scale, of tasks with a sum of weights of float64[tasks]."""
    is_base = np.array([task in mix.base for task in tasks], bool)
    own = np.array([1.0 if mix.shares is None else mix.shares.get(task, 0.0) for task in tasks])
    own = np.where(is_base | (mass == 0), 0.0, own)
    there = own > 0
    if losses is not None and mix.difficulty and there.any():
        found = [losses.difficulty(task) for task in tasks]
        known = [loss for loss, takes_part in zip(found, there, strict=True) if takes_part and loss is not None]
        mean = math.fsum(known) / len(known) if known else 0.0
        if mean > 0:
            own *= [1.0 if loss is None else (loss / mean) ** mix.difficulty for loss in found]
    if total := own.sum():
        own = (1 - mix.floor) * own / total + mix.floor * there / there.sum()
    base = np.where(is_base, mass, 0.0)
    if not (own.any() and base.any()):
        return own + base
    return (1 - mix.base_share) * own / own.sum() + mix.base_share * base / base.sum()


def allot(budget: int, share: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray | None:
    """int64[k] bytes each stratum may hold, together at most `budget`, by water-filling.

    Everybody gets bytes in proportion to its `share` (float64[k]), but at least `least` and at most `most` (int64[k]);
    None if the least are too much. If the most fit, everybody gets the most.
    """
    least = np.minimum(least, most)
    if most.sum() <= budget:
        return most.astype(np.int64)
    if least.sum() > budget:
        return None
    # the level is found by halving: what it fills grows with it
    low, high = 0.0, float(budget) / max(share[share > 0].min(initial=1.0), 1e-12)
    for _ in range(100):
        level = (low + high) / 2
        if np.clip(level * share, least, most).sum() <= budget:
            low = level
        else:
            high = level
    return np.floor(np.clip(low * share, least, most)).astype(np.int64)


def apportion(count: int, share: np.ndarray, credit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[k] draws that sum to `count`, float64[k] credit to carry on) by `share`, float64[k] that sums to 1.

    What rounding takes from one batch the next ones give back, so that over any number of batches each part gets its
    share to within a draw or two. A part without a share gets nothing and loses its credit.
    """
    some = share > 0
    wish = np.where(some, credit + count * share, 0.0)
    wish[some] += (count - wish.sum()) / some.sum()
    draws = np.floor(np.maximum(wish, 0)).astype(np.int64)
    missing = count - int(draws.sum())
    rest = np.where(some, wish - draws, -np.inf)
    if missing > 0:
        # they are fewer than the parts, for each wish was rounded down by less than 1
        draws[np.argsort(-rest, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        draws[np.argmin(np.where(draws > 0, wish - draws, np.inf))] -= 1
    return draws, wish - draws
