"""Follows the gateway's policy versions, for processes that run them but drive no robot of the fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from robot_edge.uplink.weight_client import WeightClient
from wire.clock import Clock, clock_name
from wire.messages.all import (
    Heartbeat,
    Hello,
    HelloAck,
    Message,
    ReintroduceRequest,
    Rejection,
    Stop,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.channel import Channel
from wire.types import PolicyVersion, RobotSpec, Role

log = logging.getLogger(__name__)

_HEARTBEAT_NS = 1_000_000_000


class WeightSubscriber:
    """`turn` hears the gateway and fetches what it announces; `ready` names the newest version that is here."""

    def __init__(
        self,
        name: str,
        role: Role,
        gateway: Channel,
        weights: Path,
        clock: Clock,
        *,
        spec: RobotSpec | None = None,
        tasks: tuple[str, ...] = (),
        wants: Callable[[PolicyVersion], bool] = lambda version: True,
        remind: Callable[[], Message | None] = lambda: None,
    ) -> None:
        """`weights`: a directory for the newest files.

        `wants`: whether an announced version is of interest; `remind`: what to say with every heartbeat, if anything.
        """
        self.refused = ""
        """why the gateway refuses this process, '' when it does not"""
        self.stopping = False
        self._name, self._role = name, role
        self._gateway = gateway
        self._clock = clock
        self._spec, self._tasks = spec, tasks
        self._wants, self._remind = wants, remind
        self._client = WeightClient(weights, gateway, clock)
        self._welcomed = False
        self._next_word_ns = 0

    @property
    def ready(self) -> tuple[PolicyVersion, Path] | None:
        """The newest version that is here, whole and checked, and its file."""
        return self._client.ready

    def turn(self) -> None:
        """Hear what is new, ask again for what did not come, and keep the line."""
        while (message := self._gateway.recv()) is not None:
            match message:
                case HelloAck():
                    self._welcomed, self.refused = True, ""
                case ReintroduceRequest():
                    self._welcomed, self._next_word_ns = False, 0
                case VersionAvailable(version=version):
                    if self._wants(version):
                        self._client.announced(version)
                case WeightBytes():
                    self._client.received(message)
                case Rejection(reason=reason):
                    if reason != self.refused:
                        log.error("%s '%s' is refused by the gateway: %s", self._role, self._name, reason)
                    self.refused = reason
                case Stop():
                    self.stopping = True
                case _:
                    log.warning("%s '%s' does not understand %s.", self._role, self._name, type(message).__name__)
        self._client.turn()
        now_ns = self._clock.now_ns()
        if now_ns < self._next_word_ns:
            return
        self._next_word_ns = now_ns + _HEARTBEAT_NS
        if not self._welcomed:
            self._gateway.send(Hello(self._name, self._role, clock_name(), now_ns, 0, self._spec, self._tasks))
            return
        self._welcomed = self._gateway.send(Heartbeat(now_ns))
        if (reminder := self._remind()) is not None:
            self._gateway.send(reminder)
