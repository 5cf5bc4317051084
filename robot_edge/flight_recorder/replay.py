"""Decide a recorded stretch again, tick by tick, and compare.

Each tick's borders are played to a loop built from the file's header; what that loop sends, writes, resets and waits
for, and its mode and reason, must be what was recorded, bit by bit. A replay begins at the last snapshot before the
stretch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

import wire.errors
from hal.interfaces.robot import HoldingRobot, Teleoperator
from robot_edge.control.loop import ControlLoop
from robot_edge.flight_recorder.borders import RecordedBoundary
from robot_edge.flight_recorder.events import (
    Call,
    FlightHeader,
    Gap,
    PreviewFrame,
    Raised,
    SnapshotRecord,
    TickRecord,
    array_reader,
    plain,
    raised,
    same,
    unpack,
)
from robot_edge.flight_recorder.file import FlightRecord, find_starts
from robot_edge.flight_recorder.snapshot import restore
from robot_edge.flight_recorder.writer import program
from wire.clock import Clock
from wire.errors import ConfigError
from wire.transport.channel import Channel

MakeLoop = Callable[[FlightHeader, HoldingRobot, Channel, Channel, Clock, Teleoperator | None], ControlLoop]
"""Builds the loop a header describes on a robot, uplink, inference, clock and operator; it may look at nothing else."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise."""

    tick: int
    what: str
    """which decision: `uplink.send.StepRecorded.step.executed[2]`"""
    recorded: Any
    replayed: Any


@dataclass(slots=True)
class Replay:
    """What came out."""

    header: FlightHeader
    ticks: int = 0
    """decided again and compared"""
    differences: list[Difference] = field(default_factory=list)
    """of the first tick that differs; the ticks after it are not looked at"""
    notes: list[str] = field(default_factory=list)
    """what a reader should know: gaps, another version of the program"""
    first_tick: int = 0
    last_tick: int = 0


def read_records(path: Path, session_id: str = "") -> tuple[FlightHeader, Iterator[FlightRecord]]:
    """The header of a start (the newest, or the one named) and all records of its files in `path`, in order.

    Raises `ConfigError` when there is none.
    """
    found = find_starts(path)
    chosen = [files for files in found if not session_id or files[0].header.session_id == session_id]
    if not chosen:
        raise ConfigError(
            f"{path} holds no start '{session_id}'; it holds {', '.join(one[0].header.session_id for one in found)}."
        )
    return chosen[-1][0].header, itertools.chain.from_iterable(chosen[-1])


def replay(
    path: Path,
    make_loop: MakeLoop,
    first_tick: int | None = None,
    last_tick: int | None = None,
    on_tick: Callable[[TickRecord, list[Call]], None] | None = None,
    session_id: str = "",
) -> Replay:
    """Decide ticks [first_tick, last_tick] of a start again; all that was recorded by default.

    `path` is a file or a directory; `session_id` names the start, the newest by default. Stops after the first tick
    that differs. `on_tick` is called for every tick of the stretch, with what was
    recorded of it. Raises `ConfigError` when the stretch was not
    recorded, `CorruptDataError` for what cannot be read.
    """
    header, found = read_records(path, session_id)
    result = Replay(header)
    if header.program != program():
        result.notes.append(f"recorded by vla-fleet {header.program}, replayed by {program()}.")
    player = _Player(header, make_loop, result.notes)
    last_seen = 0
    # Snapshots and the ticks after them, up to the stretch: only from the last one before it is anything decided.
    waiting: list[FlightRecord] = []
    for record in found:
        what = record.what
        if isinstance(what, PreviewFrame):
            continue
        if isinstance(what, Gap):
            result.notes.append(f"ticks {what.first} to {what.last} are missing: {what.reason}.")
            continue
        if isinstance(what, SnapshotRecord):
            if last_tick is not None and what.tick >= last_tick:
                break
            if what.tick < (first_tick or 0) or not player.ready or what.tick != player.tick:
                waiting = [record]
            continue
        last_seen = what.tick
        if last_tick is not None and what.tick > last_tick:
            break
        if first_tick is not None and what.tick < first_tick:
            waiting.append(record)
            continue
        differences: list[Difference] | None = None
        for one in (*waiting, record):
            differences = player.play(one)
            if differences:
                break
        waiting = []
        if differences is None:
            continue
        result.ticks += 1
        result.first_tick = result.first_tick or player.tick
        result.last_tick = player.tick
        result.differences = differences
        if on_tick is not None:
            on_tick(what, player.calls)
        if differences:
            break
    if not result.ticks:
        raise ConfigError(
            f"{path}: ticks {first_tick or 1} to {last_tick or 'the end'} were not recorded"
            + (f"; the last tick looked at is {last_seen}." if last_seen else ": it holds no whole tick.")
        )
    return result


