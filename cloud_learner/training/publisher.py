"""What leaves the trainer: versions on their way to the gateway, and checkpoints on its own disk."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from pathlib import Path

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training import checkpoint
from cloud_learner.training.learner import Learner
from wire.clock import Clock
from wire.errors import InvalidDataError, StorageError
from wire.messages.gateway import Heartbeat, Publish, WeightBytes
from wire.transport.channel import Channel
from wire.types import PolicyVersion

log = logging.getLogger(__name__)

PART_BYTES = 1024**2
WINDOW_BYTES = 2 * PART_BYTES
"""small, because each answer counts as progress: half a megabyte per second still does"""
MAX_UNANSWERED = 15
"""windows under way before the next one waits, so 32 MiB: more than a gateway takes in meanwhile"""
TIMEOUT_S = 5.0
"""without progress for so long, everything is sent again"""


class VersionPublisher:
    """Makes versions of a learner's weights and remembers which episodes each was the first to train on."""

    def __init__(
        self,
        learner: Learner,
        source: ReplayDataset,
        ledger: Ledger,
        gateway: Channel,
        checkpoints: Path,
        clock: Clock,
        publish_every_s: float,
        checkpoint_every_s: float,
    ) -> None:
        self._learner = learner
        self._source = source
        self._ledger = ledger
        self._gateway = gateway
        self._checkpoints = checkpoints
        self._clock = clock
        self._publish_every_ns = int(publish_every_s * 1e9)
        self._checkpoint_every_ns = int(checkpoint_every_s * 1e9)
        self._version = 0
        self._ancestors_trained_on: set[int] = set()
        self._trained_on: set[int] = set()
        """episodes drawn since the newest version, which no ancestor of the next one was trained on"""
        self._upload: WeightUploader | None = None
        self._published_at_step = -1
        self._next_publish_ns = clock.now_ns()
        self._next_checkpoint_ns = self._next_publish_ns + self._checkpoint_every_ns

    def resume(self) -> str:
        """Go on from the newest checkpoint; the phase it was written in, '' without one.

        Raises `PolicyError` when it is of another network.
        """
        found = checkpoint.load_newest(self._checkpoints)
        if found is None:
            return ""
        self._learner.restore(found.state)
        try:
            if not self._source.restore(found.meta["sampling"]):
                log.info("episodes were forgotten since the checkpoint: sampling begins a new pass.")
        except InvalidDataError as error:
            # The weights are what matters: sampling anew costs nothing but the exact order of batches.
            log.warning("sampling begins anew: %s", error)
        self._version = found.meta["version"]
        self._ancestors_trained_on = self._ledger.known_to(self._version)
        self._trained_on = set(found.meta["trained"])
        if self._version:
            self._published_at_step = self._learner.gradient_steps
        log.info("resumed at gradient step %d, version %d.", self._learner.gradient_steps, self._version)
        return str(found.meta["phase"])

    def poll(self, phase: str, accepted: bool) -> None:
        """Publish and write a checkpoint when it is time; `accepted`: the gateway knows this trainer.

        What storage does not allow now is logged and tried again later: learning goes on.
        """
        try:
            self._publish(accepted)
        except StorageError as error:
            log.error("no version can be published now: %s", error)
        if self._clock.now_ns() >= self._next_checkpoint_ns:
            try:
                self.save(phase)
            except StorageError as error:
                log.error("no checkpoint: %s", error)

    def save(self, phase: str) -> None:
        """Write a checkpoint now. Raises `StorageError`; the earlier ones are then untouched."""
        self._next_checkpoint_ns = self._clock.now_ns() + self._checkpoint_every_ns
        self._note_drawn()
        meta = {
            "version": self._version,
            "phase": phase,
            "sampling": self._source.state(),
            "trained": sorted(self._trained_on),
        }
        checkpoint.save(self._checkpoints, self._learner.state(), meta)

    def on_heartbeat_answered(self, echo_ns: int) -> None:
        """The gateway answered the heartbeat of `echo_ns`."""
        if self._upload is not None:
            self._upload.on_heartbeat_answered(echo_ns)

    def on_published(self, number: int) -> None:
        """The gateway has stored version `number`."""
        if self._upload is not None and number == self._upload.version.number:
            self._ancestors_trained_on |= self._upload.trained
            self._trained_on -= self._upload.trained
            self._version, self._upload = number, None

    def on_rejected(self) -> None:
        """The gateway does not want this version: the next one is numbered from its newest."""
        if self._upload is not None:
            self._upload, self._published_at_step = None, -1

    def pause(self) -> None:
        """The gateway cannot store anything now."""
        if self._upload is not None:
            self._upload.pause()

    def _publish(self, accepted: bool) -> None:
        now_ns = self._clock.now_ns()
        if self._upload is not None:
            self._upload.poll()
            return
        if now_ns < self._next_publish_ns or self._learner.gradient_steps == self._published_at_step or not accepted:
            return
        self._next_publish_ns = now_ns + self._publish_every_ns
        weights, newest = self._learner.weights(), self._ledger.newest_version()
        sha256 = hashlib.sha256(weights).hexdigest()
        self._published_at_step = self._learner.gradient_steps
        if newest is not None and newest.version.sha256 == sha256:
            # Stopped after its first version and before its first checkpoint: these weights are that version.
            self._version = newest.version.number
            self._ancestors_trained_on = self._ledger.known_to(self._version)
            self._trained_on -= self._ancestors_trained_on
            return
        # A version published after the checkpoint this trainer resumed from keeps its number and gets no children.
        version = PolicyVersion(
            number=max(self._version, newest.version.number if newest else 0) + 1,
            sha256=sha256,
            size_bytes=len(weights),
            parent=self._version,
            gradient_steps=self._learner.gradient_steps,
            human_steps=self._source.eligible_steps,
            newest_segment=self._source.newest_row,
            created_ns=now_ns,
        )
        self._note_drawn()
        self._upload = WeightUploader(version, weights, frozenset(self._trained_on), self._gateway, self._clock)
        self._upload.poll()

    def _note_drawn(self) -> None:
        self._trained_on |= self._source.drawn_episodes() - self._ancestors_trained_on


