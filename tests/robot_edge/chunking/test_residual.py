"""Each action is corrected from the newest state, with the chunk's own latent and corrector."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hal.interfaces.dynamics import SpecMotion
from policies.common.residual_policy import input_width
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from tests.robot_edge.chunking.simulated import LINE, Simulated, Tick, reply_to
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import PolicyCapabilities, ResidualPolicy

STATE, LATENT, ACTION, INDEX, AGE = range(0, 2), 2, 3, 4, 5


def corrector(version: int = 1, **gains: float) -> ResidualPolicy:
    """One layer that adds gain x input to the action."""
    weights = np.zeros((1, input_width(2, 1, 1)), np.float32)
    for name, gain in gains.items():
        weights[0, {"x": 0, "goal": 1, "latent": LATENT, "action": ACTION, "index": INDEX, "age": AGE}[name]] = gain
    return ResidualPolicy(
        (weights,), (np.zeros(1, np.float32),), np.zeros(2, np.float32), np.ones(2, np.float32), version
    )


class Replies:
    """Chunks of zeros whose latent is the tick they were asked at."""

    def __init__(self, helper: ResidualPolicy | None) -> None:
        self.helper = helper

    def __call__(self, request: ChunkRequest) -> ChunkReply:
        assert request.residual
        reply = reply_to(request, np.zeros((16, 1), np.float32))
        latent = np.full((1, 1), request.tick / 1000, np.float32)
        return msgspec.structs.replace(reply, latent=latent, corrector=self.helper)


def simulate(helper: ResidualPolicy | None, delay: int = 3, aligned: bool = True, speed_up: int = 1) -> Simulated:
    trained = PolicyCapabilities(8, aligned, False, True)
    scheduler = make_scheduler(ChunkingConfig("residual", speed_up=speed_up), LINE, trained, SpecMotion(LINE))
    return Simulated(
        scheduler,
        [delay],
        LINE,
        Replies(helper),
        np.array([0.0, 0.5], np.float32),
        lambda state, action: np.array([state[0] + action[0], state[1]], np.float32),
    )


def tick_asked(row: Tick) -> int:
    assert row.chunk is not None
    return row.chunk.observed_ns // LINE.period_ns


@pytest.mark.parametrize("aligned", [True, False])
def test_every_action_sees_the_newest_state(aligned: bool) -> None:
    simulated = simulate(corrector(goal=0.2, x=-0.2), aligned=aligned)
    rows = simulated.run(60)
    x = 0.0
    for row in rows[3:]:
        # a chunk of zeros, yet the robot goes to where the goal is now
        assert row.action[0] == pytest.approx(0.2 * (0.5 - x), abs=1e-5)
        x += float(row.executed[0])
    assert x == pytest.approx(0.5, abs=1e-3)


def test_a_correction_is_no_other_will() -> None:
    simulated = simulate(corrector(goal=1.0))
    rows = simulated.run(60)
    assert {row.action[0] for row in rows[3:]} == {0.5}
    assert [row.request.first_tick - row.tick for row in rows[4:] if row.request] == [3] * len(
        [row for row in rows[4:] if row.request]
    )


def test_the_latent_and_the_place_are_those_of_the_running_chunk() -> None:
    by_latent = simulate(corrector(latent=1.0)).run(40)
    for row in by_latent[3:]:
        assert row.action[0] == pytest.approx(tick_asked(row) / 1000, abs=1e-6)
    assert len({tick_asked(row) for row in by_latent[3:]}) > 3
    by_index = simulate(corrector(index=1.0)).run(40)
    for row in by_index[3:]:
        assert row.action[0] == pytest.approx(min((row.tick - row.chunk.first_tick) / 16, 1), abs=1e-6)
    by_age = simulate(corrector(age=0.5)).run(40)
    for row in by_age[3:]:
        assert row.action[0] == pytest.approx((row.tick - tick_asked(row)) / 32, abs=1e-6)


@pytest.mark.parametrize("helper", [None, corrector(version=2, goal=1.0), corrector(goal=np.nan)])
def test_without_a_fitting_corrector_the_chunk_is_executed_as_it_is(helper: ResidualPolicy | None) -> None:
    rows = simulate(helper).run(40)
    assert {row.action[0] for row in rows[3:]} == {0.0}


def test_a_corrector_of_another_shape_is_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    wide = msgspec.structs.replace(corrector(goal=1.0), weights=(np.ones((1, 9), np.float32),))
    rows = simulate(wide).run(40)
    assert {row.action[0] for row in rows[3:]} == {0.0}
    assert caplog.text.count("reads 9 and writes 1 numbers; here it needs 6 and 1") == 1


def test_what_is_remembered_is_bounded() -> None:
    simulated = simulate(corrector(goal=0.1), delay=0)
    simulated.run(400)
    assert len(simulated.scheduler._helpers) <= 8
