"""Injects latency into any run: how would a robot do with a slower model or line?

`parse_delay` reads what `--delay` takes:

| text | meaning, in control ticks |
|---|---|
| `4` | every answer comes 4 ticks after its request, or later if it is late by itself |
| `random:2-8` | drawn evenly from 2 to 8 for each request |
| `burst:2,12,0.05` | 2, but one request in 20 begins a burst of 10 answers that take 12 |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from wire.clock import Clock
from wire.errors import ConfigError
from wire.messages import Message
from wire.messages.local import ChunkReply, ChunkRequest
from wire.transport.channel import Channel

_BURST = 10
_LONGEST = 10_000
_SLACK = 0.25
"""of a period"""


Delay = Iterator[int]
"""how many ticks each answer takes at least, one after the other"""


def parse_delay(text: str, seed: int = 0) -> Delay:
    """The delay that `text` describes. Raises `ConfigError` that says what is understood."""
    kind, _, values = text.partition(":")
    try:
        match kind:
            case "random":
                low, high = (int(value) for value in values.split("-"))
                if 0 <= low <= high <= _LONGEST:
                    return _random(low, high, seed)
            case "burst":
                usual, long, share = values.split(",")
                if 0 <= int(usual) <= int(long) <= _LONGEST and 0 <= float(share) <= 1:
                    return _bursts(int(usual), int(long), float(share), seed)
            case _:
                if 0 <= int(text) <= _LONGEST:
                    return repeat(int(text))
    except ValueError:
        pass
    raise ConfigError(
        f"delay '{text}': give control ticks as `4`, as `random:2-8`, or as `burst:2,12,0.05` (usual, long, share of "
        f"requests that begin a burst); at most {_LONGEST}."
    )


def _random(low: int, high: int, seed: int) -> Delay:
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(low, high + 1))


def _bursts(usual: int, long: int, share: float, seed: int) -> Delay:
    rng = np.random.default_rng(seed)
    while True:
        if rng.random() < share:
            yield from repeat(long, _BURST)
        else:
            yield usual


class DelayedChannel:
    """The control loop's line to inference, with answers held back for so many control periods."""

    def __init__(self, channel: Channel, delay: Delay, period_ns: int, clock: Clock) -> None:
        self._channel = channel
        self._delay = delay
        self._period_ns = period_ns
        self._clock = clock
        self._due_ns: dict[int, int] = {}
        self._held: deque[ChunkReply] = deque()

    def send(self, message: Message) -> bool:
        if not self._channel.send(message):
            return False
        if isinstance(message, ChunkRequest):
            if len(self._due_ns) > 1000:  # of requests nobody answered
                self._due_ns.clear()
            # A little less: a request leaves within its tick, and the answer is looked for at the start of one, and
            # once more late in it where commands wait (`LoopConfig.write_after_s`).
            ticks = next(self._delay)
            self._due_ns[message.tick] = self._clock.now_ns() + round((ticks - _SLACK) * self._period_ns)
        return True

    def recv(self) -> Message | None:
        """The next message that is due. Answers stay in order: a quick one waits for a slow one before it."""
        while (message := self._channel.recv()) is not None:
            if not isinstance(message, ChunkReply):
                return message
            self._held.append(message)
        if not self._held or self._clock.now_ns() < self._due_ns.get(self._held[0].tick, 0):
            return None
        reply = self._held.popleft()
        self._due_ns.pop(reply.tick, None)
        return reply

    def close(self) -> None:
        self._channel.close()
