"""From which score on a model is believed, and how good it is there. Pure functions of the scores of n episodes.

`choose_thresholds` takes the lowest threshold whose precision is shown, by fixed sequence testing (Angelopoulos et al.
2021, "Learn then Test", arXiv 2110.01052): thresholds are tried from the strictest on that could pass, and the first
one that does not ends it. So all that passed hold together with the wanted confidence, however many were tried. Which
could pass is told by the scores alone, before a single outcome is looked at.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from wire.errors import ConfigError, InvalidDataError

BINS = 5


class Thresholds(msgspec.Struct, frozen=True):
    """None: it never says that."""

    success_at: float | None = None
    failure_at: float | None = None
    notes: tuple[str, ...] = ()
    """for people: why there is none"""


class ScoreBin(msgspec.Struct, frozen=True):
    """Episodes whose scores are alike."""

    low: float
    high: float
    episodes: int
    successes: int
    mean_score: float


class SuccessMeasurement(msgspec.Struct, frozen=True):
    """What a model said of episodes of which it is known how they ended."""

    episodes: int
    successes: int
    said_success: int
    right_success: int
    """of these were successes"""
    said_failure: int
    right_failure: int
    bins: tuple[ScoreBin, ...]
    """those that have any"""
    calibration_error: float
    """mean distance of a bin's successes from its mean score, by episodes (ECE: Naeini et al. 2015)"""


def choose_thresholds(scores: np.ndarray, succeeded: np.ndarray, precision: float, confidence: float) -> Thresholds:
    """Of scores float[n] and bool[n]: `precision` of what is called a success, and of what is called a failure, is
    right, each with `confidence`. Raises `ConfigError` for what is no share, `InvalidDataError` for wrong scores."""
    for name, value in (("precision", precision), ("confidence", confidence)):
        if not 0.5 <= value < 1:
            raise ConfigError(f"{name} {value}: give a share from 0.5 to below 1.")
    require_scores(scores, "a model")
    found, notes = [], []
    for word, order, right in (("success", -scores, succeeded), ("failure", scores, ~succeeded)):
        at, note = _lowest_shown(order, right, precision, confidence, word)
        found.append(at)
        notes += [note] if note else []
    success_at, failure_at = None if found[0] is None else -found[0], found[1]
    if success_at is not None and failure_at is not None and failure_at >= success_at:
        # a stricter one has passed as well
        below = scores[scores < success_at]
        failure_at = float(below.max()) if len(below) else None
    return Thresholds(success_at, failure_at, tuple(notes))


def least_needed(precision: float, confidence: float) -> int:
    """How many episodes must be called so, all of them rightly, before that precision can be shown."""
    return math.ceil(math.log(1 - confidence) / math.log(precision))


def measure(scores: np.ndarray, succeeded: np.ndarray, thresholds: Thresholds) -> SuccessMeasurement:
    """Of scores float[n] and bool[n], which neither the model nor its thresholds were made with."""
    require_scores(scores, "a model")
    none = np.zeros(len(scores), bool)
    good = none if thresholds.success_at is None else scores >= thresholds.success_at
    bad = none if thresholds.failure_at is None else (scores <= thresholds.failure_at) & ~good
    place = np.minimum((scores * BINS).astype(int), BINS - 1)
    bins = []
    for number in range(BINS):
        here = place == number
        if here.any():
            counts = int(here.sum()), int(succeeded[here].sum())
            bins.append(ScoreBin(number / BINS, (number + 1) / BINS, *counts, float(scores[here].mean())))
    error = sum(one.episodes * abs(one.successes / one.episodes - one.mean_score) for one in bins)
    return SuccessMeasurement(
        episodes=len(scores),
        successes=int(succeeded.sum()),
        said_success=int(good.sum()),
        right_success=int((good & succeeded).sum()),
        said_failure=int(bad.sum()),
        right_failure=int((bad & ~succeeded).sum()),
        bins=tuple(bins),
        calibration_error=error / max(1, len(scores)),
    )


def require_scores(scores: np.ndarray, who: str) -> None:
    """Raise `InvalidDataError` unless all are finite and from 0 to 1."""
    if not (np.isfinite(scores).all() and ((scores >= 0) & (scores <= 1)).all()):
        wrong = scores[~((scores >= 0) & (scores <= 1))]
        raise InvalidDataError(
            f"{who} scores {len(wrong)} of {len(scores)} episodes with {wrong[0]}, which is no chance from 0 to 1. "
            "None of them is used: train it again."
        )


def _lowest_shown(
    order: np.ndarray, right: np.ndarray, precision: float, confidence: float, word: str
) -> tuple[float | None, str]:
    """(the last of `order`, the surest first, up to which the precision is shown, or why there is none)"""
    least, by = least_needed(precision, confidence), np.argsort(order, kind="stable")
    order, right = order[by], right[by]
    found = None
    # equal scores go together
    ends = np.flatnonzero(np.append(order[1:] != order[:-1], True)) + 1 if len(order) else np.zeros(0, int)
    for count in ends[ends >= least].tolist():
        if _binomial_tail(count, int((~right[:count]).sum()), 1 - precision) > 1 - confidence:
            break
        found = float(order[count - 1])
    if found is not None:
        return found, ""
    held, most = int(right.sum()), len(right)
    if held < least:
        return None, (
            f"it never says {word}: {held} of the {most} episodes that are held out to choose a threshold ended so, "
            f"and {least} that it calls so, all rightly, are the least by which a precision of {precision:g} is shown. "
            "Judge more episodes, or ask for less precision."
        )
    return None, (
        f"it never says {word}: of the {most} episodes that are held out to choose a threshold, those it is surest of "
        f"are not right often enough to show a precision of {precision:g}. Judge more episodes, train longer, or ask "
        "for less."
    )


def _binomial_tail(trials: int, errors: int, share: float) -> float:
    """Chance of at most so many errors where each trial errs with chance `share`."""
    logs = (math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(errors + 1))
    terms = (one + k * math.log(share) + (trials - k) * math.log1p(-share) for k, one in enumerate(logs))
    return min(1.0, sum(map(math.exp, terms)))
