"""`vla-fleet up` with robots of two shapes: real processes, real simulators, one policy; a third shape is refused."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from cloud_learner.training.checkpoints import checkpoint
from fleet.config.recipes import get_recipe
from tests.e2e.test_processes import Job
from wire.clock import clock_name
from wire.messages.gateway import Hello, Rejection
from wire.transport.keys import make_keys
from wire.transport.zmq_channel import ZmqClient

NAME = "tests.e2e.small_recipes:shapes"
ROBOTS = ("fetch-0", "metaworld-0")


def works(snapshot: dict[str, Any]) -> bool:
    """Whether each robot acts by a version."""
    robots = {one["name"]: one for one in snapshot["robots"]}
    return all(name in robots and robots[name]["version"] and robots[name]["episodes"] for name in ROBOTS)


def refusal_of(job: Job, name: str) -> str:
    """What the gateway says to a robot that measures what none of the job does, once it has read its new key."""
    make_keys(job.data.keys, [name])
    spec, said = get_recipe("fake").spec, "not filed"
    deadline = time.monotonic() + 60
    while "not filed" in said and time.monotonic() < deadline:
        said = ""
        with contextlib.closing(ZmqClient(job.data.gateway, name, job.data.keys)) as line:
            while not said and time.monotonic() < deadline:
                line.send(Hello(name, "edge", clock_name(), time.monotonic_ns(), 7, spec))
                time.sleep(0.2)
                while (message := line.recv()) is not None:
                    if isinstance(message, Rejection):
                        said = message.reason
    return said


@pytest.mark.slow
def test_one_version_acts_on_robots_of_both_shapes_and_a_third_is_refused(tmp_path: Path) -> None:
    recipe = get_recipe(NAME)
    job = Job(tmp_path / "fleet", recipe=NAME, robots="metaworld:1,fetch:1")
    try:
        seen = job.wait("both kinds of robots work", works)
        kinds = {one["name"]: one["embodiment"] for one in seen["robots"]}
        assert kinds == {f"{name}-0": one.spec.embodiment for name, one in recipe.members.items()}
        tasks = set(recipe.tasks)
        job.wait("all their tasks are measured", lambda s: s["curve"] and set(s["curve"][-1]["tasks"]) == tasks)
        said = refusal_of(job, "walker-0")
        assert "robot 'walker-0': robot 'fake-point'" in said and "none of recipe" in said
        assert "'fetch-push' (fetch). Start it with the recipe of one of them, or add its own to the members." in said
        events = job.snapshot()["events"]
        assert any(event["kind"] == "refused" and event["robot"] == "walker-0" for event in events)
        assert job.stop() == 0
    finally:
        job.end()
    with job.data.open_buffer() as (ledger, _store):
        recorded = ledger.episodes(limit=100_000)
        acted = [{row.version for row in ledger.applied() if row.robot == name} for name in ROBOTS]
    assert set.intersection(*acted), "no version acted on both"
    newest = checkpoint.load_newest(job.data.checkpoints)
    assert newest is not None
    batches = newest.sampling["batches"]
    assert batches.keys() == recipe.members.keys() and min(batches.values()) > recipe.training.pretrain_steps, batches
    for name, one in recipe.members.items():
        online = {row.task for row in recorded if row.robot == f"{name}-0" and row.source == "online"}
        shown = {row.task for row in recorded if row.robot == f"demonstrator-{name}"}
        assert online and online <= set(one.tasks) and shown == set(one.tasks)
        hashes = {row.spec_hash for row in recorded if row.robot.endswith((f"{name}-0", f"demonstrator-{name}"))}
        assert hashes == {one.spec.hash}
