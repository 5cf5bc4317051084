"""What to draw, and how often: small pure functions that are put together.

A step's weight is the product of its factors. A *stratum* is the online or the offline (demonstrated) part of one task;
within it, a step's probability is its weight over the sum of weights. The mix says how much of a batch each stratum
gets, and `Recent` gives a part of every task's draws to what came last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from cloud_learner.buffer.check import DISCARDED, OUTCOMES
from cloud_learner.buffer.control import HOLD, actor_index, by_human, is_recovery, rollout_steps
from cloud_learner.buffer.sampling.shares import TaskMix
from wire.errors import ConfigError, suggest
from wire.messages.gateway import ACTORS
from wire.types import EpisodeOutcome


class StepRuns(msgspec.Struct, frozen=True, eq=False):
    """R runs of steps, as a factor sees them."""

    actor: np.ndarray
    """uint8[R] marked index into `wire.messages.gateway.ACTORS` (`control.RECOVERY`)"""
    version: np.ndarray
    """int32[R] policy version that acted or was ready to act, 0 when there was none"""
    demonstration: np.ndarray
    """bool[R]"""
    outcome: np.ndarray
    """int8[R] of the episode, index into `check.OUTCOMES`, -1 while unknown"""
    label: np.ndarray
    """float32[R] mean over the segment's steps of the label that the target goes by, nan where nothing was said"""
    arrival_lag: np.ndarray
    """int[R] of `control.arrival_lag`; a batch knows it only with a target that has a `staleness`, it is 0 without"""


class Moment(msgspec.Struct, frozen=True):
    """When weights are taken."""

    newest_version: int


class Factor(msgspec.Struct, frozen=True, eq=False):
    """A part of a step's weight; factors multiply. Pure: the same runs and moment, the same weights."""

    weigh: Callable[[StepRuns, Moment], np.ndarray]
    """float64[R] weight >= 0 of each step of a run"""
    by_version: bool = True
    """whether what it answers for a run changes with the newest version"""
    by_label: str = ""
    """name of the step label (`Ledger.put_step_labels`) that it changes with, at any version alike; '' for none"""


StepFilter = Callable[[np.ndarray, bool | np.ndarray], np.ndarray]
"""A static predicate of steps: bool[T] of uint8[T] marked indices into `ACTORS`, and one bool or bool[T]."""


# --- predicates -------------------------------------------------------------------------------------------------------


def imitable_steps(actor: np.ndarray, demonstration: bool | np.ndarray) -> np.ndarray:
    """What HG-DAgger imitates (arXiv 1810.02890): a human or a script; in demonstrations everybody but hold."""
    return by_human(actor) | (np.asarray(demonstration) & (actor != HOLD))


def corrected_steps(actor: np.ndarray, demonstration: bool | np.ndarray) -> np.ndarray:
    """The same without recoveries."""
    return imitable_steps(actor, demonstration) & ~is_recovery(actor)


def acted_steps(actor: np.ndarray, demonstration: bool | np.ndarray) -> np.ndarray:
    """Whoever acted, but not ticks at which the robot held: nobody chose those."""
    return actor != HOLD


# --- factors ----------------------------------------------------------------------------------------------------------


def by_actor(weights: Mapping[str, float], other: float = 0.0) -> Factor:
    """A weight by who acted; `other` for those not named. Raises `ConfigError` for a name that is no actor."""
    table = _table("by_actor", weights, ACTORS, other)
    return Factor(lambda runs, moment: table[actor_index(runs.actor)], by_version=False)


def by_recovery(weight: float) -> Factor:
    """`weight` of a step by which a person brought the robot back, 1 of all others."""
    weight = _weight("by_recovery", "recovery", weight)
    return Factor(lambda runs, moment: np.where(is_recovery(runs.actor), weight, 1.0), by_version=False)


def by_outcome(weights: Mapping[str, float], unknown: float = 1.0, other: float = 0.0) -> Factor:
    """A weight by how the episode ended; `unknown` until it did. Raises `ConfigError` for a name that is no outcome."""
    # an outcome of -1 reads the last entry
    table = np.append(_table("by_outcome", weights, OUTCOMES, other), _weight("by_outcome", "unknown", unknown))
    return Factor(lambda runs, moment: table[runs.outcome], by_version=False)


def max_lag(versions: int) -> Factor:
    """1 while a step's policy version is at most so far behind the newest, then 0: a bound on its age when it is drawn.

    Everything ages out but demonstrations, which have no version. How stale a rollout was when it arrived is
    `StalenessBound`'s.
    """
    if versions < 0:
        raise ConfigError(f"max_lag: {versions} versions; it must not be negative.")
    return Factor(
        lambda runs, moment: (runs.demonstration | (_lag(runs, moment) <= versions)).astype(np.float64),
    )


