"""Tells a loss that has left for good from one that is noisy.

What is done about it is what Chowdhery et al. 2022 ("PaLM", arXiv 2204.02311, section 5.1) did by hand: go back to a
checkpoint from before, and pass over the batches that came after it. Losses that are compared are then those of after
the return: a task that is new and hard takes a run back once, not for ever.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice

import numpy as np

from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
from cloud_learner.training.learner import Learner
from cloud_learner.training.ranks.group import RankCommand
from wire.errors import InvalidDataError

log = logging.getLogger(__name__)

RECENT = 20
"""gradient steps that a spike lasts"""
BEFORE = 200
"""steps that they are compared with"""
LEAST_BEFORE = 50
MOST_RETURNS = 3
"""to the same checkpoint"""


class SpikeGuard:
    """Median of the newest `RECENT` losses against that of the `BEFORE` in front of them."""

    def __init__(self, factor: float) -> None:
        """factor: so many times as high is a spike; 0: nothing is"""
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=BEFORE + RECENT)

    def note(self, loss: float) -> None:
        """Of a gradient step."""
        self._losses.append(loss)

    def forget(self) -> None:
        """Begin anew: the steps are those of other weights now."""
        self._losses.clear()

    @property
    def suspects(self) -> bool:
        """Whether the newest losses might begin a spike: what is saved now may be from inside it."""
        return self._ratio(RECENT // 4) > self._factor > 0

    @property
    def sees_spike(self) -> bool:
        """Whether there is one."""
        return self._ratio(RECENT) > self._factor > 0

    def _ratio(self, newest: int) -> float:
        known = len(self._losses) - newest
        if known < LEAST_BEFORE or not self._factor:
            return 0.0
        before = float(np.median(list(islice(self._losses, known))))
        now = float(np.median(list(islice(self._losses, known, None))))
        return now / before if before > 0 else 0.0


class SpikeReturns:
    """Takes a learner back to its newest checkpoint when there is a spike."""

    def __init__(self, learner: Learner, checkpoints: RunCheckpoints) -> None:
        self.count = 0
        """how often it was taken back"""
        self._learner, self._checkpoints = learner, checkpoints
        self._guard = SpikeGuard(learner.training.spike_factor)
        self._to_this_one = 0

    @property
    def suspects(self) -> bool:
        """Whether what is saved now may be from inside a spike."""
        return self._guard.suspects

    def on_saved(self) -> None:
        """There is a new checkpoint."""
        self._to_this_one = 0

    def note(self, loss: float) -> None:
        """Of a gradient step; then the learner may be back at an earlier one.

        Raises `InvalidDataError` when going back has not helped: the last good state is on disk.
        """
        self._guard.note(loss)
        if not self._guard.sees_spike:
            return
        self._guard.forget()
        step = self._learner.gradient_steps
        if not self._checkpoints.there:
            log.warning("gradient step %d: the loss has risen to %.3g, with no checkpoint to go back to.", step, loss)
            return
        if self._to_this_one == MOST_RETURNS:
            raise InvalidDataError(
                f"gradient step {step}: the loss has risen to {loss:.3g} again after going back {MOST_RETURNS} times "
                "to the same checkpoint. Train with a smaller learning rate (--set training.learning_rate=...), or "
                "look for bad values in the newest data."
            )
        self._learner.group.announce(RankCommand.restore)
        self._checkpoints.go_back()
        self._to_this_one += 1
        self.count += 1
        back = self._learner.gradient_steps
        log.warning("gradient step %d: the loss has risen to %.3g: back to gradient step %d.", step, loss, back)
