"""What the gateway shows to Prometheus: what it counts itself, and what robots and trainer report to it.

Nothing that a peer says can make the page grow, but robots of new names and their reasons to hold: labels are types of
messages, and words of ours.
"""

from __future__ import annotations

from collections import Counter as CountByKey
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from cloud_learner.buffer.check import segment_bytes
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.gateway.peers import AuthenticatedServerChannel, KnownPeer
from cloud_learner.gateway.storage.ingest import IngestOutcome, IngestResult
from cloud_learner.gateway.storage.storage_thread import StorageThread
from cloud_learner.operator.view import FleetView
from hal.resource.health import RobotHealth
from hal.resource.lease import ESTOP
from wire.clock import Clock
from wire.codec import Undecoded
from wire.messages import Message
from wire.messages.fleet import JobKind, JobPhase
from wire.messages.gateway import Segment
from wire.metrics import PREFIX, RobotSample, make_registry, robot_metrics, trainer_metrics
from wire.types import EpisodeSource, Role

HEARD_NS = 10_000_000_000
"""a peer that spoke so lately counts as connected"""


_PURPOSES = (*JobKind, ESTOP)
_OTHER = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)


class GatewayMetrics:
    """Counts as things happen, in the gateway's loop; `text` is for any thread."""

    def __init__(
        self,
        view: FleetView,
        ledger: Ledger,
        peers: Mapping[str, KnownPeer],
        refusals: Sequence[Mapping[str, int]],
        clock: Clock,
    ) -> None:
        """`peers`: by name, as the gateway keeps them; `refusals`: how often something was refused, by reason, of each
        that counts them; `ledger`: its own figures, it is asked nothing."""
        self._refusals = refusals
        self._view, self._ledger, self._peers, self._clock = view, ledger, peers, clock
        self._registry = make_registry(self)
        self._received = self._counter("gateway_messages_received", "Messages of known keys, by type.", "type")
        self._sent = self._counter(
            "gateway_messages_sent", "Messages that were handed to a connection, by type.", "type"
        )
        self._segments = self._counter("ingest_segments", "Segments that came, by what became of them.", "outcome")
        self._steps = self._counter("ingest_steps", "Steps that were stored.")
        self._bytes = self._counter("ingest_bytes", "Bytes of the segments that were stored, uncompressed.")
        self.storage_faults = self._counter("storage_faults", "Times that ledger, disk or object store said no.")
        self._ingest_s = Histogram(
            f"{PREFIX}ingest_seconds",
            "From the recording of a segment's last step until its commit, of robots that practise.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.commit_s = Histogram(
            f"{PREFIX}ingest_commit_seconds",
            "To check, write and commit the segments that came at once.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.storage: StorageThread | None = None
        """set once there is one"""
        for outcome in IngestOutcome:
            self._segments.labels(outcome)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, labels, registry=self._registry)

    def on_received(self, kind: type[Message]) -> None:
        """A message of a peer that has a key."""
        self._received.labels(kind.__name__).inc()

    def on_sent(self, message: Message) -> None:
        """A message that a connection took."""
        self._sent.labels(type(message).__name__).inc()

    def on_ingested(self, segment: Segment | None, result: IngestResult) -> None:
        """What became of a segment, None: which was not looked at."""
        self._segments.labels(result.outcome).inc()
        if result.outcome == IngestOutcome.retry:
            self.storage_faults.inc()
        if segment is not None and result.outcome == IngestOutcome.stored:
            self._steps.inc(segment.steps)
            self._bytes.inc(segment_bytes(segment))
            # a simulator's demonstrations are recorded in its own time
            if segment.episode.source == EpisodeSource.online:
                self._ingest_s.observe(max(0.0, result.latency_s))

    def text(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What is known at the moment of a scrape."""
        seen = self._view.observe()
        robots = seen.robots.items()
        now_ns = self._clock.now_ns()
        # the gateway's loop goes on meanwhile
        heard = [one for one in list(self._peers.values()) if now_ns - one.last_message_ns < HEARD_NS]
        yield _shares("gateway_peers", "Peers that were heard lately, by role.", "role", Role, (p.role for p in heard))
        refused = CounterMetricFamily(f"{PREFIX}gateway_refusals", "Who or what was turned away.", labels=("reason",))
        total = CountByKey[str]()
        for counts in self._refusals:
            # the threads that count go on meanwhile
            total.update(dict(counts))
        for reason, times in total.items():
            refused.add_metric((reason,), times)
        yield refused
        yield GaugeMetricFamily(f"{PREFIX}gateway_pages", "Operator pages that are open.", self._view.pages)
        yield SummaryMetricFamily(
            f"{PREFIX}ledger_write_wait_seconds",
            "What transactions of the gateway waited for the database and for each other to begin.",
            self._ledger.writes,
            self._ledger.write_wait_s,
        )
        if self.storage is not None:
            away_s = seen.storage_away_s or 0.0
            yield GaugeMetricFamily(f"{PREFIX}storage_away_seconds", "Since disk or database take nothing.", away_s)
            waiting = self.storage.queued_bytes
            yield GaugeMetricFamily(f"{PREFIX}storage_queue_bytes", "Segments that wait to be stored.", waiting)
            dropped = "Events that were not noted because too many waited."
            yield CounterMetricFamily(f"{PREFIX}storage_notes_dropped", dropped, self.storage.dropped)
        yield GaugeMetricFamily(f"{PREFIX}buffer_steps", "Steps in the buffer.", seen.steps_stored)
        states = [state for _, (_, _, state) in robots if state is not None]
        yield _shares("robots", "Robots by health.", "health", RobotHealth, (state.health for state in states))
        purposes = (state.lease.purpose for state in states if state.lease is not None)
        yield _shares("leases", "Robots that are held, by purpose.", "purpose", _PURPOSES, purposes)
        yield _shares(
            "jobs", "Jobs that are open or ended lately.", "phase", JobPhase, (job.phase for job in seen.jobs)
        )
        newest = seen.version.number if seen.version else 0
        yield GaugeMetricFamily(f"{PREFIX}policy_version", "The newest policy version.", newest)
        success = GaugeMetricFamily(
            f"{PREFIX}policy_success_ratio", "Held-out success of the version measured last.", labels=("task",)
        )
        for task, rate in seen.success.items():
            success.add_metric((task,), rate)
        yield success
        yield from robot_metrics(
            RobotSample(status, age_s, newest) for _, (age_s, status, _) in robots if status is not None
        )
        if seen.trainer is not None:
            age_s, status = seen.trainer
            yield GaugeMetricFamily(f"{PREFIX}trainer_link_age_seconds", "Since the trainer was heard.", age_s)
            yield from trainer_metrics(status)


class CountedChannel:
    """A server channel of which every message is counted."""

    def __init__(self, channel: AuthenticatedServerChannel, metrics: GatewayMetrics) -> None:
        self._channel, self._metrics = channel, metrics
        self.adopt, self.address, self.role = channel.adopt, channel.address, channel.role
        self.may_teach, self.key_record = channel.may_teach, channel.key_record
        self.rejections, self.close = channel.rejections, channel.close
        self.refused = channel.refused

    def recv(self) -> tuple[str, Message] | None:
        received = self._channel.recv()
        if received is not None:
            self._metrics.on_received(type(received[1]))
        return received

    def recv_unless(self, kinds: Set[type[Message]]) -> tuple[str, Message | Undecoded] | None:
        received = self._channel.recv_unless(kinds)
        if received is not None:
            message = received[1]
            self._metrics.on_received(message.kind if isinstance(message, Undecoded) else type(message))
        return received

    def send(self, peer: str, message: Message) -> bool:
        sent = self._channel.send(peer, message)
        if sent:
            self._metrics.on_sent(message)
        return sent


def _shares(name: str, text: str, label: str, known: Iterable[str], found: Iterable[str]) -> Metric:
    """How often each of the `known` words was found, and all others together."""
    words = [*map(str, known), _OTHER]
    counts = CountByKey(word if word in words else _OTHER for word in map(str, found))
    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=(label,))
    for word in words:
        family.add_metric((word,), counts[word])
    return family
