from __future__ import annotations

import pytest

from hal.resource import DEGRADED_AFTER_S, LOST_AFTER_S, Health, RobotResource, health_of
from hal.scheduler import (
    LANE_EPISODES,
    MAX_ROBOTS,
    TRAINING_SEEDS,
    TaskCount,
    TaskSchedule,
    assign_tasks,
    lane,
    task_order,
)
from wire.errors import ConfigError
from wire.types import Lease

TASKS = ("a", "b", "c", "d")


def robot(name: str, tasks: tuple[str, ...] = TASKS, **rest: object) -> RobotResource:
    return RobotResource(name, "0" * 16, tasks, **{"health": Health.ready, **rest})  # type: ignore[arg-type]


def test_lanes_never_meet_each_other_demonstrations_or_held_out_seeds() -> None:
    used: set[int] = set()
    for index in range(MAX_ROBOTS):
        seeds = lane(index)
        assert used.isdisjoint(seeds)
        assert seeds[0] in TRAINING_SEEDS and seeds[-1] in TRAINING_SEEDS
        used.update(seeds)
    assert used == set(TRAINING_SEEDS)
    assert min(used) >= 500_000 and max(used) < 1_000_000
    with pytest.raises(ConfigError, match="second fleet"):
        lane(MAX_ROBOTS)


def test_robots_begin_at_other_tasks() -> None:
    schedule = TaskSchedule(TASKS)
    jobs = [schedule.job(f"robot-{i}") for i in range(5)]
    assert [job.tasks[0] for job in jobs] == ["a", "b", "c", "d", "a"]
    assert all(sorted(job.tasks) == sorted(TASKS) for job in jobs)
    assert len({job.id for job in jobs}) == 5
    assert [job.first_seed for job in jobs] == [500_000 + i * LANE_EPISODES for i in range(5)]


def test_named_robots_keep_their_place() -> None:
    names = ("robot-0", "robot-1", "robot-2")
    forwards, backwards = TaskSchedule(TASKS, names), TaskSchedule(TASKS, names)
    one = {name: forwards.job(name) for name in names}
    other = {name: backwards.job(name) for name in reversed(names)}
    assert {n: (j.id, j.tasks, j.first_seed) for n, j in one.items()} == {
        n: (j.id, j.tasks, j.first_seed) for n, j in other.items()
    }
    assert forwards.job("late").first_seed == lane(3)[0]


def test_a_second_job_has_other_seeds_of_the_same_lane() -> None:
    schedule = TaskSchedule(TASKS)
    first, second = schedule.job("robot-0"), schedule.job("robot-0")
    assert first.id != second.id
    assert first.first_seed != second.first_seed
    assert second.first_seed in lane(0)


def test_a_robot_gets_only_what_it_can_do() -> None:
    schedule = TaskSchedule(TASKS)
    assert schedule.job("robot-0", ("c", "x", "a")).tasks == ("a", "c")
    with pytest.raises(ConfigError, match="can do x, but this fleet works on a, b, c, d"):
        schedule.job("robot-1", ("x",))
    with pytest.raises(ConfigError, match="no tasks"):
        TaskSchedule(())


def test_the_least_practised_comes_first_then_the_least_successful() -> None:
    counts = {"a": TaskCount(9, 9), "b": TaskCount(4, 4), "c": TaskCount(4, 1)}
    assert task_order(TASKS, counts, 0) == ("d", "c", "b", "a")
    assert task_order(TASKS, counts, 1) == ("c", "b", "a", "d")
    assert task_order((), counts, 3) == ()


def test_assignment_leaves_out_who_cannot_work() -> None:
    held = Lease("robot-1", "operator:ann", "correction", 2, expires_ns=100)
    fleet = [
        robot("robot-0"),
        robot("robot-1", lease=held),
        robot("robot-2", health=Health.lost),
        robot("robot-3", tasks=("b",)),
        robot("robot-4", tasks=("x",)),
    ]
    assert assign_tasks(fleet, TASKS, {}, now_ns=50) == {"robot-0": TASKS, "robot-3": ("b",)}
    later = assign_tasks(reversed(fleet), TASKS, {}, now_ns=100)
    assert later["robot-1"] == ("b", "c", "d", "a")


def test_health_follows_the_last_report() -> None:
    assert health_of(0.1, stopped=False, holding=False) is Health.ready
    assert health_of(0.1, stopped=False, holding=True) is Health.degraded
    assert health_of(DEGRADED_AFTER_S + 0.1, stopped=False, holding=False) is Health.degraded
    assert health_of(0.1, stopped=True, holding=False) is Health.stopped
    assert health_of(LOST_AFTER_S + 0.1, stopped=True, holding=False) is Health.lost
    assert not robot("r", health=Health.stopped).can_work(0)