class WeightUploader:
    """Sends one version, until its owner receives `Published`.

    All parts at once would overflow the connection's queue (a thousand messages), which drops what does not fit. So the
    parts go in windows with a heartbeat behind each: messages keep their order, and the answer to the heartbeat says
    that the window before it was stored.
    """

    def __init__(
        self, version: PolicyVersion, weights: bytes, trained: frozenset[int], gateway: Channel, clock: Clock
    ) -> None:
        """`trained`: episodes that were first trained on since the version's parent. Sends nothing before `poll`."""
        self.version = version
        self.trained = trained
        self._weights = memoryview(weights)
        self._gateway = gateway
        self._clock = clock
        self._submitted = False
        self._sent, self._window_end = 0, WINDOW_BYTES
        self._unanswered: deque[int] = deque()
        self._progress_ns = clock.now_ns()

    def poll(self) -> None:
        """Send what may go now; it never waits."""
        now_ns = self._clock.now_ns()
        if now_ns - self._progress_ns > TIMEOUT_S * 1e9:
            self._restart()
        if not self._submitted:
            if not self._gateway.send(Publish(self.version, tuple(sorted(self.trained)))):
                return
            self._submitted, self._progress_ns = True, now_ns
        while self._sent < len(self._weights):
            if self._sent == self._window_end:
                if len(self._unanswered) >= MAX_UNANSWERED or not self._gateway.send(Heartbeat(now_ns)):
                    return
                self._unanswered.append(now_ns)
                self._window_end += WINDOW_BYTES
            part = bytes(self._weights[self._sent : self._sent + PART_BYTES])
            if not self._gateway.send(WeightBytes(self.version.number, self._sent, part)):
                return
            self._sent += len(part)
            self._progress_ns = now_ns

    def on_heartbeat_answered(self, echo_ns: int) -> None:
        """All that was sent before the heartbeat of `echo_ns` is stored."""
        if echo_ns in self._unanswered:
            while self._unanswered.popleft() != echo_ns:
                pass
            self._progress_ns = self._clock.now_ns()

    def pause(self) -> None:
        """Send nothing more until everything is sent again, `TIMEOUT_S` after the last progress."""
        self._sent = len(self._weights)

    def _restart(self) -> None:
        self._submitted = False
        self._sent, self._window_end = 0, WINDOW_BYTES
        self._unanswered.clear()
        self._progress_ns = self._clock.now_ns()
