"""Evaluators at the gateway: who is there, and what they are to measure so that a version may act."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cloud_learner.gateway.peers import KnownPeer
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.held_out import HeldOutRequest
from wire.clock import Clock
from wire.messages.gateway import GATE, Evaluate, Evaluation
from wire.types import Role

log = logging.getLogger(__name__)
_AWAY_NS = 60_000_000_000
"""an evaluator that says nothing for so long is gone, and so are all at the start; it says nothing during an episode"""
_AGAIN_NS = 10_000_000_000
"""until one is asked again for the same: the message, or what it measured, was lost"""


class Evaluators:
    """For the gateway's loop. All are asked, each for another version where two are to be measured; the first answer
    counts."""

    send: Callable[[str, Evaluate], object]
    """to a peer; set before the first call"""
    announce: Callable[[str, int | None], None]
    """tell a peer of a version, so that it fetches it, None: of the one it would choose; as well"""

    def __init__(self, controller: RolloutController, peers: Mapping[str, KnownPeer], clock: Clock) -> None:
        self._controller, self._peers, self._clock = controller, peers, clock
        self._heard_ns = clock.now_ns()
        controller.set_evaluator(bool(controller.config.gate_success), self._heard_ns)
        self._asked: dict[str, tuple[HeldOutRequest, int]] = {}
        """by evaluator: what for, and when it is asked again"""

    def present(self) -> list[str]:
        """Those that were not refused, by name."""
        return sorted(name for name, one in self._peers.items() if one.role == Role.evaluator and not one.rejected)

    def poll(self) -> bool:
        """See who is there, and ask; whether versions may go on that waited."""
        controller, now_ns = self._controller, self._clock.now_ns()
        if not controller.config.gate_success:
            return False
        present = self.present()
        self._heard_ns = max([self._heard_ns, *(self._peers[name].last_message_ns for name in present)])
        changed = controller.set_evaluator(now_ns - self._heard_ns < _AWAY_NS, now_ns)
        wanted = controller.wanted_measurements
        if not wanted:
            for name in present:
                if self._asked.pop(name, None):
                    self.announce(name, None)
            return changed
        for at, name in enumerate(present):
            request, (asked, again_ns) = wanted[at % len(wanted)], self._asked.get(name, (None, 0))
            if asked in wanted and now_ns < again_ns:
                continue
            self._asked[name] = request, now_ns + _AGAIN_NS
            self.announce(name, request.number)
            self.send(name, Evaluate(request.number, request.episodes, request.first_seed, GATE))
        return changed

    def wanted_of(self, peer: str) -> int:
        """The version that it is to measure now, 0 when it may choose."""
        asked = self._asked.get(peer)
        return asked[0].number if asked is not None and asked[0] in self._controller.wanted_measurements else 0

    def on_evaluation(self, evaluation: Evaluation) -> bool:
        """A version was measured; whether that was wanted."""
        if evaluation.label != GATE:
            return False
        request = HeldOutRequest(evaluation.number, evaluation.first_seed, evaluation.episodes)
        return self._controller.on_measured(request, evaluation.outcomes, self._clock.now_ns())

    def forget(self, peer: str) -> None:
        """It said hello: what it was asked for is lost."""
        self._asked.pop(peer, None)
