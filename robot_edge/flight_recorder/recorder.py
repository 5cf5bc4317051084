"""The recorder on the control thread: stands at the loop's borders and notes what crosses them.

    flight = FlightRecorder(directory, header)
    loop = ControlLoop(name, session_id, flight.robot(robot), flight.line("uplink", uplink), ...)
    flight.start()
    while ...:
        flight.tick(loop)      # instead of loop.tick()
    flight.close()

Nothing here waits: a tick becomes bytes in memory and goes into a bounded queue. When that is full, or the disk
refuses, whole ticks are left out with a mark, and the robot goes on.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from hal.interfaces.robot import Feedback, Robot, Teleoperator
from robot_edge.flight_recorder.events import (
    LINES,
    ClockEvent,
    Connected,
    Event,
    EventEncoder,
    FlightHeader,
    Gap,
    Progressed,
    Proposed,
    Read,
    Received,
    Reset,
    SendEvent,
    SleepEvent,
    SnapshotRecord,
    TickRecord,
    WriteEvent,
    is_image,
    raised,
)
from robot_edge.flight_recorder.snapshot import RecordedBoundary, capture
from robot_edge.flight_recorder.writer import FlightConfig, QueuedRecord, Writer
from wire.clock import Clock
from wire.codec import encode
from wire.messages import Message
from wire.messages.local import EpisodeEnded, StepRecorded
from wire.transport.channel import Channel
from wire.types import Frame, Observation

log = logging.getLogger(__name__)


class Loop(Protocol):
    """What the recorder needs of a control loop."""

    mode: Any
    hold: Any

    def tick(self) -> None: ...


class FlightRecorder(RecordedBoundary):
    """Records one start of a control process into `directory`, which belongs to this robot alone."""

    def __init__(self, directory: Path, header: FlightHeader, config: FlightConfig | None = None) -> None:
        """Touches the disk only after `start`."""
        self.config = config or FlightConfig()
        self.writer = Writer(directory, header, self.config)
        self.ticks = 0
        self.lost = 0
        """ticks that could not be recorded"""
        self.live = False
        """inside a tick that is recorded"""
        self.boundary = False
        self.images: dict[str, Frame] = {}
        """the newest"""
        self.session_id = header.session_id
        """names this start of the control process"""
        self._name = header.name
        self._packer = EventEncoder()
        self._pack = self._packer.encode_into
        self._buffer = bytearray()
        self._count = self._size = 0
        self._frames: dict[str, tuple[int, np.ndarray]] = {}
        self._since_snapshot = 0
        self._gap_from = self._try_at = 0
        self._gap_reason = self._broken = ""
        self._told = False

    # --- the borders -----------------------------------------------------------------------------------------------

    def robot(self, robot: Robot) -> Robot:
        return RecordedRobot(robot, self)

    def line(self, which: Literal["uplink", "inference"], channel: Channel) -> Channel:
        return RecordedChannel(channel, self, LINES.index(which))

    def clock(self, clock: Clock) -> Clock:
        return RecordedClock(clock, self)

    def operator(self, operator: Teleoperator | None) -> Teleoperator | None:
        return RecordedOperator(operator, self) if operator is not None else None

    # --- ticks -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write. Call before the process becomes real-time, so that the writing does not."""
        self.writer.start()

    def tick(self, loop: Loop) -> None:
        """One tick of `loop`, recorded. Whatever it raises is noted and raised on."""
        self._begin(loop)
        try:
            loop.tick()
        except BaseException as error:
            self._end(loop, error)
            raise
        self._end(loop, None)

    def close(self) -> None:
        """Write what waits; call it after the last tick."""
        self._mark_gap(self.ticks)
        self.writer.close()

    @property
    def failure(self) -> str:
        """Why nothing is recorded now, '' while all is well."""
        return self.writer.failure or self._broken

    def _begin(self, loop: Loop) -> None:
        self.ticks += 1
        if not self._since_snapshot or self._gap_from or self.writer.failure or self._due():
            self._snapshot(loop)
        self._buffer = bytearray()
        self._packer.clear()
        self._count = self._size = 0
        self.live = not self._gap_from

    def _due(self) -> bool:
        after = self.config.snapshot_ticks if not self.boundary else self.config.boundary_ticks
        return self.writer.full or self._since_snapshot > after

    def _snapshot(self, loop: Loop) -> None:
        """Note what `loop` knows before this tick; after a gap this is where the record goes on."""
        if self.writer.failure and not self._gap_from:
            self._lose(self.writer.failure)
        if self._gap_from and self.ticks < self._try_at:
            return
        # A disk that refused is asked again now and then, a queue that was full at the next tick.
        failing = bool(self.writer.failure)
        self._try_at = self.ticks + (50 if failing else 5)
        try:
            tree, left_out = capture(loop)
            packer, buffer = EventEncoder(), bytearray()
            packer.copies = self._packer.copies
            packer.into(tree, buffer)
        except Exception as error:  # noqa: BLE001 - a loop that cannot be noted is flown all the same
            self._lose(f"the loop's state cannot be noted: {error!r}")
            return
        if left_out and not self._told:
            self._told = True
            log.info("robot '%s': not part of a flight's snapshots: %s.", self._name, ", ".join(left_out))
        item = QueuedRecord(SnapshotRecord, self.ticks - 1, bytes(buffer), large=packer.large, left_out=tuple(left_out))
        item.images = self.images
        item.size = len(item.data) + sum(array.nbytes for array in item.large)
        if failing:
            # Only to see whether the disk takes it; the record goes on with the snapshot after that.
            self.writer.offer(item)
            return
        if not (self._mark_gap(self.ticks - 1) and self.writer.offer(item)):
            self._lose("the disk is too slow")
            return
        self._broken = ""
        self._since_snapshot = 1
        self.boundary = False

    def _mark_gap(self, last: int) -> bool:
        """Whether the gap up to `last`, if there is one, is noted: once, whatever becomes of the snapshot after it."""
        if self._gap_from and self._gap_from <= last:
            if not self.writer.offer(QueuedRecord(Gap, self._gap_from, last=last, reason=self._gap_reason)):
                return False
            self._gap_from = 0
        return True

    def _lose(self, reason: str) -> None:
        """This tick is not recorded, nor are those after it until a snapshot is."""
        self.live = False
        self._broken = reason
        if not self._gap_from:
            self._gap_from, self._gap_reason = max(1, self.ticks), reason
            log.warning("robot '%s': tick %d is missing in the flight: %s", self._name, self.ticks, reason)

    def _end(self, loop: Loop, error: BaseException | None) -> None:
        if self.live:
            self.live = False
            item = QueuedRecord(
                TickRecord,
                self.ticks,
                bytes(self._buffer),
                self._count,
                self._packer.large,
                str(loop.mode),
                str(loop.hold.reason),
                raised(error),
                self.images,
            )
            item.size = len(item.data) + self._size
            if self.writer.offer(item):
                self._since_snapshot += 1
                return
            self._lose("the disk is too slow")
        self.lost += 1

    # --- what the borders call -------------------------------------------------------------------------------------

    def note(self, event: Event) -> None:
        """Append to the running tick."""
        try:
            self._pack(event, self._buffer, -1)
            self._count += 1
        except Exception as error:  # noqa: BLE001 - a value without a place in the file costs the tick, not the robot
            self._lose(f"{type(event).__name__} cannot be recorded: {error}")

    def note_encoded(self, event: bytes) -> None:
        """As `note`, for an event that is always the same."""
        self._buffer += event
        self._count += 1

    def saw(self, observation: Observation) -> None:
        """Take note of new frames: a copy where that is cheap, and the size of what waits for the other thread."""
        try:
            self._note_frames(observation)
        except AttributeError as error:
            # What a driver gave in an observation's place is for the loop to refuse.
            self._lose(f"an observation cannot be recorded: {error}")

    def _note_frames(self, observation: Observation) -> None:
        for camera, frame in observation.images.items():
            known = self._frames.get(camera)
            if known is not None and known[0] == frame.time_ns and known[1] is frame.image:
                continue
            copies = self._packer.copies
            if known is not None:
                copies.pop(id(known[1]), None)
            image = frame.image
            if image.nbytes <= self.config.copy_bytes and is_image(image) and image.flags.writeable:
                copies[id(frame.image)] = frame.image.copy()
            self._frames[camera] = frame.time_ns, frame.image
            self._size += frame.image.nbytes
            self.images = observation.images


