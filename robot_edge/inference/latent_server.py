"""The other end of a slow path: `think` in its own process, for the robot beside it or for several over the network."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import cv2
import msgspec
import numpy as np

from policies.interface.policy import Policy, check_observation
from robot_edge.inference.slow_path import think
from robot_edge.inference.verified_load import load_verified
from robot_edge.uplink.weights.subscriber import WeightSubscriber
from wire.clock import Clock, clock_name
from wire.errors import FleetError, InvalidDataError
from wire.identity.permissions import Port, may_send
from wire.messages import Message
from wire.messages.gateway import Hello, Rejection, ThinkVersions, VersionAvailable
from wire.messages.local import LoadWeights, ThinkReply, ThinkRequest
from wire.transport.channel import Channel, ServerChannel
from wire.types import Frame, Observation, PolicyVersion, Role
from wire.untrusted import MAX_PICTURE_PIXELS, picture_size

log = logging.getLogger(__name__)

_BESIDE = 2
"""versions that a robot's own process may have to think with: the one that acts, and the one that waits"""
_AT_ONCE = 500
"""messages of robots that are looked at before it thinks"""
_MOST_NAMED = 4


class LatentEncoder:
    """Several versions of a policy, side by side: robots that have not switched yet are still served."""

    def __init__(self, make_policy: Callable[[], Policy], most: int = _BESIDE) -> None:
        """`most`: versions at once; each takes a policy's memory."""
        self._make = make_policy
        self.most = most
        self._policies: dict[PolicyVersion, Policy] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions that are here, the newest load last."""
        return tuple(version.number for version in self._policies)

    def holds(self, version: PolicyVersion) -> bool:
        """Whether it is here."""
        return version in self._policies

    def load(self, version: PolicyVersion, path: Path, needed: Collection[int] = ()) -> bool:
        """Take `version`, whose weights lie at `path`, in beside those that are here; the oldest that is not `needed`
        makes room. What is here already is not read again. Weights that cannot be used are logged and change nothing.
        """
        if version in self._policies:
            self._policies[version] = self._policies.pop(version)
            return True
        # The oldest policy object takes the new weights; it is as it was when they cannot be used.
        oldest = next((known for known in self._policies if known.number == version.number), None)
        if oldest is None and len(self._policies) >= self.most:
            spare = (known for known in self._policies if known.number not in needed)
            oldest = next(spare, next(iter(self._policies)))
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
    """Thinks for several robots, whoever waits longest first, with all versions by which robots may act.

    They are fetched one after the other, the most wanted first. Of more than the encoder holds the last ones are left
    out, and robots that act by these are told so.
    """

    def __init__(
        self, name: str, robots: ServerChannel, gateway: Channel, encoder: LatentEncoder, weights: Path, clock: Clock
    ) -> None:
        """`robots`: where they connect. `weights`: a directory for the newest files."""
        self._robots = robots
        self._encoder = encoder
        hello = Hello(name, Role.thinker, clock_name(), 0)
        # One more file than versions: a robot's next one starts from it.
        self.subscriber = WeightSubscriber(hello, gateway, weights, clock, keep=encoder.most + 1, take=self._take)
        self._waiting: dict[str, ThinkRequest] = {}
        self._needed: tuple[int, ...] = ()
        """by which robots may act, the most wanted first"""
        self._left_out = ""
        """why some of them are not thought with, "" when all are"""
        self._offers: dict[int, VersionAvailable] = {}
        self._asked = 0
        """the version that was to be fetched last"""
        self.refused: Counter[str] = Counter()
        """messages of robots that are no question, by reason"""

    def poll(self) -> None:
        """Handle what is new, then think once if a robot waits."""
        self.subscriber.poll()
        self._follow()
        for robot, message in itertools.islice(iter(self._robots.recv, None), _AT_ONCE):
            if isinstance(message, ThinkRequest) and may_send(Port.think, self._robots.role(robot), message):
                # A newer question takes the place of the one that waits, not a later place in the row.
                self._waiting[robot] = message
            else:
                self.refused["role"] += 1
                kind = type(message).__name__
                self._robots.send(robot, Rejection(f"a think server takes no {kind}, and questions of robots alone."))
        if self._waiting:
            urgent = (robot for robot, request in self._waiting.items() if not request.can_wait)
            robot = next(urgent, next(iter(self._waiting)))
            reply = self._encoder.answer(request := self._waiting.pop(robot))
            if self._left_out and not set(request.versions) & set(self._needed[: self._encoder.most]):
                reply = msgspec.structs.replace(reply, error=self._left_out)
            self._robots.send(robot, reply)

    def _take(self, message: Message) -> bool:
        """What the gateway says of versions."""
        match message:
            case VersionAvailable(version=version):
                self._offers[version.number] = message
            case ThinkVersions(numbers=numbers):
                self._needed = numbers
                self._offers = {number: offer for number, offer in self._offers.items() if number in numbers}
                self._say_what_is_left_out()
            case _:
                return False
        return True

    def _say_what_is_left_out(self) -> None:
        most, before = self._encoder.most, self._left_out
        left_out, count = _words(self._needed[most:]), len(self._needed)
        self._left_out = ""
        if count > most:
            self._left_out = (
                f"robots may act by {count} versions at once, and this think server keeps {most}: version {left_out} "
                f"is not thought with. Start it with `--versions {count}` if its memory allows that, or end a pin, a "
                "trial or a shadow."
            )
        if self._left_out != before and self._left_out:
            log.error("%s", self._left_out)

    def _follow(self) -> None:
        """Load what has come, and have what is lacking fetched."""
        ready, needed = self.subscriber.ready, self._needed[: self._encoder.most]
        offers = {number: self._offers[number].version for number in needed if number in self._offers}
        lacking = [number for number, version in offers.items() if not self._encoder.holds(version)]
        if ready is not None and ready[0].number in lacking and ready[0] == offers[ready[0].number]:
            number = ready[0].number
            lacking.remove(number)
            if not self._encoder.load(*ready, needed):
                del self._offers[number]  # until it is announced again
        if not lacking:
            return
        if self._asked != lacking[0]:
            self._asked = lacking[0]
            self.subscriber.fetch(self._offers[self._asked])
        elif not self.subscriber.fetching:
            del self._offers[self._asked]  # it cannot be had: the log says why
            self._asked = 0


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
