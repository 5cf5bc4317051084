"""What is foretold is what the limits then make of it."""

from __future__ import annotations

import numpy as np
import pytest

from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.action_predictor import ActionPredictor
from wire.types import Dimension, RobotSpec

JOINT = Dimension("joint", "deg", -100, 100)
SPEC = RobotSpec("arm", (JOINT,), (JOINT,), (), 30.0)
LIMITS = SafetyLimits({"joint": 90.0}, {"joint": 360.0})
STATE = np.zeros(1, np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_targets_are_foretold_as_they_are_approached(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # a path, a jump, a target that stands, and nothing for a while
    path: list[np.ndarray | None] = [np.array([x], np.float32) for x in 20 * np.sin(np.arange(40) / 6)]
    path += [np.array([rng.uniform(-90, 90)], np.float32)] * 25 + [None] * 6
    path += [np.array([x], np.float32) for x in np.cumsum(rng.normal(0, 2, 40))]
    predictor, limiter, last = ActionPredictor(SPEC, LIMITS), SafetyLimiter(SPEC, LIMITS), np.zeros(1, np.float32)
    predictor.on_executed(0, last)
    ahead = np.zeros((0, 1), np.float32)
    for tick, action in enumerate(path, 1):
        foretold = predictor.predict(path[tick - 1 : tick + 11], STATE)
        predictor.on_action_selected(tick, action, STATE)
        executed = limiter.limit(action, last) if action is not None else limiter.brake(last)
        limiter.note(executed, last)
        predictor.on_executed(tick, executed)
        assert predictor.last_action_was_ours
        assert foretold[0] == executed
        if len(ahead) > 1:
            assert ahead[1] == executed, "and one tick earlier"
        ahead, last = foretold, executed
