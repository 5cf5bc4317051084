"""Which strategy fits a checkpoint, and its scheduler."""

from __future__ import annotations

from hal.interfaces.dynamics import DynamicsModel
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.config import ChunkingConfig, Strategy, check_strategy
from robot_edge.chunking.scheduler import AlignedScheduler, ChunkScheduler, DelayEstimator, RequestTracker
from robot_edge.chunking.strategies.ensemble import EnsembleScheduler
from robot_edge.chunking.strategies.future_state import FutureStateScheduler
from robot_edge.chunking.strategies.naive import NaiveScheduler
from robot_edge.chunking.strategies.residual import ResidualScheduler
from robot_edge.chunking.strategies.rtc import RtcScheduler
from robot_edge.chunking.strategies.sync import SyncScheduler
from wire.errors import ConfigError
from wire.types import PolicyCapabilities, RobotSpec


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


def make_scheduler(
    config: ChunkingConfig,
    spec: RobotSpec,
    trained: PolicyCapabilities,
    motion: DynamicsModel | None = None,
    *,
    safety: SafetyLimits | None = None,
    delay: DelayEstimator | None = None,
) -> ChunkScheduler:
    """The scheduler of `config.strategy` for a checkpoint that was trained as `trained` says.

    `safety`: the control loop's limits, which belong to what will be executed; `delay`: what an earlier scheduler of
    this robot learned of delays. Raises `ConfigError` for a strategy that does not fit the checkpoint.
    """
    tracker = RequestTracker(spec, config, delay)
    predictor = ActionPredictor(spec, safety, motion)
    max_delay = trained.trained_max_delay
    match resolve(config.strategy, trained, motion):
        case Strategy.sync:
            return SyncScheduler(tracker)
        case Strategy.naive:
            return NaiveScheduler(tracker)
        case Strategy.ensemble:
            return EnsembleScheduler(tracker)
        case Strategy.future_state:
            assert motion is not None
            return FutureStateScheduler(tracker, motion, predictor, max_delay)
        case Strategy.rtc_guided:
            return RtcScheduler(tracker, predictor, guided=True)
        case Strategy.rtc_trained:
            return RtcScheduler(tracker, predictor, guided=False, max_delay=max_delay)
        case Strategy.residual if motion is not None and trained.state_aligned and max_delay > 0:
            return ResidualScheduler(FutureStateScheduler(tracker, motion, predictor, max_delay))
        case Strategy.residual:
            return ResidualScheduler(AlignedScheduler(tracker))
        case _:
            return AlignedScheduler(tracker)
