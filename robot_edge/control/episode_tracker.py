"""The running episode: its identity, its steps, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from robot_edge.control.mode import HoldReason, Mode
from robot_edge.control.step_recorder import StepRecorder
from wire.errors import InvalidDataError
from wire.types import ActionChunk, Actor, Episode, Observation, RobotSpec, Step

_ACTOR = {Mode.policy: Actor.policy, Mode.human: Actor.human, Mode.script: Actor.script}


class ControlStep(msgspec.Struct, frozen=True, eq=False):
    """What one control period came to."""

    tick: int
    mode: Mode
    reason: HoldReason
    observation: Observation
    proposed: np.ndarray
    """float32[da]"""
    executed: np.ndarray
    """float32[da]"""
    chunk: ActionChunk | None
    delay_ticks: int
    version: int
    reward: float
    success: bool


class EpisodeTracker:
    """Counts and records; `running` between `start` and `end`."""

    def __init__(
        self,
        name: str,
        boot: str,
        spec: RobotSpec,
        recorder: StepRecorder,
        source: str,
        max_ticks: int,
        tail_ticks: int,
        tell: Callable[[str, str], None],
    ) -> None:
        """Episode ids are `<name>-<boot>-<number>`. `tell(kind, detail)`: for the operator."""
        self.recorder = recorder
        self.episode: Episode | None = None
        self.first_tick = 0
        """control tick at which the newest episode began"""
        self.ended = 0
        self.starved = 0
        """ticks without an action after the episode's first chunk was there"""
        self._robot, self._spec_hash, self._source = name, spec.hash, source
        self._max_ticks, self._tail_ticks, self._tell = max_ticks, tail_ticks, tell
        self._stem, self._begun = f"{name}-{boot}", 0
        self._own_ticks = self._success_ticks = 0
        self._acted = False

    @property
    def running(self) -> bool:
        return self.episode is not None

    def start(self, task: str, seed: int, tick: int, now_ns: int, source: str = "") -> Episode:
        """`source`: another one than usual."""
        self.first_tick, self._own_ticks, self._success_ticks, self._acted = tick, 0, 0, False
        self.episode = Episode(
            id=f"{self._stem}-{self._begun:06d}",
            robot=self._robot,
            spec_hash=self._spec_hash,
            task=task,
            seed=seed,
            source=source or self._source,
            started_ns=now_ns,
        )
        self._begun += 1
        self.recorder.start(self.episode)
        return self.episode

    def step(self, tick: ControlStep, own: bool, ending: bool) -> str:
        """Record a tick. The outcome if the episode is over with it, else ''.

        `own`: it counts against the episode's length; `ending`: whatever happens, this is the last one.
        """
        self._own_ticks += own
        # The first chunk of an episode cannot be there yet; only what runs out afterwards is starvation.
        self.starved += tick.reason in (HoldReason.no_action, HoldReason.bad_action) and self._acted
        self._acted = self._acted or tick.chunk is not None
        self._success_ticks += tick.success or self._success_ticks > 0
        if tick.reason in (HoldReason.no_recorder, HoldReason.bad_observation):
            # Nobody takes notes, so no backlog may grow; or there is nothing valid to note. The robot stands still.
            return ""
        terminated = self._success_ticks > self._tail_ticks
        truncated = not terminated and (self._own_ticks >= self._max_ticks or ending)
        observation, chunk = tick.observation, tick.chunk
        step = Step(
            tick=tick.tick - self.first_tick,
            time_ns=observation.time_ns,
            state=observation.state,
            proposed=np.asarray(tick.proposed, np.float32),
            executed=tick.executed,
            actor=_ACTOR.get(tick.mode, Actor.hold),
            frames={camera: frame.time_ns for camera, frame in observation.images.items()},
            chunk_tick=chunk.first_tick - self.first_tick if chunk else -1,
            delay_ticks=tick.delay_ticks if chunk else -1,
            version=chunk.version if chunk else tick.version,
            reward=tick.reward,
            terminated=terminated,
            truncated=truncated,
        )
        try:
            self.recorder.step(observation, step)
        except InvalidDataError as error:
            # Nothing is recorded that was not seen.
            self._tell("hold", f"the episode ends: {error}")
            return "aborted"
        if terminated:
            return "success"
        return ("aborted" if ending else "failure") if truncated else ""

    def end(self, outcome: str, now_ns: int) -> None:
        """Close the running episode, if there is one."""
        if self.episode is None:
            return
        self.recorder.end(outcome, now_ns)
        self.episode = None
        self.ended += 1
