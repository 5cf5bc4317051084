"""The trainer process: messages of the gateway → gradient step → publish. Killed at any point it resumes.

It reads the buffer that the gateway writes, trains on an average of weights, and publishes versions while robots keep
moving. It never serves.

A policy with random weights waits for demonstrations, is normalised by them (`set_normalization`) and trained on them
before its first version. One that is pretrained acts already: its weights are version 1 at once, and it learns once
people corrected as many steps as `min_corrected_steps` says.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
from cloud_learner.training.config import TrainerConfig
from cloud_learner.training.demonstrations import DemonstrationCount
from cloud_learner.training.embodiment_mix import EmbodimentMix
from cloud_learner.training.learner import Learner
from cloud_learner.training.publishing.publisher import VersionPublisher
from cloud_learner.training.publishing.version_line import VersionLine
from cloud_learner.training.reporting.run_log import further_curves
from cloud_learner.training.retry import RetryPause
from cloud_learner.training.spike_guard import SpikeReturns
from cloud_learner.training.status import TrainerCounts, TrainerPhase
from cloud_learner.training.timed_source import TimedSource
from policies.interface.policy import NormalizationData
from wire import codec
from wire.clock import Clock, clock_name
from wire.errors import ConfigError, NotFiniteError
from wire.messages.gateway import (
    FetchPictures,
    Hello,
    Segment,
    SegmentCommitted,
    Stop,
    TrainerStatus,
    VersionAvailable,
)
from wire.transport.channel import Channel
from wire.transport.session import GatewaySession
from wire.types import Role

log = logging.getLogger(__name__)

_REFRESH_NS = 200_000_000
_REFRESH_SEGMENTS = 4096
_STATUS_NS = 500_000_000
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
        source: ReplayDataset | EmbodimentMix,
        ledger: Ledger,
        gateway: Channel,
        checkpoints: RunCheckpoints,
        clock: Clock,
        config: TrainerConfig,
        publisher: VersionPublisher,
    ) -> None:
        """`set_normalization` sets the policy's normalisation before the first step, unless `config.pretrained`; of a
        mix that of each robot which joins.

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
        self._demonstrations: DemonstrationCount | None = None
        if isinstance(source, ReplayDataset):
            self._demonstrations = DemonstrationCount(source, ledger, config.demonstrations, config.by_people, clock)
        self._ledger, self._gateway = ledger, gateway
        self._checkpoints = checkpoints
        self._clock = clock
        self._config = config
        self._versions = VersionLine(learner, source, ledger, gateway, checkpoints, publisher, self.counts, clock)
        self._spikes = SpikeReturns(learner, checkpoints)
        self._losses: deque[float] = deque(maxlen=50)
        self._step_times_ns: deque[int] = deque(maxlen=50)
        now_ns = clock.now_ns()
        self._next_refresh_ns = self._next_status_ns = now_ns
        self._saving_here = self._saved_here = (-1, -1)
        """gradient step and version of the newest checkpoint that was begun, and of the newest that is there"""
        self._next_checkpoint_ns = now_ns + int(config.checkpoint_every_s * 1e9)
        self._stepped_ns = now_ns
        # A silent database is given up after a while, in which nothing is learned: that is a fifth of the time at most.
        self._refreshing = RetryPause("nothing new can be looked at now", clock, times_attempt=4.0)
        self._normalizing = RetryPause("the demonstrations cannot be read now", clock, longest_s=5.0)
        self._loading = RetryPause("no batch can be made now", clock, longest_s=5.0)
        self._saving = RetryPause("no checkpoint", clock)
        self._resume()

    def start(self) -> None:
        """Make versions, and write checkpoints, in threads from now on, beside the gradient steps."""
        self._versions.start()
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
        self._look_for_demonstrations()
        trained = not self._versions.offers_again and self._gradient_step()
        self.counts.returns = self._spikes.count
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
            begun = self._versions.poll(self.session.accepted and not self._refreshing.failing)
            due = self._clock.now_ns() >= self._next_checkpoint_ns
            waited_for = not self._checkpoints.there and (begun or self._versions.waits_for_checkpoint)
            if (due or waited_for) and self._worth_saving and self._saving.due and not self._checkpoints.busy:
                self._begin_save()
        self._report()
        return trained

    def save(self) -> None:
        """Write a checkpoint now, unless the newest one is as good or better. Raises `StorageError`; the earlier ones
        are then untouched."""
        if self._worth_saving:
            self._begin_save()
            self._checkpoints.wait()
            self._end_save()
        elif self._spikes.suspects:
            log.warning("gradient step %d is not saved: a spike may be under way.", self.learner.gradient_steps)

    @property
    def _worth_saving(self) -> bool:
        return self._here != self._saved_here and not self._spikes.suspects

    @property
    def _here(self) -> tuple[int, int]:
        return self.learner.gradient_steps, self._versions.number

    def _begin_save(self) -> None:
        self._next_checkpoint_ns = self._clock.now_ns() + int(self._config.checkpoint_every_s * 1e9)
        self._saving_here = self._here
        self._checkpoints.begin({"phase": self.phase, **self._versions.state()})

    def _end_save(self) -> None:
        self._checkpoints.pop_result()
        self._saved_here = self._saving_here
        self._spikes.on_saved()
        self.counts.saved_ns = self._clock.now_ns()

    def close(self) -> None:
        """End the threads, and give the buffer back."""
        self._checkpoints.close()
        self._versions.close()
        self._source.close()

    def _resume(self) -> None:
        """Go on from the newest checkpoint. Raises `PolicyError` when it is of another network."""
        if (meta := self._checkpoints.resume()) is None:
            return
        self.phase = TrainerPhase(meta["phase"])
        self._versions.resume(meta, self.phase == TrainerPhase.online)
        self._saved_here = self._here
        log.info("resumed at gradient step %d, version %d.", self.learner.gradient_steps, self._versions.number)

    # --- the gateway ----------------------------------------------------------------------------------------------

    def _handle_messages(self) -> None:
        while (message := self._gateway.recv()) is not None:
            known = self.session.handle_message(message)
            known |= self._versions.handle_message(message)
            match message:
                case SegmentCommitted(row=row, record=record):
                    if isinstance(segment := codec.decode(record, stored=True), Segment):
                        self._source.submit(row, segment)
                case Stop():
                    self.stopping = True
                case _ if not known and not isinstance(message, VersionAvailable):
                    log.warning("trainer does not understand %s.", type(message).__name__)

    # --- learning -------------------------------------------------------------------------------------------------

    def _look_for_demonstrations(self) -> None:
        """Begin once there are enough, and let robots of further shapes join whenever they have theirs."""
        if self._refreshing.failing or not self._normalizing.due:
            return
        with self._normalizing:
            while (examples := self._newcomer()) is not None:
                self._set_normalization(examples)
                if self.phase == TrainerPhase.waiting:
                    self.phase = TrainerPhase.pretraining

    def _newcomer(self) -> NormalizationData | None:
        if isinstance(self._source, EmbodimentMix):
            return self._source.pop_newcomer()
        waited = self._demonstrations if self.phase == TrainerPhase.waiting else None
        return self._source.examples() if waited is not None and waited.complete else None

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
                if wanted := self._source.pop_wanted_pictures():
                    self._gateway.send(FetchPictures(wanted))
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
        started_ns, refused = self._clock.now_ns(), False
        with self._loading:
            try:
                metrics = self.learner.step(self._batches)
            except NotFiniteError:
                refused = True
                raise
        waited_ns = self._batches.pop_waited_ns()
        if refused:
            self._spikes.note(math.nan)
        if self._loading.failing:
            return False
        self._losses.append(metrics["loss"])
        self.counts.metrics = metrics
        ended_ns = self._clock.now_ns()
        self._step_times_ns.append(ended_ns - started_ns)
        self._stepped_ns = ended_ns
        self.counts.draws = self._batches.draws
        self.counts.batch_wait_s += waited_ns / 1e9
        self.counts.gradient_step_s += (ended_ns - started_ns - waited_ns) / 1e9
        self._spikes.note(metrics["loss"])
        return True

    @property
    def _limit(self) -> TrainerPhase | None:
        """As what it is reported that online there is something to learn from, but not enough for another step."""
        config, steps = self._config, self._source.eligible_steps
        if config.pretrained and not self.learner.gradient_steps and steps < config.min_corrected_steps:
            return TrainerPhase.waiting
        if self.phase != TrainerPhase.online:
            return None
        batches = max(self.learner.training.accumulate, self._batches.batches_per_update)
        drawn = self.learner.gradient_steps * batches * self._batches.draws_a_batch
        most = config.max_samples_per_insert
        if self._source.ahead_of_data or (most and drawn >= most * steps):
            return TrainerPhase.rate_limited
        return None

    @property
    def _finished(self) -> bool:
        return bool(self._config.max_steps) and self.learner.gradient_steps >= self._config.max_steps

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
        self.counts.status, self.counts.dataset, self.counts.version = status, stats, self._versions.number
        self.counts.shares = self._batches.pop_shares() or self.counts.shares
        self._gateway.send(msgspec.structs.replace(status, curves=dict(further_curves(self.counts))))

    def _reported_phase(self, now_ns: int) -> TrainerPhase:
        limit = TrainerPhase.finished if self._finished else self._limit
        briefly = limit == TrainerPhase.rate_limited and now_ns - self._stepped_ns < _LIMITED_NS
        return self.phase if briefly or limit is None else limit
