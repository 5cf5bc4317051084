"""Passes chunks of policy versions on to the robots of a site, while they come: its uplink carries each about once.

It knows chunks by their hash, which robots ask for, and hands out nothing else. What it says is believed by nobody:
announcements, and which chunks a version has, come from the gateway itself.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from robot_edge.uplink.weights.window import MOST_UNDER_WAY, RequestWindow
from wire.clock import Clock
from wire.messages.gateway import FetchWeights, Rejection, WeightBytes
from wire.transport.channel import Channel, ServerChannel
from wire.weights.manifest import CHUNK_BYTES, HASH_BYTES

log = logging.getLogger(__name__)

CACHE_BYTES = 512 * 1024 * 1024
_TIMEOUT_NS = 6_000_000_000
"""a chunk of which nothing comes for so long does not come; robots are told before their own patience ends"""
_FIRST_WINDOW_BYTES = 32 * 1024
"""on a line of which nothing is known: a second's worth of a slow one"""
_LEAST_PARTS = 2
"""under way, that the line is not empty between two"""
_WAITING = 64
"""parts that one robot waits for, several times what it asks for at once"""


class _Wanted(NamedTuple):
    """A chunk by where the gateway has it."""

    number: int
    delta: bool
    offset: int
    """of its first byte"""
    size: int
    sha256: bytes


@dataclass(slots=True)
class _Coming:
    """What is here of a chunk."""

    data: bytearray = field(default_factory=bytearray)
    asked: int = 0
    """bytes of it that were asked for"""
    under_way: deque[tuple[int, int]] = field(default_factory=deque)
    """where in it each part begins that was asked for, and when that was"""
    progress_ns: int = 0
    """when a part came last, or was asked for with none under way"""
    turn: int = 0
    """grows with each part of any chunk that is asked for"""

    def ask_again(self) -> None:
        """For what is under way and may be lost."""
        self.under_way.clear()
        self.asked = len(self.data)

    def add(self, data: bytes, now_ns: int) -> int:
        """When what has come was asked for."""
        self.data += data
        self.asked = max(self.asked, len(self.data))
        self.progress_ns = asked_ns = now_ns
        while self.under_way and self.under_way[0][0] < len(self.data):
            _, asked_ns = self.under_way.popleft()
        return asked_ns


