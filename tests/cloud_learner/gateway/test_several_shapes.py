"""Robots of two shapes at one gateway: who is let in, who gets which task, and what each one's messages are held to."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cloud_learner.rollout.config import RolloutConfig
from hal.resource.admitted_robots import AdmittedRobots, RobotShape
from tests import samples
from tests.cloud_learner.dispatch.hall import Hall
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from tests.cloud_learner.gateway.test_shadow import FAR, shadow, status
from tests.cloud_learner.gateway.versions.test_rollout_service import change, hear, publish
from wire.messages.fleet import JobRequest, Requirement, SubmitJob
from wire.messages.gateway import Hello, HelloAck, Preview, Rejection, ShadowReport
from wire.types import RobotSpec
from wire.weights.action_difference import ActionDifference

SEEING = samples.spec(camera=True)
GRIPPER = msgspec.structs.replace(SEEING, embodiment="gripper", action=SEEING.action[-1:])
UNKNOWN = msgspec.structs.replace(SEEING, embodiment="walker")
ARM_TASKS, GRIPPER_TASKS = ("reach", "push"), ("push", "squeeze")
REMEDY = "robot 'walker' is none of this job, which has 'arm' and 'gripper'"


def refusal(spec: RobotSpec) -> str:
    return "" if spec in (SPEC, GRIPPER) else REMEDY


@pytest.fixture
def hall(tmp_path: Path) -> Hall:
    shapes = [RobotShape(SPEC, ARM_TASKS, "arm"), RobotShape(GRIPPER, GRIPPER_TASKS, "gripper")]
    return Hall(tmp_path, rollout=RolloutConfig(canary=0.2, control=0.0), robots=AdmittedRobots(shapes, refusal))


def gripper(hall: Hall, name: str = "gripper-0") -> FakeEdge:
    return hall.edge(name, spec=GRIPPER, tasks=GRIPPER_TASKS)


def test_robots_of_each_shape_are_let_in_and_others_are_told_what_fits(hall: Hall) -> None:
    arm, other = hall.edge("arm-0"), gripper(hall)
    walker = hall.edge("walker-0", spec=UNKNOWN, tasks=("push",))
    assert arm.welcomed and other.welcomed and not walker.welcomed
    assert walker.refused == f"spec: robot 'walker-0': {REMEDY}"
    # nobody watches or works with a robot that was turned away
    assert [robot["name"] for robot in hall.view.snapshot()["robots"]] == ["arm-0", "gripper-0"]
    for name, spec, welcome in (("evaluator", GRIPPER, HelloAck), ("evaluator-2", UNKNOWN, Rejection)):
        peer = hall.server.connect(name)
        peer.send(Hello(name, "evaluator", "c", 1, spec=spec))
        hall.gateway.poll()
        assert [type(message) for message in hall.received(peer)] == [welcome]


def test_a_robot_is_given_the_tasks_of_its_shape_alone(hall: Hall) -> None:
    arm, other = hall.edge("arm-0"), gripper(hall)
    # one that says nothing of its tasks, and one that says too much, by a recipe of all of them
    modest = hall.edge("gripper-1", spec=GRIPPER, tasks=("squeeze", "reach"))
    hall.pass_time(1)
    assert arm.job is not None and set(arm.job.tasks) == set(ARM_TASKS)
    assert other.job is not None and set(other.job.tasks) == set(GRIPPER_TASKS)
    assert modest.job is not None and set(modest.job.tasks) == {"squeeze"}
    offered = {robot.name: robot.capabilities.tasks for robot in hall.robots(hall.peer()).values()}
    assert offered == {"arm-0": ARM_TASKS, "gripper-0": GRIPPER_TASKS, "gripper-1": ("squeeze",)}
    # it can do nothing of what its shape is for here
    lost = hall.edge("arm-1", tasks=("squeeze",))
    assert "such robots of this fleet work on reach, push." in lost.refused and not lost.welcomed


@pytest.mark.parametrize(
    ("tasks", "need", "why"),
    [
        (("squeze",), {}, r"does not know 'squeze'. Did you mean 'squeeze'\? It knows reach, push \(arm\); push, squ"),
        (
            ("reach",),
            {"embodiment": "gripper"},
            r"can do 'reach': 'gripper' can do push, squeeze. This fleet knows reach",
        ),
        (("squeeze",), {"robots": ("arm-0",)}, r"can do 'squeeze': 'arm-0' can do reach, push."),
        (("squeeze",), {"cameras": ()}, ""),
        (("push",), {"robots": ("arm-0",)}, ""),
        # it may come yet, and be a gripper
        (("squeeze",), {"robots": ("arm-7",)}, ""),
    ],
)
def test_a_job_that_nobody_can_do_is_refused_with_what_fits(
    hall: Hall, tasks: tuple[str, ...], need: dict, why: str
) -> None:
    hall.edge("arm-0")
    request = JobRequest("extra", "rollout", tasks, episodes=1, requirement=Requirement(**need))
    answer = hall.ask(hall.peer(), SubmitJob(1, request))
    assert re.search(why, answer.refused) if why else not answer.refused


def test_a_picture_is_of_a_camera_of_that_robot(hall: Hall) -> None:
    arm, other = hall.edge("arm-0"), gripper(hall)
    for edge in (arm, other):
        edge.channel.send(Preview(edge.name, "front", 1, b"jpeg"))
    hall.gateway.poll()
    assert [robot for robot, _, _ in hall.view.previews(0)[1]] == ["gripper-0"]
    arm.poll()
    assert "which is no camera of 'arm-0'" in arm.refused


def test_what_is_seen_of_a_shadow_is_by_the_dimensions_of_each_robot(hall: Hall) -> None:
    arm, other = hall.edge("arm-0"), gripper(hall)
    publish(hall, 1)
    change(hall, hall.peer(), "freeze")
    publish(hall, 2)
    shadow(hall, 2, "arm-0", "gripper-0")
    one = ActionDifference(1, 0.5, (*FAR.bins[:-1], 1), (0.5,))
    for edge, difference in ((arm, FAR), (other, FAR), (other, one)):
        edge.channel.send(ShadowReport(edge.name, 2, difference))
    hall.gateway.poll()
    other.poll()
    assert "difference of actions that no two chunks can have" in other.refused, "it has one dimension, not four"
    found = status(hall, 2)
    assert found is not None and found.chunks == 2 and found.robots == ("arm-0", "gripper-0")
    assert found.largest == {"dx": 1.0, "dy": 1.0, "dz": 1.0, "grip": 1.0} and found.most == 1.0


def test_all_that_was_learned_of_shapes_survives_the_gateway(hall: Hall) -> None:
    gripper(hall)
    again = hall.killed()
    edge = gripper(again, "gripper-0")
    assert edge.welcomed and edge.job is not None and set(edge.job.tasks) == set(GRIPPER_TASKS)
    assert again.view.snapshot()["robots"][0]["embodiment"] == "gripper"


def test_a_version_is_tried_on_one_robot_of_each_shape_and_compared_within_it(hall: Hall) -> None:
    edges = [hall.edge("arm-0"), hall.edge("arm-1"), gripper(hall, "gripper-0"), gripper(hall, "gripper-1")]
    for number in (1, 2):
        publish(hall, number)
    hear(hall)
    versions = [edge.version for edge in edges]
    assert sorted(versions[:2]) == sorted(versions[2:]) == [1, 2]
    (keeps,) = (edge for edge in edges[:2] if edge.version == 1)
    assert keeps.episode("success", version=1)
    hall.gateway.poll()
    hear(hall)
    kept = hall.gateway._rollout.controller.state().versions[1].recent
    assert [task for task, _ in kept] == [f"{SPEC.hash} {keeps.job.tasks[0] if keeps.job else 'reach'}"]
