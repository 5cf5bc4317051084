"""Who is let in when a process says hello, and what becomes of a second one of the same name."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from cloud_learner.gateway import peer_checks
from cloud_learner.gateway.peers import AuthenticatedServerChannel, KnownPeer, PeerBudget, clock_budget, key_mismatch
from cloud_learner.operator.view import FleetView
from hal.resource.admitted_robots import AdmittedRobots
from wire.clock import Clock
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import Hello, Rejection
from wire.transport.channel import PEER_SUFFIX
from wire.types import CALLERS, Role

log = logging.getLogger(__name__)
_FORGET_NS = 600_000_000_000
_ALIVE_NS = 3_000_000_000
"""a robot's process that sent a message so lately is there; it sends at least one a second"""


class Introductions:
    """For the gateway's loop, which keeps `peers` by name."""

    def __init__(
        self,
        channel: AuthenticatedServerChannel,
        peers: dict[str, KnownPeer],
        view: FleetView,
        robots: AdmittedRobots,
        clock: Clock,
        refused: Counter[str],
        told: PeerBudget,
        on_forgotten: Callable[[str], None],
    ) -> None:
        """`robots`: those that are let in; `told`: of what is said in the log; `on_forgotten(name)`: a peer is none any
        more."""
        self._channel, self._peers, self._view, self._robots, self._clock = channel, peers, view, robots, clock
        self._refused, self._told, self._on_forgotten = refused, told, on_forgotten
        self._rejections: dict[str, str] = {}
        """by the name of a key: why it was turned away last"""
        self._clock_changes = clock_budget()

    def admit(self, peer: str, role: str, hello: Hello, probe: Message) -> tuple[str, KnownPeer] | None:
        """The name under which the sender of `hello` is known from now on; None: it was turned away. `probe` says
        nothing new to a peer that has one; a connection that is gone does not take it. Raises `RejectedError`."""
        peer_checks.check_hello(hello)
        now_ns = self._clock.now_ns()
        name = peer.partition(PEER_SUFFIX)[0]
        if (mismatch := key_mismatch(name, role, hello)) is not None:
            self._reject(peer, mismatch.text, mismatch.reason)
            return None
        if peer != name and role not in CALLERS:
            if reason := self._duplicate_name(peer, name, hello, now_ns, probe):
                self._reject(peer, reason, RefusalReason.duplicate_name)
                return None
            peer = self._channel.adopt(peer)
        if reason := peer_checks.spec_mismatch(peer, hello, self._robots.refusal):
            self._reject(peer, reason, RefusalReason.other_spec)
            return None
        if role == Role.edge and (reason := self._robots.task_mismatch(peer, hello)):
            self._reject(peer, reason, RefusalReason.rejected)
            return None
        if role in CALLERS:
            self._forget_silent_clients(now_ns)
        before = self._peers.get(peer)
        changed = before is not None and before.clock != hello.clock and role not in CALLERS
        if changed and not self._clock_changes.take(name, now_ns):
            self._reject(peer, peer_checks.too_many_clocks(name), RefusalReason.too_often)
            return None
        offset_ns, spec = before.offset_ns if before else None, hello.spec
        known = KnownPeer(role, hello.clock, hello.pid, hello.site, now_ns, offset_ns, spec=spec)
        known.spec_hash = spec.hash if spec is not None else ""
        self._peers[peer] = known
        self._rejections.pop(name, None)
        if before is None or before.rejected:
            log.info("%s '%s' is here.", role, peer)
        return peer, known

    def _forget_silent_clients(self, now_ns: int) -> None:
        """Each command line that somebody runs is a peer of its own: those long silent are not kept."""
        for peer, known in list(self._peers.items()):
            if known.role in CALLERS and now_ns - known.last_message_ns > _FORGET_NS:
                del self._peers[peer]
                self._on_forgotten(peer)

    def _duplicate_name(self, peer: str, name: str, hello: Hello, now_ns: int, probe: Message) -> str:
        """Why the second connection of a name is not let in, '' for the same process or when the first is gone."""
        first = self._peers.get(name)
        if first is None or (first.clock, first.pid) == (hello.clock, hello.pid):
            return ""
        if now_ns - first.last_message_ns >= _ALIVE_NS or not self._channel.send(name, probe):
            return ""
        there = peer_checks.location(self._channel.address(name), first.pid, first.site)
        here = peer_checks.location(self._channel.address(peer), hello.pid, hello.site)
        return peer_checks.second_of_a_name(name, there, here)

    def _reject(self, peer: str, text: str, reason: RefusalReason) -> None:
        """Say no, and show it to people when it is news: a peer goes on asking."""
        if (known := self._peers.get(peer)) is not None:
            known.rejected, known.welcomed = True, False
        name = peer.partition(PEER_SUFFIX)[0]
        if self._rejections.get(name) != text and self._told.take(name, self._clock.now_ns()):
            self._rejections[name] = text
            log.error("'%s' is rejected: %s", peer, text)
            self._view.add_event("refused", f"refused: {text}", name)
        self._refused[reason] += 1
        self._channel.send(peer, Rejection(text))
