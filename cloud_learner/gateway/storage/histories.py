"""What is stored of the episodes that robots are recording, kept in memory: segments are checked against it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future

from cloud_learner.buffer.check import CommittedHistory
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import StorageError
from wire.messages.gateway import Segment

log = logging.getLogger(__name__)
_REMEMBERED = 256
_READS_AT_ONCE = 32
"""threads that wait for an object store, at most"""


class HistoryPendingError(StorageError):
    """What is stored of an episode is being read; its segments are taken when that is done."""


class EpisodeHistories:
    """The histories of the episodes that were asked for last; not for several threads at once.

    One that is not known is read back once: by the caller where it lies on this machine, in a thread where an object
    store has to answer, for which nobody else must wait.
    """

    def __init__(self, ledger: Ledger, store: SegmentStore) -> None:
        self._ledger = ledger
        self._store = store
        self._known: OrderedDict[str, CommittedHistory] = OrderedDict()
        self._reading: dict[str, Future[CommittedHistory]] = {}

    def get(self, episode: str, wait: bool = False) -> CommittedHistory:
        """What is stored of the episode, empty for a new one; `wait`: however long reading it takes.

        Raises `HistoryPendingError` while it is being read, and `StorageError` when that failed: then the next call
        begins anew.
        """
        history = self._known.get(episode)
        if history is None:
            history = self._read_back(episode, wait)
            self._keep(episode, history)
        self._known.move_to_end(episode)
        return history

    def may_have(self, segment: Segment) -> bool:
        """Whether a segment may be stored already: not if what is stored of its episode is known, without it."""
        history = self._known.get(segment.episode.id)
        return history is None or segment.index in history

    def note_stored(self, segment: Segment) -> None:
        """A segment that is found to be stored: only the answer of its commit was lost, if it is news."""
        history = self._known.get(segment.episode.id)
        if history is not None and segment.index not in history:
            history.add(segment)

    def take_back(self, segment: Segment) -> None:
        """A segment that was added to the history of its episode and could not be stored."""
        history = self._known.get(segment.episode.id)
        if history is not None and segment.index in history:
            history.remove(segment)

    def forget(self, episode: str) -> None:
        """An episode of which nothing more is to come, or of which others know more."""
        self._known.pop(episode, None)

    def _keep(self, episode: str, history: CommittedHistory) -> None:
        self._known[episode] = history
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _read_back(self, episode: str, wait: bool) -> CommittedHistory:
        future = self._reading.get(episode)
        if future is None:
            places = self._ledger.segments_of(episode)
            rows = [place.row for place in places]
            if wait or not (self._store.objects.remote and any(place.shard is not None for place in places)):
                return self._read(episode, rows)
            self._make_room()
            if len(self._reading) < _READS_AT_ONCE:
                self._start(episode, rows)
        elif wait or future.done():
            del self._reading[episode]
            return future.result()
        raise HistoryPendingError(
            f"what is stored of episode {episode!r} is being read from {self._store.objects.place}: its segments are "
            "taken when that is done."
        )

    def _start(self, episode: str, rows: list[int]) -> None:
        future = self._reading[episode] = Future()

        def read() -> None:
            try:
                future.set_result(self._read(episode, rows))
            except BaseException as error:  # noqa: BLE001 - raised again where it is asked for
                future.set_exception(error)

        # a daemon: a store that is silent must not keep the gateway from ending
        threading.Thread(target=read, name=f"history of {episode}", daemon=True).start()

    def _make_room(self) -> None:
        """Of what nobody came back for, keep what was read."""
        for episode, future in list(self._reading.items()):
            if future.done():
                del self._reading[episode]
                if future.exception() is None:
                    self._keep(episode, future.result())

    def _read(self, episode: str, rows: list[int]) -> CommittedHistory:
        history = CommittedHistory()
        found = self._store.read(rows)
        for stored in found.segments.values():
            history.add(stored)
        for row, reason in found.damaged.items():
            log.error("segment row %d of episode %s cannot be read back: %s", row, episode, reason)
        return history
