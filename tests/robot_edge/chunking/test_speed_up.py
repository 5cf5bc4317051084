"""Every q-th action, with any strategy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hal.interfaces.dynamics import SpecMotion
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from tests.robot_edge.chunking.simulated import LINE, SPEC, Simulated, reply_to
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import CommandType, Dimension, PolicyCapabilities

Q = 2


def test_plans_are_shorter_and_keep_their_ticks() -> None:
    scheduler = make_scheduler(ChunkingConfig("aligned", 4, Q), SPEC, PolicyCapabilities())
    rows = Simulated(scheduler, [2]).run(20)
    for row in rows[2:]:
        index = row.tick - row.chunk.first_tick
        # index i of a chunk stands for actions 2i and 2i + 1; of absolute ones the last counts
        assert row.said[0] == row.said[1] + 2 * index + 1
    # the first chunk begins when it is here, the others when they were asked for
    assert [row.tick for row in rows if row.request] == [0, 4, 8, 12, 16]
    assert [row.chunk.first_tick for row in (rows[2], rows[6], rows[10])] == [2, 4, 8]


def test_the_state_asked_for_is_where_the_faster_robot_will_be() -> None:
    def small(request: ChunkRequest) -> ChunkReply:
        rng = np.random.default_rng(request.tick)
        return reply_to(request, rng.uniform(-0.8, 0.8, (16, 1)).astype(np.float32))

    scheduler = make_scheduler(
        ChunkingConfig("future_state", 4, Q), LINE, PolicyCapabilities(8, True), SpecMotion(LINE)
    )
    simulated = Simulated(
        scheduler,
        [3],
        LINE,
        small,
        np.zeros(2, np.float32),
        lambda state, action: np.array([state[0] + action[0], 0], np.float32),
    )
    places = []
    for _ in range(80):
        places.append(float(simulated.state[0]))
        simulated.run(1)
    requests = [row.request for row in simulated.rows if row.request and row.request.first_tick < 80]
    assert len(requests) > 10
    for request in requests:
        assert request.state[0] == pytest.approx(places[request.first_tick], abs=1e-5)


@pytest.mark.parametrize("pace", [1, 2])
@pytest.mark.parametrize("strategy", ["rtc_trained", "rtc_guided"])
def test_what_is_committed_is_what_will_be_executed_within_the_limits(strategy: str, pace: int) -> None:
    """A target that jumps to and fro and a delta, both slower to change than the policy wants."""
    spec = msgspec.structs.replace(
        LINE, action=(Dimension("x", "m", -1, 1, CommandType.delta), Dimension("goal", "m", -100, 100))
    )
    limits = SafetyLimits(velocity={"goal": 40.0}, acceleration={"x": 400.0, "goal": 900.0})
    limiter, before = SafetyLimiter(spec, limits), np.zeros(2, np.float32)

    def limited(action: np.ndarray) -> np.ndarray:
        nonlocal before
        done = limiter.limit(action, before)
        limiter.note(done, before)
        before = done
        return done

    def jumps(request: ChunkRequest) -> ChunkReply:
        rng = np.random.default_rng(request.tick)
        wild = rng.uniform(-0.45, 0.45, (16, 1)), np.repeat(rng.uniform(-5, 5, (4, 1)), 4, axis=0)
        return reply_to(request, np.concatenate(wild, axis=1).astype(np.float32))

    trained = PolicyCapabilities(8, False, True)
    scheduler = make_scheduler(ChunkingConfig(strategy, 4, pace), spec, trained, safety=limits)
    rows = Simulated(scheduler, [3], spec, jumps, np.zeros(2, np.float32), limit=limited).run(60)
    late = [row for row in rows[3:] if row.request and row.request.prefix and row.tick + 3 < 60]
    assert len(late) > 8
    changed = 0
    for row in late:
        prefix = row.request.prefix
        assert prefix.committed > 0
        for i in range(prefix.committed // pace):
            group, done = prefix.actions[i * pace : (i + 1) * pace], rows[row.tick + i].executed
            assert group[:, 0].sum() == pytest.approx(done[0], abs=1e-4)
            assert group[-1, 1] == pytest.approx(done[1], abs=1e-4)
            changed += not np.allclose(done, rows[row.tick + i].action, atol=1e-3)
    assert changed > 8, "the limits are felt"


def test_a_prefix_is_at_the_pace_the_policy_knows() -> None:
    """Two ticks of delay are four of the policy's actions."""
    scheduler = make_scheduler(ChunkingConfig("rtc_trained", 4, Q), SPEC, PolicyCapabilities(8, False, True))
    rows = Simulated(scheduler, [2]).run(30)
    late = [row for row in rows[1:] if row.request]
    assert len(late) > 4
    for row in late:
        prefix = row.request.prefix
        assert prefix.committed == len(prefix.actions) == 4
        running, made_for = rows[row.tick - 1].chunk.first_tick, rows[row.tick - 1].said[1]
        assert prefix.actions[:, 0].tolist() == [made_for + 2 * (row.tick - running) + i for i in range(4)]
