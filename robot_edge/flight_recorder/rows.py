"""Recorded ticks as people read them: one row each, from the record alone, and a table of them for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from hal.interfaces.robot import Feedback
from robot_edge.flight_recorder.events import (
    Call,
    FlightHeader,
    Gap,
    PreviewFrame,
    SnapshotRecord,
    TickRecord,
    unpack,
)
from robot_edge.flight_recorder.replay import read_records
from wire.errors import ConfigError
from wire.messages.gateway import EdgeEvent
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeEnded, EpisodeStarted, StepRecorded
from wire.types import Observation, Step

_NEAR = 1000
"""ticks: a picture may stand as far from its tick, and a request from its reply"""
_SHOWN_DIMENSIONS = 7
"""of an action, in the table"""


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
    executed: np.ndarray | None = None
    """float32[da] that the robot did"""
    latency_s: float = -1.0
    """from the request to the reply that came, -1 without one"""
    notes: str = ""
    """what else happened"""


def read_rows(
    path: Path, first_tick: int | None = None, last_tick: int | None = None, session_id: str = ""
) -> tuple[FlightHeader, Iterator[Row | PreviewFrame | Gap]]:
    """A stretch of a start (the newest, or the one named), with its pictures and gaps.

    Raises `ConfigError` when there is no such start, and while iterating when the stretch was not recorded.
    """
    header, found = read_records(path, session_id)
    first, last = first_tick or 1, last_tick or 2**62

    def stretch() -> Iterator[Row | PreviewFrame | Gap]:
        asked: dict[int, int] = {}
        any_row = False
        for record in found:
            what = record.what
            if isinstance(what, SnapshotRecord):
                continue
            begin, end = (what.first, what.last) if isinstance(what, Gap) else (what.tick, what.tick)
            if begin > last + _NEAR:
                break
            inside = begin <= last and end >= first
            if isinstance(what, TickRecord) and first - _NEAR <= begin <= last:
                row = _row(what, unpack(what, record.large), asked)
                any_row |= inside
                if inside:
                    yield row
            elif inside and not isinstance(what, TickRecord):
                yield what
        if not any_row:
            raise ConfigError(f"{path}: no tick from {first_tick or 1} to {last_tick or 'the end'} was recorded.")

    return header, stretch()


def _row(record: TickRecord, calls: list[Call], asked: dict[int, int]) -> Row:
    """`asked`: when the request of a tick left, filled in here."""
    row = Row(record.tick, 0, record.mode, record.reason)
    deadline_ns, now_ns = 0, 0
    notes = []
    for call in calls:
        match call:
            case Call("clock.sleep_until", given=(until_ns,)):
                deadline_ns = deadline_ns or until_ns
            case Call("clock.now_ns"):
                now_ns = call.result
                row.time_ns = row.time_ns or now_ns
            case Call("robot.read", result=Observation() as observation):
                row.state = observation.state
            case Call("robot.write", result=Feedback() as feedback):
                row.executed = feedback.executed
            case Call("robot.reset", given=(task, seed)):
                notes.append(f"reset: {task}, seed {seed}")
            case Call(result=ChunkReply() as reply):
                if reply.tick in asked:
                    row.latency_s = (now_ns - asked.pop(reply.tick)) / 1e9
                if reply.error:
                    notes.append(f"inference: {reply.error}")
            case Call("uplink.recv" | "inference.recv", result=message) if message is not None:
                kind = getattr(message, "kind", "")
                line = call.name.removesuffix(".recv")
                notes.append(f"{line} says {type(message).__name__}{f' {kind}' if kind else ''}")
            case Call(given=(ChunkRequest() as request,), result=accepted):
                asked[request.tick] = now_ns
                if not accepted:
                    notes.append("inference takes no request")
            case Call(given=(StepRecorded(step=step),)):
                row.step = step
            case Call(given=(EpisodeStarted(episode=episode),)):
                notes.append(f"episode {episode.id}")
            case Call(given=(EpisodeEnded() as ended,)):
                notes.append(f"episode ends: {ended.outcome}")
            case Call(given=(EdgeEvent() as event,)):
                notes.append(f"{event.kind}: {event.detail}")
        if call.error is not None and call.name in ("robot.read", "robot.write"):
            notes.append(call.error.text)
    if record.error is not None:
        notes.append(f"{record.error.kind}: {record.error.text}")
    if deadline_ns:
        row.late_s = max(0, row.time_ns - deadline_ns) / 1e9
    row.notes = "; ".join(dict.fromkeys(notes))
    return row


def print_table(
    path: Path, out: TextIO, first_tick: int | None = None, last_tick: int | None = None, session_id: str = ""
) -> int:
    """Print the ticks of a stretch to `out`, one a line; how many. Raises as `read_rows` does."""
    header, stretch = read_rows(path, first_tick, last_tick, session_id)
    count = 0
    for item in stretch:
        if isinstance(item, Gap):
            out.write(f"{item.first:>8}  … {item.last}: not recorded: {item.reason}\n")
        elif isinstance(item, Row):
            if count % 40 == 0:
                out.write(_head(header))
            out.write(_line(item) + "\n")
            count += 1
    return count


def _head(header: FlightHeader) -> str:
    names = " ".join(f"{d.name[:6]:>6}" for d in header.spec.action[:_SHOWN_DIMENSIONS])
    return f"{'tick':>8} {'late ms':>7} {'mode':<6} {'who':<6} {'chunk':>6} {'delay':>5}  {names}  reason, events\n"


def _line(row: Row) -> str:
    step = row.step
    who = step.actor.value if step is not None else "-"
    chunk = f"{step.chunk_tick}" if step is not None and step.chunk_tick >= 0 else "-"
    delay = f"{step.delay_ticks}" if step is not None and step.delay_ticks >= 0 else "-"
    text = "; ".join(word for word in (row.reason, row.notes) if word)
    return (
        f"{row.tick:>8} {row.late_s * 1e3:>7.2f} {row.mode:<6} {who:<6} {chunk:>6} {delay:>5}"
        f"  {_numbers(row.executed)}  {text}"
    ).rstrip()


def _numbers(action: np.ndarray | None) -> str:
    if action is None:
        return "-"
    more = " …" if len(action) > _SHOWN_DIMENSIONS else ""
    return " ".join(f"{value:>6.3g}" for value in action[:_SHOWN_DIMENSIONS]) + more
