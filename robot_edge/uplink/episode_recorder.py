"""What control records becomes segments in the spool; an episode that nobody goes on with is ended here."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import NamedTuple

from robot_edge.uplink.segments import SegmentBuilder
from robot_edge.uplink.spool import Spool
from wire.clock import Clock
from wire.errors import DiskFullError, StorageError
from wire.messages.gateway import Nack, Segment
from wire.messages.local import EpisodeEnded, EpisodeJudged, EpisodeLost, EpisodeStarted, FrameRecorded, StepRecorded
from wire.task_thread import Task, TaskQueue
from wire.transport.channel import Channel
from wire.types import EpisodeOutcome

log = logging.getLogger(__name__)

_BROKEN_OFF_S = 30.0
"""an episode without a step for so long is over: control records one in every tick, or ends it sooner"""
_SLOW_NS = 10_000_000_000
"""a segment that has waited for the disk for so long: the robot holds"""
_HOLD_BYTES = 64 * 1024 * 1024
"""when so much waits for the disk the robot holds, however long it has waited"""
_MOST_BYTES = 2 * _HOLD_BYTES
"""when so much waits nothing more is taken from control, which then records nothing more"""
_STEP_BYTES = 1024
"""what a step takes in memory beside its pictures, or less"""


class _Waiting(NamedTuple):
    """A segment that is not on the device yet."""

    segment: Segment
    ending: Segment | None
    """what its episode ends with should nothing follow"""
    size: int
    """bytes in memory, roughly"""
    since_ns: int


def _size(segment: Segment) -> int:
    return segment.steps * _STEP_BYTES + sum(len(jpeg) for one in segment.frames.values() for jpeg in one.encoded)


class EpisodeRecorder:
    """One episode at a time. What is in memory dies with the process: a segment at most of the running episode, and
    what waits for the disk. What the spool keeps of an episode ends then with the step after its newest segment.

    Segments are written one after the other, as tasks of `disk`. When one cannot be, or waits for long, the robot holds
    until it is written.
    """

    def __init__(
        self, name: str, spool: Spool, disk: TaskQueue, control: Channel, clock: Clock, segment_steps: int
    ) -> None:
        """`control` is told when the spool takes nothing, and when steps were lost. Raises `StorageError`."""
        self._name, self._spool, self._disk, self._control, self._clock = name, spool, disk, control, clock
        self._segment_steps = segment_steps
        self._builder: SegmentBuilder | None = None
        self._step_ns = 0
        """when the newest step came"""
        self._unspooled: deque[_Waiting] = deque()
        self._unspooled_bytes = 0
        self._storing = False
        """the first of them is being written"""
        self._write_fault = ""
        """why it could not be; '' once it was"""
        self._slow_fault = ""
        """what waits for the disk waits for too long; until all of it is written"""
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
            self._add(ending, None)

    @property
    def unspooled(self) -> int:
        """Segments that the disk has not taken yet."""
        return len(self._unspooled)

    @property
    def overloaded(self) -> bool:
        """Whether so much waits for the disk that nothing more may be handed over."""
        return self._unspooled_bytes > _MOST_BYTES

    def handle_message(self, message: EpisodeStarted | StepRecorded | EpisodeEnded | EpisodeJudged) -> None:
        match message:
            case EpisodeStarted(episode=episode):
                self.break_off()
                self._builder, self._step_ns = SegmentBuilder(episode, self._segment_steps), self._clock.now_ns()
            case _ if self._builder is None or self._builder.episode.id != message.episode_id:
                if message.episode_id != self._lost_episode:
                    self._lost_episode, self._lost_told = message.episode_id, False
            case StepRecorded(step=step, chunk=chunk, outcome=outcome, trace=trace):
                self._step_ns = self._clock.now_ns()
                if (segment := self._builder.step(step, chunk, outcome, trace)) is not None:
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
        now_ns = self._clock.now_ns()
        if self.overloaded:
            # Steps may come that are not taken now.
            self._step_ns = now_ns
        running = self._builder is not None and not self._builder.awaits_verdict
        if running and now_ns - self._step_ns > _BROKEN_OFF_S * 1e9:
            log.warning("robot '%s': no step for %g s; the episode is aborted.", self._name, _BROKEN_OFF_S)
            self.break_off()
        self._store_next()
        self._disk.poll()
        self._check_storage()
        if not self._lost_told:
            self._lost_told = self._control.send(EpisodeLost(self._lost_episode))

    # --- to the disk ----------------------------------------------------------------------------------------------

    def _put(self, segment: Segment | None, ending: Segment | None = None) -> None:
        if segment is not None:
            self._add(segment, ending)
            self._store_next()
            self._disk.poll()

    def _add(self, segment: Segment, ending: Segment | None) -> None:
        size = _size(segment)
        self._unspooled.append(_Waiting(segment, ending, size, self._clock.now_ns()))
        self._unspooled_bytes += size

    def _store_next(self) -> None:
        """Have the first of what waits written, or see whether a spool that was full has room again."""
        troubled = bool(self.storage_fault)
        if self._storing or not (self._unspooled or troubled):
            return
        self._storing = True
        first = self._unspooled[0] if self._unspooled else None
        # What is stored is sent at once; what fails is tried again at the pace of the loop.
        self._disk.submit(
            Task(partial(self._store, first, troubled), self._on_stored, self._on_failed, wakes=not troubled)
        )

    def _store(self, waiting: _Waiting | None, troubled: bool) -> bool:
        """For the thread of the disk; whether there was one to be written."""
        if troubled:
            self._spool.check_room()
        if waiting is None:
            return False
        try:
            self._spool.put(waiting.segment, waiting.ending)
        except DiskFullError:
            if not self._spool.on_disk_full():
                raise
            self._spool.put(waiting.segment, waiting.ending)
        return True

    def _on_stored(self, written: bool) -> None:
        self._storing, self._write_fault = False, ""
        if written:
            self._unspooled_bytes -= self._unspooled.popleft().size
        self._check_storage()
        if self._unspooled:
            self._store_next()

    def _on_failed(self, error: Exception) -> None:
        """When the disk does not take it the robot holds and nothing is dropped that somebody acted in."""
        self._storing = False
        if not isinstance(error, StorageError):
            raise error
        self._write_fault = str(error)
        self._check_storage()

    def _check_storage(self) -> None:
        """Say whether the spool takes what is recorded, when that has changed."""
        if not self._unspooled:
            self._slow_fault = ""
        elif not self._slow_fault and not self._write_fault:
            waits_ns = self._clock.now_ns() - self._unspooled[0].since_ns
            if waits_ns > _SLOW_NS or self._unspooled_bytes > _HOLD_BYTES:
                self._slow_fault = (
                    f"the spool's disk is too slow: {len(self._unspooled)} segments, "
                    f"{self._unspooled_bytes / 1e6:.1f} MB, wait for it, the oldest for {waits_ns / 1e9:.1f} s. The "
                    "robot goes on when they are written; look at the disk, and at what else writes to it"
                )
        fault = self._write_fault or self._slow_fault
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
