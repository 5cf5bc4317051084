"""How long the robot has moved goes with each request, and no picture is called older than that."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.interfaces.dynamics import SpecMotion
from robot_edge.chunking.config import ChunkingConfig, Strategy
from robot_edge.chunking.factory import make_scheduler
from robot_edge.inference.server import infer_chunk
from tests import samples
from tests.robot_edge.chunking.simulated import reply_to
from tests.robot_edge.inference.thinking import Scripted
from wire.messages.local import ChunkRequest
from wire.types import Latent, PolicyCapabilities

SPEC = samples.spec()
TRAINED = PolicyCapabilities(8, state_aligned=True, prefix_trained=True, residual_trained=True)
DONE = st.lists(st.sampled_from([[0, 0, 0, 0.5], [0, 0, 0, -0.5], [0.1, 0, 0, 0.5]]), min_size=1, max_size=24)


@pytest.mark.parametrize("strategy", [strategy for strategy in Strategy if strategy is not Strategy.auto])
@settings(max_examples=30)
@given(done=DONE)
def test_a_request_says_for_how_long_the_robot_has_moved(strategy: Strategy, done: list[list[float]]) -> None:
    scheduler = make_scheduler(ChunkingConfig(strategy, execute_ticks=1), SPEC, TRAINED, SpecMotion(SPEC))
    scheduler.reset(0)
    moved, last, action = 0, None, np.zeros(4, np.float32)
    for tick, numbers in enumerate(done):
        seen = samples.observation(1000 + tick)
        request = scheduler.request_chunk(tick, seen)
        if request is not None:
            assert request.moved_ticks == moved
            scheduler.submit(reply_to(request, np.zeros((4, 4), np.float32)), tick)
        scheduler.next_action(tick, seen)
        # A driver may give the same array at every tick.
        action[:] = numbers
        scheduler.on_executed(tick, action, waited=False)
        # standing still: no delta, and the gripper as it was
        still = not action[:3].any() and (last is None or action[3] == last)
        moved, last = 0 if still else moved + 1, float(action[3])
    scheduler.reset(len(done))
    request = scheduler.request_chunk(len(done), samples.observation(5000))
    assert request is not None and request.moved_ticks == 0


@given(age=st.integers(0, 60), moved=st.integers(-1, 60), ahead=st.integers(0, 8))
def test_a_picture_is_called_no_older_than_the_robot_has_moved(age: int, moved: int, ahead: int) -> None:
    policy, period_ns = Scripted(), SPEC.period_ns
    policy.load(b"1", 1)
    now_ns = 100 * period_ns
    latent = Latent(np.array([ord("1"), 0, 0], np.float32), now_ns - age * period_ns, 1)
    seen = msgspec.structs.replace(samples.observation(), time_ns=now_ns)
    reply = infer_chunk(policy, latent, ChunkRequest(5, seen, 5 + ahead, seen.state, moved_ticks=moved))
    ((moment, shown, tick, _),) = policy.acted
    told = (moment.time_ns - shown.observed_ns) / period_ns
    assert told == ahead + (age if moved < 0 else min(age, moved)) and tick == 5 + ahead
    # what is recorded is when it was really seen
    assert reply.chunk is not None and reply.chunk.latent_observed_ns == latent.observed_ns
    assert np.array_equal(shown.data, latent.data)
