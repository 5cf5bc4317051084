"""The trainer process: sample → loss → step → publish. It never serves; killed at any point it resumes.

It reads the buffer that the gateway writes, trains on an average of weights, and offers versions to the gateway while
robots keep moving.

A policy with random weights waits for demonstrations, is normalised by them (`set_normalization`) and trained on them
before its first version. One that is pretrained acts already: its weights are version 1 at once, and it learns from the
first step on that somebody corrects.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.training import checkpoint
from cloud_learner.training.learner import Learner
from cloud_learner.training.publisher import WeightUploader
from policies.interface.policy import Batch, NormalizationData
from wire.clock import Clock, clock_name
from wire.errors import InvalidDataError, StorageError
from wire.messages.gateway import (
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    Published,
    ReintroduceRequest,
    Rejection,
    Segment,
    SegmentCommitted,
    Stop,
    TrainerStatus,
    VersionAvailable,
)
from wire.transport.channel import Channel
from wire.types import PolicyVersion, Role

log = logging.getLogger(__name__)

_REFRESH_S = 0.2
_REFRESH_SEGMENTS = 4096
_STATUS_S = 0.5


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


class BatchSource(Protocol):
    """The part of `cloud_learner.buffer.loading.dataset.ReplayDataset` that the trainer needs."""

    @property
    def newest_row(self) -> int: ...

    @property
    def eligible_steps(self) -> int: ...

    @property
    def segments(self) -> int: ...

    def refresh(self, limit: int) -> int: ...

    def offer(self, row: int, segment: Segment) -> None: ...

    def next(self) -> Batch: ...

    def finished(self, source: str) -> int: ...

    def examples(self) -> NormalizationData: ...

    def drawn_episodes(self) -> set[int]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> bool: ...

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None: ...

    def close(self) -> None: ...


class Versions(Protocol):
    """The part of the ledger that the trainer needs."""

    def newest_version(self) -> VersionRow | None: ...

    def known_to(self, number: int) -> set[int]: ...


class Trainer:
    """`turn` does at most one gradient step."""

    def __init__(
        self,
        name: str,
        learner: Learner,
        set_normalization: Callable[[NormalizationData], None],
        source: BatchSource,
        versions: Versions,
        gateway: Channel,
        checkpoints: Path,
        clock: Clock,
        config: TrainerConfig,
    ) -> None:
        """`set_normalization` sets the policy's normalisation before the first step, unless `config.pretrained`.

        Restores the newest checkpoint below `checkpoints` if there is one. Raises `PolicyError` when it does not fit.
        """
        self.learner = learner
        self.phase = "online" if config.pretrained else "waiting"
        self.stopping = False
        self.refused = ""
        self._name = name
        self._set_normalization = set_normalization
        self._source = source
        self._versions = versions
        self._gateway = gateway
        self._checkpoints = checkpoints
        self._clock = clock
        self._config = config
        self._version = 0
        self._known: set[int] = set()
        self._drawn: set[int] = set()
        self._upload: WeightUploader | None = None
        self._published_at_step = -1
        self._welcomed = False
        self._losses: deque[float] = deque(maxlen=50)
        self._step_times_ns: deque[int] = deque(maxlen=50)
        now_ns = clock.now_ns()
        self._next_refresh_ns = self._next_hello_ns = self._next_status_ns = now_ns
        self._next_publish_ns = now_ns
        self._next_checkpoint_ns = now_ns + int(config.checkpoint_every_s * 1e9)
        self._resume()

    def turn(self) -> bool:
        """One round of work; True when it trained, False when there was nothing to train on."""
        self._listen()
        now_ns = self._clock.now_ns()
        if now_ns >= self._next_refresh_ns:
            self._next_refresh_ns = now_ns + int(_REFRESH_S * 1e9)
            if self._refresh() == _REFRESH_SEGMENTS:
                # A resumed fleet's ledger takes a moment to read; half of it is not what robots should learn from.
                self._next_refresh_ns = now_ns
                self._report()
                return True
        if self.phase == "waiting" and self._source.finished("demonstration") >= self._config.demonstrations:
            self._set_normalization(self._source.examples())
            self.phase = "pretraining"
        trained = False
        if self._has_work:
            trained = self._step()
        if self.phase == "pretraining" and self.learner.gradient_steps >= self._config.pretrain_steps:
            self.phase = "online"
            self._next_publish_ns = now_ns
        if self.phase == "online":
            self._publish_if_possible()
            if now_ns >= self._next_checkpoint_ns:
                self._save_if_possible()
        self._report()
        return trained

    def save(self) -> None:
        """Write a checkpoint now."""
        self._next_checkpoint_ns = self._clock.now_ns() + int(self._config.checkpoint_every_s * 1e9)
        self._note_drawn()
        meta = {
            "version": self._version,
            "phase": self.phase,
            "sampling": self._source.state(),
            "trained": sorted(self._drawn),
        }
        checkpoint.save(self._checkpoints, self.learner.state(), meta)

    def close(self) -> None:
        """Give the buffer back."""
        self._source.close()

    def _save_if_possible(self) -> None:
        try:
            self.save()
        except StorageError as error:
            # Learning goes on: the last good checkpoint stays, and the next one is tried at its time.
            log.error("no checkpoint: %s", error)

    def _refresh(self) -> int:
        try:
            return self._source.refresh(_REFRESH_SEGMENTS)
        except StorageError as error:
            # A database that was away comes back; meanwhile what is known is trained on.
            log.error("nothing new can be looked at now: %s", error)
            return 0

    def _publish_if_possible(self) -> None:
        try:
            self._publish()
        except StorageError as error:
            log.error("no version can be published now: %s", error)

    @property
    def _has_work(self) -> bool:
        # Only what is pretrained can be past waiting while there is nothing to learn from.
        return self.phase != "waiting" and not self._finished and self._source.eligible_steps > 0

    @property
    def _finished(self) -> bool:
        return bool(self._config.max_steps) and self.learner.gradient_steps >= self._config.max_steps

    def _resume(self) -> None:
        found = checkpoint.load_newest(self._checkpoints)
        if found is None:
            return
        self.learner.restore(found.state)
        self._version, self.phase = found.meta["version"], found.meta["phase"]
        self._restore_sampling(found.meta["sampling"])
        self._known = self._versions.known_to(self._version)
        self._drawn = set(found.meta.get("trained", ()))
        if self._version:
            self._published_at_step = self.learner.gradient_steps
        log.info("resumed at gradient step %d, version %d.", self.learner.gradient_steps, self._version)

    def _restore_sampling(self, state: dict[str, Any]) -> None:
        try:
            if not self._source.restore(state):
                log.info("episodes were forgotten since the checkpoint: sampling begins a new pass.")
        except InvalidDataError as error:
            # The weights are what matters: sampling anew costs nothing but the exact order of batches.
            log.warning("sampling begins anew: %s", error)

    def _step(self) -> bool:
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
            self._note_losses(batch)
        return True

    def _note_losses(self, batch: Batch) -> None:
        """Tell sampling how well each task's online and offline parts are learned.

        A policy says so by `image_losses`, float32[b] of its last `loss`; of one that has none, tasks are drawn alike.
        """
        losses = getattr(self.learner.policy, "image_losses", None)
        if losses is not None:
            self._source.note_losses(batch, losses)

    # --- publish --------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        now_ns = self._clock.now_ns()
        if self._upload is not None:
            self._upload.turn()
            return
        if now_ns < self._next_publish_ns or self.learner.gradient_steps == self._published_at_step:
            return
        if not self._welcomed:
            # Who was not introduced is not listened to, and a large file is not sent for that.
            return
        self._next_publish_ns = now_ns + int(self._config.publish_every_s * 1e9)
        weights, newest = self.learner.weights(), self._versions.newest_version()
        sha256 = hashlib.sha256(weights).hexdigest()
        if newest is not None and newest.version.sha256 == sha256:
            # It was stopped after its first version and before its first checkpoint: this is that version.
            self._version, self._published_at_step = newest.version.number, self.learner.gradient_steps
            self._known = self._versions.known_to(self._version)
            self._drawn -= self._known
            return
        # A version published after the checkpoint this trainer resumed from keeps its number and gets no children.
        version = PolicyVersion(
            number=max(self._version, newest.version.number if newest else 0) + 1,
            sha256=sha256,
            size_bytes=len(weights),
            parent=self._version,
            gradient_steps=self.learner.gradient_steps,
            human_steps=self._source.eligible_steps,
            newest_segment=self._source.newest_row,
            created_ns=now_ns,
        )
        self._published_at_step = self.learner.gradient_steps
        self._note_drawn()
        self._upload = WeightUploader(version, weights, frozenset(self._drawn), self._gateway, self._clock)
        self._upload.turn()

    def _note_drawn(self) -> None:
        """Keep what was drawn first on the way to the next version: the ledger knows what its ancestors saw."""
        self._drawn |= self._source.drawn_episodes() - self._known

    # --- talk -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := self._gateway.recv()) is not None:
            match message:
                case Published(number=number):
                    if self._upload is not None and number == self._upload.version.number:
                        self._known |= self._upload.trained
                        self._drawn -= self._upload.trained
                        self._version, self._upload = number, None
                case SegmentCommitted(row=row, segment=segment):
                    self._source.offer(row, segment)
                case HelloAck(echo_ns=echo_ns):
                    # A refusal of one version is not one of this trainer.
                    self._welcomed, self.refused = True, ""
                    if self._upload is not None:
                        self._upload.answered(echo_ns)
                case ReintroduceRequest():
                    self._welcomed, self._next_hello_ns = False, 0
                case VersionAvailable():
                    # Its own versions, and those of the gateway it resumed with: nothing to do.
                    log.debug("version announced.")
                case Rejection(reason=reason):
                    self.refused = reason
                    log.error("trainer '%s' is refused by the gateway: %s", self._name, reason)
                    if self._upload is not None:
                        # A version number the gateway does not want is asked for again, from its newest.
                        self._upload, self._published_at_step = None, -1
                case Nack(reason=reason):
                    log.error("version not taken, it is offered again: %s", reason)
                    if self._upload is not None:
                        self._upload.rest()
                case Stop():
                    self.stopping = True
                case _:
                    log.warning("trainer does not understand %s.", type(message).__name__)
        now_ns = self._clock.now_ns()
        if now_ns >= self._next_hello_ns:
            self._next_hello_ns = now_ns + 1_000_000_000
            if self._welcomed:
                self._welcomed = self._gateway.send(Heartbeat(now_ns))
            else:
                self._gateway.send(Hello(self._name, Role.trainer, clock_name(), now_ns))

    def _report(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._next_status_ns:
            return
        self._next_status_ns = now_ns + int(_STATUS_S * 1e9)
        mean_s = float(np.mean(self._step_times_ns)) / 1e9 if self._step_times_ns else 0.0
        self._gateway.send(
            TrainerStatus(
                gradient_steps=self.learner.gradient_steps,
                loss=float(np.mean(self._losses)) if self._losses else 0.0,
                steps_per_s=1.0 / mean_s if mean_s else 0.0,
                imitated_steps=self._source.eligible_steps,
                cached_segments=self._source.segments,
                phase="finished" if self._finished else self.phase,
            )
        )
