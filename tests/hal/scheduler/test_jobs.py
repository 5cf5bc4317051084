from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.scheduler.jobs import MOST_SLICE, CountedWork, EndlessWork, ExaminedWork, JobRecord, WorkUnit
from hal.scheduler.seeds import Stretch
from wire.messages.fleet import JobRequest

FIRST = 1_000_000


def test_endless_work_is_never_done() -> None:
    work = EndlessWork()
    assert work.open(("a",))
    assert work.take(("a",), 3) == WorkUnit(0)
    work.put_back(WorkUnit(4500), ())
    assert work.claim("a", 1)


def test_counted_work_is_handed_out_in_shrinking_parts() -> None:
    work = CountedWork(40)
    taken = []
    while work.open(("a",)):
        taken.append(work.take(("a",), 4).episodes)
    assert sum(taken) == 40
    assert taken[0] == 5
    assert taken == sorted(taken, reverse=True)
    assert not work.claim("a", 1)
    work.put_back(WorkUnit(5), [1, 2])
    assert [work.claim("a", seed) for seed in range(4)] == [True, True, True, False]


def test_one_robot_alone_gets_as_much_as_a_part_may_have() -> None:
    work = CountedWork(40)
    assert [work.take(("a",), 1).episodes for _ in range(3)] == [MOST_SLICE, MOST_SLICE, 8]


def test_examined_work_is_every_seed_of_every_task_once() -> None:
    work = ExaminedWork(("a", "b"), Stretch(FIRST, 3))
    assert work.take(("a", "b"), 1) == WorkUnit(3, "a", FIRST)
    assert work.open(("a", "b"))
    assert not work.open(("a",)), "a robot that can only do a task that is handed out has nothing to do"
    assert work.take(("b",), 1) == WorkUnit(3, "b", FIRST)
    work.put_back(WorkUnit(3, "a", FIRST), [FIRST + 1])
    assert work.take(("a",), 1) == WorkUnit(1, "a", FIRST)
    assert work.take(("a",), 1) == WorkUnit(1, "a", FIRST + 2)
    assert not work.open(("a", "b"))


def test_a_late_episode_is_taken_from_what_is_left() -> None:
    work = ExaminedWork(("a",), Stretch(FIRST, 5))
    assert work.claim("a", FIRST + 2)
    assert not work.claim("a", FIRST + 2)
    assert not work.claim("a", FIRST + 5)
    assert not work.claim("b", FIRST)
    assert [work.take(("a",), 1) for _ in range(2)] == [WorkUnit(2, "a", FIRST), WorkUnit(2, "a", FIRST + 3)]


steps = st.lists(
    st.tuples(st.sampled_from(("take", "back", "claim")), st.integers(0, 9), st.integers(1, 3)), max_size=60
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 10), steps)
def test_no_examined_episode_is_lost_or_handed_out_twice(episodes: int, steps: list[tuple[str, int, int]]) -> None:
    tasks = ("a", "b")
    work = ExaminedWork(tasks, Stretch(FIRST, episodes))
    out: list[WorkUnit] = []
    left = {(task, FIRST + n) for task in tasks for n in range(episodes)}
    for step, number, robots in steps:
        able = tasks[: 1 + number % 2]
        assert work.open(able) == any(task in able for task, _ in left)
        if step == "take" and work.open(able):
            part = work.take(able, robots)
            pairs = {(part.task, seed) for seed in part.seeds}
            assert pairs
            assert pairs <= left
            left -= pairs
            out.append(part)
        elif step == "back" and out:
            part = out.pop(number % len(out))
            done = list(part.seeds)[: number % (part.episodes + 1)]
            work.put_back(part, done)
            left |= {(part.task, seed) for seed in part.seeds if seed not in done}
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
