"""What robots recorded, on its way to the thread that stores it, and what is said when it is stored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from cloud_learner.dispatch.dispatcher import Dispatcher
from cloud_learner.gateway.metrics import GatewayMetrics
from cloud_learner.gateway.peers import AuthenticatedServerChannel, KnownPeer, event_budget
from cloud_learner.gateway.storage.credit import credit_bytes
from cloud_learner.gateway.storage.ingest import KNOWN, IngestOutcome
from cloud_learner.gateway.storage.storage_thread import SegmentAnswer, StorageThread
from cloud_learner.operator.view import FleetView
from wire.clock import Clock
from wire.codec import Undecoded
from wire.errors import MessageTooLargeError, ProtocolError
from wire.identity.permissions import RECORDERS
from wire.identity.refusals import RefusalReason
from wire.messages.gateway import Ack, Nack, Rejection, Segment, SegmentCommitted
from wire.types import EpisodeSource, Role

_SENDERS = (*RECORDERS, Role.relay)
log = logging.getLogger(__name__)
_HERE_NS = 5_000_000_000
_BEHIND = "the gateway has more segments waiting than it keeps; send this one again later."


class SegmentIntake:
    """For the gateway's loop: `submit` what came, `on_answer` says what became of it."""

    dispatcher: Dispatcher
    """set before the first segment comes"""
    on_stored: Callable[[Segment, int], None]
    """called with each segment that is new, and the human steps of its episode with the last one; as well"""
    on_disk_full: Callable[[], None]
    """called when a segment could not be stored for want of room; as well"""
    storage: StorageThread
    """as well"""

    def __init__(
        self,
        channel: AuthenticatedServerChannel,
        peers: Mapping[str, KnownPeer],
        view: FleetView,
        metrics: GatewayMetrics,
        clock: Clock,
        refused: Counter[str],
    ) -> None:
        self._channel, self._peers, self._view, self._metrics = channel, peers, view, metrics
        self._clock, self._refused = clock, refused
        self._pending = ""
        self.credit_bytes = credit_bytes(0, 1, fault=False)
        """what each of those who send segments may have under way now"""
        self.recorders = 0
        """of them that are here"""
        self._told = event_budget()

    def poll(self) -> None:
        """See how much can be taken, and whether anything can."""
        now_ns = self._clock.now_ns()
        self.recorders = sum(
            known.role in _SENDERS and now_ns - known.last_message_ns < _HERE_NS for known in self._peers.values()
        )
        fault = self.storage.segment_fault
        self.credit_bytes = credit_bytes(self.storage.queued_bytes, self.recorders, bool(fault))
        self._view.update_storage(fault)

    def submit(self, peer: str, message: Undecoded) -> None:
        """Have it stored."""
        if not self.storage.submit_segment(peer, message.data, self._clock.now_ns(), self.offset_ns(peer)):
            self._refused[RefusalReason.not_stored] += 1
            self._channel.send(peer, Nack(_BEHIND))

    def offset_ns(self, robot: str) -> int:
        """The gateway's time minus the robot's, 0 while nobody knows. For any thread."""
        known = self._peers.get(robot)
        return (known.offset_ns or 0) if known is not None else 0

    def on_answer(self, answer: SegmentAnswer) -> None:
        """Acknowledge what is stored, and show it; say what is not."""
        self.storage.release(answer)
        peer, segment, result = answer.peer, answer.segment, answer.result
        if answer.invalid is not None:
            self._on_invalid(answer, answer.invalid)
            return
        self._metrics.on_ingested(segment, result)
        if segment is None or result.outcome == IngestOutcome.retry:
            self._refused[RefusalReason.not_stored] += 1
            if result.disk_full:
                self.on_disk_full()
            if not result.fault and result.reason != self._pending:
                # Told once per change, not once per message; faults are shown as long as they last.
                self._pending = result.reason
                self._view.add_event("storage", result.reason, peer)
            self._channel.send(peer, Nack(result.reason))
            return
        self._pending = ""
        if result.outcome == IngestOutcome.quarantined:
            if not result.told:
                self._view.add_event("quarantine", result.reason, segment.episode.robot)
            self._channel.send(peer, Ack((), (segment.id,), credit_bytes=self.credit_bytes))
            return

        def acknowledge() -> None:
            self._channel.send(peer, Ack((segment.id,), credit_bytes=self.credit_bytes))

        # Counted before it is acknowledged: what is not counted yet when this process dies comes again.
        duplicate = result.outcome in KNOWN
        now_ns = self._clock.now_ns()
        self.dispatcher.on_segment_stored(segment, result.human_steps, duplicate, now_ns, acknowledge)
        if duplicate:
            return
        self.on_stored(segment, result.human_steps)
        if segment.episode.source != EpisodeSource.evaluation:
            committed = SegmentCommitted(result.row, result.record)
            for name, known in self._peers.items():
                if known.role == Role.trainer and not known.rejected:
                    # It need not read the segment from disk; one that cannot take it now does.
                    self._channel.send(name, committed)
        online = segment.episode.source == EpisodeSource.online
        self._view.add_stored_steps(segment.steps, result.latency_s if online else None)
        if segment.last:
            version = int(segment.version.max(initial=0))
            episode, steps = segment.episode, result.human_steps
            self._view.add_episode(
                episode.robot, episode.task, segment.outcome, steps, version=version, practised=online
            )

    def _on_invalid(self, answer: SegmentAnswer, error: ProtocolError | MessageTooLargeError) -> None:
        """It is no segment, or not its robot's."""
        self._refused[error.reason] += 1
        if not answer.refused:
            self._channel.send(answer.peer, Rejection(str(error)))
            return
        if self._told.take(answer.peer, self._clock.now_ns()):
            log.error("of relay '%s': %s", answer.peer, error)
            self._view.add_event("refused", str(error), answer.peer)
        self._channel.send(answer.peer, Ack((), refused=(answer.refused,), credit_bytes=self.credit_bytes))
