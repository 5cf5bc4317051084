"""What algorithms make of how episodes ended: which steps that says something of, and what people are told of it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

import numpy as np

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import actor_index, rollout_steps
from cloud_learner.buffer.sampling.shares import TaskMix
from cloud_learner.buffer.sampling.target import (
    Factor,
    Moment,
    SamplingDistribution,
    StepRuns,
    by_recovery,
    uniform,
)
from policies.interface.policy import Batch
from wire.types import EpisodeOutcome

log = logging.getLogger(__name__)
_SUCCESS, _FAILURE = (OUTCOMES.index(name) for name in (EpisodeOutcome.success, EpisodeOutcome.failure))
NOTICED_STEPS = 2000
"""steps drawn after which it is said, once, if they do not tell good from bad"""


def is_judged(outcome: np.ndarray) -> np.ndarray:
    """bool[n] of int8[n]: whether the episode is known to have succeeded or failed."""
    return (outcome == _SUCCESS) | (outcome == _FAILURE)


def taught_or_judged(own_weight: float, recovery_weight: float, mix: TaskMix, max_lag: int = 0) -> SamplingDistribution:
    """Everybody's steps; the policy's own count, `own_weight` for each of a person, once it is known whether their
    episode succeeded, and until it is more than `max_lag` versions behind the newest; 0: for ever. `recovery_weight`:
    of a step by which a person brought the robot back."""

    def weigh(runs: StepRuns, moment: Moment) -> np.ndarray:
        own = rollout_steps(actor_index(runs.actor), runs.demonstration)
        counts = is_judged(runs.outcome)
        if max_lag:
            counts &= moment.newest_version - runs.version.astype(np.int64) <= max_lag
        return np.where(own, own_weight * counts, 1.0)

    return uniform(factors=(Factor(weigh, by_version=max_lag > 0), by_recovery(recovery_weight)), mix=mix)


class StepOutcomes(NamedTuple):
    """Of the n steps of a batch, whose they are and what came of them."""

    own: np.ndarray
    """bool[n]: the policy's, not a person's, a script's or a demonstration's"""
    known: np.ndarray
    """bool[n]: whether it is known that the episode succeeded or failed, and where it ended"""
    succeeded: np.ndarray
    """bool[n]"""
    ticks_to_end: np.ndarray
    """int64[n], where that is known"""


def read_outcomes(batch: Batch, shape: tuple[int, int]) -> StepOutcomes:
    """Of a batch of `shape` (b, k), n = b * k, with or without an axis for the k steps behind each image."""

    def flat(name: str) -> np.ndarray:
        return of_each_step(batch[name], shape)

    outcome, ticks = flat("outcome"), flat("ticks_to_end")
    own = rollout_steps(flat("actor"), ~flat("online"))
    return StepOutcomes(own, is_judged(outcome) & (ticks >= 0), outcome == _SUCCESS, ticks)


def of_each_step(values: object, shape: tuple[int, int]) -> np.ndarray:
    """[b * k] of [b], [b, 1] or [b, k]: what is said of an image holds for all steps behind it."""
    array = np.asarray(values)
    return np.broadcast_to(array.reshape(len(array), -1), shape).ravel()


class OutcomeNotices:
    """Says, once, what keeps good from being told from bad in what this process has drawn."""

    def __init__(self, algorithm: str, when_all_fail: str, when_all_succeed: str = "") -> None:
        """What is made then of steps of the policy's own; nothing is said where that is empty."""
        self.counts: Counter[str] = Counter()
        """steps drawn"""
        self._who = f"algorithm '{algorithm}'"
        self._when_all_fail, self._when_all_succeed = when_all_fail, when_all_succeed
        self._said: set[str] = set()

    def note(self, steps: StepOutcomes) -> None:
        """Of a batch that was drawn."""
        own, counts = steps.own & steps.known, self.counts
        counts.update(
            drawn=own.size,
            known=int(steps.known.sum()),
            own=int(own.sum()),
            own_succeeded=int((own & steps.succeeded).sum()),
        )
        if counts["drawn"] >= NOTICED_STEPS and not counts["known"]:
            self.say(
                "no step drawn so far is of an episode that is known to have succeeded or failed: what people did is "
                "imitated, and nothing else is learned until somebody judges episodes."
            )
        if counts["own"] >= NOTICED_STEPS and not counts["own_succeeded"]:
            self.say(
                "no step of the policy's own drawn so far is of an episode that succeeded: "
                f"{self._when_all_fail} until one does."
            )
        if self._when_all_succeed and counts["own"] >= NOTICED_STEPS and counts["own"] == counts["own_succeeded"]:
            self.say(
                "every step of the policy's own drawn so far is of an episode that succeeded: "
                f"{self._when_all_succeed} until one fails."
            )

    def say(self, text: str, detail: object = "") -> None:
        """Log it, unless it was, with whatever `detail` then."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s%s", self._who, text, detail and f" ({detail})")
