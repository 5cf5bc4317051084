"""The inference process: slow `think`, fast `act`, weights swapped whole between two of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from policies.interface.policy import Policy
from robot_edge.inference.slow_path import InlineSlowPath, LatentBuffer, SlowPath, StampedLatent, seen_ns, think
from robot_edge.inference.weight_swapper import WeightSwapper
from robot_edge.shadow.tap import ShadowTap
from wire.clock import Clock
from wire.errors import ConfigError, FleetError
from wire.messages.gateway import EdgeEvent, Hello, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeStarted, LoadWeights
from wire.transport.channel import Channel
from wire.transport.frame_ring import intact
from wire.types import ActionChunk, Latent, Observation, Role

log = logging.getLogger(__name__)

FALLBACKS = ("hold", "local")
_IDLE_NS = 1_000_000_000
"""a robot that asks for nothing for so long has nothing to starve of"""
_ERROR_CHARACTERS = 300
"""of what a policy that failed says: every status repeats it while the robot holds for it"""


@dataclass(frozen=True, slots=True)
class SlowConfig:
    """The pace of the slow path, and what happens when it falls silent."""

    every_s: float = 0.0
    """time between the frames of two thoughts; 0 thinks about every new frame that is asked about"""
    max_age_s: float = 2.0
    """a latent is not used when frames so much newer are here"""
    fallback: str = "hold"
    """hold: no chunk, with the reason; local: think in the inference process until the slow path is back"""

    def __post_init__(self) -> None:
        if self.fallback not in FALLBACKS:
            raise ConfigError(f"no fallback '{self.fallback}' of the slow path; use one of {', '.join(FALLBACKS)}.")
        if not 0 <= self.every_s < self.max_age_s:
            raise ConfigError(
                f"the slow path thinks every {self.every_s:g} s but its latents serve only {self.max_age_s:g} s: "
                "max_age_s must be larger."
            )


class Inference:
    """Answers the newest chunk request; older ones that pile up are stale and skipped.

    A chunk is made by one policy version from a latent of the same version. A new version takes over when its first
    latent is there; until then the old one goes on with its own.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        control: Channel,
        uplink: Channel,
        clock: Clock,
        *,
        standby: Policy | None = None,
        slow: SlowPath | None = None,
        config: SlowConfig | None = None,
        local: Policy | None = None,
        tap: ShadowTap | None = None,
    ) -> None:
        """`standby`: a second policy object, into which new weights are loaded while the first one acts. `slow`: where
        the thinking is done, here when it is not given. `local`: a small policy, loaded and ready, that thinks and acts
        while the slow path is silent and the fallback is `local`; without it the policy itself thinks here. `tap`: of
        what a shadow process compares.
        """
        self._tap = tap
        self._made_from: StampedLatent | None = None
        """what the newest chunk was made from, by the version that acts"""
        self._name = name
        self._control = control
        self._uplink = uplink
        self._clock = clock
        self._config = config or SlowConfig()
        self._swap = WeightSwapper(name, policy, standby)
        self._slow: SlowPath = slow or InlineSlowPath(policy)
        self._local = local
        self._local_thought: StampedLatent | None = None
        self._latents = LatentBuffer()
        self._seen: Observation | None = None
        self._void_before_ns: int | None = None
        self._episode_is_new = False
        self._asked_at_ns = clock.now_ns() - _IDLE_NS
        self._waiting_since_ns = 0
        self._silent = ""
        self._rejection = ""
        self._failure = ""

    def hello(self) -> None:
        """Tell the uplink that this process is here: it answers with the weights that are wanted."""
        self._uplink.send(Hello(self._name, Role.inference, "", self._clock.now_ns(), os.getpid()))

    def poll(self) -> None:
        """Take in what has come, then answer the newest request."""
        while (message := self._uplink.recv()) is not None:
            if isinstance(message, LoadWeights) and self._swap.submit(message):
                # The uplink is a new one and asks what runs.
                self._notify_activated()
        request = None
        while (received := self._control.recv()) is not None:
            if isinstance(received, ChunkRequest):
                request = received
            elif isinstance(received, EpisodeStarted):
                self._episode_is_new, request = True, None
        self._collect()
        self._poll_weights()
        if request is not None:
            self._asked_at_ns = self._clock.now_ns()
            reply = self._answer(request)
            self._control.send(reply)
            if self._tap is not None and self._made_from is not None:
                self._tap.offer(request, reply, self._made_from)

    def close(self) -> None:
        """End the threads and lines that belong to this object."""
        self._swap.close()
        self._slow.close()

    # --- weights --------------------------------------------------------------------------------------------------

    def _poll_weights(self) -> None:
        swap = self._swap
        overdue = self._clock.now_ns() - self._waiting_since_ns > self._config.max_age_s * 1e9
        if swap.poll(hurry=overdue or self._nothing_to_lose()):
            message = swap.waiting or swap.running
            assert message is not None
            self._waiting_since_ns = self._clock.now_ns()
            self._slow.adopt(swap.loaded, message.version, message.path)
            if swap.waiting is None:
                self._notify_activated()
        if swap.rejection != self._rejection and swap.rejection:
            self._uplink.send(EdgeEvent(self._name, self._clock.now_ns(), "refused", swap.rejection))
        if (reverted := swap.pop_reverted()) is not None:
            self._uplink.send(reverted)
        self._rejection = swap.rejection
        self._switch()

    def _switch(self) -> None:
        """The waiting version takes over as soon as that leaves no gap."""
        swap = self._swap
        if swap.waiting is not None and (self._slow.immediate or self._ready() or self._nothing_to_lose()):
            swap.switch()
            self._notify_activated()

    def _ready(self) -> bool:
        """Whether the waiting version has a latent that can be acted on."""
        seen, waiting = self._seen, self._swap.waiting
        return seen is not None and waiting is not None and self._fresh(seen, waiting.version.number) is not None

    def _nothing_to_lose(self) -> bool:
        """Whether the active version could not act anyway, or nobody asks it to."""
        seen, number = self._seen, self._swap.active.version
        idle = self._clock.now_ns() - self._asked_at_ns >= _IDLE_NS
        return number == 0 or idle or seen is None or self._fresh(seen, number) is None

    def _notify_activated(self) -> None:
        policy = self._swap.active
        self._uplink.send(VersionActivated(self._name, policy.version, self._clock.now_ns(), policy.trained))

    # --- latents --------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take in the thoughts that have become ready."""
        for thought in self._slow.pop():
            if self._episode_is_new or (
                self._void_before_ns is not None and thought.made_from_ns < self._void_before_ns
            ):
                continue
            self._latents.put(thought)

    def _fresh(self, seen: Observation, number: int) -> StampedLatent | None:
        """A thought of version `number` that may be acted on now.

        Frames' own times are compared: with no newer frame than the one it saw, a thought does not grow old.
        """
        thought = self._latents.newest(number, seen.task)
        if thought is None or not 0 <= seen_ns(seen) - thought.seen_ns <= self._config.max_age_s * 1e9:
            return None
        return thought

    def _due(self, seen: Observation, thought: StampedLatent | None) -> bool:
        if thought is None or thought.task != seen.task:
            return True
        # A clock that has jumped back makes a thought due as well.
        return not 0 <= seen_ns(seen) - thought.seen_ns <= self._config.every_s * 1e9

    def _think(self, seen: Observation) -> None:
        """Ask the slow path if it is time, for the version that waits before the one that acts."""
        waiting = self._swap.waiting
        versions: tuple[int, ...] = (self._swap.active.version,)
        if waiting is not None:
            versions = (waiting.version.number, *versions)
        if self._due(seen, self._latents.newest(versions[0], seen.task)):
            self._slow.request(seen, versions)
            self._collect()

    # --- answers --------------------------------------------------------------------------------------------------

    def _answer(self, request: ChunkRequest) -> ChunkReply:
        if self._swap.active.version == 0:
            return ChunkReply(None, self._swap.rejection or "no policy version is loaded yet.", request.tick)
        seen, self._made_from = request.observation, None
        self._seen = seen
        if self._episode_is_new:
            # Nothing that was thought about the last episode's scene is true of this one.
            self._episode_is_new, self._void_before_ns, self._local_thought = False, seen.time_ns, None
            self._latents.clear()
        if self._void_before_ns is not None:
            # A clock that has jumped back must not make every thought to come void.
            self._void_before_ns = min(self._void_before_ns, seen.time_ns)
        try:
            self._think(seen)
            self._switch()
            policy = self._swap.active
            thought = self._fresh(seen, policy.version)
            self._notify("" if thought is not None else self._silence(seen))
            if thought is None and self._config.fallback == "local":
                policy = self._local or policy
                thought = self._think_here(policy, seen)
            if thought is None:
                return ChunkReply(None, self._silent, request.tick, silent=True)
            reply = infer_chunk(policy, thought.latent, request)
            self._made_from = thought if policy is self._swap.active else None
        except FleetError as error:
            return ChunkReply(None, str(error), request.tick)
        except Exception as error:
            # Whatever a policy raises, the process that serves it goes on; the trace is in the log.
            if repr(error) != self._failure:
                log.exception("robot '%s': its policy failed.", self._name)
            self._failure = repr(error)
            return ChunkReply(None, f"the policy failed: {error!r}"[:_ERROR_CHARACTERS], request.tick)
        if not intact(seen):
            return ChunkReply(None, "the frames were overwritten while the policy looked at them.", request.tick)
        return reply

    def _think_here(self, policy: Policy, seen: Observation) -> StampedLatent:
        known = self._local_thought
        if known is None or known.latent.version != policy.version or self._due(seen, known):
            known = self._local_thought = think(policy, seen)
        return known

    def _notify(self, silence: str) -> None:
        """Let people know when the slow path falls silent and when it is back."""
        if bool(silence) != bool(self._silent):
            detail = f"{silence} Fallback: {self._config.fallback}." if silence else "the slow path is back."
            log.warning("robot '%s': %s", self._name, detail)
            kind = "slow_path_silent" if silence else "recovered"
            self._uplink.send(EdgeEvent(self._name, self._clock.now_ns(), kind, detail))
        self._silent = silence

    def _silence(self, seen: Observation) -> str:
        number = self._swap.active.version
        thought = self._latents.newest(number, seen.task)
        why = f": {self._slow.problem}" if self._slow.problem else ""
        if thought is None:
            return f"the slow path has no latent of version {number} for this instruction yet{why}."
        return f"the slow path is silent for {abs(seen_ns(seen) - thought.seen_ns) / 1e9:.2f} s{why}."


