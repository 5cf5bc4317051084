from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.scheduler.episodes import training_seeds
from hal.scheduler.records import MOST_EPISODES, CountedWork, ExaminedWork, JobRecord
from wire.messages.fleet import JobRequest

FIRST = 1_000_000
SEEDS = training_seeds(0, 0)


def unit(task: str, first_seed: int, episodes: int) -> tuple[str, range]:
    return task, range(first_seed, first_seed + episodes)


def test_endless_work_is_never_done() -> None:
    work = CountedWork(0)
    assert work.open(("a",))
    assert work.pop(("a",), 3, SEEDS) == ("", SEEDS), "as much as the robot has seeds for"
    work.put_back(*unit("", SEEDS[0], 4500), ())
    assert work.open(("a",))
    assert work.claim("a", 1)


def test_counted_work_is_handed_out_in_shrinking_parts() -> None:
    work = CountedWork(40)
    taken = []
    while work.open(("a",)):
        taken.append(len(work.pop(("a",), 4, SEEDS)[1]))
    assert sum(taken) == 40
    assert taken[0] == 5
    assert taken == sorted(taken, reverse=True)
    assert not work.claim("a", 1)
    work.put_back(*unit("", SEEDS[0], 5), [SEEDS[0], SEEDS[1]])
    assert [work.claim("a", seed) for seed in range(4)] == [True, True, True, False]


def test_a_part_ends_with_the_robots_seeds() -> None:
    work = CountedWork(40)
    assert work.pop(("a",), 1, SEEDS[:3]) == unit("", SEEDS[0], 3)
    assert [work.claim("a", seed) for seed in range(38)] == [True] * 37 + [False]


def test_one_robot_alone_gets_as_much_as_a_part_may_have() -> None:
    work = CountedWork(40)
    assert [len(work.pop(("a",), 1, SEEDS)[1]) for _ in range(3)] == [MOST_EPISODES, MOST_EPISODES, 8]


def test_examined_work_is_every_seed_of_every_task_once() -> None:
    work = ExaminedWork(("a", "b"), range(FIRST, FIRST + 3))
    assert work.pop(("a", "b"), 1, SEEDS) == unit("a", FIRST, 3)
    assert work.open(("a", "b"))
    assert not work.open(("a",)), "a robot that can only do a task that is handed out has nothing to do"
    assert work.pop(("b",), 1, SEEDS) == unit("b", FIRST, 3)
    work.put_back(*unit("a", FIRST, 3), [FIRST + 1])
    assert work.pop(("a",), 1, SEEDS) == unit("a", FIRST, 1)
    assert work.pop(("a",), 1, SEEDS) == unit("a", FIRST + 2, 1)
    assert not work.open(("a", "b"))


def test_a_late_episode_is_taken_from_what_is_left() -> None:
    work = ExaminedWork(("a",), range(FIRST, FIRST + 5))
    assert work.claim("a", FIRST + 2)
    assert not work.claim("a", FIRST + 2)
    assert not work.claim("a", FIRST + 5)
    assert not work.claim("b", FIRST)
    assert [work.pop(("a",), 1, SEEDS) for _ in range(2)] == [unit("a", FIRST, 2), unit("a", FIRST + 3, 2)]


steps = st.lists(
    st.tuples(st.sampled_from(("pop", "back", "claim")), st.integers(0, 9), st.integers(1, 3)), max_size=60
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 10), steps)
def test_no_examined_episode_is_lost_or_handed_out_twice(episodes: int, steps: list[tuple[str, int, int]]) -> None:
    tasks = ("a", "b")
    work = ExaminedWork(tasks, range(FIRST, FIRST + episodes))
    out: list[tuple[str, range]] = []
    left = {(task, FIRST + n) for task in tasks for n in range(episodes)}
    for step, number, robots in steps:
        able = tasks[: 1 + number % 2]
        assert work.open(able) == any(task in able for task, _ in left)
        if step == "pop" and work.open(able):
            task, seeds = work.pop(able, robots, SEEDS)
            pairs = {(task, seed) for seed in seeds}
            assert pairs
            assert pairs <= left
            left -= pairs
            out.append((task, seeds))
        elif step == "back" and out:
            task, seeds = out.pop(number % len(out))
            done = seeds[: number % (len(seeds) + 1)]
            work.put_back(task, seeds, done)
            left |= {(task, seed) for seed in seeds if seed not in done}
        elif step == "claim":
            pair = (tasks[number % 2], FIRST + number)
            assert work.claim(*pair) == (pair in left)
            left.discard(pair)


@pytest.mark.parametrize(
    ("request_", "target", "priority"),
    [
        (JobRequest("j", "rollout", ("a", "b")), 0, 10),
        (JobRequest("j", "rollout", ("a", "b"), episodes=5), 5, 10),
        (JobRequest("j", "evaluation", ("a", "b"), episodes=5), 10, 20),
        (JobRequest("j", "evaluation", ("a", "a"), episodes=5), 5, 20),
        (JobRequest("j", "teleoperation", ("a",), priority=55), 0, 55),
    ],
)
def test_what_a_job_aims_at(request_: JobRequest, target: int, priority: int) -> None:
    job = JobRecord(request_, 0, 0)
    assert (job.target, job.priority, job.standing) == (target, priority, target == 0)
    finished = [job.count(True) for _ in range(target)]
    assert finished == [False] * (target - 1) + [True] * bool(target)
