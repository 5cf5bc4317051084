"""The inference process: slow `think`, fast `act`, weights swapped whole between two of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from policies.base import Policy
from wire.channel import Channel
from wire.clock import Clock
from wire.errors import FleetError
from wire.messages import Applied, ChunkReply, ChunkRequest, Hello, LoadWeights
from wire.types import Latent

log = logging.getLogger(__name__)


class Inference:
    """Answers the newest chunk request; older ones that pile up are stale and skipped."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        control: Channel,
        uplink: Channel,
        clock: Clock,
        think_every_s: float = 0.0,
        read: Callable[[str], bytes] = lambda path: Path(path).read_bytes(),
    ) -> None:
        """`think_every_s`: pace of the slow path; 0 thinks once per new frame that is asked about."""
        self._name = name
        self._policy = policy
        self._control = control
        self._uplink = uplink
        self._clock = clock
        self._think_every_ns = int(think_every_s * 1e9)
        self._read = read
        self._latent: Latent | None = None
        self._task = ""

    def hello(self) -> None:
        """Tell the uplink that this process is new and has no weights."""
        self._uplink.send(Hello(self._name, "inference", "", self._clock.now_ns(), os.getpid()))

    def turn(self) -> None:
        while (message := self._uplink.recv()) is not None:
            if isinstance(message, LoadWeights):
                self._load(message)
        request = None
        while (message := self._control.recv()) is not None:
            if isinstance(message, ChunkRequest):
                request = message
        if request is not None:
            self._answer(request)

    def _load(self, message: LoadWeights) -> None:
        number = message.version.number
        try:
            self._policy.load(self._read(message.path), number)
        except (FleetError, OSError) as error:
            log.error(
                "robot '%s' stays on version %d: version %d: %s",
                self._name,
                self._policy.version,
                number,
                error,
            )
            return
        self._latent = None
        self._uplink.send(Applied(self._name, number, self._clock.now_ns()))

    def _answer(self, request: ChunkRequest) -> None:
        if self._policy.version == 0:
            self._control.send(ChunkReply(None, "no policy version is loaded yet."))
            return
        observation = request.observation
        try:
            latent = self._latent
            seen_ns = max((frame.time_ns for frame in observation.images.values()), default=observation.time_ns)
            due = (
                latent is None or seen_ns - latent.observed_ns > self._think_every_ns or observation.task != self._task
            )
            if latent is None or due:
                latent = self._latent = self._policy.think(observation)
                self._task = observation.task
            chunk = self._policy.act(observation, latent, request.tick)
        except FleetError as error:
            self._control.send(ChunkReply(None, str(error)))
            return
        self._control.send(ChunkReply(chunk))
