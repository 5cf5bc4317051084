"""Passes chunks of policy versions on to the robots of a site, while they come: its uplink carries each about once.

It knows chunks by their hash, which robots ask for, and hands out nothing else. What it says is believed by nobody:
announcements, and which chunks a version has, come from the gateway itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, OrderedDict
from typing import NamedTuple

from wire.clock import Clock
from wire.messages.gateway import FetchWeights, Rejection, WeightBytes
from wire.transport.channel import Channel, ServerChannel
from wire.weights.manifest import CHUNK_BYTES, HASH_BYTES

log = logging.getLogger(__name__)

CACHE_BYTES = 512 * 1024 * 1024
_UNDER_WAY = 4
"""chunks: more than a round trip takes, on a line of a hundred megabits"""
_TIMEOUT_NS = 8_000_000_000
_WAITING = 64
"""parts that one robot waits for, several times what it asks for at once"""
_PART_BYTES = 1024 * 1024


class _Wanted(NamedTuple):
    """A chunk by where the gateway has it."""

    number: int
    delta: bool
    offset: int
    """of its first byte"""
    sha256: bytes


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
        self._waiting: OrderedDict[_Wanted, list[tuple[str, FetchWeights]]] = OrderedDict()
        """who waits for a chunk that is not here, the longest first"""
        self._under_way: dict[_Wanted, int] = {}
        """when it was asked for"""
        self._counts: Counter[str] = Counter()

    def on_request(self, robot: str, message: FetchWeights) -> None:
        """A robot asks for part of a chunk."""
        within = message.offset % CHUNK_BYTES
        sound = message.offset >= 0 and 0 < message.size <= CHUNK_BYTES - within and message.number > 0
        if not sound or len(message.chunk) != HASH_BYTES:
            self.refused["impossible_part"] += 1
            self._robots.send(robot, Rejection("a part is asked for by its chunk's hash and lies within it."))
            return
        if (chunk := self._chunks.get(message.chunk)) is not None:
            self._chunks.move_to_end(message.chunk)
            self._answer(robot, message, chunk)
            return
        if self._counts[robot] >= _WAITING:
            self.refused["too_often"] += 1
            return
        self._counts[robot] += 1
        wanted = _Wanted(message.number, message.delta, message.offset - within, message.chunk)
        self._waiting.setdefault(wanted, []).append((robot, message))

    def _answer(self, robot: str, asked: FetchWeights, chunk: bytes) -> None:
        within = asked.offset % CHUNK_BYTES
        data = chunk[within : within + asked.size]
        if data:
            self.served_bytes += len(data)
            self._robots.send(robot, WeightBytes(asked.number, asked.offset, data, asked.delta))

    def on_refused(self, reason: str) -> None:
        """What was asked for is not there: whoever waits asks the gateway, which says why."""
        log.warning("the gateway refuses a chunk: %s", reason)
        for wanted in list(self._under_way):
            self._forget(wanted)

    def on_chunk(self, message: WeightBytes) -> None:
        """The gateway has sent one."""
        place = message.number, message.delta, message.offset
        wanted = next((one for one in self._under_way if one[:3] == place), None)
        if wanted is None:
            return
        self.fetched_bytes += len(message.data)
        robots = self._forget(wanted)
        if hashlib.sha256(message.data).digest() != wanted.sha256:
            self.refused["wrong_chunk"] += 1
            log.error("a chunk of version %d is not the one that %d robots asked for.", message.number, len(robots))
            return
        self._keep(wanted.sha256, message.data)
        for robot, asked in robots:
            self._answer(robot, asked, message.data)

    def poll(self, may_ask: bool) -> None:
        """Fetch what robots wait for, if the gateway may be asked."""
        now_ns = self._clock.now_ns()
        for wanted in [one for one, at_ns in self._under_way.items() if now_ns - at_ns > _TIMEOUT_NS]:
            self._forget(wanted)
        for wanted in self._waiting:
            if len(self._under_way) >= _UNDER_WAY or not may_ask:
                return
            if wanted not in self._under_way:
                asked = FetchWeights(wanted.number, wanted.offset, _PART_BYTES, wanted.delta, wanted.sha256)
                if not self._gateway.send(asked):
                    return
                self._under_way[wanted] = now_ns

    def _forget(self, wanted: _Wanted) -> list[tuple[str, FetchWeights]]:
        """Nobody waits for this chunk any more; those who did."""
        self._under_way.pop(wanted, None)
        robots = self._waiting.pop(wanted, [])
        for robot, _ in robots:
            self._counts[robot] -= 1
            if self._counts[robot] <= 0:
                del self._counts[robot]
        return robots

    def _keep(self, sha256: bytes, chunk: bytes) -> None:
        self._chunks[sha256] = chunk
        self._held_bytes += len(chunk)
        while self._held_bytes > self._cache_bytes and len(self._chunks) > 1:
            _, oldest = self._chunks.popitem(last=False)
            self._held_bytes -= len(oldest)
