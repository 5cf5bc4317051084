"""Jobs on a robot: what changes between two episodes, and what goes on."""

from __future__ import annotations

import pytest

from hal.drivers.fake import FAKE_TASKS
from robot_edge.control.mode import HoldReason, Mode
from tests.robot_edge.control.test_loop import Bench
from wire.messages.gateway import EdgeStatus, Job, VersionActivated
from wire.messages.local import EpisodeStarted
from wire.types import Actor, Episode

LEFT, RIGHT = FAKE_TASKS[:2]


def episodes(bench: Bench) -> list[Episode]:
    return [m.episode for m in bench.said if isinstance(m, EpisodeStarted)]


def status(bench: Bench) -> EdgeStatus:
    return [m for m in bench.said if isinstance(m, EdgeStatus)][-1]


def scenes(bench: Bench) -> list[tuple[str, int]]:
    return [(episode.task, episode.seed) for episode in episodes(bench)]


def bench_with(*jobs: Job, **more: int) -> Bench:
    bench = Bench(max_ticks=10, status_every_ticks=1, **more)
    bench.uplink.send(VersionActivated("robot-0", 3, 0))
    for job in jobs:
        bench.uplink.send(job)
    return bench


def test_the_same_job_again_restarts_nothing_and_takes_over_its_tasks() -> None:
    bench = bench_with(Job("main", (LEFT,), 500)).tick(25)
    assert scenes(bench) == [(LEFT, 500), (LEFT, 501), (LEFT, 502)]
    bench.uplink.send(Job("main", (RIGHT,), 500, lease=7))
    bench.tick(2)
    assert bench.outcomes() == ["failure"] * 2, "the running episode goes on"
    assert bench.loop.inbox.job is not None and bench.loop.inbox.job.lease == 0, "and so does its job"
    bench.tick(20)
    assert scenes(bench)[3:] == [(RIGHT, 503), (RIGHT, 504)]
    assert (bench.loop.inbox.job.lease, status(bench).job, status(bench).job_episodes) == (7, "main", 4)


def test_another_job_begins_after_the_running_episode_and_an_interrupted_one_goes_on() -> None:
    bench = bench_with(Job("main", (LEFT, RIGHT), 500)).tick(15)
    bench.uplink.send(Job("other", (RIGHT,), 900))
    bench.tick(3)
    assert status(bench).job == "main"
    bench.tick(16)
    assert (status(bench).job, status(bench).job_episodes) == ("other", 1)
    bench.uplink.send(Job("main", (LEFT, RIGHT), 500))
    bench.tick(23)
    assert scenes(bench) == [(LEFT, 500), (RIGHT, 501), (RIGHT, 900), (RIGHT, 901), (LEFT, 502), (RIGHT, 503)]
    bench.uplink.send(Job("main", (LEFT, RIGHT), 700))
    bench.tick(23)
    assert scenes(bench)[6:] == [(LEFT, 700), (RIGHT, 701)], "another stretch of seeds begins at its beginning"


def test_no_tasks_mean_rest_after_the_running_episode() -> None:
    bench = bench_with(Job("main", (LEFT,), 500)).tick(5)
    bench.uplink.send(Job("rest", (), 0))
    bench.tick(2)
    assert bench.loop.mode is Mode.policy
    bench.tick(30)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.no_job)
    assert len(episodes(bench)) == 1
    assert (status(bench).job, status(bench).fault) == ("rest", "")
    bench.uplink.send(Job("main", (LEFT,), 500))
    bench.tick(3)
    assert scenes(bench)[1:] == [(LEFT, 501)]


def test_a_job_of_so_many_episodes_counts_those_that_were_finished() -> None:
    bench = bench_with(Job("few", (LEFT,), 500, episodes=2)).tick(5)
    bench.lose_episode()
    bench.tick(60)
    assert bench.outcomes() == ["aborted", "failure", "failure"]
    assert (bench.loop.hold.reason, status(bench).job_episodes) == (HoldReason.no_job, 2)
    assert [seed for _, seed in scenes(bench)] == [500, 501, 502]


def test_an_evaluation_waits_for_its_version_and_nobody_helps() -> None:
    bench = Bench(operated=True, max_ticks=25, status_every_ticks=1)
    bench.answer = -bench.answer - 1  # type: ignore[operator] # so wrong that the operator would step in
    bench.uplink.send(VersionActivated("robot-0", 3, 0))
    bench.uplink.send(Job("canary", (LEFT,), 1_000_000, kind="evaluation", episodes=2, version=2))
    bench.tick(5)
    assert (bench.loop.mode, bench.loop.hold.reason, episodes(bench)) == (Mode.hold, HoldReason.other_version, [])
    bench.uplink.send(VersionActivated("robot-0", 2, 0))
    bench.tick(10)
    assert [(e.source, e.seed) for e in episodes(bench)] == [("evaluation", 1_000_000)]
    bench.tick(10)
    assert {step.actor for step in bench.steps()} == {Actor.hold, Actor.policy}
    bench.uplink.send(VersionActivated("robot-0", 4, 0))
    bench.tick(10)
    assert bench.outcomes() == ["aborted"], "what another version did is not measured"
    assert bench.loop.hold.reason is HoldReason.other_version
    bench.uplink.send(VersionActivated("robot-0", 2, 0))
    bench.uplink.send(Job("main", (LEFT,), 500))
    bench.tick(40)
    assert episodes(bench)[-1].source == "online"
    assert Actor.script in {step.actor for step in bench.steps()}


@pytest.mark.parametrize("version", [0, 3])
def test_a_job_without_a_version_or_with_the_one_that_acts_begins_at_once(version: int) -> None:
    bench = bench_with(Job("canary", (LEFT,), 1_000_000, kind="evaluation", version=version)).tick(3)
    assert bench.loop.mode is Mode.policy
