"""The scripted operator of the Fetch arm."""

from __future__ import annotations

import numpy as np
import pytest

from hal.drivers.gym.presets import fetch
from hal.registry import make_operator, make_robot
from tests.extras import needs

pytestmark = needs("gymnasium_robotics")


@pytest.mark.parametrize(("task", "scenes"), [("reach", 3), ("push", 6)])
def test_it_succeeds(task, scenes):
    robot = make_robot("gym-fetch", fetch(task))
    operator = make_operator("gym-fetch", robot)
    robot.connect()
    try:
        assert operator.progress() == float("inf")
        for seed in range(scenes):
            robot.reset(task, seed)
            left = []
            for _ in range(50):
                action = operator.propose(robot.read())
                assert action.shape == (4,) and (np.abs(action) <= 1).all()
                left.append(operator.progress())
                if robot.write(action).success:
                    break
            else:
                pytest.fail(f"{task} from seed {seed}: {left[-1]:.3f} m left")
            assert left[-1] < left[0]
    finally:
        robot.close()
