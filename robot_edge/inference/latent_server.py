"""The other end of a slow path: `think` in its own process, for the robot beside it or for several over the network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from policies.interface.policy import Policy, check_observation
from robot_edge.inference.latent_encoder import think
from robot_edge.uplink.weight_subscriber import WeightSubscriber
from wire.clock import Clock
from wire.errors import FleetError, InvalidDataError
from wire.messages.all import (
    LoadWeights,
    Rejection,
    ThinkReply,
    ThinkRequest,
)
from wire.transport.channel import Channel, ServerChannel
from wire.types import Frame, Observation, PolicyVersion, Role

log = logging.getLogger(__name__)


class LatentEncoder:
    """The newest versions of a policy, side by side: robots that have not switched yet are still served."""

    def __init__(self, make_policy: Callable[[], Policy], keep: int = 2) -> None:
        """`keep` versions, at least 2."""
        self._make = make_policy
        self._keep = keep
        self._policies: dict[PolicyVersion, Policy] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions that are here, the newest load last."""
        return tuple(version.number for version in self._policies)

    def load(self, version: PolicyVersion, weights: Callable[[], bytes]) -> bool:
        """Take `version` in beside those that are here; the oldest makes room. What is here already is not read again.

        Weights that cannot be used are logged and change nothing.
        """
        if version in self._policies:
            self._policies[version] = self._policies.pop(version)
            return True
        # The oldest policy object takes the new weights; it is as it was when they cannot be used.
        full = len(self._policies) >= self._keep
        oldest = next((known for known in self._policies if known.number == version.number), None)
        if oldest is None and full:
            oldest = next(iter(self._policies))
        policy = self._make() if oldest is None else self._policies[oldest]
        try:
            policy.load(weights(), version.number)
        except (FleetError, OSError) as error:
            log.error("version %d is not thought with: %s", version.number, error)
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

    def __init__(self, line: Channel, thinker: LatentEncoder, read: Callable[[str], bytes] | None = None) -> None:
        self._line = line
        self._thinker = thinker
        self._read = read or (lambda path: Path(path).read_bytes())

    def turn(self) -> None:
        """Load what is new, then think about the newest observation; older ones that pile up are stale."""
        request = None
        while (message := self._line.recv()) is not None:
            if isinstance(message, LoadWeights):
                path = message.path
                self._thinker.load(message.version, lambda path=path: self._read(path))  # type: ignore[misc]
            elif isinstance(message, ThinkRequest):
                request = message
        if request is not None:
            self._line.send(self._thinker.answer(request))


class LatentServer:
    """Thinks for several robots, whoever waits longest first; follows the gateway's versions as an evaluator does."""

    def __init__(
        self,
        name: str,
        robots: ServerChannel,
        gateway: Channel,
        thinker: LatentEncoder,
        weights: Path,
        clock: Clock,
        read: Callable[[Path], bytes] = Path.read_bytes,
    ) -> None:
        """`robots`: where they connect. `weights`: a directory for the newest files. `name` begins with "thinker"."""
        self._robots = robots
        self._thinker = thinker
        self._read = read
        self._follower = WeightSubscriber(name, Role.thinker, gateway, weights, clock)
        self._waiting: dict[str, ThinkRequest] = {}
        self._offered: PolicyVersion | None = None

    @property
    def busy(self) -> bool:
        """Whether a robot waits."""
        return bool(self._waiting)

    def turn(self) -> None:
        """Hear what is new, then think once if a robot waits."""
        self._follower.turn()
        ready = self._follower.ready
        if ready is not None:
            version, path = ready
            if version != self._offered:
                self._offered = version
                self._thinker.load(version, lambda: self._read(path))
        while (heard := self._robots.recv()) is not None:
            robot, message = heard
            if isinstance(message, ThinkRequest):
                # A newer question takes the place of the one that waits, not a later place in the row.
                self._waiting[robot] = message
            else:
                self._robots.send(robot, Rejection(f"a think server does not understand {type(message).__name__}."))
        if self._waiting:
            robot = next(iter(self._waiting))
            self._robots.send(robot, self._thinker.answer(self._waiting.pop(robot)))

    @property
    def refused(self) -> str:
        """Why the gateway refuses this server, '' when it does not."""
        return self._follower.refused

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._follower.stopping


def _decoded(request: ThinkRequest) -> Observation:
    """The observation with its images. Raises `InvalidDataError` for bytes that are no picture."""
    seen = request.observation
    if not request.jpeg:
        return seen
    images = dict(seen.images)
    for camera, data in request.jpeg.items():
        if camera not in images:
            raise InvalidDataError(f"a picture of camera '{camera}' without its time.")
        try:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error as error:
            raise InvalidDataError(f"the picture of camera '{camera}' is no JPEG.") from error
        if pixels is None:
            raise InvalidDataError(f"the picture of camera '{camera}' is no JPEG.")
        images[camera] = Frame(images[camera].time_ns, cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))
    return Observation(seen.time_ns, seen.state, images, seen.task)


def _words(versions: tuple[int, ...]) -> str:
    return " or ".join(map(str, versions)) if versions else "none"
