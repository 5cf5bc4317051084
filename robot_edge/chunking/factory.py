"""Which strategy fits a checkpoint, and its schedule."""

from __future__ import annotations

from enum import StrEnum

from hal.interfaces.dynamics import DynamicsModel
from hal.safety.limiter import SafetyLimits
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.base import ChunkScheduler
from robot_edge.chunking.delay_estimate import DelayEstimator
from robot_edge.chunking.request_tracker import RequestTracker
from robot_edge.chunking.strategies.aligned import AlignedSchedule
from robot_edge.chunking.strategies.ensemble import EnsembleSchedule
from robot_edge.chunking.strategies.future_state import FutureStateSchedule
from robot_edge.chunking.strategies.naive import NaiveSchedule
from robot_edge.chunking.strategies.residual import ResidualSchedule
from robot_edge.chunking.strategies.rtc import RtcSchedule
from robot_edge.chunking.strategies.sync import SyncSchedule
from wire.errors import ConfigError, suggest
from wire.types import PolicyCapabilities, RobotSpec


class Strategy(StrEnum):
    """What is done about actions that come late."""

    sync = "sync"
    """stand still and wait for each chunk"""
    naive = "naive"
    """execute each chunk from its beginning, whenever it comes"""
    aligned = "aligned"
    """skip the actions that came too late"""
    ensemble = "ensemble"
    """average what several chunks say about a tick"""
    future_state = "future_state"
    """ask with the state the robot will have when the chunk begins"""
    rtc_guided = "rtc_guided"
    """steer each chunk to continue the running one; any policy that generates by flow"""
    rtc_trained = "rtc_trained"
    """the same with a policy that was trained to"""
    residual = "residual"
    """correct each action from the newest state"""
    auto = "auto"
    """what the checkpoint was trained for"""


def check_strategy(name: str) -> Strategy:
    """The strategy called `name`. Raises `ConfigError` that lists all."""
    try:
        return Strategy(name)
    except ValueError:
        known = [strategy.value for strategy in Strategy]
        raise ConfigError(f"strategy '{name}' is not one.{suggest(name, known)} Known: {', '.join(known)}.") from None


def resolve(strategy: str, trained: PolicyCapabilities, motion: DynamicsModel | None) -> Strategy:
    """The strategy meant by `strategy` for a checkpoint that says `trained`; never `auto`.

    Raises `ConfigError` for one that the checkpoint was not trained for, with what to do.
    """
    chosen = check_strategy(strategy)
    aligned = trained.state_aligned and trained.trained_max_delay > 0
    prefixed = trained.prefix_trained and trained.trained_max_delay > 0
    if chosen is Strategy.auto:
        if aligned and motion is not None:
            return Strategy.future_state
        return Strategy.rtc_trained if prefixed else Strategy.aligned
    says = (
        f"the checkpoint says trained_max_delay {trained.trained_max_delay}, state_aligned {trained.state_aligned}, "
        f"prefix_trained {trained.prefix_trained}, residual_trained {trained.residual_trained}"
    )
    instead = f"choose strategy '{resolve(Strategy.auto, trained, motion)}' or 'auto'"
    for wanted, fits, way_out in (
        (Strategy.future_state, aligned, "train with a max_offset above 0 and the robot's motion"),
        (
            Strategy.future_state,
            motion is not None,
            "give the recipe the robot's `motion` (hal.interfaces.dynamics.SpecMotion)",
        ),
        (Strategy.rtc_trained, prefixed, "train with prefixes"),
        (Strategy.residual, trained.residual_trained, "train the residual corrector"),
    ):
        if chosen is wanted and not fits:
            lacks = f"{says}, and the recipe has no motion" if motion is None else says
            raise ConfigError(f"strategy '{chosen}' does not fit: {lacks}. Either {way_out}, or {instead}.")
    return chosen


def make_schedule(
    strategy: str,
    spec: RobotSpec,
    trained: PolicyCapabilities,
    motion: DynamicsModel | None,
    *,
    execute_ticks: int,
    speed_up: int = 1,
    patience_ticks: int = 40,
    safety: SafetyLimits | None = None,
    forecast: DelayEstimator | None = None,
) -> ChunkScheduler:
    """The schedule of `strategy` for a checkpoint that was trained as `trained` says.

    `execute_ticks`: ticks a chunk runs before the next takes over; `speed_up`: execute every so-manieth action;
    `patience_ticks`: a request unanswered for so long is repeated; `safety`: the control loop's limits, which belong
    to what will be executed; `forecast`: what an earlier schedule of this robot learned of delays.

    Raises `ConfigError` for a strategy that is not known or does not fit the checkpoint, and for numbers below 1.
    """
    chosen = resolve(strategy, trained, motion)
    for name, value in (("execute_ticks", execute_ticks), ("speed_up", speed_up), ("patience_ticks", patience_ticks)):
        if value < 1:
            raise ConfigError(f"strategy '{chosen}': {name} is {value}; give 1 or more.")
    line = RequestTracker(patience_ticks, forecast, spec, speed_up)
    foresight = ActionPredictor(spec, safety, motion)
    max_delay = trained.trained_max_delay
    match chosen:
        case Strategy.sync:
            return SyncSchedule(execute_ticks, line)
        case Strategy.naive:
            return NaiveSchedule(execute_ticks, line)
        case Strategy.ensemble:
            return EnsembleSchedule(line=line)
        case Strategy.future_state:
            assert motion is not None
            return FutureStateSchedule(execute_ticks, motion, foresight, max_delay, line)
        case Strategy.rtc_guided:
            return RtcSchedule(execute_ticks, spec, True, foresight, None, line)
        case Strategy.rtc_trained:
            return RtcSchedule(execute_ticks, spec, False, foresight, max_delay, line)
        case Strategy.residual if motion is not None and trained.state_aligned and max_delay > 0:
            ahead = FutureStateSchedule(execute_ticks, motion, foresight, max_delay, line)
            return ResidualSchedule(ahead, spec, foresight, speed_up)
        case Strategy.residual:
            return ResidualSchedule(AlignedSchedule(execute_ticks, line=line), spec, None, speed_up)
        case _:
            return AlignedSchedule(execute_ticks, line=line)
