"""What an episode was, of all that is said of it. The rule that no single model's word admits anything is here.

docs/decisions/0052-no-models-word-alone.md says why.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SUCCESS, FAILURE, NOBODY_KNOWS = 1.0, 0.0, -1.0
INDEPENDENT = 2
"""so many kinds of models must say the same, and none another, where neither a person nor the record knows"""


def agree(person: np.ndarray, record: np.ndarray, models: Mapping[str, np.ndarray], doubt: bool = False) -> np.ndarray:
    """float32[n] `SUCCESS`, `FAILURE` or `NOBODY_KNOWS`, of n episodes.

    Each source says float32[n], 1 success, 0 failure, nan nothing. `person`: labels of people, who have the last word.
    `record`: how it ended, as a person at the robot or a simulator said. `models`: by kind; two of one kind learned
    from the same and count as one, so there is one of each. With `doubt`, a record that a model contradicts counts for
    nothing until a person has spoken: that takes away, and never adds.
    """
    said = np.array([*models.values()], np.float32).reshape(len(models), len(record))
    good, bad = (said == SUCCESS).sum(0), (said == FAILURE).sum(0)
    verdict: np.ndarray = np.full(len(record), NOBODY_KNOWS, np.float32)
    verdict[(good >= INDEPENDENT) & (bad == 0)] = SUCCESS
    verdict[(bad >= INDEPENDENT) & (good == 0)] = FAILURE
    verdict = np.where(np.isnan(record), verdict, record)
    if doubt:
        contradicted = ((record == SUCCESS) & (bad > 0)) | ((record == FAILURE) & (good > 0))
        verdict = np.where(contradicted, NOBODY_KNOWS, verdict)
    return np.where(np.isnan(person), verdict, person).astype(np.float32)


def by_thresholds(scores: np.ndarray, success_at: float | None, failure_at: float | None) -> np.ndarray:
    """float32[n] what a model says whose scores are float32[n], nan for none: success from `success_at` on, failure up
    to `failure_at`; None: it never says that."""
    said = np.full(len(scores), np.nan, np.float32)
    if failure_at is not None:
        said[scores <= failure_at] = FAILURE
    if success_at is not None:
        said[scores >= success_at] = SUCCESS
    return said
