"""The trainer process: messages of the gateway → gradient step → publish. Killed at any point it resumes.

It reads the buffer that the gateway writes, trains on an average of weights, and publishes versions while robots keep
moving. It never serves.

A policy with random weights waits for demonstrations, is normalised by them (`set_normalization`) and trained on them
before its first version. One that is pretrained acts already: its weights are version 1 at once, and it learns once
people corrected as many steps as `min_corrected_steps` says.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.config import TrainerConfig
from cloud_learner.training.learner import Learner
from cloud_learner.training.publisher import PreparedVersion, VersionPublisher
from cloud_learner.training.retry import RetryPause
from cloud_learner.training.run_checkpoints import RunCheckpoints
from cloud_learner.training.status import TrainerCounts, TrainerPhase
from cloud_learner.training.timed_source import TimedSource
from cloud_learner.training.uploader import WeightUploader
from policies.interface.policy import NormalizationData
from wire import codec
from wire.clock import Clock, clock_name
from wire.errors import ConfigError
from wire.messages.gateway import (
    Hello,
    HelloAck,
    Nack,
    Published,
    Rejection,
    Segment,
    SegmentCommitted,
    Stop,
    TrainerStatus,
    VersionAvailable,
)
from wire.transport.channel import Channel
from wire.transport.session import GatewaySession
from wire.types import EpisodeSource, PolicyVersion, Role

log = logging.getLogger(__name__)

_REFRESH_NS = 200_000_000
_REFRESH_SEGMENTS = 4096
_STATUS_NS = 500_000_000
_COUNT_NS = 1_000_000_000
_REFUSAL_CHARACTERS = 500
_LIMITED_NS = 10_000_000_000
"""without a gradient step for so long: shorter waits for robots are as usual, and not told of"""


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
        checkpoints: RunCheckpoints,
        clock: Clock,
        config: TrainerConfig,
        publisher: VersionPublisher,
    ) -> None:
        """`set_normalization` sets the policy's normalisation before the first step, unless `config.pretrained`.

        Goes on from the newest of `checkpoints` if there is one. Raises `PolicyError` when it does not fit.
        """
        self.learner = learner
        self.counts = TrainerCounts()
        """for whoever watches; written by whoever calls `step`"""
        self.phase = TrainerPhase.online if config.pretrained else TrainerPhase.waiting
        self.session = GatewaySession(gateway, Hello(name, Role.trainer, clock_name(), 0), clock)
        """a refused version counts as a refusal until the next heartbeat is answered"""
        self.stopping = False
        """whether the gateway asked for the end"""
        self._set_normalization = set_normalization
        self._source, self._batches = source, TimedSource(source, clock)
        self._ledger = ledger
        self._gateway = gateway
        self._checkpoints = checkpoints
        self._clock = clock
        self._config = config
        self._publisher = publisher
        self.counts.publishing = publisher.counts
        self._version = 0
        self._ancestors_trained_on: set[int] = set()
        self._trained_on: set[int] = set()
        """episodes drawn since the newest version, which no ancestor of the next one was trained on"""
        self._prepared: PreparedVersion | None = None
        """made, and on its way once there is an upload"""
        self._upload: WeightUploader | None = None
        self._was_rejected = False
        self._offers_again = False
        """resumed with weights that may be its first version: they are offered before they change"""
        self._published_at_step = -1
        self._losses: deque[float] = deque(maxlen=50)
        self._step_times_ns: deque[int] = deque(maxlen=50)
        now_ns = clock.now_ns()
        self._next_refresh_ns = self._next_status_ns = self._next_publish_ns = self._next_count_ns = now_ns
        self._next_checkpoint_ns = now_ns + int(config.checkpoint_every_s * 1e9)
        self._stepped_ns = now_ns
        # A silent database is given up after a while, in which nothing is learned: that is a fifth of the time at most.
        self._refreshing = RetryPause("nothing new can be looked at now", clock, times_attempt=4.0)
        self._normalizing = RetryPause("the demonstrations cannot be read now", clock, longest_s=5.0)
        self._loading = RetryPause("no batch can be made now", clock, longest_s=5.0)
        self._publishing = RetryPause("no version can be published now", clock, times_attempt=4.0)
        self._saving = RetryPause("no checkpoint", clock)
        self._resume()

    def start(self) -> None:
        """Make versions, and write checkpoints, in threads from now on, beside the gradient steps."""
        self._publisher.start()
        self._checkpoints.start()

    def step(self) -> bool:
        """One round of work; True when there may be more to do at once, False when there was nothing to train on."""
        self._handle_messages()
        self.session.poll()
        if self._refresh() == _REFRESH_SEGMENTS:
            # A resumed fleet's ledger takes a moment to read; half of it is not what robots should learn from.
            self._next_refresh_ns = self._clock.now_ns()
            self._report()
            return True
        if self.phase == TrainerPhase.waiting:
            self._look_for_demonstrations()
        trained = not self._offers_again and self._gradient_step()
        if (
            self.phase == TrainerPhase.pretraining
            and self.learner.gradient_steps >= self.learner.training.pretrain_steps
        ):
            self.phase = TrainerPhase.online
            # what it learned before robots acted by it does not count against what they bring
            self._source.count_from_now()
        if self.phase == TrainerPhase.online:
            # What storage does not allow now is tried again later: learning goes on.
            if self._checkpoints.has_result:
                with self._saving:
                    self._end_save()
            if self._publishing.due:
                with self._publishing:
                    self._publish()
            due = self._clock.now_ns() >= self._next_checkpoint_ns
            waited_for = self._prepared is not None and not self._checkpoints.there
            if (due or waited_for) and self._saving.due and not self._checkpoints.busy:
                self._begin_save()
        self._report()
        return trained

    def save(self) -> None:
        """Write a checkpoint now. Raises `StorageError`; the earlier ones are then untouched."""
        self._begin_save()
        self._checkpoints.wait()
        self._end_save()

    def _begin_save(self) -> None:
        self._next_checkpoint_ns = self._clock.now_ns() + int(self._config.checkpoint_every_s * 1e9)
        self._note_drawn()
        self._publisher.on_checkpoint(self._version)
        self._checkpoints.begin({"version": self._version, "phase": self.phase, "trained": sorted(self._trained_on)})

    def _end_save(self) -> None:
        self._checkpoints.pop_result()
        self.counts.saved_ns = self._clock.now_ns()

    def close(self) -> None:
        """End the threads, and give the buffer back."""
        self._checkpoints.close()
        self._publisher.close()
        self._source.close()

    def _resume(self) -> None:
        """Go on from the newest checkpoint. Raises `PolicyError` when it is of another network."""
        if (meta := self._checkpoints.resume()) is None:
            return
        self.phase = TrainerPhase(meta["phase"])
        self._version = meta["version"]
        self._ancestors_trained_on = self._ledger.known_to(self._version)
        self._trained_on = set(meta["trained"])
        if self._version:
            self._published_at_step = self.learner.gradient_steps
        self._offers_again = self.phase == TrainerPhase.online and not self._version
        log.info("resumed at gradient step %d, version %d.", self.learner.gradient_steps, self._version)

    # --- the gateway ----------------------------------------------------------------------------------------------

    def _handle_messages(self) -> None:
        while (message := self._gateway.recv()) is not None:
            about_connection = self.session.handle_message(message)
            match message:
                case SegmentCommitted(row=row, record=record):
                    if isinstance(segment := codec.decode(record, stored=True), Segment):
                        self._source.submit(row, segment)
                case HelloAck(echo_ns=echo_ns):
                    if self._upload is not None:
                        self._upload.on_heartbeat_answered(echo_ns)
                case Published(number=number):
                    if self._upload is not None and number == self._upload.version.number:
                        self._on_published(self._upload)
                case Nack(reason=reason):
                    log.error("version not taken, it is submitted again: %s", reason)
                    if self._upload is not None:
                        self._upload.pause()
                case Rejection() if self._upload is not None:
                    # The next version is numbered from the gateway's newest, and goes whole: it may lack the base.
                    self._prepared, self._upload, self._published_at_step = None, None, -1
                    self._was_rejected = True
                case Stop():
                    self.stopping = True
                case VersionAvailable():
                    pass
                case _ if not about_connection:
                    log.warning("trainer does not understand %s.", type(message).__name__)

    def _on_published(self, upload: WeightUploader) -> None:
        assert self._prepared is not None
        self._ancestors_trained_on |= upload.trained
        self._trained_on -= upload.trained
        self.counts.published += 1
        self.counts.publish_s += (self._clock.now_ns() - upload.version.created_ns) / 1e9
        self._publisher.on_published(self._prepared)
        self._version, self._prepared, self._upload = upload.version.number, None, None

    # --- learning -------------------------------------------------------------------------------------------------

    def _look_for_demonstrations(self) -> None:
        if self._refreshing.failing or not self._normalizing.due:
            return
        with self._normalizing:
            if self._has_demonstrations():
                self._set_normalization(self._source.examples())
                self.phase = TrainerPhase.pretraining

    def _has_demonstrations(self) -> bool:
        wanted, config = self._config.demonstrations, self._source.config
        shown = self._source.finished(EpisodeSource.demonstration)
        if self._config.by_people and self._source.eligible_steps:
            shown += self._source.finished(EpisodeSource.online)
        if shown >= wanted:
            return True
        if not config.validation or self._clock.now_ns() < self._next_count_ns:
            return False
        # Those that are held out have been recorded as well, and nobody records others in their place.
        self._next_count_ns = self._clock.now_ns() + _COUNT_NS
        counts = (
            episodes
            for task, source, outcome, episodes, *_ in self._ledger.shares()
            if source == EpisodeSource.demonstration and outcome and task in config.tasks
        )
        return sum(counts) >= wanted

    def _refresh(self) -> int:
        """Look for new segments in the buffer when it is time; how many there were."""
        now_ns = self._clock.now_ns()
        if now_ns < self._next_refresh_ns or not self._refreshing.due:
            return 0
        self._next_refresh_ns = now_ns + _REFRESH_NS
        known = self._source.eligible_steps
        # A database that was away comes back; meanwhile what is known is trained on.
        with self._refreshing:
            try:
                return self._source.refresh(_REFRESH_SEGMENTS)
            except ConfigError as error:
                if not known:
                    raise
                log.error("learning goes on without the newest segments: %s", error)
        return 0

    def _gradient_step(self) -> bool:
        """One gradient step on the next batch; whether there was one to do."""
        # Only what is pretrained can be past waiting while there is nothing to learn from.
        if self.phase == TrainerPhase.waiting or self._finished or not self._source.eligible_steps:
            return False
        if self._limit is not None or not self._loading.due:
            return False
        started_ns = self._clock.now_ns()
        with self._loading:
            metrics = self.learner.step(self._batches)
        waited_ns = self._batches.pop_waited_ns()
        if self._loading.failing:
            return False
        self._losses.append(metrics["loss"])
        ended_ns = self._clock.now_ns()
        self._step_times_ns.append(ended_ns - started_ns)
        self._stepped_ns = ended_ns
        self.counts.draws = self._batches.draws
        self.counts.batch_wait_s += waited_ns / 1e9
        self.counts.gradient_step_s += (ended_ns - started_ns - waited_ns) / 1e9
        return True

    @property
    def _limit(self) -> TrainerPhase | None:
        """As what it is reported that online there is something to learn from, but not enough for another step."""
        config, steps = self._config, self._source.eligible_steps
        if config.pretrained and not self.learner.gradient_steps and steps < config.min_corrected_steps:
            return TrainerPhase.waiting
        if self.phase != TrainerPhase.online:
            return None
        drawn = self.learner.gradient_steps * self.learner.training.accumulate * self._batches.draws_a_batch
        most = config.max_samples_per_insert
        if self._source.ahead_of_data or (most and drawn >= most * steps):
            return TrainerPhase.rate_limited
        return None

    @property
    def _finished(self) -> bool:
        return bool(self._config.max_steps) and self.learner.gradient_steps >= self._config.max_steps

    # --- versions -------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Have a version made when it is time; number it when it is made, and send it."""
        now_ns, steps = self._clock.now_ns(), self.learner.gradient_steps
        if self._upload is not None:
            self._upload.poll()
            return
        if not self.session.accepted or self._refreshing.failing:
            # without the ledger nobody can say what the version's number is
            return
        idle = self._prepared is None and not self._publisher.busy
        if idle and now_ns >= self._next_publish_ns and steps != self._published_at_step:
            self._submit_version(now_ns)
        if self._prepared is None:
            self._prepared = self._publisher.poll()
        # No version without a checkpoint of its learner: whoever is started anew knows it for its own.
        if self._prepared is not None and self._checkpoints.there:
            self._upload_version(self._prepared)
        self._offers_again &= self._publisher.busy or self._prepared is not None

    def _submit_version(self, now_ns: int) -> None:
        """Hand a copy of the weights to the publisher. Raises `StorageError` when the ledger cannot be read."""
        parent = self._ledger.version(self._version) if self._version else None
        self._next_publish_ns = now_ns + int(self.learner.training.publish_every_s * 1e9)
        self._published_at_step = steps = self.learner.gradient_steps
        self._note_drawn()
        # number, hash and size are said when it is made
        seen = self._source.eligible_steps, self._source.newest_row
        version = PolicyVersion(0, "", 0, self._version, steps, *seen, now_ns)
        weights, sha256 = self.learner.snapshot(), parent.version.sha256 if parent is not None else ""
        whole, self._was_rejected = self._was_rejected, False
        self._publisher.submit(weights, version, frozenset(self._trained_on), sha256, whole=whole)
        if not (self._checkpoints.there or self._checkpoints.busy):
            self._begin_save()

    def _upload_version(self, prepared: PreparedVersion) -> None:
        """Number a version and begin to send it. Raises `StorageError` when the ledger cannot be read."""
        newest, version = self._ledger.newest_version(), prepared.version
        if newest is not None and newest.version.sha256 == version.sha256:
            # Stopped between this version and a checkpoint: these weights are that version.
            self._ancestors_trained_on = self._ledger.known_to(newest.version.number)
            self._trained_on -= self._ancestors_trained_on
            self._version, self._prepared = newest.version.number, None
            self._publisher.on_published(prepared)
            return
        # A version published after the checkpoint this trainer resumed from keeps its number and gets no children.
        number = max(self._version, newest.version.number if newest else 0) + 1
        version = msgspec.structs.replace(version, number=number)
        base = version.parent if prepared.delta is not None else 0
        data = prepared.file.data if prepared.delta is None else prepared.delta
        self._upload = WeightUploader(version, data, prepared.trained, self._gateway, self._clock, base)
        self._upload.poll()

    def _note_drawn(self) -> None:
        self._trained_on |= self._source.drawn_episodes() - self._ancestors_trained_on

    def _report(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._next_status_ns:
            return
        self._next_status_ns = now_ns + _STATUS_NS
        mean_s = float(np.mean(self._step_times_ns)) / 1e9 if self._step_times_ns else 0.0
        stats, publishing = self._source.stats, self.counts.publishing
        status = TrainerStatus(
            gradient_steps=self.learner.gradient_steps,
            loss=float(np.mean(self._losses)) if self._losses else 0.0,
            steps_per_s=1.0 / mean_s if mean_s else 0.0,
            imitated_steps=self._source.eligible_steps,
            cached_segments=stats.segments,
            phase=self._reported_phase(now_ns),
            echo=self._source.echo,
            refused=sum(publishing.refused.values()),
            refusal=publishing.refusal[:_REFUSAL_CHARACTERS],
            rollout_steps=stats.rollout_steps,
            stale_steps=stats.stale_steps,
        )
        self.counts.status, self.counts.dataset, self.counts.version = status, stats, self._version
        self._gateway.send(status)

    def _reported_phase(self, now_ns: int) -> TrainerPhase:
        limit = TrainerPhase.finished if self._finished else self._limit
        briefly = limit == TrainerPhase.rate_limited and now_ns - self._stepped_ns < _LIMITED_NS
        return self.phase if briefly or limit is None else limit
