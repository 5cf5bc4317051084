"""The versions of a run: which weights become one, its number, what it was trained on, its way to the gateway."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
from cloud_learner.training.embodiment_mix import EmbodimentMix
from cloud_learner.training.learner import Learner
from cloud_learner.training.publishing.publisher import PreparedVersion, VersionPublisher
from cloud_learner.training.publishing.uploader import ASK_S, WeightUploader
from cloud_learner.training.retry import RetryPause
from cloud_learner.training.status import TrainerCounts
from wire.clock import Clock
from wire.messages import Message
from wire.messages.gateway import HelloAck, Nack, Published, Rejection
from wire.transport.channel import Channel
from wire.types import PolicyVersion

log = logging.getLogger(__name__)


class VersionLine:
    """Each version is made from the one before. `poll` until `close`."""

    def __init__(
        self,
        learner: Learner,
        source: ReplayDataset | EmbodimentMix,
        ledger: Ledger,
        gateway: Channel,
        checkpoints: RunCheckpoints,
        publisher: VersionPublisher,
        counts: TrainerCounts,
        clock: Clock,
    ) -> None:
        """Writes what it does into `counts`."""
        self.number = 0
        """of the newest version that the gateway has from here"""
        self.offers_again = False
        """resumed with weights that may be its first version: they are offered before they change"""
        self._learner, self._source, self._ledger, self._gateway = learner, source, ledger, gateway
        self._checkpoints, self._publisher, self._counts, self._clock = checkpoints, publisher, counts, clock
        counts.publishing = publisher.counts
        self._ancestors_trained_on: set[int] = set()
        self._trained_on: set[int] = set()
        """episodes drawn since the newest version, which no ancestor of the next one was trained on"""
        self._prepared: PreparedVersion | None = None
        """made, and on its way once there is an upload"""
        self._upload: WeightUploader | None = None
        self._was_rejected, self._postponed = False, ""
        self._published_at_step = -1
        self._next_ns = self._next_upload_ns = clock.now_ns()
        self._pause = RetryPause("no version can be published now", clock, times_attempt=4.0)

    def start(self) -> None:
        """Make versions in a thread from now on."""
        self._publisher.start()

    def close(self) -> None:
        """End the thread."""
        self._publisher.close()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint that is begun now."""
        self.note_drawn()
        self._publisher.on_checkpoint(self.number)
        return {"version": self.number, "trained": sorted(self._trained_on)}

    def resume(self, state: dict[str, Any], online: bool) -> None:
        """Go on from what `state` gave. Raises `StorageError` when the ledger cannot be read."""
        self.number = state["version"]
        self._ancestors_trained_on = self._ledger.known_to(self.number)
        self._trained_on = set(state["trained"])
        if self.number:
            self._published_at_step = self._learner.gradient_steps
        self.offers_again = online and not self.number

    @property
    def waits_for_checkpoint(self) -> bool:
        """No version without a checkpoint of its learner: whoever is started anew knows it for its own."""
        return self._prepared is not None and not self._checkpoints.there

    def note_drawn(self) -> None:
        """Remember what batches were drawn from."""
        self._trained_on |= self._source.drawn_episodes() - self._ancestors_trained_on

    # --- the gateway ----------------------------------------------------------------------------------------------

    def handle_message(self, message: Message) -> bool:
        """Whether it was about a version, or may have been."""
        upload = self._upload
        match message:
            case HelloAck(echo_ns=echo_ns):
                if upload is not None:
                    upload.on_heartbeat_answered(echo_ns)
            case Published(number=number):
                if upload is not None and number == upload.version.number:
                    self._on_published(upload)
            case Nack(reason=reason):
                # It is numbered anew then: another trainer's may have its number.
                if reason != self._postponed:
                    log.warning("a version is not taken now, and sent again until it is: %s", reason)
                self._postponed, self._upload = reason, None
                self._next_upload_ns = self._clock.now_ns() + int(ASK_S * 1e9)
            case Rejection() if upload is not None:
                # The next version is numbered from the gateway's newest, and goes whole: it may lack the base.
                self._prepared, self._upload, self._published_at_step = None, None, -1
                self._was_rejected = True
            case _:
                return False
        return True

    def _on_published(self, upload: WeightUploader) -> None:
        assert self._prepared is not None
        self._ancestors_trained_on |= upload.trained
        self._trained_on -= upload.trained
        self._counts.published += 1
        self._counts.publish_s += (self._clock.now_ns() - upload.version.created_ns) / 1e9
        self._publisher.on_published(self._prepared)
        self.number, self._prepared, self._upload, self._postponed = upload.version.number, None, None, ""

    # --- making them ----------------------------------------------------------------------------------------------

    def poll(self, reachable: bool) -> bool:
        """Have a version made when it is time; number it when it is made, and send it. Whether one is begun now.

        `reachable`: gateway and ledger; without the ledger nobody can say what the version's number is. What storage
        does not allow is tried again later.
        """
        begun = False
        if self._pause.due:
            with self._pause:
                begun = self._poll(reachable)
        return begun

    def _poll(self, reachable: bool) -> bool:
        if self._upload is not None:
            self._upload.poll()
            return False
        if not reachable:
            return False
        now_ns, begun = self._clock.now_ns(), False
        idle = self._prepared is None and not self._publisher.busy
        if idle and now_ns >= self._next_ns and self._learner.gradient_steps != self._published_at_step:
            self._begin(now_ns)
            begun = True
        if self._prepared is None:
            self._prepared = self._publisher.poll()
        if self._prepared is not None and self._checkpoints.there and now_ns >= self._next_upload_ns:
            self._send(self._prepared)
        self.offers_again &= self._publisher.busy or self._prepared is not None
        return begun

    def _begin(self, now_ns: int) -> None:
        """Hand a copy of the weights to the publisher. Raises `StorageError` when the ledger cannot be read."""
        parent = self._ledger.version(self.number) if self.number else None
        self._next_ns = now_ns + int(self._learner.training.publish_every_s * 1e9)
        self._published_at_step = steps = self._learner.gradient_steps
        self.note_drawn()
        # number, hash and size are said when it is made
        seen = self._source.eligible_steps, self._source.newest_row
        version = PolicyVersion(0, "", 0, self.number, steps, *seen, now_ns)
        weights, sha256 = self._learner.snapshot(), parent.version.sha256 if parent is not None else ""
        whole, self._was_rejected = self._was_rejected, False
        self._publisher.submit(weights, version, frozenset(self._trained_on), sha256, whole=whole)

    def _send(self, prepared: PreparedVersion) -> None:
        """Number a version and begin to send it. Raises `StorageError` when the ledger cannot be read."""
        newest, version = self._ledger.newest_version(), prepared.version
        if newest is not None and newest.version.sha256 == version.sha256:
            # Stopped between this version and a checkpoint: these weights are that version.
            self._ancestors_trained_on = self._ledger.known_to(newest.version.number)
            self._trained_on -= self._ancestors_trained_on
            self.number, self._prepared = newest.version.number, None
            self._publisher.on_published(prepared)
            return
        # A version published after the checkpoint this trainer resumed from keeps its number and gets no children.
        number = max(self.number, newest.version.number if newest else 0) + 1
        version = msgspec.structs.replace(version, number=number)
        base = version.parent if prepared.delta is not None else 0
        data = prepared.file.data if prepared.delta is None else prepared.delta
        self._upload = WeightUploader(version, data, prepared.trained, self._gateway, self._clock, base)
        self._upload.poll()
