"""A recipe whose robots can be unplugged from outside: while the file CABLES/ROBOT exists, nothing gets through."""

from __future__ import annotations

import os
from dataclasses import replace

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from hal.drivers.fake import FakeConfig, FakeRobot, Faults
from robot_edge.control.config import LoopConfig, RobotTimeouts
from tests.e2e.small_recipes import unhurried

CABLES = "VLA_FLEET_TEST_CABLES"
CONTROL_HZ = 40.0


def recipe(seed: int = 0) -> Recipe:
    """The fake job with such robots, which are tried again soon."""
    made = fake(seed)
    usual = FakeConfig(control_hz=CONTROL_HZ)
    cable = os.path.join(os.environ.get(CABLES, "/nonexistent"), "{robot}")
    return replace(
        made,
        make_policy=unhurried(made.make_policy),
        robot_config=replace(usual, faults=Faults(unplugged=True, only_while=cable)),
        unpaced_config=usual,
        spec=FakeRobot(usual).spec,
        demonstrations=1,
        loop=LoopConfig(max_ticks=80, driver=RobotTimeouts(give_up_s=0.5, first_pause_s=0.3, longest_pause_s=2.0)),
        evaluator=replace(made.evaluator, every_s=1000.0, episodes=1, max_ticks=20),
    )
