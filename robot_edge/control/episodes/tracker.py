"""The running episode: its identity, its steps and what ends it, and their way to the uplink."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from hal.interfaces.robot import Feedback
from robot_edge.control.config import LoopConfig
from robot_edge.control.episodes.intervention import Intervention
from robot_edge.control.mode import HoldReason, Mode
from wire.errors import InvalidDataError, MessageTooLargeError
from wire.messages.gateway import RecordedChunk, TerminalObservation
from wire.messages.local import EpisodeEnded, EpisodeJudged, EpisodeStarted, FrameRecorded, StepRecorded
from wire.messages.recording import FlowTrace
from wire.transport.channel import Channel
from wire.transport.frame_ring import private, without_preview
from wire.types import ActionChunk, Actor, Episode, EpisodeOutcome, Observation, RobotSpec, Step

log = logging.getLogger(__name__)

_Record = EpisodeStarted | StepRecorded | FrameRecorded | EpisodeEnded | EpisodeJudged

_ACTOR = {Mode.policy: Actor.policy, Mode.human: Actor.human, Mode.script: Actor.script}


class EpisodeTracker:
    """Counts and records; `running` between `start` and `end`."""

    def __init__(
        self,
        name: str,
        session_id: str,
        spec: RobotSpec,
        recorder: StepRecorder,
        config: LoopConfig,
        notify: Callable[[str, str], None],
    ) -> None:
        """Episode ids are `<name>-<session_id>-<number>`. `notify(kind, detail)`: for the operator."""
        self.recorder = recorder
        self.episode: Episode | None = None
        self.outcome = ""
        """how it ended, once its last step is recorded: only what that led to is still to be seen"""
        self.first_tick = 0
        """control tick at which the newest episode began"""
        self.ended = 0
        self.starved = 0
        """ticks without an action after the policy has acted, and nobody else since"""
        self.intervention = Intervention(config.episodes.recovery_first)
        self._robot, self._spec_hash, self._config, self._notify = name, spec.hash, config, notify
        self._stem, self._begun = f"{name}-{session_id}", 0
        self._own_ticks = self._success_ticks = 0
        self._asked_to_end, self._verdict = False, ""
        self._longest = round(config.episodes.max_s * spec.control_hz) or None
        """ticks, whoever acts"""
        self._acted = False
        self._chunk: tuple[int, int] | None = None

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
            source=source or self._config.source,
            started_ns=now_ns,
        )
        self._begun += 1
        self.outcome, self._chunk, self._asked_to_end, self._verdict = "", None, False, ""
        self.intervention.new_episode()
        self.recorder.start(self.episode)
        return self.episode

    def end_with(self, verdict: EpisodeOutcome | None) -> None:
        """A person ends it, with a verdict or without: the next step that is recorded is the last."""
        self._asked_to_end, self._verdict = True, verdict or self._verdict

    def hands_back(self, driven: bool) -> bool:
        """Whether the episode is over because whoever drove has handed back; `driven`: somebody drives still.

        What the policy would do from there is not recorded, so nobody can say how it would have ended: it is unjudged.
        """
        if driven or not (self.running and self.intervention.had and self._config.episodes.after_correction == "end"):
            return False
        seen = EpisodeOutcome.success if self._success_ticks else EpisodeOutcome.unjudged
        self.outcome = self._verdict or seen
        return True

    def step(
        self,
        tick: int,
        mode: Mode,
        reason: HoldReason,
        observation: Observation,
        proposed: np.ndarray,
        feedback: Feedback,
        chunk: ActionChunk | None,
        made: ActionChunk | None,
        *,
        delay_ticks: int,
        version: int,
        own: bool,
        ending: bool,
    ) -> bool:
        """Record what a tick came to. False if the episode must end at once, as aborted.

        `proposed`: float32[da]; `chunk`: what the policy's action is from, and `made`, the same as the policy made it;
        `own`: no person has the robot, and it counts against the episode's length; `ending`: whatever happens, this is
        the last one.
        """
        self._own_ticks += own
        # The first chunk of an episode cannot be there yet; only what runs out afterwards is starvation.
        waits = reason in (HoldReason.no_action, HoldReason.bad_action)
        self.starved += waits and self._acted
        self._acted = mode is Mode.policy or (self._acted and waits)
        self._success_ticks += feedback.success or self._success_ticks > 0
        if reason in (HoldReason.no_recorder, HoldReason.bad_observation):
            # Nobody takes notes, so no backlog may grow; or there is nothing valid to note. The robot stands still.
            return True
        succeeded = self._verdict == EpisodeOutcome.success or (self._success_ticks > 0 and not self._verdict)
        too_long = self._longest is not None and tick + 1 - self.first_tick >= self._longest
        over = feedback.truncated or self._own_ticks >= self._config.max_ticks or too_long or ending
        over |= self._asked_to_end
        # What is cut off in the tail was done before.
        terminated = feedback.terminated or self._success_ticks > self._config.tail_ticks or (succeeded and over)
        terminated |= bool(self._verdict)
        truncated = over and not terminated
        outcome = ""
        if terminated or (truncated and not ending):
            outcome = EpisodeOutcome.success if succeeded else self._verdict or self._unsuccessful
        actor = _ACTOR.get(mode, Actor.hold)
        step = Step(
            tick=tick - self.first_tick,
            time_ns=observation.time_ns,
            state=observation.state,
            proposed=np.asarray(proposed, np.float32),
            executed=feedback.executed,
            actor=actor,
            frames={camera: frame.time_ns for camera, frame in observation.images.items()},
            chunk_tick=chunk.first_tick - self.first_tick if chunk else -1,
            delay_ticks=delay_ticks if chunk else -1,
            version=chunk.version if chunk else version,
            reward=feedback.reward,
            terminated=terminated,
            truncated=truncated,
            recovery=self.intervention.step(actor, by_person=not own),
        )
        try:
            first = self._first_use(mode, chunk, made)
            self.recorder.step(observation, step, first, outcome, made.trace if first is not None and made else None)
        except InvalidDataError as error:
            # Nothing is recorded that was not seen.
            self._notify("hold", f"the episode ends: {error}")
            return False
        self.outcome = outcome
        return not truncated or bool(outcome)

    def end(
        self,
        now_ns: int,
        terminal: Observation | None = None,
        *,
        awaits_verdict: bool = False,
        discarded: bool = False,
    ) -> str:
        """Close the running episode; its outcome, if its last step is recorded. Else it was broken off: as a person
        said, success in the tail, aborted before.

        `terminal`: what was observed after its last action; `awaits_verdict`: the recorder leaves its end open.
        """
        broken_off = self._verdict or (EpisodeOutcome.success if self._success_ticks else EpisodeOutcome.aborted)
        outcome = EpisodeOutcome.discarded if discarded else self.outcome or broken_off
        self.outcome = ""
        self.recorder.end(outcome, now_ns, terminal, awaits_verdict=awaits_verdict)
        self.episode = None
        self.ended += 1
        return outcome

    @property
    def _unsuccessful(self) -> EpisodeOutcome:
        """An episode that ended, and nobody has seen a success."""
        return EpisodeOutcome.unjudged if self._config.episodes.judged_by_person else EpisodeOutcome.failure

    def _first_use(self, mode: Mode, chunk: ActionChunk | None, made: ActionChunk | None) -> RecordedChunk | None:
        """The chunk if the policy acts by it for the first time."""
        if mode is not Mode.policy or chunk is None or made is None:
            return None
        # By value: a replay begins with copies of what was known.
        before, self._chunk = self._chunk, (chunk.first_tick, made.observed_ns)
        if self._chunk == before:
            return None
        actions = np.asarray(made.actions, np.float32)
        first_tick = chunk.first_tick - self.first_tick
        return RecordedChunk(first_tick, made.version, actions, made.observed_ns, made.seed, made.log_prob)


class StepRecorder:
    """Sends every step, and every frame once, to the uplink, which makes them durable. Never blocks the control loop.

    It keeps what the uplink cannot take yet and says so through `healthy`.
    """

    def __init__(self, channel: Channel, backlog: int = 24) -> None:
        """`backlog`: messages kept before `healthy` turns false, which makes the robot hold."""
        self._channel = channel
        self._limit = backlog
        self._waiting: deque[_Record] = deque()
        self._episode: Episode | None = None
        self._frame_ns: dict[str, int] = {}
        self._step_ns = 0
        self.previews = True

    @property
    def healthy(self) -> bool:
        """Whether steps leave this process."""
        if self._waiting:
            self._flush()
        return len(self._waiting) < self._limit

    def start(self, episode: Episode) -> None:
        self._episode = episode
        self._frame_ns = {}
        self._put(EpisodeStarted(episode))

    def step(
        self,
        observation: Observation,
        step: Step,
        chunk: RecordedChunk | None = None,
        outcome: str = "",
        trace: FlowTrace | None = None,
    ) -> None:
        """Record one tick, the chunk it is the first to act by with its trace, and the episode's outcome if that is
        known with it.

        Frames not yet recorded go first, so that a step never refers to what did not come.

        Raises `InvalidDataError`, and records no step, when a frame was overwritten before it could be taken.
        """
        assert self._episode is not None
        self._put_frames(self._episode, observation)
        self._step_ns = step.time_ns
        if trace is not None and chunk is not None:
            trace = msgspec.structs.replace(trace, first_tick=chunk.first_tick)
        self._put(StepRecorded(self._episode.id, step, chunk, outcome, trace))

    def end(
        self, outcome: str, now_ns: int, observation: Observation | None = None, *, awaits_verdict: bool = False
    ) -> None:
        """`observation`: made after the last action. Left out if it is not newer than the last step, or its frames were
        overwritten. `awaits_verdict`: `judge` closes it.
        """
        assert self._episode is not None
        terminal = None
        if observation is not None and observation.time_ns > self._step_ns:
            with contextlib.suppress(InvalidDataError):
                self._put_frames(self._episode, observation)
                seen = {camera: frame.time_ns for camera, frame in observation.images.items()}
                terminal = TerminalObservation(observation.time_ns, observation.state, seen)
        self._put(EpisodeEnded(self._episode.id, outcome, now_ns, terminal, awaits_verdict))
        self._episode = None

    def judge(self, episode: Episode, outcome: str, *, final: bool) -> None:
        """Somebody has said how an episode ended that was left open; `final`: nobody will say otherwise."""
        self._put(EpisodeJudged(episode.id, outcome, final))

    def _put_frames(self, episode: Episode, observation: Observation) -> None:
        for camera, frame in observation.images.items():
            if frame.time_ns > self._frame_ns.get(camera, -1):
                self._frame_ns[camera] = frame.time_ns
                sent = frame if self.previews else without_preview(frame)
                self._put(FrameRecorded(episode.id, camera, sent))

    def _put(self, record: _Record) -> None:
        waiting = bool(self._waiting)
        if not waiting and self._sent(record):
            return
        if isinstance(record, FrameRecorded):
            # What it shows may be overwritten while it waits.
            record = FrameRecorded(record.episode_id, record.camera, private(record.frame))
        self._waiting.append(record)
        if waiting:
            self._flush()

    def _flush(self) -> None:
        while self._waiting and self._sent(self._waiting[0]):
            self._waiting.popleft()

    def _sent(self, record: _Record) -> bool:
        try:
            return self._channel.send(record)
        except MessageTooLargeError as error:
            if not isinstance(record, FrameRecorded) or record.frame.preview is None:
                raise
            log.warning("camera '%s': pictures for people are left out: %s", record.camera, error)
            self.previews = False
            plain = FrameRecorded(record.episode_id, record.camera, without_preview(record.frame))
            return self._channel.send(plain)
