"""The trainer process: session with the gateway → gradient step → publish. Killed at any point it resumes.

It reads the buffer that the gateway writes, trains on an average of weights, and publishes versions while robots keep
moving. It never serves.

A policy with random weights waits for demonstrations, is normalised by them (`set_normalization`) and trained on them
before its first version. One that is pretrained acts already: its weights are version 1 at once, and it learns from the
first step on that somebody corrects.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.learner import Learner
from cloud_learner.training.publisher import VersionPublisher
from cloud_learner.training.session import GatewaySession
from policies.interface.policy import NormalizationData
from wire.clock import Clock
from wire.errors import InvalidDataError, StorageError
from wire.messages.gateway import TrainerStatus
from wire.transport.channel import Channel

log = logging.getLogger(__name__)

_REFRESH_NS = 200_000_000
_REFRESH_SEGMENTS = 4096
_STATUS_NS = 500_000_000


class TrainerPhase(StrEnum):
    """How far the trainer is."""

    waiting = "waiting"
    """for demonstrations"""
    pretraining = "pretraining"
    """on demonstrations; nothing is published yet"""
    online = "online"
    """on what robots bring; versions are published"""
    finished = "finished"
    """`max_steps` are done; only reported, it goes on to publish"""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Pace of the trainer process; what it optimises is the algorithm's config."""

    demonstrations: int = 12
    """finished demonstration episodes to wait for before pretraining"""
    pretrain_steps: int = 600
    publish_every_s: float = 5.0
    checkpoint_every_s: float = 30.0
    max_steps: int = 0
    """stop training after so many gradient steps, 0 never: for comparisons at equal compute"""
    pretrained: bool = False
    """the first weights are published as they are; neither `set_normalization` nor `pretrain_steps` is for them"""


class Trainer:
    """`step` does at most one gradient step."""

    def __init__(
        self,
        name: str,
        learner: Learner,
        set_normalization: Callable[[NormalizationData], None],
        source: ReplayDataset,
        ledger: Ledger,
        gateway: Channel,
        checkpoints: Path,
        clock: Clock,
        config: TrainerConfig,
    ) -> None:
        """`set_normalization` sets the policy's normalisation before the first step, unless `config.pretrained`.

        Restores the newest checkpoint below `checkpoints` if there is one. Raises `PolicyError` when it does not fit.
        """
        self.learner = learner
        self.phase = TrainerPhase.online if config.pretrained else TrainerPhase.waiting
        self._set_normalization = set_normalization
        self._source = source
        self._gateway = gateway
        self._clock = clock
        self._config = config
        self._publisher = VersionPublisher(
            learner, source, ledger, gateway, checkpoints, clock, config.publish_every_s, config.checkpoint_every_s
        )
        self._session = GatewaySession(name, gateway, source, self._publisher, clock)
        self._losses: deque[float] = deque(maxlen=50)
        self._step_times_ns: deque[int] = deque(maxlen=50)
        self._next_refresh_ns = self._next_status_ns = clock.now_ns()
        if phase := self._publisher.resume():
            self.phase = TrainerPhase(phase)

    @property
    def stopping(self) -> bool:
        """Whether the gateway asked for the end."""
        return self._session.stopping

    @property
    def rejection(self) -> str:
        """Why the gateway rejects this trainer, '' when it does not."""
        return self._session.rejection

    def step(self) -> bool:
        """One round of work; True when there may be more to do at once, False when there was nothing to train on."""
        self._session.poll()
        if self._refresh() == _REFRESH_SEGMENTS:
            # A resumed fleet's ledger takes a moment to read; half of it is not what robots should learn from.
            self._next_refresh_ns = self._clock.now_ns()
            self._report()
            return True
        if self.phase == TrainerPhase.waiting and self._source.finished("demonstration") >= self._config.demonstrations:
            self._set_normalization(self._source.examples())
            self.phase = TrainerPhase.pretraining
        trained = self._gradient_step()
        if self.phase == TrainerPhase.pretraining and self.learner.gradient_steps >= self._config.pretrain_steps:
            self.phase = TrainerPhase.online
        if self.phase == TrainerPhase.online:
            self._publisher.poll(self.phase, self._session.accepted)
        self._report()
        return trained

    def save(self) -> None:
        """Write a checkpoint now. Raises `StorageError`."""
        self._publisher.save(self.phase)

    def close(self) -> None:
        """Give the buffer back."""
        self._source.close()

    def _refresh(self) -> int:
        """Look for new segments in the buffer when it is time; how many there were."""
        now_ns = self._clock.now_ns()
        if now_ns < self._next_refresh_ns:
            return 0
        self._next_refresh_ns = now_ns + _REFRESH_NS
        try:
            return self._source.refresh(_REFRESH_SEGMENTS)
        except StorageError as error:
            # A database that was away comes back; meanwhile what is known is trained on.
            log.error("nothing new can be looked at now: %s", error)
            return 0

    def _gradient_step(self) -> bool:
        """One gradient step on the next batch; whether there was one to do."""
        # Only what is pretrained can be past waiting while there is nothing to learn from.
        if self.phase == TrainerPhase.waiting or self._finished or not self._source.eligible_steps:
            return False
        started_ns = self._clock.now_ns()
        try:
            batch = self._source.next()
            loss = self.learner.step(batch)
        except (InvalidDataError, StorageError) as error:
            log.error("%s", error)
            return False
        self._losses.append(loss)
        self._step_times_ns.append(self._clock.now_ns() - started_ns)
        if self.learner.config.adaptive_share:
            # Sampling follows how well each task's online and offline parts are learned.
            losses = getattr(self.learner.policy, "image_losses", None)
            if losses is not None:
                self._source.note_losses(batch, losses)
        return True

    @property
    def _finished(self) -> bool:
        return bool(self._config.max_steps) and self.learner.gradient_steps >= self._config.max_steps

    def _report(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._next_status_ns:
            return
        self._next_status_ns = now_ns + _STATUS_NS
        mean_s = float(np.mean(self._step_times_ns)) / 1e9 if self._step_times_ns else 0.0
        self._gateway.send(
            TrainerStatus(
                gradient_steps=self.learner.gradient_steps,
                loss=float(np.mean(self._losses)) if self._losses else 0.0,
                steps_per_s=1.0 / mean_s if mean_s else 0.0,
                imitated_steps=self._source.eligible_steps,
                cached_segments=self._source.segments,
                phase=TrainerPhase.finished if self._finished else self.phase,
                echo=self._source.echo,
            )
        )