class RecordedClock(RecordedBoundary):
    """Keeps the `Clock` protocol."""

    def __init__(self, inner: Clock, flight: FlightRecorder) -> None:
        self._inner = inner
        self._flight = flight

    def now_ns(self) -> int:
        now_ns = self._inner.now_ns()
        if self._flight.live:
            self._flight.note(ClockEvent(now_ns))
        return now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        if self._flight.live:
            self._flight.note(SleepEvent(deadline_ns))
        self._inner.sleep_until(deadline_ns)


class RecordedChannel(RecordedBoundary):
    """Keeps the `Channel` protocol; whatever else the line has is reached through it."""

    def __init__(self, inner: Channel, flight: FlightRecorder, line: int) -> None:
        self._inner = inner
        self._flight = flight
        self._line = line
        self._nothing = msgspec.msgpack.encode(Received(line, None))

    def send(self, message: Message) -> bool:
        accepted = self._inner.send(message)
        flight = self._flight
        if flight.live:
            # A step stands in the file as it went to the uplink.
            step: Any = msgspec.Raw(encode(message)[1:]) if type(message) is StepRecorded else message
            flight.note(SendEvent(self._line, accepted, step))
        if accepted and type(message) is EpisodeEnded:
            flight.boundary = True
        return accepted

    def recv(self) -> Message | None:
        message = self._inner.recv()
        if self._flight.live:
            if message is None:
                self._flight.note_encoded(self._nothing)
            else:
                self._flight.note(Received(self._line, message))
        return message

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordedRobot(RecordedBoundary):
    """Keeps the `Robot` protocol; whatever else the robot has is reached through it."""

    def __init__(self, inner: Robot, flight: FlightRecorder) -> None:
        self.spec = inner.spec
        self._inner = inner
        self._flight = flight

    def connect(self) -> None:
        try:
            self._inner.connect()
        except BaseException as error:
            if self._flight.live:
                self._flight.note(Connected(raised(error)))
            raise
        if self._flight.live:
            self._flight.note(Connected())

    def reset(self, task: str, seed: int) -> None:
        try:
            self._inner.reset(task, seed)
        except BaseException as error:
            if self._flight.live:
                self._flight.note(Reset(task, seed, raised(error)))
            raise
        if self._flight.live:
            self._flight.note(Reset(task, seed))

    def read(self) -> Observation:
        try:
            observation = self._inner.read()
        except BaseException as error:
            if self._flight.live:
                self._flight.note(Read(None, raised(error)))
            raise
        self._flight.saw(observation)
        if self._flight.live:
            self._flight.note(Read(observation))
        return observation

    def write(self, action: np.ndarray) -> Feedback:
        try:
            feedback = self._inner.write(action)
        except BaseException as error:
            if self._flight.live:
                self._flight.note(WriteEvent(action, None, raised(error)))
            raise
        if self._flight.live:
            self._flight.note(WriteEvent(action, feedback))
        return feedback

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordedOperator(RecordedBoundary):
    """Keeps the `Teleoperator` protocol."""

    def __init__(self, inner: Teleoperator, flight: FlightRecorder) -> None:
        self._inner = inner
        self._flight = flight

    def propose(self, observation: Observation) -> np.ndarray | None:
        try:
            action = self._inner.propose(observation)
        except BaseException as error:
            if self._flight.live:
                self._flight.note(Proposed(None, raised(error)))
            raise
        if self._flight.live:
            self._flight.note(Proposed(action))
        return action

    def progress(self) -> float:
        try:
            left = self._inner.progress()
        except BaseException as error:
            if self._flight.live:
                self._flight.note(Progressed(0.0, raised(error)))
            raise
        if self._flight.live:
            self._flight.note(Progressed(left))
        return left
