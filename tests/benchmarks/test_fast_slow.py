"""The benchmark of slow eyes and fast hands, very small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import fast_slow
from hal.drivers.metaworld.robot import metaworld_spec
from policies.flow.factory import pixels_network
from policies.flow.policy import FlowPolicy
from tests.extras import needs

pytestmark = needs("metaworld")

SIZE = fast_slow.FastSlowSize(("drawer-open",), 1, 2, 1, 60, (0,), (5.0,))


@pytest.mark.slow
def test_a_small_run_gives_every_cell(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        found = fast_slow._seed(SIZE, 0, tmp_path)
    finally:
        torch.set_num_threads(threads)
    (fast,), (single,) = (found[fast_slow._cell(kind, 5.0)] for kind in fast_slow.KINDS)
    # The first thought takes 16 ticks, the first chunk one; from then on there is an action for every tick.
    assert fast["waited"] == 17 and fast["starved"] == 0 and fast["chunks"] == 6
    # 16 ticks to think, 16 actions, and again.
    assert single["waited"] == 16 and single["starved"] == 16 and single["chunks"] == 2
    assert found["act_ms"][0]["p50"] > 0


def test_the_slow_path_is_paced_by_the_simulated_clock() -> None:
    from benchmarks.async_delay.rollout import Stage

    spec = metaworld_spec(SIZE.config)
    policy = FlowPolicy(spec, pixels_network(spec, max_offset=8))
    stage = Stage(SIZE.robot)
    try:
        stage.robot.reset("drawer-open", 0)
        thinker = fast_slow.Paced(policy, stage, 5.0)
        ages = []
        for _ in range(80):
            observation = stage.robot.read()
            thinker.look(observation)
            latent = thinker.newest(observation)
            ages.append(-1 if latent is None else (observation.time_ns - latent.observed_ns) // spec.period_ns)
            stage.robot.write(np.zeros(4, np.float32))
            stage.clock.advance(spec.period_ns)
        assert ages[:16] == [-1] * 16
        assert ages[16:48] == [*range(16, 32), *range(16, 32)]
        thinker.begin()
        assert thinker.newest(observation) is None, "a new episode begins without a thought"
    finally:
        stage.close()