class ChunkRelay:
    """`poll` is called in a loop."""

    def __init__(
        self,
        robots: ServerChannel,
        gateway: Channel,
        clock: Clock,
        refused: Counter[str],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`robots`: where they connect; `refused`: what came and is nothing, by reason; `cache_bytes`: of chunks that
        are kept, those that were asked for last."""
        self.refused = refused
        self.served_bytes = self.fetched_bytes = 0
        self._robots, self._gateway, self._clock, self._cache_bytes = robots, gateway, clock, cache_bytes
        self._chunks: OrderedDict[bytes, bytes] = OrderedDict()
        self._held_bytes = 0
        self._queues: dict[str, deque[tuple[_Wanted, FetchWeights]]] = {}
        """what each robot waits for; it is answered in this order, for it takes parts in no other"""
        self._coming: dict[_Wanted, _Coming] = {}
        self._window = RequestWindow()
        self._window.size_bytes = _FIRST_WINDOW_BYTES
        self._turn = 0
        self._heard, self._heard_ns = False, clock.now_ns()
        """whether the gateway was heard lately, and when it was last"""

    def on_request(self, robot: str, message: FetchWeights) -> None:
        """A robot asks for part of a chunk."""
        within = message.offset % CHUNK_BYTES
        sound = message.offset >= 0 and message.size > 0 and message.number > 0
        if (
            not (sound and within + message.size <= message.chunk_bytes <= CHUNK_BYTES)
            or len(message.chunk) != HASH_BYTES
        ):
            self.refused["impossible_part"] += 1
            text = "a part is asked for by its chunk's hash and size, and lies within it."
            self._robots.send(robot, Rejection(text, message))
            return
        queue = self._queues.setdefault(robot, deque())
        if len(queue) >= _WAITING:
            self.refused["too_often"] += 1
            return
        wanted = _wanted(message)
        queue.append((wanted, message))
        if wanted.sha256 not in self._chunks:
            self._coming.setdefault(wanted, _Coming())

    def on_refused(self, request: FetchWeights, reason: str) -> None:
        """What was asked for is not there."""
        coming = self._coming.get(wanted := _wanted(request))
        if coming is not None and coming.under_way:
            self._refuse(wanted, f"the gateway refuses the relay a chunk of version {request.number}: {reason}")

    def on_chunk(self, message: WeightBytes) -> None:
        """The gateway has sent a part of one."""
        within, now_ns = message.offset % CHUNK_BYTES, self._clock.now_ns()
        place = message.number, message.delta, message.offset - within
        found = [
            (wanted, coming)
            for wanted, coming in self._coming.items()
            if wanted[:3] == place and len(coming.data) == within < coming.asked
        ]
        if found:
            self.fetched_bytes += len(message.data)
        for wanted, coming in found:
            self._window.adapt(coming.add(message.data, now_ns), now_ns, len(message.data))
            if len(coming.data) >= wanted.size:
                self._on_whole(wanted, bytes(coming.data))

    def poll(self, heard: bool) -> None:
        """Fetch what robots wait for, and hand it out. `heard`: whether the gateway is there and was heard lately."""
        now_ns = self._clock.now_ns()
        if heard:
            self._heard_ns = now_ns
            if not self._heard:
                for coming in self._coming.values():
                    coming.ask_again()
        self._heard = heard
        earliest_ns = now_ns - _TIMEOUT_NS
        silent = self._heard_ns < earliest_ns
        for wanted, coming in list(self._coming.items()):
            if silent or (coming.under_way and coming.progress_ns < earliest_ns):
                self._refuse(wanted, "the gateway does not answer the relay.")
        if heard and self._coming:
            self._ask(now_ns)
        for robot in list(self._queues):
            self._serve(robot)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _ask(self, now_ns: int) -> None:
        """As much as the line may have under way: of the chunks that robots wait for next in turn, then of others."""
        parts = sum(len(coming.under_way) for coming in self._coming.values())
        size = sum(coming.asked - len(coming.data) for coming in self._coming.values())
        next_ones = {queue[0][0] for queue in self._queues.values() if queue}
        while parts < MOST_UNDER_WAY:
            most = self._window.part_bytes
            if parts >= _LEAST_PARTS and size + most > self._window.size_bytes:
                return
            unasked = [one for one in self._coming.items() if one[1].asked < one[0].size]
            if not unasked:
                return
            wanted, coming = min(unasked, key=lambda one: one[1].turn if one[0] in next_ones else math.inf)
            at, most = coming.asked, min(most, wanted.size - coming.asked)
            number, delta, begin, whole, sha256 = wanted
            if not self._gateway.send(FetchWeights(number, begin + at, most, delta, sha256, whole)):
                return
            if not coming.under_way:
                coming.progress_ns = now_ns
            coming.under_way.append((at, now_ns))
            coming.asked += most
            self._turn = coming.turn = self._turn + 1
            parts, size = parts + 1, size + most

    def _serve(self, robot: str) -> None:
        """Hand out what it waits for, as far as that is here."""
        queue = self._queues[robot]
        while queue:
            wanted, asked = queue[0]
            if (chunk := self._find(wanted, asked)) is None:
                return
            queue.popleft()
            self._answer(robot, asked, chunk)
        del self._queues[robot]

    def _find(self, wanted: _Wanted, asked: FetchWeights) -> bytes | bytearray | None:
        """The chunk, or so much of its beginning that the part is in it."""
        if (chunk := self._chunks.get(wanted.sha256)) is not None:
            self._chunks.move_to_end(wanted.sha256)
            return chunk
        # It may have been here when it was asked for, and have made room for others.
        data = self._coming.setdefault(wanted, _Coming()).data
        end = asked.offset - wanted.offset + asked.size
        # The last bytes are handed out once all of it is known to be right: a robot would blame the relay.
        return data if end <= len(data) and end < wanted.size else None

    def _answer(self, robot: str, asked: FetchWeights, chunk: bytes | bytearray) -> None:
        within = asked.offset % CHUNK_BYTES
        data = bytes(chunk[within : within + asked.size])
        if data:
            self.served_bytes += len(data)
            self._robots.send(robot, WeightBytes(asked.number, asked.offset, data, asked.delta))

    def _on_whole(self, wanted: _Wanted, chunk: bytes) -> None:
        if hashlib.sha256(chunk).digest() != wanted.sha256:
            self.refused["wrong_chunk"] += 1
            self._refuse(wanted, f"a chunk of version {wanted.number} is not the one that was asked for.")
            return
        del self._coming[wanted]
        self._held_bytes += len(chunk) - len(self._chunks.get(wanted.sha256, b""))
        self._chunks[wanted.sha256] = chunk
        while self._held_bytes > self._cache_bytes and len(self._chunks) > 1:
            _, oldest = self._chunks.popitem(last=False)
            self._held_bytes -= len(oldest)

    def _refuse(self, wanted: _Wanted, reason: str) -> None:
        """Whoever waits for this chunk asks the gateway itself."""
        del self._coming[wanted]
        told: set[str] = set()
        for robot, queue in self._queues.items():
            for entry in [one for one in queue if one[0] == wanted]:
                queue.remove(entry)
                self._robots.send(robot, Rejection(reason, entry[1]))
                told.add(robot)
        log.warning("%d robots are told to ask the gateway: %s", len(told), reason)


def _wanted(request: FetchWeights) -> _Wanted:
    """The chunk that it asks for part of."""
    begin = request.offset - request.offset % CHUNK_BYTES
    return _Wanted(request.number, request.delta, begin, request.chunk_bytes, request.chunk)
