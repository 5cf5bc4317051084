"""The default follows the checkpoint; what does not fit is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from hal.interfaces.dynamics import SpecMotion
from robot_edge.chunking.config import ChunkingConfig, Strategy
from robot_edge.chunking.factory import make_scheduler, resolve
from robot_edge.chunking.scheduler import AlignedScheduler, DelayEstimator
from robot_edge.chunking.strategies.ensemble import EnsembleScheduler
from robot_edge.chunking.strategies.future_state import FutureStateScheduler
from robot_edge.chunking.strategies.naive import NaiveScheduler
from robot_edge.chunking.strategies.residual import ResidualScheduler
from robot_edge.chunking.strategies.rtc import RtcScheduler
from robot_edge.chunking.strategies.sync import SyncScheduler
from tests.robot_edge.chunking.simulated import LINE, Simulated, reply_to
from wire.errors import ConfigError
from wire.types import PolicyCapabilities

MOTION = SpecMotion(LINE)
ALL = PolicyCapabilities(8, True, True, True)


@pytest.mark.parametrize(
    ("trained", "motion", "chosen"),
    [
        (PolicyCapabilities(), None, Strategy.aligned),
        (PolicyCapabilities(), MOTION, Strategy.aligned),
        (PolicyCapabilities(8, True), MOTION, Strategy.future_state),
        (PolicyCapabilities(8, True), None, Strategy.aligned),
        (PolicyCapabilities(0, True), MOTION, Strategy.aligned),
        (PolicyCapabilities(8, False, True), MOTION, Strategy.rtc_trained),
        (PolicyCapabilities(8, True, True), None, Strategy.rtc_trained),
        (ALL, MOTION, Strategy.future_state),
    ],
)
def test_the_default_follows_the_checkpoint(
    trained: PolicyCapabilities, motion: SpecMotion | None, chosen: Strategy
) -> None:
    assert resolve("auto", trained, motion) is chosen


@pytest.mark.parametrize(
    ("strategy", "trained", "motion", "parts"),
    [
        ("future_state", PolicyCapabilities(8, False), MOTION, ["state_aligned False", "max_offset", "'aligned'"]),
        ("future_state", PolicyCapabilities(0, True), MOTION, ["trained_max_delay 0", "max_offset"]),
        ("future_state", PolicyCapabilities(8, True, True), None, ["no motion", "SpecMotion", "'rtc_trained'"]),
        ("rtc_trained", PolicyCapabilities(8, True), MOTION, ["prefix_trained False", "'future_state'"]),
        ("residual", PolicyCapabilities(8, True, True), MOTION, ["residual_trained False", "corrector"]),
    ],
)
def test_a_mismatch_is_refused_with_the_reason(
    strategy: str, trained: PolicyCapabilities, motion: SpecMotion | None, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        make_scheduler(ChunkingConfig(strategy), LINE, trained, motion)
    for part in (f"'{strategy}'", *parts, "'auto'"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("sync", SyncScheduler),
        ("naive", NaiveScheduler),
        ("aligned", AlignedScheduler),
        ("ensemble", EnsembleScheduler),
        ("future_state", FutureStateScheduler),
        ("rtc_guided", RtcScheduler),
        ("rtc_trained", RtcScheduler),
        ("residual", ResidualScheduler),
        ("auto", FutureStateScheduler),
    ],
)
def test_each_name_has_its_schedule(strategy: str, kind: type) -> None:
    assert type(make_scheduler(ChunkingConfig(strategy), LINE, ALL, MOTION)) is kind


@pytest.mark.parametrize("strategy", ["sync", "naive", "aligned", "ensemble", "rtc_guided"])
def test_what_needs_no_training_takes_any_checkpoint(strategy: str) -> None:
    make_scheduler(ChunkingConfig(strategy), LINE, PolicyCapabilities())


def test_an_unknown_name_gets_help() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'future_state'"):
        ChunkingConfig("future-state")


@pytest.mark.parametrize("wrong", [{"execute_ticks": 0}, {"speed_up": 0}, {"timeout_ticks": 0}])
def test_numbers_below_one_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ChunkingConfig("aligned", **wrong)


def test_delays_are_handed_on_to_the_next_schedule() -> None:
    delay = DelayEstimator()
    for strategy in ("aligned", "future_state"):
        scheduler = make_scheduler(ChunkingConfig(strategy), LINE, ALL, MOTION, delay=delay)
        policy = lambda request: reply_to(request, np.zeros((16, 1), np.float32))  # noqa: E731
        simulated = Simulated(scheduler, [5], LINE, policy, np.zeros(2, np.float32))
        rows = simulated.run(20)
        if strategy == "future_state":
            assert rows[0].request is not None
            assert rows[0].request.first_tick == 5
    assert delay.ticks == 5
