"""Look once more before each action: chunks corrected on the fast path (A2C2, arXiv 2509.23224)."""

from __future__ import annotations

import logging
from collections import OrderedDict

import msgspec
import numpy as np

from policies.common.residual_policy import correct, input_width
from robot_edge.chunking.scheduler import AlignedScheduler, ChunkScheduler, PlannedAction
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import ActionChunk, Observation, ResidualPolicy

log = logging.getLogger(__name__)

_KEPT = 8
"""chunks whose latent and corrector are remembered"""

_Key = tuple[int, int, int]


class ResidualScheduler(ChunkScheduler):
    """Another scheduler whose every action is corrected from the newest state.

    It stands best on `FutureStateScheduler`: what the robot's own motion changes is foretold there, so the small
    network is left with what nobody can foretell, how the world moves. Without a motion model it stands on
    `AlignedScheduler`. A chunk that came without a corrector, or with one of another version or shape, is executed as
    it is.
    """

    def __init__(self, base: AlignedScheduler) -> None:
        self._base = base
        spec = base.tracker.spec
        self._low, self._high = spec.action_low(), spec.action_high()
        self._period_ns = spec.period_ns
        self._speed_up = base.tracker.config.speed_up
        self._misfit = ""
        self._helpers: OrderedDict[_Key, tuple[np.ndarray, ResidualPolicy]] = OrderedDict()

    @property
    def delay_ticks(self) -> int:
        return self._base.delay_ticks

    @property
    def made(self) -> ActionChunk | None:
        return self._base.made

    def reset(self, tick: int) -> None:
        self._helpers.clear()
        self._base.reset(tick)

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        request = self._base.request_chunk(tick, observation)
        return None if request is None else msgspec.structs.replace(request, residual=True)

    def submit(self, reply: ChunkReply, tick: int) -> None:
        if reply.chunk is not None and reply.latent is not None and reply.corrector is not None:
            self._remember(reply.chunk, np.asarray(reply.latent, np.float32).ravel(), reply.corrector)
        self._base.submit(reply, tick)

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        planned, made = self._base.next_action(tick, observation), self._base.made
        if planned is None or made is None:
            return None
        action, chunk = planned
        helpers = self._helpers.get(_key(made))
        if helpers is None:
            return planned
        latent, corrector = helpers
        corrected = correct(
            corrector,
            observation.state,
            latent,
            action,
            self._low,
            self._high,
            (tick - chunk.first_tick) * self._speed_up,
            max(observation.time_ns - chunk.latent_observed_ns, 0) / self._period_ns,
        )
        if not np.isfinite(corrected).all():
            return planned
        if self._base.predictor is not None:
            self._base.predictor.on_action_selected(tick, corrected, observation.state)
        return corrected, chunk

    def on_executed(self, tick: int, action: np.ndarray, waited: bool) -> None:
        self._base.on_executed(tick, action, waited)

    def void(self) -> None:
        self._base.void()

    def _remember(self, chunk: ActionChunk, latent: np.ndarray, corrector: ResidualPolicy) -> None:
        misfit = _misfit(chunk, len(latent), corrector, len(self._low))
        if misfit != self._misfit and misfit:
            log.warning("actions are not corrected: %s", misfit)
        self._misfit = misfit
        if misfit:
            return
        self._helpers[_key(chunk)] = (latent, corrector)
        if len(self._helpers) > _KEPT:
            self._helpers.popitem(last=False)


def _misfit(chunk: ActionChunk, latent_width: int, corrector: ResidualPolicy, action_dim: int) -> str:
    """Why `corrector` cannot correct `chunk`, '' if it can."""
    if corrector.version != chunk.version:
        return f"the corrector is of version {corrector.version}, the chunk of {chunk.version}."
    reads, writes = corrector.weights[0].shape[1], corrector.weights[-1].shape[0]
    needed = input_width(len(corrector.mean), latent_width, action_dim)
    if (reads, writes) != (needed, action_dim):
        return (
            f"the corrector reads {reads} and writes {writes} numbers; here it needs {needed} and {action_dim} "
            f"(a latent of {latent_width}, {action_dim} action dimensions)."
        )
    return ""


def _key(made: ActionChunk) -> _Key:
    return made.first_tick, made.observed_ns, made.version
