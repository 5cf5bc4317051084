"""Which robot works on which task, from which seed. Pure: no clock, no randomness, no numpy.

Seeds are spent so that no scene is ever both practised and examined:
    [0, 500_000)            demonstrations
    [500_000, 1_000_000)    training: lanes of 5,000 episodes, one lane a robot
    [1_000_000, ...)        held out for evaluation
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from hal.resource import RobotResource
from wire.errors import ConfigError, nearest
from wire.messages import Job

TRAINING_SEEDS = range(500_000, 1_000_000)
LANE_EPISODES = 5_000
MAX_ROBOTS = len(TRAINING_SEEDS) // LANE_EPISODES


class TaskCount(msgspec.Struct, frozen=True):
    """What has been done on one task."""

    episodes: int = 0
    successes: int = 0

    @property
    def rate(self) -> float:
        return self.successes / self.episodes if self.episodes else 0.0


def lane(index: int) -> range:
    """The training seeds of the fleet's robot number `index`. Raises `ConfigError` beyond `MAX_ROBOTS`."""
    if not 0 <= index < MAX_ROBOTS:
        raise ConfigError(
            f"robot number {index}: there are training seeds for {MAX_ROBOTS} robots. Start a second fleet for more."
        )
    first = TRAINING_SEEDS.start + index * LANE_EPISODES
    return range(first, first + LANE_EPISODES)


def lane_seed(first_seed: int, done: int) -> int:
    """The seed to go on with `done` episodes after `first_seed`; a lane starts over at its end."""
    start = TRAINING_SEEDS.start + (first_seed - TRAINING_SEEDS.start) // LANE_EPISODES * LANE_EPISODES
    return start + (first_seed - start + done) % LANE_EPISODES


def task_order(tasks: Sequence[str], counts: Mapping[str, TaskCount], start: int) -> tuple[str, ...]:
    """`tasks`, the least practised first and among equals the least successful, turned by `start`.

    Robots with other `start`s begin at other tasks, so that a fleet covers all of them from its first episode on.
    """
    none = TaskCount()
    ranked = sorted(tasks, key=lambda task: (counts.get(task, none).episodes, counts.get(task, none).rate))
    start %= max(1, len(ranked))
    return tuple(ranked[start:] + ranked[:start])


def assign_tasks(
    robots: Iterable[RobotResource], tasks: Sequence[str], counts: Mapping[str, TaskCount], now_ns: int
) -> dict[str, tuple[str, ...]]:
    """By robot, its order of those of `tasks` it can do. Robots that cannot work now or know none are left out."""
    able = sorted((robot for robot in robots if robot.can_work(now_ns)), key=lambda robot: robot.name)
    orders = {
        robot.name: task_order([task for task in tasks if task in robot.tasks], counts, index)
        for index, robot in enumerate(able)
    }
    return {name: order for name, order in orders.items() if order}


class TaskSchedule:
    """Hands each robot its job. The same robots in the same order get the same jobs."""

    def __init__(self, tasks: Sequence[str], robots: Sequence[str] = ()) -> None:
        """`robots` named here keep their place whatever the order they come in; others get the next free one."""
        if not tasks:
            raise ConfigError("TaskSchedule: no tasks. Name at least one.")
        self._tasks = tuple(tasks)
        self._index = {name: index for index, name in enumerate(dict.fromkeys(robots))}
        self._generation: dict[str, int] = {}

    def job(self, robot: str, can_do: Sequence[str] = (), counts: Mapping[str, TaskCount] | None = None) -> Job:
        """The next job of `robot`, which can do the tasks `can_do` (empty: all).

        A second job of the same robot starts half way round its lane, so it meets other seeds first. Raises
        `ConfigError` when it can do none of the fleet's tasks or no lane is left.
        """
        tasks = [task for task in self._tasks if not can_do or task in can_do]
        if not tasks:
            raise ConfigError(
                f"robot '{robot}' can do {', '.join(can_do)}, but this fleet works on {', '.join(self._tasks)}."
                f"{nearest(can_do[0], self._tasks)} Start the robot with the fleet's recipe."
            )
        index = self._index.setdefault(robot, len(self._index))
        seeds = lane(index)
        generation = self._generation.get(robot, 0)
        self._generation[robot] = generation + 1
        first = seeds[generation * (LANE_EPISODES // 2) % LANE_EPISODES]
        return Job(f"{robot}/{generation}", task_order(tasks, counts or {}, index), first)
