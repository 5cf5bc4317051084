"""What the inference process gives the shadow process: now and then a chunk that acts, and what it was made from."""

from __future__ import annotations

import logging

import msgspec

from robot_edge.inference.slow_path import StampedLatent
from wire.errors import MessageTooLargeError
from wire.messages.local import ChunkReply, ChunkRequest, ChunkSample, SampleRequest
from wire.transport.channel import Channel
from wire.transport.frame_ring import intact, without_previews
from wire.types import Observation

log = logging.getLogger(__name__)


class ShadowTap:
    """Gives one sample for each request; without a request it costs a look at the channel."""

    def __init__(self, channel: Channel) -> None:
        """`channel`: to the shadow process. Nothing but requests for samples is taken from it."""
        self._channel = channel
        self._wanted, self._fits = False, True

    def offer(self, request: ChunkRequest, reply: ChunkReply, thought: StampedLatent) -> None:
        """`reply`, which has gone out, was made for `request` from `thought`."""
        while (message := self._channel.recv()) is not None:
            self._wanted |= self._fits and isinstance(message, SampleRequest)
        if not self._wanted or reply.chunk is None or not intact(thought.observation):
            return
        seen = request.observation
        bare = msgspec.structs.replace(request, observation=Observation(seen.time_ns, seen.state, {}, seen.task))
        sample = ChunkSample(without_previews(thought.observation), bare, reply.chunk)
        try:
            self._wanted = not self._channel.send(sample)
        except MessageTooLargeError as error:
            # Its frames lie in no ring: no other one will fit either.
            log.error("no chunk can be compared: %s", error)
            self._fits = self._wanted = False
