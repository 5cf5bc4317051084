"""Pictures that relays hold back: who wants them, and which relay is asked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.notes import Note, Notes
from cloud_learner.gateway.peers import AuthenticatedServerChannel, KnownPeer
from wire.clock import Clock
from wire.messages.gateway import FetchPictures, PicturesGone
from wire.types import Role

_ASK_NS = 5_000_000_000
"""between two times that a relay is asked for what it has not sent"""
_AT_ONCE = 500
_HERE_NS = 5_000_000_000


class HeldPictures:
    """For the gateway's loop: what is wanted is kept in the ledger, by whoever wants it, until it has come."""

    def __init__(
        self,
        channel: AuthenticatedServerChannel,
        peers: Mapping[str, KnownPeer],
        ledger: Ledger,
        notes: Notes,
        clock: Clock,
    ) -> None:
        self._channel, self._peers, self._ledger, self._notes, self._clock = channel, peers, ledger, notes, clock
        self._next_ns = 0

    def handle_message(self, peer: str, message: FetchPictures | PicturesGone) -> None:
        """A trainer wants some, or a relay has some no more."""
        segments = message.segments[:_AT_ONCE]
        if isinstance(message, FetchPictures):
            self._notes.submit(Note(partial(self._ledger.ask_pictures, segments), lambda _: self._soon()))
        else:
            self._notes.submit(Note(partial(self._ledger.note_pictures_gone, peer, segments)))

    def poll(self) -> None:
        """Ask the relays that are here for what is wanted of them."""
        now_ns = self._clock.now_ns()
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + _ASK_NS
        for name, known in self._peers.items():
            if known.role == Role.relay and not known.rejected and now_ns - known.last_message_ns < _HERE_NS:
                run = partial(self._ledger.wanted_pictures, name, _AT_ONCE)
                self._notes.submit(Note(run, partial(self._ask, name), key=f"pictures {name}", lasting=False))

    def _soon(self) -> None:
        self._next_ns = 0

    def _ask(self, relay: str, segments: tuple[str, ...]) -> None:
        if segments:
            self._channel.send(relay, FetchPictures(segments))
