"""Sends what lies in the spool: no more at once than the gateway gives credit for and the connection takes in a moment,
and again what was not answered."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from robot_edge.uplink.spool_index import SpooledEpisode, SpooledSegment, SpoolIndex
from wire.clock import Clock
from wire.messages import Message
from wire.messages.gateway import FIRST_CREDIT_BYTES
from wire.task_thread import Task, TaskQueue
from wire.transport.channel import Channel

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
_FIRST_TIMEOUT_NS = 5 * SECOND
_LEAST_TIMEOUT_NS, _MOST_TIMEOUT_NS = 1 * SECOND, 20 * SECOND
_BACKOFF_NS = 4 * SECOND
"""what is not answered is tried again at least so often, unless answers take longer: nobody waits for much more when a
database is back"""
_NO_CREDIT_NS = 5 * SECOND
"""without credit and without a word for so long: one segment goes, for the word may have been lost"""
_MOST_TRIES = 64
_FIRST_WINDOW, _LEAST_WINDOW, _MOST_WINDOW = 128 * 1024, 32 * 1024, 64 * 1024 * 1024
_WAITS_NS = SECOND // 2
"""what is sent waits no longer than this behind what was sent before it, so that the newest is never late"""
_POLL_NS = SECOND // 50
"""so long at most in one poll"""


class SegmentQueue(Protocol):
    """What lies on a disk to be sent: a robot's spool, or a relay's."""

    index: SpoolIndex
    sends_at_once: bool
    """what is put in now is sent soon"""

    def at_hand(self, episode: SpooledEpisode, segment: SpooledSegment) -> Message | None:
        """As `load`, for any thread, where it needs no disk."""
        ...

    def load(self, episode: SpooledEpisode, segment: SpooledSegment) -> Message | None:
        """What the index handed out, None if it is gone."""
        ...


class _Loaded(NamedTuple):
    """A segment that lies in the spool, in memory."""

    place: SpooledSegment
    message: Message


@dataclass(slots=True)
class _Sent:
    """A segment under way, kept so that nobody waits for the disk to send it again."""

    loaded: _Loaded
    first_ns: int
    """when it was sent first"""
    sent_ns: int
    """and last"""


class SegmentSender:
    """`poll` while the gateway is heard. Of an episode segments are sent in order; one that was lost comes again later.

    The window is what may be under way: within the gateway's credit, it grows while answers come soon and halves when
    they are late, so little lies in queues that what comes next, or a heartbeat, would have to wait behind.

    What the window has room for is read by tasks of `disk`, and sent when it is here.
    """

    def __init__(self, spool: SegmentQueue, disk: TaskQueue, gateway: Channel, clock: Clock) -> None:
        self._spool, self._disk, self._gateway, self._clock = spool, disk, gateway, clock
        self._under_way: dict[str, _Sent] = {}
        """by id, in the order of sending"""
        self._reading: dict[str, SpooledSegment] = {}
        """by id: the spool was asked for them"""
        self._reading_bytes = 0
        self._ready: dict[str, _Loaded] = {}
        """by id: come next, for they are read, or were under way when the connection was cut"""
        self.bytes_under_way = 0
        """sent and not answered"""
        self.resent = 0
        """segments that were sent once more without a cut"""
        self._credit = FIRST_CREDIT_BYTES
        self._credit_ns = 0
        self._window = _FIRST_WINDOW
        self._halved_ns = 0
        self._trip_ns = self._variation_ns = 0
        self._least_trip_ns = 0
        self._answered_ns = 0
        """when the newest of those was sent that are answered, of which there is no doubt what was answered"""
        self._timeout_ns = self._resend_ns = self._heard_again_ns = 0
        self._refused_ns = -1
        """when the gateway could not store something last"""
        self._tries = 1
        """so many of the overdue are sent again at once; it doubles while they are answered"""

    def on_connected(self, channel: Channel | None = None) -> None:
        """A gateway has let this robot in, perhaps another one: what was under way is sent again, in order and once.

        `channel`: by which it goes from now on, None: by the same."""
        self._gateway = channel or self._gateway
        again = {segment_id: sent.loaded for segment_id, sent in self._under_way.items()}
        self._ready = {**again, **self._ready}
        self._under_way.clear()
        self.bytes_under_way = 0
        self._least_trip_ns = 0
        self._credit, self._credit_ns = FIRST_CREDIT_BYTES, self._clock.now_ns()
        self.on_heard_again()

    def on_heard_again(self) -> None:
        """The gateway was silent: what it has not answered yet may still be answered."""
        self._heard_again_ns, self._timeout_ns = self._clock.now_ns(), 0
        self._window = min(self._window, _FIRST_WINDOW)

    def on_credit(self, credit_bytes: int) -> None:
        """So much may be under way from now on."""
        self._credit, self._credit_ns = max(0, credit_bytes), self._clock.now_ns()

    def on_answer(self, ids: tuple[str, ...]) -> None:
        """These need not be sent any more."""
        now_ns = self._clock.now_ns()
        for segment_id in ids:
            self._pop_reading(segment_id)
            self._ready.pop(segment_id, None)
            if (sent := self._under_way.pop(segment_id, None)) is None:
                continue
            self._timeout_ns = 0
            # A stall says nothing of how long answers take.
            trip_ns = now_ns - max(sent.first_ns, self._heard_again_ns)
            if sent.sent_ns == sent.first_ns:
                self._answered_ns = max(self._answered_ns, sent.sent_ns)
                self._measure(trip_ns, sent.loaded.place.size, now_ns)
            else:
                if self._refused_ns < sent.first_ns:
                    # Answers take longer than was thought.
                    self._trip_ns = max(self._trip_ns, trip_ns)
                self._tries = min(_MOST_TRIES, 2 * self._tries)
            self.bytes_under_way -= sent.loaded.place.size

    def on_refused(self) -> None:
        """Something that is under way could not be stored, and has to come again."""
        self._refused_ns = self._clock.now_ns()

    def poll(self) -> None:
        """Send what may be sent now."""
        started_ns = now_ns = self._clock.now_ns()
        if self._under_way and self._may_try(now_ns):
            self._resend(now_ns)
        while now_ns - started_ns < _POLL_NS and self._send_next(now_ns):
            now_ns = self._clock.now_ns()
        idle = not (self._ready or self._reading) and self._spool.index.next() is None
        self._spool.sends_at_once = idle and self._may_send(0, now_ns)

    def pause(self) -> None:
        """Nothing can be sent now."""
        self._spool.sends_at_once = False

    # --- inside -------------------------------------------------------------------------------------------------

    def _send_next(self, now_ns: int) -> bool:
        """Whether something was sent or asked for, and there may be more."""
        if not self._ready:
            return self._read_next(now_ns)
        segment_id, loaded = next(iter(self._ready.items()))
        if not self._may_send(loaded.place.size, now_ns) or not self._send(segment_id, loaded, now_ns):
            return False
        del self._ready[segment_id]
        return True

    def _read_next(self, now_ns: int) -> bool:
        """Have the next one read that may be sent; whether there is one."""
        found = self._spool.index.pop(lambda size: self._may_send(size, now_ns))
        if found is None:
            return False
        episode, place = found
        segment_id = f"{episode.id}/{place.number}"
        # Behind what is being read, for of an episode order is kept.
        if not self._reading and (message := self._spool.at_hand(episode, place)) is not None:
            self._ready[segment_id] = _Loaded(place, message)
            return True
        self._reading[segment_id] = place
        self._reading_bytes += place.size
        on_read = partial(self._on_read, segment_id)
        self._disk.submit(Task(partial(self._spool.load, episode, place), on_read, self._on_failed))
        self._disk.poll()
        return True

    def _on_read(self, segment_id: str, message: Message | None) -> None:
        place = self._pop_reading(segment_id)
        # Dropped, or acknowledged to an earlier process, while it was read.
        if place is not None and message is not None:
            self._ready[segment_id] = _Loaded(place, message)

    def _on_failed(self, error: Exception) -> None:
        """What cannot be read is not sent, and must not be lost from sight: whoever starts this process tries again."""
        raise error

    def _pop_reading(self, segment_id: str) -> SpooledSegment | None:
        if (place := self._reading.pop(segment_id, None)) is not None:
            self._reading_bytes -= place.size
        return place

    def _send(self, segment_id: str, loaded: _Loaded, now_ns: int) -> bool:
        """False when the connection does not take it."""
        if not self._gateway.send(loaded.message):
            return False
        before = self._under_way.pop(segment_id, None)
        if before is None:
            self.bytes_under_way += loaded.place.size
        self._under_way[segment_id] = _Sent(loaded, before.first_ns if before else now_ns, now_ns)
        return True

    def _may_send(self, size: int, now_ns: int) -> bool:
        if taken := self.bytes_under_way + self._reading_bytes:
            return taken + size <= min(self._credit, self._window)
        return self._may_try(now_ns)

    def _may_try(self, now_ns: int) -> bool:
        """Whether a single segment may go, however large it is."""
        return self._credit > 0 or now_ns - self._credit_ns > _NO_CREDIT_NS

    def _resend(self, now_ns: int) -> None:
        """What is overdue, when something that was sent later is answered. Else only the first, and ever more rarely,
        for the gateway cannot store now, or is slow; more of them at once while such are answered."""
        timeout_ns, tries = self._usual_timeout_ns(), 0
        backoff_ns = max(timeout_ns, min(_BACKOFF_NS, 2 * self._timeout_ns))
        if now_ns - max(self._resend_ns, self._heard_again_ns) > self._timeout_ns:
            if self._timeout_ns:
                # Nothing was answered since the last try.
                self._tries = 1
            tries = self._tries
        for segment_id, sent in list(self._under_way.items()):
            if now_ns - max(sent.sent_ns, self._heard_again_ns) <= timeout_ns:
                return
            if self._answered_ns <= sent.sent_ns:
                if not tries:
                    continue
                tries -= 1
                self._timeout_ns, self._resend_ns = backoff_ns, now_ns
            if not self._send(segment_id, sent.loaded, now_ns):
                return
            self.resent += 1

    def _usual_timeout_ns(self) -> int:
        if not self._trip_ns:
            return _FIRST_TIMEOUT_NS
        return min(_MOST_TIMEOUT_NS, max(_LEAST_TIMEOUT_NS, self._trip_ns + 4 * self._variation_ns))

    def _measure(self, trip_ns: int, size: int, now_ns: int) -> None:
        """A segment was answered `trip_ns` after it was sent, for the first time."""
        if self._trip_ns:
            self._variation_ns += (abs(trip_ns - self._trip_ns) - self._variation_ns) // 4
            self._trip_ns += (trip_ns - self._trip_ns) // 8
        else:
            self._trip_ns, self._variation_ns = max(1, trip_ns), trip_ns // 2
        self._least_trip_ns = min(self._least_trip_ns or trip_ns, trip_ns)
        if trip_ns > self._least_trip_ns + _WAITS_NS:
            if now_ns - self._halved_ns > trip_ns:
                self._window, self._halved_ns = max(_LEAST_WINDOW, self._window // 2), now_ns
        elif 2 * self.bytes_under_way >= self._window:
            self._window = min(_MOST_WINDOW, self._window + size)
