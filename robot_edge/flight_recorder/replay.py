"""Decide a recorded stretch again, tick by tick, and compare.

Each tick's borders are played to a loop built from the file's header; what that loop sends, writes, resets and waits
for, and its mode and reason, must be what was recorded, bit by bit. A replay begins at the last snapshot before the
stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

import wire.errors
from hal.interfaces.robot import Feedback, Robot, Teleoperator
from robot_edge.flight_recorder.events import (
    LINES,
    ClockEvent,
    Connected,
    Event,
    FlightHeader,
    Gap,
    PreviewFrame,
    Progressed,
    Proposed,
    Raised,
    Read,
    Received,
    Reset,
    SendEvent,
    SleepEvent,
    SnapshotRecord,
    TickRecord,
    WriteEvent,
    array_reader,
    plain,
    raised,
    same,
    unpack,
)
from robot_edge.flight_recorder.file import FlightRecord, Reading, starts
from robot_edge.flight_recorder.recorder import Loop
from robot_edge.flight_recorder.snapshot import RecordedBoundary, restore
from robot_edge.flight_recorder.writer import program
from wire.clock import Clock
from wire.errors import ConfigError
from wire.messages import Message
from wire.transport.channel import Channel
from wire.types import Observation, RobotSpec


class MakeLoop(Protocol):
    """Builds the loop a header describes on the borders given; it may not look at anything else."""

    def __call__(
        self,
        header: FlightHeader,
        robot: Robot,
        uplink: Channel,
        inference: Channel,
        clock: Clock,
        operator: Teleoperator | None,
    ) -> Loop: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise."""

    tick: int
    what: str
    """which decision: `uplink.StepRecorded.step.executed[2]`"""
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return f"tick {self.tick}: {self.what}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class ReplayedTick:
    """One tick that was decided again."""

    tick: int
    events: list[Event]
    """as recorded"""
    mode: str
    reason: str
    differences: list[Difference]
    loop: Loop


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


def records(path: Path, session_id: str = "") -> tuple[FlightHeader, Iterator[FlightRecord]]:
    """The header of a start (the newest, or the one named) and all records of its files in `path`, in order.

    Raises `ConfigError` when there is none.
    """
    found = starts(path)
    chosen = [start for start in found if not session_id or start.session_id == session_id]
    if not chosen:
        raise ConfigError(
            f"{path} holds no start '{session_id}'; it holds {', '.join(start.session_id for start in found)}."
        )
    files = [Reading(file) for file in chosen[-1].files]
    return files[0].header, (record for file in files for record in file)


def replay(
    path: Path,
    make_loop: MakeLoop,
    first_tick: int | None = None,
    last_tick: int | None = None,
    on_tick: Callable[[ReplayedTick], None] | None = None,
    session_id: str = "",
) -> Replay:
    """Decide ticks [first_tick, last_tick] of a start again; all that was recorded by default.

    `path` is a file or a directory; `session_id` names the start, the newest by default. Stops after the first tick
    that differs. `on_tick` is called for every tick of the stretch. Raises `ConfigError` when the stretch was not
    recorded, `CorruptDataError` for what cannot be read.
    """
    header, found = records(path, session_id)
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
            differences = player.take(one)
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
            on_tick(ReplayedTick(player.tick, player.events, what.mode, what.reason, differences, player.loop))
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
        self.events: list[Event] = []
        self._at = 0
        self._building = True
        self._differences: list[Difference] = []
        self.loop = make_loop(
            header,
            _PlayedRobot(header.spec, self),
            _PlayedChannel(0, self),
            _PlayedChannel(1, self),
            _PlayedClock(self),
            _PlayedOperator(self) if header.operated else None,
        )
        self._building = False

    def take(self, record: FlightRecord) -> list[Difference] | None:
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
        self.events = unpack(what, record.large)
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
        if self._at < len(self.events):
            self._differ("order of calls", _name(self.events[self._at]), "nothing more")
        if raised(error) != what.error:
            self._differ("error", what.error, raised(error))
        for name, recorded, now in (
            ("mode", what.mode, str(self.loop.mode)),
            ("reason", what.reason, str(self.loop.hold.reason)),
        ):
            if now != recorded:
                self._differ(name, recorded, now)

    def next(self, kind: type[Any], line: int | None = None) -> Any:
        """The next recorded event, which must be of `kind`; None while the loop is being built."""
        if self._building:
            return None
        event = self.events[self._at] if self._at < len(self.events) else None
        if type(event) is not kind or (line is not None and event.line != line):  # type: ignore[union-attr]
            called = f"{LINES[line]}.{kind.__name__}" if line is not None else kind.__name__
            self._differ("order of calls", _name(event) if event is not None else "nothing more", called)
            raise _DivergedError
        self._at += 1
        return event

    def compare(self, what: str, recorded: Any, replayed: Any) -> None:
        """Note the first difference between two values, if there is one."""
        if not self._building and not same(recorded, replayed):
            where, a, b = first_difference(plain(recorded), plain(replayed))
            name = type(recorded).__name__
            if isinstance(recorded, msgspec.Struct):
                what = f"{what}.{name if type(replayed) is type(recorded) else 'message'}"
            self._differ(what + where, a, b)

    def _differ(self, what: str, recorded: Any, replayed: Any) -> None:
        self._differences.append(Difference(self.tick, what, recorded, replayed))


