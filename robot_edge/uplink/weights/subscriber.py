"""Follows the gateway's versions, for processes that run them but drive no robot of the fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from robot_edge.uplink.weights.client import WeightClient
from wire.clock import Clock
from wire.messages import Message
from wire.messages.gateway import (
    Deltas,
    FetchWeights,
    Hello,
    HelloAck,
    Rejection,
    Stop,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.channel import Channel
from wire.transport.session import GatewaySession
from wire.types import PolicyVersion

log = logging.getLogger(__name__)


class WeightSubscriber:
    """Follows the gateway's versions, for processes that run them but drive no robot of the fleet.

    `poll` handles what the gateway says and fetches what it announces; `ready` names the newest version that is here.
    """

    def __init__(
        self,
        hello: Hello,
        gateway: Channel,
        weights: Path,
        clock: Clock,
        *,
        keep: int = 3,
        take: Callable[[Message], bool] = lambda message: False,
        wants: Callable[[PolicyVersion], bool] = lambda version: True,
        remind: Callable[[], Message | None] = lambda: None,
    ) -> None:
        """`hello`: what the process is; `weights`: a directory for the `keep` newest files.

        `take`: whether somebody else handles a message; `wants`: whether an announced version is of interest; `remind`:
        what to say with every heartbeat, if anything.
        """
        self.session = GatewaySession(gateway, hello, clock)
        self.stopping = False
        self._name = f"{hello.role} '{hello.name}'"
        self._gateway = gateway
        self._take, self._wants, self._remind = take, wants, remind
        self._client = WeightClient(weights, gateway, clock, keep)
        self._client.is_gateway_silent = lambda: self.session.silent
        self._client.check.spec_hash = hello.spec.hash if hello.spec is not None else ""

    @property
    def ready(self) -> tuple[PolicyVersion, Path] | None:
        """The newest version that is here, whole and checked, and its file."""
        return self._client.ready

    @property
    def fetching(self) -> int:
        """The version that is under way, 0: none."""
        return self._client.fetching

    def fetch(self, offer: VersionAvailable) -> None:
        """Have this version next; `ready` says when it is here."""
        self._client.handle_message(offer)

    def poll(self) -> None:
        """Handle what is new, ask again for what did not come, and keep the connection."""
        while (message := self._gateway.recv()) is not None:
            if self._take(message):
                continue
            match message:
                case VersionAvailable(version=version) if not self._wants(version):
                    pass
                case VersionAvailable() | Deltas() | WeightBytes() | Rejection(request=FetchWeights()):
                    self._client.handle_message(message)
                case Stop():
                    self.stopping = True
                case _:
                    if isinstance(message, HelloAck):
                        self._client.check.key = message.signing_key
                    if not self.session.handle_message(message):
                        log.warning("%s does not understand %s.", self._name, type(message).__name__)
        self._client.poll()
        if self.session.poll() and (reminder := self._remind()) is not None:
            self._gateway.send(reminder)
