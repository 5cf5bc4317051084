"""The shadow process: makes a chunk again with another version, from the same observation and noise, and compares.

It runs where nobody else wants to, for a small share of the time, and has no way to control: what it computes is
measured and thrown away.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from policies.interface.policy import LearnedPolicy, Policy
from robot_edge.inference.server import infer_chunk
from robot_edge.inference.slow_path import InlineSlowPath, SlowPath, StampedLatent
from robot_edge.inference.verified_load import load_verified
from robot_edge.shadow.memory import require_memory
from robot_edge.shadow.reports import merged
from wire.clock import Clock
from wire.errors import FleetError, InvalidDataError, PolicyError
from wire.messages.gateway import Hello, ShadowReport
from wire.messages.local import ChunkSample, LoadShadow, SampleRequest
from wire.transport.channel import Channel
from wire.transport.frame_ring import private
from wire.types import Observation, PolicyVersion, Role
from wire.weights.action_difference import ActionDifference

log = logging.getLogger(__name__)

_SHARE = 0.05
"""of the time, at most, in which it computes"""
_LEAST_PAUSE_NS, _REPORT_NS = 500_000_000, 5_000_000_000
_LOST_NS = 2_000_000_000
"""after so long it asks again: the robot may rest, or inference is another process"""
_THOUGHT_NS = 10_000_000_000
"""a latent that another machine has not sent by then does not come"""
_FAULT_CHARS = 300


class ShadowRunner:
    """`poll` does what there is to do now."""

    def __init__(
        self,
        name: str,
        make_policy: Callable[[], LearnedPolicy],
        uplink: Channel,
        inference: Channel,
        clock: Clock,
        remote: SlowPath | None = None,
    ) -> None:
        """`make_policy` is called once there is a version to compute. `remote`: thinks elsewhere, None: here."""
        self._name, self._make = name, make_policy
        self._uplink, self._inference, self._clock, self._remote = uplink, inference, clock, remote
        self._policy: Policy | None = None
        self._version: PolicyVersion | None = None
        """what it computes, None while there is nothing"""
        self._slow: SlowPath | None = None
        self._sample: ChunkSample | None = None
        """whose latent is on its way"""
        self._asked = False
        """for a sample; one that comes late, beside another one, is left"""
        self._began_ns = self._next_ns = self._reported_ns = 0
        self._report: ShadowReport | None = None

    def hello(self) -> None:
        """Tell the uplink that this process is here: it answers with what is to be computed."""
        self._uplink.send(Hello(self._name, Role.inference, "", self._clock.now_ns(), os.getpid()))

    def poll(self) -> None:
        """Load what is wanted, compare a chunk if it is time, and report."""
        wanted = None
        while (message := self._uplink.recv()) is not None:
            if isinstance(message, LoadShadow):
                wanted = message
        if wanted is not None:
            self._load(wanted)
        sample = None
        while (received := self._inference.recv()) is not None:
            if isinstance(received, ChunkSample):
                sample = received
        if self._version is not None:
            self._compare(sample)
        self._send_report()

    def close(self) -> None:
        """Give the connection to a think server back."""
        if self._remote is not None:
            self._remote.close()

    # --- the version ----------------------------------------------------------------------------------------------

    def _load(self, message: LoadShadow) -> None:
        version = message.version
        if version is not None and version == self._version:
            return
        self._version, self._sample, self._report = None, None, None
        if version is None:
            self._policy = self._slow = None
            return
        try:
            path = Path(message.path)
            if self._policy is None:
                require_memory(path, message.inference_pid)
                policy = self._make()
                if policy.history:
                    raise PolicyError("it looks at earlier ticks as well, which a shadow does not see.")
                self._policy = policy
            load_verified(self._policy, version, path)
        except Exception as error:
            self._policy = self._slow = None
            text = f"version {version.number} cannot be computed here: {_text(error)}"
            log.error("robot '%s': %s", self._name, text, exc_info=not _is_known(error))
            self._add(ShadowReport(self._name, version.number, fault=text))
            return
        self._slow = self._remote or InlineSlowPath(self._policy)
        self._version, self._next_ns = version, 0
        self._report = ShadowReport(self._name, version.number)
        log.info("robot '%s': version %d is computed beside the one that acts.", self._name, version.number)

    # --- comparing ------------------------------------------------------------------------------------------------

    def _compare(self, sample: ChunkSample | None) -> None:
        version, policy, slow = self._version, self._policy, self._slow
        assert version is not None
        assert policy is not None
        assert slow is not None
        now_ns = self._clock.now_ns()
        if self._sample is None and (sample is None or not self._asked):
            if now_ns >= self._next_ns and self._inference.send(SampleRequest()):
                self._asked, self._next_ns = True, now_ns + _LOST_NS
            return
        if self._sample is None:
            assert sample is not None
            self._began_ns = now_ns
            if (own := self._take(sample, version)) is None:
                self._rest()
                return
            self._sample = own
        try:
            difference = self._difference(policy, slow, self._sample)
        except Exception as error:
            if self._report is None or not self._report.faults:
                text = "robot '%s': a chunk of the shadow, version %d: %s"
                log.error(text, self._name, version.number, error, exc_info=not _is_known(error))
            self._add(ShadowReport(self._name, version.number, faults=1, fault=_text(error)))
        else:
            if difference is None:
                return
            self._add(ShadowReport(self._name, version.number, difference))
        self._rest()

    def _take(self, sample: ChunkSample, version: PolicyVersion) -> ChunkSample | None:
        """With its frames in memory of this process, which may take its time; None for one that says nothing."""
        if sample.chunk.version == version.number:
            return None  # the robot acts by this version
        try:
            return msgspec.structs.replace(sample, observation=_own(sample.observation))
        except InvalidDataError as error:
            log.info("robot '%s': a chunk is not compared: %s", self._name, error)
            return None

    def _difference(self, policy: Policy, slow: SlowPath, sample: ChunkSample) -> ActionDifference | None:
        """None while the latent is on its way."""
        about = sample.observation
        if (thought := _thought(slow, about)) is None:
            slow.request(about, (policy.version,))
            thought = _thought(slow, about)
        if thought is None:
            if self._clock.now_ns() - self._began_ns > _THOUGHT_NS:
                raise PolicyError(slow.problem or "nobody thinks with this version.")
            return None
        request, acted = sample.request, sample.chunk
        made = infer_chunk(policy, thought.latent, request, acted.seed).chunk
        assert made is not None
        decided = request.prefix.committed if request.prefix is not None else 0
        low, high = policy.spec.action_low(), policy.spec.action_high()
        return ActionDifference.of(made.actions[decided:], acted.actions[decided:], low, high)

    def _rest(self) -> None:
        self._sample, self._asked, now_ns = None, False, self._clock.now_ns()
        took_ns = now_ns - self._began_ns
        self._next_ns = now_ns + max(_LEAST_PAUSE_NS, round(took_ns * (1 / _SHARE - 1)))

    # --- what came of it ------------------------------------------------------------------------------------------

    def _add(self, news: ShadowReport) -> None:
        self._report = news if self._report is None else merged(self._report, news)

    def _send_report(self) -> None:
        now_ns = self._clock.now_ns()
        if self._report is not None and now_ns - self._reported_ns >= _REPORT_NS and self._uplink.send(self._report):
            self._report, self._reported_ns = None, now_ns


def _own(observation: Observation) -> Observation:
    """In memory of this process, which may take its time. Raises `InvalidDataError` for what was overwritten."""
    images = {camera: private(frame) for camera, frame in observation.images.items()}
    return Observation(observation.time_ns, observation.state, images, observation.task)


def _thought(slow: SlowPath, about: Observation) -> StampedLatent | None:
    return next((one for one in slow.pop() if one.observation is about), None)


def _is_known(error: Exception) -> bool:
    return isinstance(error, FleetError | OSError)


def _text(error: Exception) -> str:
    return (str(error) if _is_known(error) else f"it failed: {error!r}")[:_FAULT_CHARS]