_SMALLEST_EXPONENT = -900.0
"""of two: what is older weighs as much as that, for smaller numbers lose their precision"""


def lag_half_life(versions: float) -> Factor:
    """0.5 ** (lag / versions): a step weighs half as much when its version is so far behind the newest.

    Relative weights are the same whenever they are taken, so a step newer than the moment weighs a little above 1. A
    demonstration weighs 1.
    """
    if not versions > 0:
        raise ConfigError(f"lag_half_life: {versions} versions; it must be positive.")
    return Factor(
        lambda runs, moment: np.where(
            runs.demonstration, 1.0, np.exp2(np.clip(-_lag(runs, moment) / versions, _SMALLEST_EXPONENT, 64))
        ),
    )


_MOST_EXPONENT = 4.0
"""of a priority: any float32 to this power is a finite float64"""


def by_label(name: str, exponent: float = 1.0, least: float = 1e-6, unknown: float = 1.0) -> Factor:
    """max(label, least) ** exponent: prioritized replay, P(i) ~ p_i^alpha (arXiv 1511.05952, section 3.3).

    A job writes the priorities of steps with `Ledger.put_step_labels`; a segment has the mean of those that are finite,
    and all its steps weigh as much; `unknown` while it has none. For the weights of importance sampling (section 3.4)
    batches have `probability`. Raises `ConfigError` for numbers that cannot work.
    """
    if not name:
        raise ConfigError("by_label: name the label of the steps that is their priority.")
    if not 0 <= exponent <= _MOST_EXPONENT:
        raise ConfigError(f"by_label: exponent {exponent} of '{name}' must be from 0 to {_MOST_EXPONENT:g}.")
    least, unknown = _weight("by_label", "least", least), _weight("by_label", "unknown", unknown)

    def weigh(runs: StepRuns, moment: Moment) -> np.ndarray:
        label = runs.label.astype(np.float64)
        return np.where(np.isnan(label), unknown, np.maximum(label, least) ** exponent)

    return Factor(weigh, by_version=False, by_label=name)


def _lag(runs: StepRuns, moment: Moment) -> np.ndarray:
    return moment.newest_version - runs.version.astype(np.int64)


