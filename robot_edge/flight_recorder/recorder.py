"""The recorder on the control thread: stands at the loop's borders and notes what crosses them.

    flight = FlightRecorder(directory, header)
    loop = ControlLoop(name, session_id, flight.border("robot", robot), flight.border("uplink", uplink), ...)
    flight.start()
    while ...:
        flight.tick(loop)      # instead of loop.tick()
    flight.close()

Nothing here waits: a tick becomes bytes in memory and goes into a bounded queue. When that is full, or the disk
refuses, whole ticks are left out with a mark, and the robot goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from robot_edge.control.loop import ControlLoop
from robot_edge.flight_recorder.borders import RecordedBoundary
from robot_edge.flight_recorder.events import (
    Call,
    CallEncoder,
    FlightHeader,
    Gap,
    SnapshotRecord,
    TickRecord,
    raised,
)
from robot_edge.flight_recorder.snapshot import capture
from robot_edge.flight_recorder.writer import FlightConfig, Writer
from wire.codec import encode
from wire.messages.local import EpisodeEnded, StepRecorded
from wire.types import Frame

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class FlightRecorder:
    """Records one start of a control process into `directory`, which belongs to this robot alone."""

    def __init__(self, directory: Path, header: FlightHeader, config: FlightConfig | None = None) -> None:
        """Touches the disk only after `start`."""
        self.config = config or FlightConfig()
        self.writer = Writer(directory, header, self.config)
        self.ticks = 0
        self.lost = 0
        """ticks that could not be recorded"""
        self.session_id = header.session_id
        """names this start of the control process"""
        self._name = header.name
        self._live = False
        """inside a tick that is recorded"""
        self._episode_ended = False
        """since the last snapshot"""
        self._images: Mapping[str, Frame] = {}
        """the newest"""
        self._encoder = CallEncoder()
        self._calls: list[bytes] = []
        self._since_snapshot = 0
        self._gap_from = self._try_at = 0
        self._gap_reason = ""

    def border(self, name: str, inner: _T) -> _T:
        """The loop's `inner` (its "robot", "uplink", "inference", "clock" or "operator"), whose calls are recorded."""
        return cast(_T, RecordedBoundary(name, inner, self))

    # --- ticks -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write. Call before the process becomes real-time, so that the writing does not."""
        self.writer.start()

    def tick(self, loop: ControlLoop) -> None:
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

    def _begin(self, loop: ControlLoop) -> None:
        self.ticks += 1
        if not self._since_snapshot or self._gap_from or self.writer.failure or self._due():
            self._snapshot(loop)
        self._encoder.clear()
        self._calls = []
        self._live = not self._gap_from

    def _due(self) -> bool:
        after = self.config.snapshot_ticks if not self._episode_ended else self.config.boundary_ticks
        return self.writer.full or self._since_snapshot > after

    def _snapshot(self, loop: ControlLoop) -> None:
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
            encoder = CallEncoder()
            state = encoder.encode(tree)
        except Exception as error:  # noqa: BLE001 - a loop that cannot be noted is flown all the same
            self._lose(f"the loop's state cannot be noted: {error!r}")
            return
        record = SnapshotRecord(self.ticks - 1, state, left_out=tuple(left_out))
        if failing:
            # Only to see whether the disk takes it; the record goes on with the snapshot after that.
            self.writer.submit(record, encoder.large, self._images)
            return
        if not (self._mark_gap(self.ticks - 1) and self.writer.submit(record, encoder.large, self._images)):
            self._lose("the disk is too slow")
            return
        self._since_snapshot = 1
        self._episode_ended = False

    def _mark_gap(self, last: int) -> bool:
        """Whether the gap up to `last`, if there is one, is noted: once, whatever becomes of the snapshot after it."""
        if self._gap_from and self._gap_from <= last:
            if not self.writer.submit(Gap(self._gap_from, last, self._gap_reason)):
                return False
            self._gap_from = 0
        return True

    def _lose(self, reason: str) -> None:
        """This tick is not recorded, nor are those after it until a snapshot is."""
        self._live = False
        if not self._gap_from:
            self._gap_from, self._gap_reason = max(1, self.ticks), reason
            log.warning("robot '%s': tick %d is missing in the flight: %s", self._name, self.ticks, reason)

    def _end(self, loop: ControlLoop, error: BaseException | None) -> None:
        if self._live:
            self._live = False
            mode, reason = str(loop.mode), str(loop.hold.reason)
            record = TickRecord(self.ticks, self._calls, mode=mode, reason=reason, error=raised(error))
            if self.writer.submit(record, self._encoder.large, self._images):
                self._since_snapshot += 1
                return
            self._lose("the disk is too slow")
        self.lost += 1

    # --- calls ------------------------------------------------------------------------------------------------------

    def call(self, name: str, perform: Callable[[], Any], *given: Any) -> Any:
        """What `perform` returns or raises, noted in the running tick."""
        try:
            result = perform()
        except BaseException as error:
            self._note(Call(name, given, None, raised(error)))
            raise
        if name == "robot.read":
            # A driver may answer anything; whoever reads says what is wrong with it.
            self._images = getattr(result, "images", {})
        elif name == "uplink.send":
            message = given[0]
            if self._live and type(message) is StepRecorded:
                # A step stands in the file as it went to the uplink.
                given = (msgspec.Raw(encode(message)[1:]),)
            self._episode_ended |= result and type(message) is EpisodeEnded
        self._note(Call(name, given, result))
        return result

    def _note(self, call: Call) -> None:
        if not self._live:
            return
        try:
            self._calls.append(self._encoder.encode(call))
        except Exception as error:  # noqa: BLE001 - a value without a place in the file costs the tick, not the robot
            self._lose(f"{call.name} cannot be recorded: {error}")
