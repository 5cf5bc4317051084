"""Which task an episode has, and from which seed it starts.

A fleet practises the least successful and least sampled tasks more. No scene is ever both practised and examined:

[0, 500_000)            demonstrations
[500_000, 1_000_000)    training: partitions of 5,000 episodes, one a robot
[1_000_000, 2**31)      held out for evaluation
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import gcd
from operator import itemgetter

from wire.errors import ConfigError

TRAINING_SEEDS = range(500_000, 1_000_000)
HELD_OUT_SEEDS = range(1_000_000, 2**31)
PARTITION_EPISODES = 5_000
SPARE_EPISODES = 500
"""at the end of a partition, for episodes that were aborted and use a seed all the same"""
PARTITIONS = len(TRAINING_SEEDS) // PARTITION_EPISODES
_USED = PARTITION_EPISODES - SPARE_EPISODES

FLOOR = 0.25
"""share of an equal share that each task gets whatever its success"""
RECENT = 50
"""episodes of a task that its success is measured over"""
SLOTS_PER_TASK = 4
"""a cycle has so many slots for each task; FLOOR x SLOTS_PER_TASK is at least one slot"""


class TaskBalancer:
    """The counts of a fleet, and the shares and cycles that follow from them.

    The share of task t among the tasks T is

        share(t) = floor/|T| + (1 - floor) u(t) / sum over T of u
        u(t)     = (1 - s(t)) (m + 1) / (n(t) + 1)
        s(t)     = (successes + 1) / (episodes + 2)          of the last `RECENT` episodes of t (Laplace's rule)
        n(t)     = episodes of t so far, m their mean over T; the second factor is kept between 1/4 and 4

    so a task that has just been added, or that fails, is practised more, and one that always succeeds still is.
    """

    def __init__(self, counts: Mapping[str, tuple[int, int]] | None = None) -> None:
        """`counts`: (episodes, successes) of what was done before, by task."""
        self.episodes: Counter[str] = Counter()
        self._recent: dict[str, deque[bool]] = {}
        for task, (episodes, successes) in (counts or {}).items():
            self.episodes[task] = episodes
            # Which of them succeeded is not known any more; spread evenly they have the same rate.
            size = min(episodes, RECENT)
            won = round(successes / max(1, episodes) * size)
            self._recent[task] = deque(((i + 1) * won // size > i * won // size for i in range(size)), maxlen=RECENT)

    def add(self, task: str, success: bool) -> None:
        """One more episode of `task` is done."""
        self.episodes[task] += 1
        self._recent.setdefault(task, deque(maxlen=RECENT)).append(success)

    def shares(self, tasks: Sequence[str]) -> dict[str, float]:
        """The share of each of `tasks`; they sum to 1."""
        mean = sum(self.episodes[task] for task in tasks) / max(1, len(tasks))
        needs = {}
        for task in tasks:
            recent = self._recent.get(task, ())
            success = (sum(recent) + 1) / (len(recent) + 2)
            scarcity = min(4.0, max(0.25, (mean + 1) / (self.episodes[task] + 1)))
            needs[task] = (1 - success) * scarcity
        total = sum(needs.values())
        return {task: FLOOR / len(needs) + (1 - FLOOR) * need / total for task, need in needs.items()}

    def cycle(self, tasks: Sequence[str], start: int = 0) -> tuple[str, ...]:
        """Task names in proportion to their shares, each at least once and spread evenly, beginning at `start`.

        Robots with different `start`s begin at different tasks, so that a fleet covers all of them from its first
        episode on.
        """
        shares = self.shares(tuple(dict.fromkeys(tasks)))
        slots = range(SLOTS_PER_TASK * len(shares))
        # The n-th turn of a task is due at (n + 1/2) / share (stride scheduling, Waldspurger and Weihl, 1995).
        turns = sorted((((n + 0.5) / share, task) for task, share in shares.items() for n in slots), key=itemgetter(0))
        order = tuple(task for _, task in turns[: len(slots)])
        # In lowest terms: equal needs make the shortest cycle.
        order = order[: len(order) // (gcd(*Counter(order).values()) or 1)]
        start %= max(1, len(order))
        return order[start:] + order[:start]


def seed_partition(index: int) -> range:
    """The training seeds of the fleet's robot number `index`. With more robots than partitions, robots share them."""
    first = TRAINING_SEEDS.start + index % PARTITIONS * PARTITION_EPISODES
    return range(first, first + PARTITION_EPISODES)


def training_seeds(index: int, spent: int) -> range:
    """The next training seeds of robot number `index`, which has used `spent`: to where its partition starts over.

    Robots that share a partition begin at different seeds of it: the n-th at the n-th number of the sequence
    0, 1/2, 1/4, 3/4, 1/8, ... (van der Corput, 1935).
    """
    n = index // PARTITIONS
    share = int(f"{n:b}"[::-1], 2) / 2 ** n.bit_length()
    usable = seed_partition(index)[:_USED]
    return usable[(round(share * _USED) + spent) % _USED :]


def held_out_seeds(first_seed: int, episodes: int) -> range:
    """Seeds for `episodes` of an evaluation, from `first_seed` on (0: where the held-out ones begin).

    Raises `ConfigError` for seeds that are practised or demonstrated.
    """
    first = first_seed or HELD_OUT_SEEDS.start
    if first < HELD_OUT_SEEDS.start or first + episodes > HELD_OUT_SEEDS.stop:
        raise ConfigError(
            f"first_seed: seeds {first} to {first + episodes - 1} are not held out for evaluation. Begin at "
            f"{HELD_OUT_SEEDS.start} or later, or leave it 0."
        )
    return range(first, first + episodes)
