"""The other end of a slow path: `think` in its own process, for the robot beside it or for several over the network."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from policies.interface.policy import Policy, check_observation
from robot_edge.inference.slow_path import think
from robot_edge.inference.verified_load import load_verified
from robot_edge.uplink.weights.subscriber import WeightSubscriber
from wire.clock import Clock, clock_name
from wire.errors import FleetError, InvalidDataError
from wire.identity.permissions import Port, may_send
from wire.messages.gateway import Hello, Rejection
from wire.messages.local import LoadWeights, ThinkReply, ThinkRequest
from wire.transport.channel import Channel, ServerChannel
from wire.types import Frame, Observation, PolicyVersion, Role
from wire.untrusted import MAX_PICTURE_PIXELS, picture_size

log = logging.getLogger(__name__)

_VERSIONS = 2
_AT_ONCE = 500
"""messages of robots that are looked at before it thinks"""
_MOST_NAMED = 4


class LatentEncoder:
    """The newest versions of a policy, side by side: robots that have not switched yet are still served."""

    def __init__(self, make_policy: Callable[[], Policy]) -> None:
        self._make = make_policy
        self._policies: dict[PolicyVersion, Policy] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions that are here, the newest load last."""
        return tuple(version.number for version in self._policies)

    def load(self, version: PolicyVersion, path: Path) -> bool:
        """Take `version`, whose weights lie at `path`, in beside those that are here; the oldest
        makes room. What is here already is not read again. Weights that cannot be used are logged and change nothing.
        """
        if version in self._policies:
            self._policies[version] = self._policies.pop(version)
            return True
        # The oldest policy object takes the new weights; it is as it was when they cannot be used.
        full = len(self._policies) >= _VERSIONS
        oldest = next((known for known in self._policies if known.number == version.number), None)
        if oldest is None and full:
            oldest = next(iter(self._policies))
        policy = self._make() if oldest is None else self._policies[oldest]
        try:
            load_verified(policy, version, path)
        except (FleetError, OSError) as error:
            log.error("version %d is not thought with: %s", version.number, error)
            if oldest is not None and policy.version != oldest.number:
                del self._policies[oldest]  # neither of them
            return False
        if oldest is not None:
            del self._policies[oldest]
        self._policies[version] = policy
        return True

    def answer(self, request: ThinkRequest) -> ThinkReply:
        """The latent for `request`, or the reason why there is none."""
        there = {version.number: policy for version, policy in self._policies.items()}
        wanted = next((number for number in request.versions if number in there), None)
        if wanted is None:
            reason = f"asked to think with version {_words(request.versions)}, but has {_words(self.versions)}."
            return ThinkReply(request.number, None, self.versions, reason)
        policy = there[wanted]
        try:
            observation = _decoded(request)
            check_observation(policy.spec, observation)
            thought = think(policy, observation)
        except FleetError as error:
            return ThinkReply(request.number, None, self.versions, str(error))
        except Exception as error:
            # One robot's picture must not end the server of all.
            log.exception("a policy of version %d failed.", wanted)
            return ThinkReply(request.number, None, self.versions, f"the policy failed: {error!r}")
        return ThinkReply(request.number, thought.latent, self.versions)


class LatentWorker:
    """Thinks for one robot beside its inference process, which tells it what to load."""

    def __init__(self, channel: Channel, encoder: LatentEncoder) -> None:
        self._channel = channel
        self._encoder = encoder

    def poll(self) -> None:
        """Load what is new, then think about the newest observation; older ones that pile up are stale."""
        request = None
        while (message := self._channel.recv()) is not None:
            if isinstance(message, LoadWeights):
                self._encoder.load(message.version, Path(message.path))
            elif isinstance(message, ThinkRequest):
                request = message
        if request is not None:
            self._channel.send(self._encoder.answer(request))


class LatentServer:
    """Thinks for several robots, whoever waits longest first; follows the gateway's versions as an evaluator does."""

    def __init__(
        self, name: str, robots: ServerChannel, gateway: Channel, encoder: LatentEncoder, weights: Path, clock: Clock
    ) -> None:
        """`robots`: where they connect. `weights`: a directory for the newest files."""
        self._robots = robots
        self._encoder = encoder
        hello = Hello(name, Role.thinker, clock_name(), 0)
        self.subscriber = WeightSubscriber(hello, gateway, weights, clock)
        self._waiting: dict[str, ThinkRequest] = {}
        self._loaded: tuple[PolicyVersion, Path] | None = None
        self.refused: Counter[str] = Counter()
        """messages of robots that are no question, by reason"""

    def poll(self) -> None:
        """Handle what is new, then think once if a robot waits."""
        self.subscriber.poll()
        if (ready := self.subscriber.ready) is not None and ready != self._loaded:
            self._loaded = ready
            self._encoder.load(*ready)
        for robot, message in itertools.islice(iter(self._robots.recv, None), _AT_ONCE):
            if isinstance(message, ThinkRequest) and may_send(Port.think, self._robots.role(robot), message):
                # A newer question takes the place of the one that waits, not a later place in the row.
                self._waiting[robot] = message
            else:
                self.refused["role"] += 1
                kind = type(message).__name__
                self._robots.send(robot, Rejection(f"a think server takes no {kind}, and questions of robots alone."))
        if self._waiting:
            robot = next(iter(self._waiting))
            self._robots.send(robot, self._encoder.answer(self._waiting.pop(robot)))


def _decoded(request: ThinkRequest) -> Observation:
    """The observation with its images. Raises `InvalidDataError` for bytes that are no picture."""
    seen = request.observation
    if not request.jpeg:
        return seen
    images = dict(seen.images)
    for camera, data in request.jpeg.items():
        if camera not in images:
            raise InvalidDataError(f"a picture of camera '{camera}' without its time.")
        # what a picture claims to be is allocated before it is decoded
        size = picture_size(data)
        if size is None or not 0 < math.prod(size) <= MAX_PICTURE_PIXELS:
            raise InvalidDataError(f"the picture of camera '{camera}' is no JPEG of a size that is decoded.")
        try:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error:
            pixels = None
        if pixels is None:
            raise InvalidDataError(f"the picture of camera '{camera}' is no JPEG.")
        images[camera] = Frame(images[camera].time_ns, cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))
    return Observation(seen.time_ns, seen.state, images, seen.task)


def _words(versions: tuple[int, ...]) -> str:
    more = " or others" if len(versions) > _MOST_NAMED else ""
    return " or ".join(map(str, versions[:_MOST_NAMED])) + more if versions else "none"
