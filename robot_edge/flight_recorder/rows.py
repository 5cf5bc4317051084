"""Recorded ticks as people read them: one row each, from the record alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robot_edge.flight_recorder.events import (
    INFERENCE,
    ClockEvent,
    Event,
    FlightHeader,
    Gap,
    PreviewFrame,
    Read,
    Received,
    Reset,
    SendEvent,
    SleepEvent,
    SnapshotRecord,
    TickRecord,
    WriteEvent,
    unpack,
)
from robot_edge.flight_recorder.replay import records
from wire.errors import ConfigError
from wire.messages.gateway import EdgeEvent
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeEnded, EpisodeStarted, StepRecorded
from wire.types import Step


@dataclass(slots=True)
class Row:
    """One tick."""

    tick: int
    time_ns: int
    """by the robot's clock, when it began"""
    mode: str
    reason: str
    late_s: float = 0.0
    """how long after its deadline it began"""
    state: np.ndarray | None = None
    """float32[ds] as read, None when nothing could be"""
    step: Step | None = None
    """None when nothing was recorded: between episodes, or nothing valid was seen"""
    written: np.ndarray | None = None
    """float32[da] that the robot was given"""
    executed: np.ndarray | None = None
    """float32[da] that it did"""
    request: ChunkRequest | None = None
    reply: ChunkReply | None = None
    latency_s: float = -1.0
    """from the request to this reply, -1 without one"""
    notes: str = ""
    """what else happened"""


def rows(
    path: Path, first_tick: int | None = None, last_tick: int | None = None, session_id: str = ""
) -> tuple[FlightHeader, Iterator[Row | PreviewFrame | Gap]]:
    """A stretch of a start (the newest, or the one named), with its pictures and gaps.

    Raises `ConfigError` when there is no such start, and while iterating when the stretch was not recorded.
    """
    header, found = records(path, session_id)
    first, last = first_tick or 1, last_tick or 2**62

    def stretch() -> Iterator[Row | PreviewFrame | Gap]:
        asked: dict[int, int] = {}
        any_row = False
        for record in found:
            what = record.what
            if isinstance(what, SnapshotRecord):
                continue
            if isinstance(what, Gap):
                if what.last >= first and what.first <= last:
                    yield what
                continue
            # a picture may stand a little before or after its tick's block
            if what.tick > last + 1000:
                break
            if isinstance(what, PreviewFrame):
                if first <= what.tick <= last:
                    yield what
                continue
            if what.tick < first - 1000 or what.tick > last:
                continue
            row = _row(what, unpack(what, record.large), asked)
            if what.tick >= first:
                any_row = True
                yield row
        if not any_row:
            raise ConfigError(f"{path}: no tick from {first_tick or 1} to {last_tick or 'the end'} was recorded.")

    return header, stretch()


def _row(record: TickRecord, events: list[Event], asked: dict[int, int]) -> Row:
    """`asked`: when the request of a tick left, filled in here."""
    row = Row(record.tick, 0, record.mode, record.reason)
    deadline_ns, now_ns = 0, 0
    notes = []
    for event in events:
        match event:
            case SleepEvent():
                deadline_ns = deadline_ns or event.deadline_ns
            case ClockEvent():
                now_ns = event.now_ns
                row.time_ns = row.time_ns or now_ns
            case Read():
                if event.observation is not None:
                    row.state = event.observation.state
                elif event.error is not None:
                    notes.append(event.error.text)
            case WriteEvent():
                row.written = event.action
                if event.feedback is not None:
                    row.executed = event.feedback.executed
                elif event.error is not None:
                    notes.append(event.error.text)
            case Reset():
                notes.append(f"reset: {event.task}, seed {event.seed}")
            case Received(line=line, message=message) if message is not None:
                if isinstance(message, ChunkReply):
                    row.reply = message
                    if message.tick in asked:
                        row.latency_s = (now_ns - asked.pop(message.tick)) / 1e9
                    if message.error:
                        notes.append(f"inference: {message.error}")
                else:
                    notes.append(f"{'inference' if line == INFERENCE else 'uplink'} says {_said(message)}")
            case SendEvent(message=ChunkRequest() as request):
                row.request = request
                asked[request.tick] = now_ns
                if not event.accepted:
                    notes.append("inference takes no request")
            case SendEvent(message=StepRecorded() as taken):
                row.step = taken.step
            case SendEvent(message=EpisodeStarted() as started):
                notes.append(f"episode {started.episode.id}")
            case SendEvent(message=EpisodeEnded() as ended):
                notes.append(f"episode ends: {ended.outcome}")
            case SendEvent(message=EdgeEvent() as told):
                notes.append(f"{told.kind}: {told.detail}")
    if record.error is not None:
        notes.append(f"{record.error.kind}: {record.error.text}")
    if deadline_ns:
        row.late_s = max(0, row.time_ns - deadline_ns) / 1e9
    row.notes = "; ".join(dict.fromkeys(notes))
    return row


def _said(message: object) -> str:
    kind = getattr(message, "kind", "")
    return f"{type(message).__name__}{f' {kind}' if kind else ''}"