def first_difference(a: Any, b: Any) -> tuple[str, Any, Any]:
    """(where, a's value, b's value) of the first place two plain values differ."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        for key in a:
            if not same(a[key], b[key]):
                where, left, right = first_difference(a[key], b[key])
                return f".{key}{where}", left, right
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape and a.dtype == b.dtype and a.size:
        for place in np.ndindex(a.shape):
            if a[place].tobytes() != b[place].tobytes():
                return f"[{', '.join(map(str, place))}]", a[place].item(), b[place].item()
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            if not same(left, right):
                where, left, right = first_difference(left, right)
                return f"[{index}]{where}", left, right
    return "", a, b


def _name(event: Event) -> str:
    line = getattr(event, "line", None)
    return f"{LINES[line]}.{type(event).__name__}" if line is not None else type(event).__name__


def _raise(error: Raised | None) -> None:
    """Raise what a border raised: one of our errors, or one of the same name and text as what it was."""
    if error is None:
        return
    kind = getattr(wire.errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = type(error.kind, (Exception,), {})
    raise kind(error.text)


class _PlayedClock(RecordedBoundary):
    def __init__(self, player: _Player) -> None:
        self._player = player

    def now_ns(self) -> int:
        event = self._player.next(ClockEvent)
        return event.now_ns if event else 0

    def sleep_until(self, deadline_ns: int) -> None:
        event = self._player.next(SleepEvent)
        if event:
            self._player.compare("clock.sleep_until", event.deadline_ns, deadline_ns)


class _PlayedChannel(RecordedBoundary):
    def __init__(self, line: int, player: _Player) -> None:
        self._line = line
        self._player = player

    def send(self, message: Message) -> bool:
        event = self._player.next(SendEvent, self._line)
        if event is None:
            return False
        self._player.compare(LINES[self._line], event.message, message)
        return event.accepted

    def recv(self) -> Message | None:
        event = self._player.next(Received, self._line)
        return event.message if event else None

    def close(self) -> None:
        return


class _PlayedRobot(RecordedBoundary):
    def __init__(self, spec: RobotSpec, player: _Player) -> None:
        self.spec = spec
        self._player = player

    def connect(self) -> None:
        event = self._player.next(Connected)
        if event:
            _raise(event.error)

    def reset(self, task: str, seed: int) -> None:
        event = self._player.next(Reset)
        if event:
            self._player.compare("robot.reset", (event.task, event.seed), (task, seed))
            _raise(event.error)

    def read(self) -> Observation:
        event = self._player.next(Read)
        assert event is not None, "a loop reads its robot in ticks only"
        _raise(event.error)
        return event.observation

    def write(self, action: np.ndarray) -> Feedback:
        event = self._player.next(WriteEvent)
        assert event is not None, "a loop writes to its robot in ticks only"
        self._player.compare("robot.write", event.action, np.asarray(action))
        _raise(event.error)
        return event.feedback

    def close(self) -> None:
        return


class _PlayedOperator(RecordedBoundary):
    def __init__(self, player: _Player) -> None:
        self._player = player

    def propose(self, observation: Observation) -> np.ndarray | None:
        event = self._player.next(Proposed)
        if event:
            _raise(event.error)
        return event.action if event else None

    def progress(self) -> float:
        event = self._player.next(Progressed)
        if event:
            _raise(event.error)
        return event.left if event else 0.0
