"""pi_RL in a whole fleet: what robots leave of their chunks is as probable at the learner as they said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.algorithms.critics.critic_updates import select_rows
from cloud_learner.buffer.control import POLICY
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from policies.flow.policy import FlowPolicy

pytestmark = pytest.mark.slow


def recipe(kind: str) -> Recipe:
    given = [f"algorithm.{name}={value}" for name, value in (("warmup", 3), ("critic_width", 32))]
    plain = fake()
    training = replace(plain.training, batch=16, publish_every_s=0.5)
    chosen = {"policy": "flow:state", "policy_config": f'{{"explore": "{kind}"}}'}
    over = Overrides(algorithm="pi-rl", set_=given, **chosen)
    return over.applied(replace(plain, training=training, checkpoint_every_s=1e6))


@pytest.fixture(scope="module", params=["sde", "noise"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessFleet]:
    """Two robots that worked for some episodes, at the end by one version."""
    made = InProcessFleet(tmp_path_factory.mktemp("fleet"), recipe(request.param))
    made.turn(200, gradient_steps_per_round=0.3)
    made.turn(150, gradient_steps_per_round=0.0)
    # looks at what came last
    made.trainer.step()
    yield made
    made.close()


def test_traces_are_as_probable_at_the_learner_as_robots_said(fleet: InProcessFleet) -> None:
    robot = fleet.robots[0].inference._swap.active
    assert isinstance(robot, FlowPolicy) and robot.version >= 2
    traced, own, alike = 0, 0, 0
    for _ in range(60):
        batch = fleet.trainer._source.next()
        there = batch["traces"]["step"] >= 0
        mine = (batch["actor"] == POLICY) & batch["online"]
        assert not (there & ~mine).any()
        traced, own = traced + int(there.sum()), own + int(mine.sum())
        rows = np.flatnonzero(there & (batch["version"] == robot.version))
        if len(rows):
            chosen = select_rows(batch, rows)
            with torch.no_grad():
                found = robot.trace_log_probability(chosen)
            said = torch.from_numpy(chosen["traces"]["log_prob"])
            torch.testing.assert_close(found, said, rtol=1e-4, atol=1e-3)
            alike += len(rows)
    assert alike > 20 and traced > 0.7 * own


def test_it_learns_from_them(fleet: InProcessFleet) -> None:
    said: set[str] = set()
    for _ in range(10):
        fleet.trainer.step()
        said |= fleet.trainer.counts.metrics.keys()
    assert {"surrogate", "effective_share", "behind", "traced_share"} <= said
