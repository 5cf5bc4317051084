"""What control records becomes segments in the spool; an episode that nobody goes on with is ended here."""

from __future__ import annotations

import logging

from robot_edge.uplink.segments import SegmentBuilder, Spool
from wire.clock import Clock
from wire.errors import StorageError
from wire.messages.gateway import Nack, Segment
from wire.messages.local import EpisodeEnded, EpisodeJudged, EpisodeLost, EpisodeStarted, FrameRecorded, StepRecorded
from wire.transport.channel import Channel
from wire.types import EpisodeOutcome

log = logging.getLogger(__name__)

_BROKEN_OFF_S = 30.0
"""an episode without a step for so long is over: control records one in every tick, or ends it sooner"""


class EpisodeRecorder:
    """One episode at a time. What it has of it in memory, a segment at most, dies with the process; then what the spool
    keeps of the episode ends with the step after its newest segment.
    """

    def __init__(self, name: str, spool: Spool, control: Channel, clock: Clock, segment_steps: int) -> None:
        """`control` is told when the spool takes nothing, and when steps were lost. Raises `StorageError`."""
        self._name, self._spool, self._control, self._clock = name, spool, control, clock
        self._segment_steps = segment_steps
        self._builder: SegmentBuilder | None = None
        self._step_ns = 0
        """when the newest step came"""
        self._unspooled: list[tuple[Segment, Segment | None]] = []
        """with what the episode ends with should nothing follow"""
        self._storage_fault = ""
        self._lost_episode, self._lost_told = "", True
        """id of the newest one of which steps are missing, and whether control was told"""
        if (ending := spool.ending()) is not None:
            # An episode that had ended with this very step is whole.
            self._lost_episode, self._lost_told = ending.episode.id, ending.outcome != EpisodeOutcome.aborted
            log.warning(
                "robot '%s': an earlier uplink died in episode %s: %s.", name, ending.episode.id, ending.outcome
            )
            self._unspooled.append((ending, None))

    @property
    def unspooled(self) -> int:
        """Segments that the disk has not taken yet."""
        return len(self._unspooled)

    def handle_message(self, message: EpisodeStarted | StepRecorded | EpisodeEnded | EpisodeJudged) -> None:
        match message:
            case EpisodeStarted(episode=episode):
                self.break_off()
                self._builder, self._step_ns = SegmentBuilder(episode, self._segment_steps), self._clock.now_ns()
            case _ if self._builder is None or self._builder.episode.id != message.episode_id:
                if message.episode_id != self._lost_episode:
                    self._lost_episode, self._lost_told = message.episode_id, False
            case StepRecorded(step=step, chunk=chunk, outcome=outcome):
                self._step_ns = self._clock.now_ns()
                if (segment := self._builder.step(step, chunk, outcome)) is not None:
                    self._put(segment, self._builder.broken_off())
            case EpisodeEnded(outcome=outcome, ended_ns=ended_ns, terminal=terminal, awaits_verdict=True):
                self._builder.await_verdict(outcome, ended_ns, terminal)
            case EpisodeJudged(outcome=outcome, final=final):
                self._builder.judge(outcome)
                if final:
                    self.break_off()
            case EpisodeEnded(outcome=outcome, ended_ns=ended_ns, terminal=terminal):
                self._put(self._builder.end(outcome, ended_ns, terminal))
                self._builder = None

    def frame(self, message: FrameRecorded) -> bytes | None:
        """The JPEG that is kept of it, None for one of no running episode."""
        if self._builder is None or self._builder.episode.id != message.episode_id:
            return None
        return self._builder.frame(message.camera, message.frame.time_ns, message.frame.image)

    def break_off(self) -> None:
        """Nothing more comes of the running episode, if there is one: aborted, unless it is known how it ended."""
        if self._builder is not None:
            self._put(self._builder.end(EpisodeOutcome.aborted, self._clock.now_ns()))
            self._builder = None

    def report_storage(self) -> None:
        """Tell control whether the spool takes segments."""
        self._control.send(Nack(self._storage_fault))

    def poll(self) -> None:
        """Write what is not yet durable; end an episode that goes on no more; say of which steps are missing."""
        running = self._builder is not None and not self._builder.awaits_verdict
        if running and self._clock.now_ns() - self._step_ns > _BROKEN_OFF_S * 1e9:
            log.warning("robot '%s': no step for %g s; the episode is aborted.", self._name, _BROKEN_OFF_S)
            self.break_off()
        self._spool_waiting()
        if not self._lost_told:
            self._lost_told = self._control.send(EpisodeLost(self._lost_episode))

    def _put(self, segment: Segment | None, ending: Segment | None = None) -> None:
        if segment is not None:
            self._unspooled.append((segment, ending))
            self._spool_waiting()

    def _spool_waiting(self) -> None:
        """When the disk does not take it the robot holds and nothing is dropped."""
        while self._unspooled:
            try:
                self._spool.put(*self._unspooled[0])
            except StorageError as error:
                if not self._storage_fault:
                    log.error("robot '%s' holds: %s", self._name, error)
                    self._storage_fault = str(error)
                    self.report_storage()
                return
            self._unspooled.pop(0)
            if self._storage_fault:
                log.info("robot '%s': the spool takes segments again.", self._name)
                self._storage_fault = ""
                self.report_storage()
