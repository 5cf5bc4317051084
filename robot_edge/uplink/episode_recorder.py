"""What control records becomes segments in the spool; an episode that nobody goes on with is ended here."""

from __future__ import annotations

import logging

from robot_edge.uplink.segments import SegmentBuilder
from robot_edge.uplink.spool import Spool
from wire.clock import Clock
from wire.errors import DiskFullError, StorageError
from wire.messages.gateway import Nack, Segment
from wire.messages.local import EpisodeEnded, EpisodeJudged, EpisodeLost, EpisodeStarted, FrameRecorded, StepRecorded
from wire.transport.channel import Channel
from wire.types import EpisodeOutcome

log = logging.getLogger(__name__)

_BROKEN_OFF_S = 30.0
"""an episode without a step for so long is over: control records one in every tick, or ends it sooner"""
_ROOM_BYTES = 16 * 1024 * 1024
"""so much of the spool is dropped at once when the disk is full: a disk that others fill has to give way too"""


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
        self.storage_fault = ""
        """why the robot holds: the spool takes nothing more; '' while it does"""
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
        self._control.send(Nack(self.storage_fault))

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
        """When the disk does not take it the robot holds and nothing is dropped that somebody acted in."""
        fault = ""
        while self._unspooled and not fault:
            try:
                self._put_first()
            except StorageError as error:
                fault = str(error)
        if not fault and self._spool.is_full:
            # What is recorded until the robot holds is taken in as well.
            fault = (
                f"the spool is full: {self._spool.size / 1e9:.3g} GB wait for the gateway, and nothing of it may be "
                "dropped, for a person or a script had a hand in it. Mend the connection, or give it more room with "
                "--spool-max"
            )
        if bool(fault) != bool(self.storage_fault):
            if fault:
                log.error("robot '%s' holds: %s", self._name, fault)
            else:
                log.info("robot '%s': the spool takes segments again.", self._name)
            self._control.send(Nack(fault))
        self.storage_fault = fault

    def _put_first(self) -> None:
        segment, ending = self._unspooled[0]
        try:
            self._spool.put(segment, ending)
        except DiskFullError:
            if not self._spool.make_room(_ROOM_BYTES):
                raise
            self._spool.put(segment, ending)
        self._unspooled.pop(0)
