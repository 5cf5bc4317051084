"""The slow path as the fast one sees it: where `think` runs, and the newest latent of each policy version.

It runs in the inference process, in another one on the same computer, or on another machine. Whoever asks goes on
acting meanwhile; latents are taken when they are there.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from policies.interface.policy import Policy
from robot_edge.uplink.segments import encode_jpeg
from wire.clock import Clock
from wire.errors import InvalidDataError
from wire.messages.gateway import Rejection
from wire.messages.local import LoadWeights, ThinkReply, ThinkRequest
from wire.transport.channel import Channel
from wire.transport.frame_ring import intact, without_previews
from wire.types import Frame, Latent, Observation, PolicyVersion

_VERSIONS = 4


@dataclass(frozen=True, slots=True)
class StampedLatent:
    """A latent and what it was made from."""

    latent: Latent
    seen_ns: int
    """time of the newest frame it saw; `latent.observed_ns` may be that of the oldest"""
    observation: Observation

    @property
    def made_from_ns(self) -> int:
        """Time of the observation."""
        return self.observation.time_ns

    @property
    def task(self) -> str:
        """The instruction."""
        return self.observation.task


class LatentBuffer:
    """The newest latent of each version. One is only ever given to the policy version that made it."""

    def __init__(self) -> None:
        self._newest: dict[int, StampedLatent] = {}

    def put(self, thought: StampedLatent) -> None:
        """Thoughts come in the order in which they were asked for: a later one is the newer one."""
        version = thought.latent.version
        self._newest.pop(version, None)
        self._newest[version] = thought
        if len(self._newest) > _VERSIONS:
            del self._newest[next(iter(self._newest))]

    def newest(self, version: int, task: str) -> StampedLatent | None:
        """The newest thought of this version about this instruction; None when there is none."""
        thought = self._newest.get(version)
        return thought if thought is not None and thought.task == task else None

    def clear(self) -> None:
        """Forget all thoughts: what they saw is no longer so."""
        self._newest.clear()


def seen_ns(observation: Observation) -> int:
    """Time of the newest frame of `observation`; its own when it has no cameras."""
    return max((frame.time_ns for frame in observation.images.values()), default=observation.time_ns)


def think(policy: Policy, observation: Observation) -> StampedLatent:
    """`policy`'s thought about `observation`.

    Raises what `Policy.think` raises, and `InvalidDataError` when the frames were overwritten meanwhile.
    """
    latent = policy.think(observation)
    if not intact(observation):
        raise InvalidDataError(
            "camera frames were overwritten while the policy looked at them: keep more of them (keep_s)."
        )
    return _stamped(latent, observation)


def _stamped(latent: Latent, observation: Observation) -> StampedLatent:
    return StampedLatent(latent, seen_ns(observation), observation)


class SlowPath(abc.ABC):
    """Turns observations into latents at its own pace."""

    immediate = False
    """whether a thought is there when `request` returns"""
    problem = ""
    """why no thought comes, '' when nothing is known to be wrong"""

    def __init__(self) -> None:
        self._thoughts: list[StampedLatent] = []

    @abc.abstractmethod
    def adopt(self, policy: Policy, version: PolicyVersion, path: str) -> None:
        """`version`, whose weights lie at `path`, has been loaded into `policy` and will be asked for."""

    @abc.abstractmethod
    def request(self, observation: Observation, versions: tuple[int, ...]) -> None:
        """Think about `observation` with the first of `versions` that is there, unless there is enough to do.

        Raises what `Policy.think` raises when it runs here.
        """

    def pop(self) -> list[StampedLatent]:
        """Thoughts that were finished since the last call, oldest first."""
        thoughts, self._thoughts = self._thoughts, []
        return thoughts

    def close(self) -> None:
        """Give channels back."""
        self._thoughts.clear()


class InlineSlowPath(SlowPath):
    """Thinks at once, in the process that acts: for small policies."""

    immediate = True

    def __init__(self, *policies: Policy) -> None:
        super().__init__()
        self._policies = list(policies)

    def adopt(self, policy: Policy, version: PolicyVersion, path: str) -> None:
        if not any(policy is known for known in self._policies):
            self._policies.append(policy)

    def request(self, observation: Observation, versions: tuple[int, ...]) -> None:
        there = {policy.version: policy for policy in self._policies}
        for version in versions:
            if version in there:
                self._thoughts.append(think(there[version], observation))
                return


class ProcessSlowPath(SlowPath):
    """Thinks in another process of this computer, which loads the same weights (`latent_server.LatentWorker`).

    One thought is under way at a time; what cannot be sent or is not answered is asked again with newer frames.
    """

    def __init__(self, channel: Channel, clock: Clock, timeout_s: float = 2.0) -> None:
        """`timeout_s`: an answer that has not come by then is given up, at least the longest thought."""
        super().__init__()
        self._channel = channel
        self._clock = clock
        self._timeout_ns = int(timeout_s * 1e9)
        # The answer to a predecessor of this process must never look like one to us.
        self._number = clock.now_ns()
        self._asked: ThinkRequest | None = None
        self._about: Observation | None = None
        self._asked_ns = 0
        self._weights: dict[int, LoadWeights] = {}

    def adopt(self, policy: Policy, version: PolicyVersion, path: str) -> None:
        # A version that comes back is the newest again.
        self._weights.pop(version.number, None)
        self._weights[version.number] = LoadWeights(version, path)
        while len(self._weights) > 2:
            del self._weights[next(iter(self._weights))]
        self._channel.send(self._weights[version.number])

    def request(self, observation: Observation, versions: tuple[int, ...]) -> None:
        self._listen()
        now_ns = self._clock.now_ns()
        if self._asked is not None:
            if now_ns - self._asked_ns < self._timeout_ns:
                return
            self.problem = f"no answer within {self._timeout_ns / 1e9:g} s"
        self._number += 1
        self._asked, self._asked_ns = self._make_request(self._number, observation, versions), now_ns
        self._about = observation
        if not self._channel.send(self._asked):
            self._asked, self.problem = None, self._unreachable()

    def pop(self) -> list[StampedLatent]:
        self._listen()
        return super().pop()

    def close(self) -> None:
        self._channel.close()

    def _listen(self) -> None:
        while (message := self._channel.recv()) is not None:
            if isinstance(message, ThinkReply):
                self._answered(message)
            elif isinstance(message, Rejection):
                self.problem = message.reason

    def _answered(self, reply: ThinkReply) -> None:
        if self._asked is None or self._about is None or reply.number != self._asked.number:
            return
        self._asked, self.problem = None, reply.error
        if reply.latent is not None:
            self._thoughts.append(_stamped(reply.latent, self._about))
        # A thinker that was killed and came back has nothing.
        for number, load in self._weights.items():
            if number not in reply.versions:
                self._channel.send(load)

    def _make_request(self, number: int, observation: Observation, versions: tuple[int, ...]) -> ThinkRequest:
        return ThinkRequest(number, versions, observation)

    def _unreachable(self) -> str:
        return "the thinking process is not there, or does not keep up"


class RemoteSlowPath(ProcessSlowPath):
    """Thinks on another machine (`latent_server.LatentServer`), which gets its weights from the gateway itself."""

    def __init__(self, channel: Channel, clock: Clock, timeout_s: float = 2.0, *, can_wait: bool = False) -> None:
        """As `ProcessSlowPath`; `can_wait`: nobody acts by these latents, so whoever does comes first."""
        super().__init__(channel, clock, timeout_s)
        self._can_wait = can_wait

    def adopt(self, policy: Policy, version: PolicyVersion, path: str) -> None:
        """Nothing to send: a path on this computer means nothing there."""

    def _make_request(self, number: int, observation: Observation, versions: tuple[int, ...]) -> ThinkRequest:
        plain = without_previews(observation)
        jpeg = {camera: encode_jpeg(frame.image) for camera, frame in plain.images.items()}
        if not intact(observation):
            raise InvalidDataError(
                "camera frames were overwritten while they were encoded: keep more of them (keep_s)."
            )
        images = {camera: Frame(frame.time_ns, frame.image[:0]) for camera, frame in plain.images.items()}
        about = Observation(plain.time_ns, plain.state, images, plain.task)
        return ThinkRequest(number, versions, about, jpeg, self._can_wait)

    def _unreachable(self) -> str:
        return getattr(self._channel, "refusal", "") or "the link to the think server is down"