class _DivergedError(BaseException):
    """The loop called its borders in another order; not an `Exception`, so that no loop catches it."""


class _Player:
    """A loop and the tick that is played to it."""

    def __init__(self, header: FlightHeader, make_loop: MakeLoop, notes: list[str]) -> None:
        self.notes = notes
        self.tick = -1
        self.ready = False
        self.calls: list[Call] = []
        self._at = 0
        self._differences: list[Difference] = []

        def border(name: str) -> Any:
            return RecordedBoundary(name, SimpleNamespace(spec=header.spec), self)

        uplink, inference, clock = border("uplink"), border("inference"), border("clock")
        self.loop = make_loop(
            header, border("robot"), uplink, inference, clock, border("operator") if header.operated else None
        )

    def play(self, record: FlightRecord) -> list[Difference] | None:
        """Go to a snapshot, or decide a tick; None when that is not possible after what is missing before it."""
        what = record.what
        if isinstance(what, SnapshotRecord):
            read = array_reader(record.large)
            restore(self.loop, msgspec.msgpack.decode(what.state), lambda node: read(np.ndarray, node))
            self.tick, self.ready = what.tick, True
            if what.tick and what.left_out:
                self.notes.append(f"the snapshot after tick {what.tick} lacks {', '.join(what.left_out)}.")
            return None
        assert isinstance(what, TickRecord)
        self.ready = self.ready and what.tick == self.tick + 1
        if not self.ready:
            return None
        self.tick = what.tick
        self.calls = unpack(what, record.large)
        self._at, self._differences = 0, []
        self._decide(what)
        return self._differences

    def _decide(self, what: TickRecord) -> None:
        error: BaseException | None = None
        try:
            self.loop.tick()
        except _DivergedError:
            return
        except Exception as caught:  # noqa: BLE001 - a tick may have ended with any
            error = caught
        if self._at < len(self.calls):
            self._differ("order of calls", self.calls[self._at].name, "nothing more")
        if raised(error) != what.error:
            self._differ("error", what.error, raised(error))
        for name, recorded, now in (
            ("mode", what.mode, str(self.loop.mode)),
            ("reason", what.reason, str(self.loop.hold.reason)),
        ):
            if now != recorded:
                self._differ(name, recorded, now)

    def call(self, name: str, perform: Callable[[], Any], *given: Any) -> Any:
        """What was recorded of the next call, which must be this one."""
        if self.tick < 0:
            # The loop is being built.
            return 0 if name == "clock.now_ns" else None
        recorded = self.calls[self._at] if self._at < len(self.calls) else Call("nothing more")
        if recorded.name != name:
            self._differ("order of calls", recorded.name, name)
            raise _DivergedError
        self._at += 1
        for was, now in zip(recorded.given, given, strict=True):
            if not same(was, now):
                where, a, b = first_difference(plain(was), plain(now))
                kind = type(was).__name__ if type(now) is type(was) else "message"
                self._differ((f"{name}.{kind}" if isinstance(was, msgspec.Struct) else name) + where, a, b)
        if recorded.error is not None:
            _raise(recorded.error)
        return recorded.result

    def _differ(self, what: str, recorded: Any, replayed: Any) -> None:
        self._differences.append(Difference(self.tick, what, recorded, replayed))


def first_difference(a: Any, b: Any) -> tuple[str, Any, Any]:
    """(where, a's value, b's value) of the first place two plain values differ."""
    left, right = _parts(a), _parts(b)
    if left.keys() == right.keys():
        for name in left:
            if not same(left[name], right[name]):
                where, one, other = first_difference(left[name], right[name])
                return name + where, one, other
    return "", a, b


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {f".{key}": part for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return {f"[{', '.join(map(str, at))}]": value[at].item() for at in np.ndindex(value.shape)}
    return {f"[{at}]": part for at, part in enumerate(value)} if isinstance(value, (list, tuple)) else {}


def _raise(error: Raised) -> None:
    """Raise what a border raised: one of our errors, or one of the same name and text as what it was."""
    kind = getattr(wire.errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = type(error.kind, (Exception,), {})
    raise kind(error.text)
