"""Gradient steps on a buffer as it is, to the last of a given number. Killed at any point it resumes.

The same learner, sampling and checkpoints as a fleet's trainer (`cloud_learner.training.trainer`), which waits for
robots, follows what they bring and publishes; here nothing comes and nothing goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cloud_learner.algorithms.interface import Metrics
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training import checkpoint
from cloud_learner.training.learner import Learner
from policies.interface.policy import NormalizationData
from wire.clock import Clock
from wire.errors import InvalidDataError


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """How long it trains."""

    steps: int
    """gradient steps in all, those before a restart included"""
    checkpoint_every_s: float = 30.0
    pretrained: bool = False
    """the first weights act already: their normalisation stays"""


class OfflineTrainer:
    """`step` until `finished`, then `weights`."""

    def __init__(
        self,
        learner: Learner,
        set_normalization: Callable[[NormalizationData], None],
        source: ReplayDataset,
        checkpoints: Path,
        clock: Clock,
        config: OfflineConfig,
    ) -> None:
        """Takes in what the buffer has, and goes on from the newest checkpoint below `checkpoints`.

        Raises `InvalidDataError` where there is nothing to learn from, and `PolicyError` for a checkpoint that does not
        fit.
        """
        self.learner = learner
        self.source = source
        self._checkpoints, self._clock, self._config = checkpoints, clock, config
        resumed = checkpoint.resume_run(checkpoints, learner, source)
        while source.refresh():
            pass
        if not source.eligible_steps:
            raise InvalidDataError(
                f"the buffer has no step to learn from on the tasks {', '.join(source.config.tasks)}. Record or import "
                "demonstrations of them first; `vla-fleet buffer stats` says what is there."
            )
        if resumed is None and not config.pretrained:
            set_normalization(source.examples())
        self._next_checkpoint_ns = clock.now_ns() + int(config.checkpoint_every_s * 1e9)

    @property
    def finished(self) -> bool:
        return self.learner.gradient_steps >= self._config.steps

    def step(self) -> Metrics:
        """One gradient step, and a checkpoint when it is time.

        Raises `InvalidDataError` where the loss is not finite, and `StorageError` for a buffer that cannot be read or a
        checkpoint that cannot be written; what was saved before stays.
        """
        metrics = self.learner.step(self.source)
        if self._clock.now_ns() >= self._next_checkpoint_ns:
            self.save()
        return metrics

    def save(self) -> None:
        """Write a checkpoint now. Raises `StorageError`."""
        checkpoint.save_run(self._checkpoints, self.learner, self.source, {})
        self._next_checkpoint_ns = self._clock.now_ns() + int(self._config.checkpoint_every_s * 1e9)

    def weights(self) -> bytes:
        """What robots would run now, as a weights file."""
        return self.learner.weights()

    def close(self) -> None:
        """Give the buffer back."""
        self.source.close()
