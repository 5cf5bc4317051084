"""A version that is computed beside the one that acts: fetched, given to the shadow process, and what comes of it."""

from __future__ import annotations

import logging
from pathlib import Path

from robot_edge.shadow.reports import merged
from robot_edge.uplink.gateway_link import GatewayLink
from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.plan import same
from robot_edge.uplink.weights.relay_source import RelaySource
from robot_edge.uplink.weights.shadow_client import ShadowWeightClient
from wire.clock import Clock
from wire.messages import Message
from wire.messages.gateway import Deltas, Hello, Rejection, ShadowReport, ShadowRequest, WeightBytes
from wire.messages.local import LoadShadow
from wire.transport.channel import Channel
from wire.types import PolicyVersion

log = logging.getLogger(__name__)

_MOST_STARTS = 3
"""of the process with one version: one that ends it each time is left"""


class ShadowLink:
    """For the uplink's loop. Inference never hears of this version, and control hears nothing from here."""

    def __init__(
        self,
        name: str,
        directory: Path,
        gateway: Channel,
        link: GatewayLink,
        acting: WeightClient,
        clock: Clock,
        relay: RelaySource | None = None,
    ) -> None:
        """`directory`: for its files; `acting`: fetches the version to act by. Raises `StorageError`."""
        self.weights = ShadowWeightClient(directory, gateway, clock, acting, relay)
        self.weights.is_gateway_silent = lambda: link.silent
        self.process: Channel | None = None
        """to the shadow process, None where there is none"""
        self.inference_pid = 0
        self._name, self._gateway, self._link, self._acting = name, gateway, link, acting
        self._wanted: PolicyVersion | None = None
        self._pid = self._starts = 0
        """of the process, and how often it began since it was given this version"""
        self._fault = ""
        self._report: ShadowReport | None = None
        """what the gateway was not told yet"""

    def handle_request(self, request: ShadowRequest) -> None:
        """The gateway wants a version computed, or none."""
        offer = request.offer
        if self._wanted is not None and offer is not None and same(self._wanted, offer.version):
            return
        self._wanted = offer.version if offer is not None else None
        self._starts, self._report, self._fault = 0, None, ""
        self.weights.clear()
        self._load(None)
        if offer is None:
            return
        if self.process is None:
            self._say("this robot runs no process for it.")
            return
        self.weights.check.key, self.weights.check.spec_hash = self._acting.check.key, self._acting.check.spec_hash
        self.weights.link_bases()
        self.weights.handle_message(offer)

    def handle_weights(self, message: Deltas | WeightBytes | Rejection, by_relay: bool = False) -> None:
        """What came of a version: it may be of this one."""
        if isinstance(message, WeightBytes):
            self.weights.add_part(message, by_relay)
        else:
            self.weights.handle_message(message)

    def handle_process(self, message: Message) -> None:
        """What the shadow process says."""
        match message:
            case Hello(pid=pid):
                if pid != self._pid:
                    self._pid = pid
                    self._on_start()
            case ShadowReport():
                if self._wanted is not None and message.number == self._wanted.number:
                    self._add(message)
                else:
                    self._load(None)  # of an uplink before this one
            case _:
                log.warning("uplink of '%s' does not understand %s.", self._name, type(message).__name__)

    def _on_start(self) -> None:
        """Another shadow process, or another uplink."""
        self._starts += 1
        if self._starts > _MOST_STARTS:
            self._say(f"its process ended {_MOST_STARTS} times with this version; see its log.")
        elif not self._send_ready():
            self._load(None)

    def poll(self) -> None:
        """Fetch it, and tell the gateway what came of it."""
        if self.weights.poll():
            self._starts = 0
            self._send_ready()
        if self._wanted is not None and self.weights.fault != self._fault:
            self._fault = self.weights.fault
            self._say(self._fault)
        if self._report is not None and self._link.open and self._gateway.send(self._report):
            self._report = None

    def _say(self, fault: str) -> None:
        if self._wanted is not None and fault:
            log.error("robot '%s': version %d is not computed as a shadow: %s", self._name, self._wanted.number, fault)
            self._add(ShadowReport(self._name, self._wanted.number, fault=fault))

    def _add(self, news: ShadowReport) -> None:
        self._report = news if self._report is None else merged(self._report, news)

    def _send_ready(self) -> bool:
        ready = self.weights.ready
        if ready is None or self._wanted is None or not same(ready[0], self._wanted):
            return False
        self._load(ready[0], str(ready[1]))
        return True

    def _load(self, version: PolicyVersion | None, path: str = "") -> None:
        if self.process is not None:
            self.process.send(LoadShadow(version, path, self.inference_pid))
