"""Fetches the version that is to act, hears which one does, and begins with that after a start."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from robot_edge.uplink.weights.cache import ActedVersion
from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.plan import Offer, same
from robot_edge.uplink.weights.relay_source import RelaySource
from wire.clock import Clock
from wire.errors import WeightsError, storage_error
from wire.messages.gateway import VersionAvailable
from wire.task_thread import Task
from wire.transport.channel import Channel
from wire.types import PolicyVersion

log = logging.getLogger(__name__)

_AGAIN_NS = 30_000_000_000
"""memory or disk that lacked may be free by then"""


class ActingWeightClient(WeightClient):
    """For whoever has inference load what is `ready`, and says what acts.

    The version that acted last is ready after a start, before the gateway is heard, if file and signature are right.
    """

    _loading = 8

    def __init__(self, directory: Path, channel: Channel, clock: Clock, relay: RelaySource | None = None) -> None:
        """As `WeightClient`."""
        super().__init__(directory, channel, clock, relay=relay)
        self._clock = clock
        self._short: Offer | None = None
        """there was no room for it, at `_short_ns`"""
        self._short_ns = 0
        self._withdrawn: frozenset[int] = frozenset()
        """versions that may not begin to act"""
        self._handed_out: dict[int, tuple[PolicyVersion, Path]] = {}
        """by number, the newest last: what inference was given since the one that acts"""
        self._acts: tuple[PolicyVersion, Path] | None = None
        self.tasks.submit(Task(self._cache.acted, self._on_acted, self._on_damaged))

    def poll(self) -> bool:
        short = self._short
        if (
            short is not None
            and short.version.number == self.announced
            and self.fault
            and not self.fetching
            and self._clock.now_ns() - self._short_ns > _AGAIN_NS
        ):
            self.fetch(*short)
        return super().poll()

    def on_activated(self, number: int) -> None:
        """Inference acts by this version."""
        while number in self._handed_out:
            first = next(iter(self._handed_out))
            self._acts = self._handed_out.pop(first)

        def failed(error: Exception) -> None:
            if not isinstance(error, OSError):
                raise error
            log.error("%s", storage_error(error, f"noting version {number}, which acts,", self._cache.note))

        self.tasks.submit(Task(partial(self._cache.on_activated, number, self.check.key), failed=failed))
        self.tasks.poll()

    def _on_offer(self, message: VersionAvailable) -> None:
        self._withdrawn = frozenset(message.withdrawn)
        if self.fetching in self._withdrawn:
            self._drop()
        if self._following is not None and self._following.version.number in self._withdrawn:
            self._following = None
        self._give_up_loading(message.version)
        super()._on_offer(message)

    def _give_up_loading(self, wanted: PolicyVersion) -> None:
        """What inference loads gives way to what it has, if it may not act any more."""
        here, acts = self.ready, self._acts
        if here is None or acts is None or same(here[0], acts[0]):
            return
        called_back = here[0].number > wanted.number
        if called_back or here[0].number in self._withdrawn or same(acts[0], wanted):
            # At once: that needs no look at the file.
            self.ready, self._is_new = acts, True

    def _on_ready(self, offer: Offer) -> None:
        super()._on_ready(offer)
        if self.ready is not None:
            self._note_handed_out(*self.ready)

    def _note_handed_out(self, version: PolicyVersion, path: Path) -> None:
        self._handed_out.pop(version.number, None)
        self._handed_out[version.number] = version, path
        if len(self._handed_out) > self._loading:
            self._handed_out.pop(next(iter(self._handed_out)))

    def _on_no_room(self, offer: Offer, fault: str) -> None:
        # It is said once, though the figures change.
        known = self._short is not None and same(self._short.version, offer.version)
        self._short, self._short_ns = offer, self._clock.now_ns()
        super()._on_no_room(offer, (known and self.fault) or fault)

    def _on_acted(self, found: tuple[ActedVersion, Path] | None) -> None:
        if found is None or self.ready is not None or found[0].version.number in self._withdrawn:
            return
        note, path = found
        # The gateway's word goes first: the robot may be of another fleet now.
        self.check.key = self.check.key or note.key
        try:
            self.check.chunks_of(VersionAvailable(note.version, 0, note.manifest, note.signature))
        except WeightsError as error:
            self._on_damaged(error)
            return
        log.info("version %d acted last, and does until the gateway announces another one.", note.version.number)
        self.ready, self._is_new = (note.version, path), True
        self._note_handed_out(note.version, path)

    def _on_damaged(self, error: Exception) -> None:
        if isinstance(error, OSError):
            error = storage_error(error, "reading the version that acted last", self._cache.note)
        elif not isinstance(error, WeightsError):
            raise error
        log.error("%s No version acts until the gateway announces a version.", error)
