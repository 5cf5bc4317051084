"""Which robots a job is for, and which work they can do there."""

from __future__ import annotations

import re

import msgspec
import pytest

from hal.resource.admitted_robots import AdmittedRobots, RobotShape
from tests import samples
from wire.errors import ConfigError
from wire.messages.fleet import JobRequest, Requirement
from wire.messages.gateway import Hello

ARM = samples.spec()
BLIND = msgspec.structs.replace(samples.spec(camera=False), embodiment="blind")
ONE = AdmittedRobots.of_one(ARM, ("reach", "push"))
TWO = AdmittedRobots(
    [RobotShape(ARM, ("reach", "push"), "arm"), RobotShape(BLIND, ("push", "squeeze"), "blind")], lambda spec: "no"
)


def job(*tasks: str, **need: object) -> JobRequest:
    return JobRequest("extra", "rollout", tasks, requirement=Requirement(**need))  # type: ignore[arg-type]


def test_one_shape_is_what_a_fleet_of_one_is_for():
    assert ONE.refusal(ARM) == "" and "'embodiment' differs: sample against blind" in ONE.refusal(BLIND)
    assert ONE.tasks == ("reach", "push") and TWO.tasks == ("reach", "push", "squeeze")
    assert ONE.most_cameras == TWO.most_cameras == 1
    assert TWO.tasks_of(BLIND) == ("push", "squeeze") and ONE.tasks_of(BLIND) == ()


@pytest.mark.parametrize(
    ("robots", "said", "can"),
    [
        (ONE, (), ("reach", "push")),
        (ONE, ("push", "juggle"), ("push",)),
        (TWO, ("squeeze", "push"), ("push",)),
    ],
)
def test_a_robot_can_do_what_it_says_of_what_its_shape_does(robots, said, can):
    found = robots.capabilities(ARM, said, "lab")
    assert (found.tasks, found.embodiment, found.site) == (can, "sample", "lab")
    assert robots.task_mismatch("r", Hello("r", "edge", "c", 1, spec=ARM, tasks=said)) == ""


def test_a_robot_that_can_do_nothing_of_it_is_told_what_there_is():
    other = Hello("r", "edge", "c", 1, spec=ARM, tasks=("squeeze",))
    assert "'r' can do squeeze, but this fleet works on reach, push." in ONE.task_mismatch("r", other)
    assert "but such robots of this fleet work on reach, push." in TWO.task_mismatch("r", other)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (job("juggle"), "does not know 'juggle'. It knows reach, push (arm); push, squeeze (blind)."),
        (job("push", "squeeze", cameras=("front",)), "can do 'squeeze': 'arm' can do reach, push. This fleet knows"),
        (job("reach", robots=("b-0",)), "can do 'reach': 'b-0' can do push, squeeze."),
    ],
)
def test_a_job_with_a_task_that_nobody_can_do_is_refused_with_what_fits(asked, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        TWO.job_tasks(asked, [("b-0", TWO.capabilities(BLIND, (), "lab"))])


@pytest.mark.parametrize(
    ("asked", "tasks"),
    [
        (job(), ("reach", "push", "squeeze")),
        (job(embodiment="blind"), ("push", "squeeze")),
        (job(robots=("b-0",)), ("push", "squeeze")),
        # it may come yet, and be an arm
        (job("reach", robots=("b-0", "b-1")), ("reach",)),
        # nobody fits at all: it waits, and says for what
        (job(embodiment="walker"), ("reach", "push", "squeeze")),
        (job("push", site="moon"), ("push",)),
    ],
)
def test_a_job_is_about_what_the_robots_it_asks_for_can_do(asked, tasks):
    assert TWO.job_tasks(asked, [("b-0", TWO.capabilities(BLIND, (), "lab"))]) == tasks
