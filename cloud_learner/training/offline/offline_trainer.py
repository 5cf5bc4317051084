"""Gradient steps on a buffer as it is, to the last of a given number. Killed at any point it resumes.

The same learner, sampling and checkpoints as a fleet's trainer (`cloud_learner.training.trainer`), which waits for
robots, follows what they bring and publishes; here nothing comes and nothing goes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from cloud_learner.algorithms.interface import Metrics
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
from cloud_learner.training.embodiment_mix import EmbodimentMix
from cloud_learner.training.learner import Learner
from cloud_learner.training.ranks.group import RankCommand
from cloud_learner.training.spike_guard import SpikeReturns
from policies.interface.policy import NormalizationData
from wire.clock import Clock
from wire.errors import InvalidDataError, StorageError


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """How long it trains."""

    steps: int
    """gradient steps in all, those before a restart included"""
    checkpoint_every_s: float = 30.0
    pretrained: bool = False
    """the first weights act already: their normalisation stays"""


class OfflineTrainer:
    """`step` until `finished`, then `weights` and `close`. Of several ranks the first does so, the others `follow`."""

    def __init__(
        self,
        learner: Learner,
        set_normalization: Callable[[NormalizationData], None],
        source: ReplayDataset | EmbodimentMix,
        checkpoints: RunCheckpoints,
        clock: Clock,
        config: OfflineConfig,
    ) -> None:
        """Takes in what the buffer has, and goes on from the newest of `checkpoints`.

        Raises `InvalidDataError` where there is nothing to learn from, `PolicyError` for a checkpoint that does not
        fit, and `StorageError` where ranks have found the buffer in different states.
        """
        self.learner = learner
        self._group = learner.group
        self.source, self._set_normalization = source, set_normalization
        self._checkpoints, self._clock, self._config = checkpoints, clock, config
        self._spikes = SpikeReturns(learner, checkpoints)
        resumed = checkpoints.resume()
        self._saved_at = learner.gradient_steps if resumed is not None else -1
        while source.refresh():
            pass
        self._let_join()
        if not source.eligible_steps:
            raise InvalidDataError(
                f"the buffer has no step to learn from on the tasks {', '.join(source.config.tasks)}. Record or import "
                "demonstrations of them first; `vla-fleet buffer stats` says what is there."
            )
        if isinstance(source, ReplayDataset):
            self._require_one_plan(source)
            if resumed is None and not config.pretrained:
                set_normalization(source.examples())
        self._next_checkpoint_ns = clock.now_ns() + int(config.checkpoint_every_s * 1e9)

    def _let_join(self) -> None:
        """Robots of a mix that the network does not know: all that have data, as nothing more comes."""
        if isinstance(self.source, EmbodimentMix):
            while (examples := self.source.pop_newcomer()) is not None:
                self._set_normalization(examples)

    def _require_one_plan(self, source: ReplayDataset) -> None:
        if self._group.world == 1:
            return
        mine = zlib.crc32(json.dumps(source.sampler.state()).encode())
        if not self._group.mean(float(self._group.first(mine) == mine)) == 1.0:
            raise StorageError("the buffer changed while the ranks opened it: say the same command again.")

    @property
    def finished(self) -> bool:
        return self.learner.gradient_steps >= self._config.steps

    def step(self) -> Metrics:
        """One gradient step, and a checkpoint when it is time.

        Raises `InvalidDataError` where the loss is not finite or rises for good, and `StorageError` for a buffer that
        cannot be read or a checkpoint that cannot be written; what was saved before stays.
        """
        self._group.announce(RankCommand.step)
        metrics = self.learner.step(self.source)
        if self._spikes.note(metrics["loss"]):
            self._let_join()
        if self._clock.now_ns() >= self._next_checkpoint_ns and not self._spikes.suspects:
            self.save()
        return metrics

    def save(self) -> None:
        """Write a checkpoint now, unless the newest one is of this gradient step. Raises `StorageError`."""
        if self._saved_at == self.learner.gradient_steps:
            return
        self._group.announce(RankCommand.save)
        self._write()
        self._saved_at = self.learner.gradient_steps
        self._spikes.on_saved()
        self._next_checkpoint_ns = self._clock.now_ns() + int(self._config.checkpoint_every_s * 1e9)

    def follow(self) -> None:
        """Of the other ranks: do what the first one does, until it is done. Raises as `step` does."""
        while (command := self._group.receive()) != RankCommand.stop:
            match command:
                case RankCommand.step:
                    self.learner.step(self.source)
                case RankCommand.save:
                    self._write()
                case RankCommand.restore:
                    self._checkpoints.go_back()
                case RankCommand.snapshot:
                    self.learner.weights()

    def _write(self) -> None:
        self._checkpoints.begin({})
        self._checkpoints.wait()
        self._checkpoints.pop_result()

    def weights(self) -> bytes:
        """What robots would run now, as a weights file."""
        self._group.announce(RankCommand.snapshot)
        return self.learner.weights()

    def close(self) -> None:
        """Give the buffer back, and let the other ranks end."""
        self._group.announce(RankCommand.stop)
        self.source.close()
