"""Policy versions: taken from trainers, announced and served to whoever runs them, by a thread of its own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.dispatcher import Dispatcher
from cloud_learner.dispatch.notes import Note, Notes
from cloud_learner.gateway import peer_checks
from cloud_learner.gateway.peers import AuthenticatedServerChannel, KnownPeer
from cloud_learner.gateway.storage.weight_store import VersionOffer, WeightStore
from cloud_learner.gateway.versions.publish_slot import PublishSlot
from cloud_learner.gateway.versions.rollout_service import RolloutService
from cloud_learner.operator.view import FleetView
from cloud_learner.rollout.commands import require_version
from cloud_learner.rollout.config import RolloutConfig
from wire.clock import Clock
from wire.errors import DiskFullError, NumberTakenError, RejectedError, StorageError
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import (
    Evaluation,
    FetchDeltas,
    FetchWeights,
    Nack,
    Publish,
    Published,
    Rejection,
    ShadowRequest,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.task_thread import Task, TaskQueue, TaskThread
from wire.types import PolicyVersion, Role

_ANNOUNCEMENTS = 10_000
_FETCHES_AT_ONCE = 16
"""of one peer"""
_UPLOAD_BYTES = 128 * 1024 * 1024
"""of parts that wait to be written: several times what a trainer sends ahead"""


class VersionService:
    """For the gateway's loop; what reads or writes files or asks the ledger is a task of `tasks`."""

    pinned_version: Callable[[str], int]
    """the version that a robot is to keep for its job, 0: none; `follow` sets it before the first message comes"""

    def __init__(
        self,
        channel: AuthenticatedServerChannel,
        peers: Mapping[str, KnownPeer],
        view: FleetView,
        ledger: Ledger,
        weights: WeightStore,
        notes: Notes,
        clock: Clock,
        refused: Counter[str],
        rollout: RolloutConfig,
    ) -> None:
        """Asks the ledger for the versions there are. Raises `StorageError`."""
        self._channel, self._peers, self._view, self._ledger = channel, peers, view, ledger
        self._weights, self._notes, self._clock, self._refused = weights, notes, clock, refused
        self.tasks = TaskQueue("weights")
        # a large version that has just come takes seconds to be looked through: robots have theirs meanwhile
        self._serving = TaskQueue("weights for robots")
        self.threads: tuple[TaskThread, ...] = (self.tasks, self._serving)
        if weights.exchange is not None:
            weights.exchange.on_arrived = self._on_arrived
            self.threads += (weights.exchange,)
        self._announced_ns: OrderedDict[tuple[str, int], int] = OrderedDict()
        """when each peer heard of each version first"""
        self._assigned: dict[str, int] = {}
        """what each robot was to be told of last"""
        self._awaited: dict[int, set[tuple[str, bool]]] = {}
        """by version on its way from another gateway: who is to be offered it, and whether as a shadow"""
        self._fetching: Counter[str] = Counter()
        self._upload_bytes: Counter[str] = Counter()
        self._slot = PublishSlot(clock)
        self._newest = weights.newest()
        self.signing_key = weights.signing_key
        self.rollout = RolloutService(rollout, ledger, weights, self.tasks, notes, view, peers, clock)
        self.rollout.send, self.rollout.announce = channel.send, self.announce
        self.rollout.request_shadow = self.request_shadow
        self.rollout.pinned_version = lambda peer: self.pinned_version(peer)
        self.rollout.evaluators.announce, self.rollout.evaluators.send = self.announce, channel.send

    def follow(self, dispatcher: Dispatcher) -> None:
        """Its jobs may keep robots at a version, but at none that is gone."""

        def require_weights(number: int) -> None:
            state = self.rollout.controller.state()
            if number in state.versions:
                require_version(state, number)

        self.pinned_version, dispatcher.require_weights = dispatcher.pinned_version, require_weights

    # --- in -----------------------------------------------------------------------------------------------------

    def begin(self, peer: str, publish: Publish) -> None:
        """A trainer offers a version."""
        if reason := self._slot.take(peer, publish.version.number):
            self._postpone(peer, publish.version, reason)
            return

        # heartbeats behind it are answered behind what is said of it
        self._upload_bytes[peer] += 0

        def begun(known: PolicyVersion | None) -> None:
            self._taken(peer, 0)
            if known is not None:
                self._slot.release(peer)
                self._channel.send(peer, Published(known.number))

        def refused(error: Exception) -> None:
            self._taken(peer, 0)
            self._slot.release(peer)
            self._refuse(peer, error)

        self.tasks.submit(Task(partial(self._weights.begin, publish), begun, refused))

    def _postpone(self, peer: str, version: PolicyVersion, reason: str) -> None:
        """Another trainer publishes; but what was stored before is confirmed."""

        def found(known: PolicyVersion | None) -> None:
            is_stored = known is not None and known.sha256 == version.sha256
            self._channel.send(peer, Published(version.number) if is_stored else Nack(reason))

        self.tasks.submit(Task(partial(self._weights.version, version.number), found, partial(self._refuse, peer)))

    def receive(self, peer: str, part: WeightBytes) -> None:
        """A part of a version that was offered."""
        if not self._slot.accepts(peer):
            return
        size = len(part.data)
        if self._upload_bytes[peer] + size > _UPLOAD_BYTES:
            self._refused[RefusalReason.too_often] += 1
            self._channel.send(peer, Rejection(f"weights of version {part.number} come faster than they are answered."))
            return
        self._upload_bytes[peer] += size

        def received(offer: VersionOffer | None) -> None:
            self._taken(peer, size)
            if offer is not None:
                self._slot.release(peer)
                self._channel.send(peer, Published(offer.version.number))
                self._on_offer(offer)

        def refused(error: Exception) -> None:
            self._taken(peer, size)
            self._slot.release(peer)
            self._refuse(peer, error)

        self.tasks.submit(Task(partial(self._receive, part), received, refused))

    def when_received(self, peer: str, then: Callable[[], None]) -> None:
        """Call `then` when all parts that `peer` sent before are written: a trainer sends no more ahead of that."""
        if peer in self._upload_bytes:
            self.tasks.submit(Task(lambda: None, lambda _: then()))
        else:
            then()

    def _taken(self, peer: str, size: int) -> None:
        self._upload_bytes[peer] -= size
        if self._upload_bytes[peer] <= 0:
            del self._upload_bytes[peer]

    def _receive(self, part: WeightBytes) -> VersionOffer | None:
        version = self._weights.receive(part)
        return self._weights.offer(version.number) if version is not None else None

    def _on_arrived(self, version: PolicyVersion) -> None:
        """It has come from another gateway."""
        self.tasks.submit(Task(partial(self._weights.offer, version.number), self._on_offer))

    def _on_offer(self, offer: VersionOffer | None) -> None:
        """It is here, published at this gateway or at another one."""
        if offer is None or not offer.whole_here:
            return
        number = offer.version.number
        if self._newest is None or number >= self._newest.version.number:
            self._newest = offer
            self._view.add_version(offer.version)
            self.rollout.on_version(offer.version)
        for peer, is_shadow in sorted(self._awaited.pop(number, ())):
            if is_shadow:
                self.request_shadow(peer, self.rollout.shadow_of(peer))
            elif self._welcomed(peer):
                # a robot may be to have another one by now
                self.announce(peer, None if self._is_robot(peer) else number)

    def _is_here(self, offer: VersionOffer, peer: str, is_shadow: bool) -> bool:
        """Nobody is offered a version before it can be signed, which takes its file; then it is."""
        if not offer.whole_here:
            self._awaited.setdefault(offer.version.number, set()).add((peer, is_shadow))
        return offer.whole_here

    # --- out ----------------------------------------------------------------------------------------------------

    def announce(self, peer: str, number: int | None) -> None:
        """Tell `peer` that it is to have a version; None: the one that is for it now. Whoever was not welcomed yet is
        told then."""
        if not self._welcomed(peer):
            return
        pinned = self.pinned_version(peer)
        if pinned and number not in (None, pinned):
            # It evaluates an older version: newer ones are announced to it when it has done so.
            return
        number = pinned or number or self.rollout.version_for(peer, self._peers[peer].role)
        if not number:
            return
        self._assigned[peer] = number
        newest = self._newest
        if newest is not None and newest.version.number == number and newest.whole_here:
            self._send(peer, newest)
            return

        def found(offer: VersionOffer | None) -> None:
            if offer is None:
                self._channel.send(peer, Rejection(f"there is no policy version {number}."))
            elif (self._assigned[peer] == number or not self._is_robot(peer)) and self._is_here(offer, peer, False):
                self._send(peer, offer)

        self.tasks.submit(Task(partial(self._weights.request, number), found, partial(self._refuse, peer)))

    def announce_to_measure(self, peer: str, number: int) -> None:
        """An evaluator is to measure this one. One whose file is gone is refused: it would be waited for in vain."""

        def found(is_gone: bool) -> None:
            if is_gone:
                text = f"version {number} cannot be measured: its weights are gone, as only the newest are kept."
                self._channel.send(
                    peer, Rejection(f"{text} Measure a newer one, and pin what is to be measured later.")
                )
            else:
                self.announce(peer, number)

        self.tasks.submit(Task(partial(self._weights.is_gone, number), found, partial(self._refuse, peer)))

    def request_shadow(self, robot: str, number: int) -> None:
        """Have `robot` compute a version without acting by it; 0: none."""
        if not number:
            self._channel.send(robot, ShadowRequest(None))
            return

        def found(offer: VersionOffer | None) -> None:
            if offer is not None and self._is_here(offer, robot, True) and self._welcomed(robot):
                self._channel.send(robot, ShadowRequest(_available(offer, self._clock.now_ns())))

        self.tasks.submit(Task(partial(self._weights.request, number), found, partial(self._refuse, robot)))

    def on_hello(self, peer: str, role: str) -> None:
        """`peer` has just been welcomed."""
        self._peers[peer].welcomed = True
        self.rollout.forget(peer)
        if role == Role.evaluator:
            self.announce(peer, None)
        elif role in (Role.edge, Role.thinker):
            self.rollout.poll()
        if self.pinned_version(peer):
            self.announce(peer, None)

    def serve(self, peer: str, request: FetchWeights | FetchDeltas) -> None:
        """Send a part of a version, or say by which deltas it can be had."""
        if self._fetching[peer] >= _FETCHES_AT_ONCE:
            self._refused[RefusalReason.too_often] += 1
            return
        self._fetching[peer] += 1

        def answer(message: Message | None) -> None:
            self._fetched(peer)
            if message is not None:
                # otherwise it is on its way here, and asked for again
                self._channel.send(peer, message)

        def refuse(error: Exception) -> None:
            self._fetched(peer)
            self._refuse(peer, error, request if isinstance(request, FetchWeights) else None)

        if isinstance(request, FetchDeltas):
            self.tasks.submit(Task(partial(self._weights.deltas, request), answer, refuse))
        else:
            self._serving.submit(Task(partial(self._weights.serve, request), answer, refuse))

    def note_activation(self, peer: str, activated: VersionActivated, offset_ns: int) -> None:
        """A robot acts by a version; `offset_ns`: the gateway's time minus the robot's."""
        self.rollout.on_activation(peer, activated.number)
        announced_ns = self._announced_ns.get((peer, activated.number))
        if announced_ns is None:
            return
        activated_ns = peer_checks.check_time(activated.applied_ns) + offset_ns

        def noted(is_news: bool) -> None:
            if is_news:
                self._view.add_activation((activated_ns - announced_ns) / 1e9)

        run = partial(self._ledger.note_applied, peer, activated.number, announced_ns, activated_ns)
        self._notes.submit(Note(run, noted, key=f"applied {peer} {activated.number}"))

    def note_evaluation(self, evaluation: Evaluation, wall_ns: int) -> None:
        """A version was measured."""
        peer_checks.check_evaluation(evaluation)
        self.rollout.on_evaluation(evaluation)

        def noted(is_news: bool) -> None:
            if is_news:
                self._view.add_evaluation(evaluation)

        run = partial(self._ledger.add_evaluation, evaluation, wall_ns)
        self._notes.submit(Note(run, noted, droppable=True))

    def _fetched(self, peer: str) -> None:
        self._fetching[peer] -= 1
        if self._fetching[peer] <= 0:
            del self._fetching[peer]

    def _is_robot(self, peer: str) -> bool:
        """It acts by one version; others may be told of several."""
        return self._peers[peer].role == Role.edge

    def _welcomed(self, peer: str) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.welcomed

    def _send(self, peer: str, offer: VersionOffer) -> None:
        if not self._welcomed(peer):
            return  # it was started again meanwhile
        version = offer.version
        announced_ns = self._announced_ns.setdefault((peer, version.number), self._clock.now_ns())
        if len(self._announced_ns) > _ANNOUNCEMENTS:
            self._announced_ns.popitem(last=False)
        withdrawn = self.rollout.withdrawn(version.number) if self._is_robot(peer) else ()
        self._channel.send(peer, _available(offer, announced_ns, withdrawn))

    def _refuse(self, peer: str, error: Exception, request: FetchWeights | None = None) -> None:
        if isinstance(error, StorageError):
            if isinstance(error, DiskFullError):
                self.rollout.prune(full=True)
            self._refused[RefusalReason.not_stored] += 1
            self._view.add_event("storage", str(error), peer)
            self._channel.send(peer, Nack(str(error)))
            return
        if not isinstance(error, RejectedError | OverflowError):
            raise error
        self._refused[RefusalReason.rejected] += 1
        taken = isinstance(error, NumberTakenError)
        self._channel.send(peer, Nack(str(error)) if taken else Rejection(str(error), request))


def _available(offer: VersionOffer, announced_ns: int, withdrawn: tuple[int, ...] = ()) -> VersionAvailable:
    version, manifest, signature, delta = offer
    return VersionAvailable(version, announced_ns, manifest, signature, delta, withdrawn)
