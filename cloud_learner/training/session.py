"""The trainer's session with the gateway: hello, heartbeats, and what each message is for."""

from __future__ import annotations

import logging

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.publisher import VersionPublisher
from wire.clock import Clock, clock_name
from wire.messages.gateway import (
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    Published,
    ReintroduceRequest,
    Rejection,
    SegmentCommitted,
    Stop,
    VersionAvailable,
)
from wire.transport.channel import Channel
from wire.types import Role

log = logging.getLogger(__name__)

_HEARTBEAT_NS = 1_000_000_000


class GatewaySession:
    """New segments go to the source of batches, answers about versions to the publisher."""

    def __init__(
        self, name: str, gateway: Channel, source: ReplayDataset, publisher: VersionPublisher, clock: Clock
    ) -> None:
        self.accepted = False
        self.rejection = ""
        """why the gateway rejected this trainer or its last version, '' when it did not"""
        self.stopping = False
        self._name = name
        self._gateway = gateway
        self._source = source
        self._publisher = publisher
        self._clock = clock
        self._next_heartbeat_ns = clock.now_ns()

    def poll(self) -> None:
        """Handle what has come, and say hello or that the trainer lives when it is time; it never waits."""
        while (message := self._gateway.recv()) is not None:
            match message:
                case SegmentCommitted(row=row, segment=segment):
                    self._source.submit(row, segment)
                case HelloAck(echo_ns=echo_ns):
                    # A rejected version does not reject the trainer.
                    self.accepted, self.rejection = True, ""
                    self._publisher.on_heartbeat_answered(echo_ns)
                case ReintroduceRequest():
                    self.accepted, self._next_heartbeat_ns = False, 0
                case Published(number=number):
                    self._publisher.on_published(number)
                case Nack(reason=reason):
                    log.error("version not taken, it is submitted again: %s", reason)
                    self._publisher.pause()
                case Rejection(reason=reason):
                    self.rejection = reason
                    log.error("trainer '%s' is rejected by the gateway: %s", self._name, reason)
                    self._publisher.on_rejected()
                case Stop():
                    self.stopping = True
                case VersionAvailable():
                    log.debug("a version was announced.")
                case _:
                    log.warning("trainer does not understand %s.", type(message).__name__)
        now_ns = self._clock.now_ns()
        if now_ns >= self._next_heartbeat_ns:
            self._next_heartbeat_ns = now_ns + _HEARTBEAT_NS
            if self.accepted:
                self.accepted = self._gateway.send(Heartbeat(now_ns))
            else:
                self._gateway.send(Hello(self._name, Role.trainer, clock_name(), now_ns))
