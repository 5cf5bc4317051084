"""Tells a loss that has left for good from one that is noisy.

What is done about it is what Chowdhery et al. 2022 ("PaLM", arXiv 2204.02311, section 5.1) did by hand: go back to a
checkpoint from before, and pass over the batches that came after it. Losses that are compared are then those of after
the return: a task that is new and hard takes a run back once, not for ever. Gradient steps that are refused one after
another are a spike as well: no finite loss is left to compare.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from itertools import islice

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
    """Median of the newest `RECENT` losses against that of the `BEFORE` in front of them, and what those scatter by."""

    def __init__(self, factor: float) -> None:
        """factor: so many times as high is a spike; 0: nothing is"""
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=BEFORE + RECENT)
        self._refused = 0
        """newest gradient steps, in a row"""

    def note(self, loss: float) -> None:
        """Of a gradient step; not finite: of one that was refused."""
        if math.isfinite(loss):
            self._losses.append(loss)
            self._refused = 0
        else:
            self._refused += 1

    @property
    def knows_enough(self) -> bool:
        """Whether there are losses enough that others can be compared with them."""
        return len(self._losses) >= LEAST_BEFORE

    def forget(self) -> None:
        """Begin anew: the steps are those of other weights now."""
        self._losses.clear()

    @property
    def suspects(self) -> bool:
        """Whether the newest losses might begin a spike: what is saved now may be from inside it."""
        return self._refused > 0 or self._rise(RECENT // 4) > self._factor > 0

    @property
    def sees_spike(self) -> bool:
        """Whether there is one. Of refused steps each `RECENT` are one."""
        refused = self._refused > 0 and self._refused % RECENT == 0
        return self._factor > 0 and (refused or self._rise(RECENT) > self._factor)

    def _rise(self, newest: int) -> float:
        """How many times as high the newest are. A loss may be around zero, or below: what it scatters by is then what
        they are measured with."""
        known = len(self._losses) - newest
        if known < LEAST_BEFORE or not self._factor:
            return 0.0
        # sorted in Python, which takes a fifth of numpy's time for so few
        earlier = sorted(islice(self._losses, known))
        low, before, high = (earlier[known * quarter // 4] for quarter in (1, 2, 3))
        now = sorted(islice(self._losses, known, None))[newest // 2]
        scale = max(abs(before), high - low)
        return 1 + (now - before) / scale if scale else 0.0


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
        """Whether what is saved now may be from inside a spike, as it may be so soon after a return that none would be
        seen."""
        return self._guard.suspects or (self.count > 0 and not self._guard.knows_enough)

    def on_saved(self) -> None:
        """There is a new checkpoint."""
        self._to_this_one = 0

    def note(self, loss: float) -> bool:
        """Of a gradient step, not finite for one that was refused; whether the learner is back at an earlier one now.

        Raises `InvalidDataError` when going back has not helped: the last good state is on disk.
        """
        self._guard.note(loss)
        if not self._guard.sees_spike:
            return False
        self._guard.forget()
        step = self._learner.gradient_steps
        what = f"{RECENT} steps in a row were not applied, their losses or gradients not finite"
        if math.isfinite(loss):
            what = f"the loss has risen to {loss:.3g}"
        if not self._checkpoints.there:
            log.warning("gradient step %d: %s, with no checkpoint to go back to.", step, what)
            return False
        if self._to_this_one == MOST_RETURNS:
            raise InvalidDataError(
                f"gradient step {step}: {what}, again after going back {MOST_RETURNS} times to the same checkpoint. "
                "Train with a smaller learning rate (--set training.learning_rate=...), look for bad values in the "
                f"newest data, or move the newest checkpoint in {self._checkpoints.directory} away, to go on from the "
                "one before."
            )
        self._learner.group.announce(RankCommand.restore)
        self._checkpoints.go_back()
        self._to_this_one += 1
        self.count += 1
        log.warning("gradient step %d: %s: back to gradient step %d.", step, what, self._learner.gradient_steps)
        return True