def _weight(where: str, name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: the weight of '{name}' is {value}; it must be a number that is not negative.")
    return float(value)


def _table(where: str, weights: Mapping[str, float], names: Sequence[str], other: float) -> np.ndarray:
    for name in weights:
        if name not in names:
            raise ConfigError(f"{where}: '{name}' is none of {tuple(names)}.{suggest(name, names)}")
    return np.array([_weight(where, name, weights.get(name, other)) for name in names])


class StalenessBound(msgspec.Struct, frozen=True):
    """S: how far behind the fleet's newest version a rollout may be when it arrives.

    ECHO-2 learns stably at a lag of 6 and not at 11 (arXiv 2602.02192), VCPO at 128 (arXiv 2602.17616). What a person
    or a script did and demonstrations are labels, good whatever version the robot had: they are never stale. A rollout
    whose version nobody knows, such as an imported one, counts as one of version 0.
    """

    max_lag: int
    """S, in versions; a rollout step of a larger `control.arrival_lag` is stale"""
    weight: float = 0.0
    """what the weight of a stale step is multiplied with; with 0 it is in no window, not behind its beginning either"""

    def __post_init__(self) -> None:
        if self.max_lag < 0 or not 0 <= self.weight <= 1:
            raise ConfigError(
                f"staleness: a lag of {self.max_lag} versions must not be negative, the weight {self.weight} of what "
                "is stale from 0 to 1."
            )

    def is_stale(self, actor: np.ndarray, demonstration: bool | np.ndarray, lag: np.ndarray) -> np.ndarray:
        """bool[T] of steps with `arrival_lag` int[T]."""
        return rollout_steps(actor, demonstration) & (lag > self.max_lag)


class Recent(msgspec.Struct, frozen=True):
    """Prefers what came last. The steps that count as recent stay in memory."""

    share: float = 0.0
    """probability that a draw comes from the newest of its task"""
    newest: int = 2400
    """how many eligible steps of a task count as newest, by ledger row, and the rest of the oldest one's segment"""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.newest < 1:
            raise ConfigError(f"recent: share {self.share} must be within 0 and 1, newest {self.newest} at least 1.")


EVENLY = Recent()
"""no preference"""
BY_TASK = TaskMix()
"""an equal share of each task, online data by its mass"""


# --- target -----------------------------------------------------------------------------------------------------------


class SamplingDistribution(msgspec.Struct, frozen=True, eq=False):
    """What a trainer wants to see."""

    factors: tuple[Factor, ...]
    """on top of 1 for each step that may begin a window"""
    mix: TaskMix
    recent: Recent
    starts: StepFilter
    """which steps may ever begin a window: frames that only others saw are not even decoded"""
    continues: StepFilter
    """which steps may stand inside a window: its mask is 0 from the first that may not"""
    staleness: StalenessBound | None = None
    """what is made of rollouts that arrived late; None: nothing"""

    def __post_init__(self) -> None:
        if len(names := {factor.by_label for factor in self.factors} - {""}) > 1:
            raise ConfigError(
                f"target: factors go by the labels {', '.join(sorted(names))}, and one is possible. Write what they "
                "come to as a label of its own."
            )

    @property
    def leaves_out_stale(self) -> StalenessBound | None:
        """The bound, if what is stale is in no window."""
        return self.staleness if self.staleness is not None and not self.staleness.weight else None

    @property
    def label(self) -> str:
        """Name of the step label that weights change with, '' for none."""
        return next((factor.by_label for factor in self.factors if factor.by_label), "")

    def weights(self, runs: StepRuns, moment: Moment) -> np.ndarray:
        """float64[R] of each step of a run, 0 for those that may not begin a window and those of discarded episodes.

        Raises `ConfigError` if a factor answers with something else.
        """
        weights = self.starts(runs.actor, runs.demonstration).astype(np.float64)
        for factor in self.factors:
            weights = weights * factor.weigh(runs, moment)
        if self.staleness is not None:
            stale = self.staleness.is_stale(runs.actor, runs.demonstration, runs.arrival_lag)
            weights = np.where(stale, weights * self.staleness.weight, weights)
        if weights.shape != runs.actor.shape or not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ConfigError("target: a factor must answer with one finite weight, 0 or more, for each run.")
        return np.where(runs.outcome == DISCARDED, 0.0, weights)


def imitation(
    recent: Recent = EVENLY,
    factors: tuple[Factor, ...] = (),
    mix: TaskMix = BY_TASK,
    staleness: StalenessBound | None = None,
    recovery_weight: float = 1.0,
) -> SamplingDistribution:
    """Windows of what people and scripts did: for HG-DAgger and behaviour cloning. None of it is ever stale.

    `recovery_weight`: of steps by which a person brought the robot back. With 0 they are in no window, not behind its
    beginning either.
    """
    taught = imitable_steps if recovery_weight else corrected_steps
    if recovery_weight not in (0, 1):
        factors = (*factors, by_recovery(recovery_weight))
    return SamplingDistribution(factors, mix, recent, taught, taught, staleness)


def uniform(
    recent: Recent = EVENLY,
    factors: tuple[Factor, ...] = (),
    mix: TaskMix = BY_TASK,
    staleness: StalenessBound | None = None,
) -> SamplingDistribution:
    """Windows of everything that somebody did: for reinforcement learning and value functions."""
    return SamplingDistribution(factors, mix, recent, acted_steps, acted_steps, staleness)


# --- verdicts ---------------------------------------------------------------------------------------------------------

VERDICT = "verdict"
"""what such a target goes by in place of a step label: what `ReplayDataset` was given to read verdicts with says it"""
_BY_VERDICT = tuple(map(OUTCOMES.index, (EpisodeOutcome.failure, EpisodeOutcome.success, EpisodeOutcome.unjudged)))


def outcome_by_verdict(outcome: np.ndarray, verdict: np.ndarray) -> np.ndarray:
    """int8[k] outcomes of recorded ones int8[k] by verdicts float32[k]: 1 success, 0 failure, -1 that nobody knows, nan
    what is recorded.

    An episode that goes on, was aborted or discarded stays what it is, whatever anybody says of it.
    """
    judged = np.array(_BY_VERDICT, np.int8)[np.nan_to_num(verdict, nan=0.0).astype(np.intp)]
    return np.where(np.isin(outcome, _BY_VERDICT) & ~np.isnan(verdict), judged, outcome).astype(np.int8)


def by_verdicts(target: SamplingDistribution) -> SamplingDistribution:
    """The same target, to which an episode's outcome is its verdict. Raises `ConfigError` for one with a priority."""

    def read(factor: Factor) -> Factor:
        def weigh(runs: StepRuns, moment: Moment) -> np.ndarray:
            outcome = outcome_by_verdict(runs.outcome, runs.label)
            return factor.weigh(msgspec.structs.replace(runs, outcome=outcome), moment)

        return Factor(weigh, factor.by_version, factor.by_label)

    # batches bring verdicts, too: that is so without any factor
    evenly = Factor(lambda runs, moment: np.ones(runs.actor.shape), by_version=False, by_label=VERDICT)
    return msgspec.structs.replace(target, factors=(*map(read, target.factors), evenly))