def infer_chunk(policy: Policy, latent: Latent, request: ChunkRequest, seed: int = 0) -> ChunkReply:
    """The chunk that `policy` makes for `request` from `latent`, from the noise of `seed`; 0: as it likes.

    The fast path acts on the state of the moment the chunk begins, so the latent's age is counted up to then, from when
    it was seen or, if that is later, from when the robot began to move: who demonstrated hardly ever stood still, so to
    a network a great age means that much has been done. Raises what `Policy.act` raises.
    """
    seen, period_ns = request.observation, policy.spec.period_ns
    later_ticks = request.first_tick - request.tick
    moment = Observation(seen.time_ns + later_ticks * period_ns, request.state, seen.images, seen.task)
    begun_ns = moment.time_ns - (request.moved_ticks + later_ticks) * period_ns
    # A policy that names seeds takes them.
    act: Callable[..., ActionChunk] = partial(policy.act, seed=seed) if seed else policy.act  # type: ignore[call-arg]
    if request.moved_ticks < 0 or begun_ns <= latent.observed_ns:
        chunk = act(moment, latent, request.first_tick, request.prefix)
    else:
        begun = msgspec.structs.replace(latent, observed_ns=begun_ns)
        chunk = act(moment, begun, request.first_tick, request.prefix)
        chunk = msgspec.structs.replace(chunk, latent_observed_ns=latent.observed_ns)
    return ChunkReply(
        chunk,
        tick=request.tick,
        latent=latent.data if request.residual else None,
        corrector=policy.corrector if request.residual else None,
    )
