"""How long work has got: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from cloud_learner.buffer.files import write_durably
from wire.errors import storage_errors

_LINE_S = 10.0
_NOTE_S = 0.5
_SPEED_S = 30.0
"""over how much of late the speed is taken"""


class ProgressSink(Protocol):
    """Call `update` as often as you like."""

    def begin(self, done: int) -> None:
        """So many were done before, at another speed."""
        ...

    def update(self, done: int, text: str = "") -> None:
        """So many are done; `text` stands beside it."""
        ...

    def say(self, text: str) -> None:
        """A line for people."""
        ...


class WorkProgress:
    """For people."""

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        """`total`: 0 while nobody knows."""
        self._total, self._unit = total, unit
        now_s = time.monotonic()
        self.begin(done)
        self._next_line_s = now_s + _LINE_S
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=_SPEED_S)
            self._task = self._bar.add_task(unit, total=total or None, completed=done)
            self._bar.start()

    def begin(self, done: int) -> None:
        """As `ProgressSink`."""
        self._done = done
        self._marks = [(time.monotonic(), done)]

    def update(self, done: int, text: str = "", total: int = 0) -> None:
        """As `ProgressSink`; `total`: now known, or another one."""
        if done < self._done:
            # it was taken back
            self.begin(done)
        self._done, now_s = done, time.monotonic()
        self._total = total or self._total
        if now_s - self._marks[-1][0] > 0.5:
            self._marks = [one for one in self._marks if now_s - one[0] < _SPEED_S] or self._marks[-1:]
            self._marks.append((now_s, done))
        shown = f"{self._unit}, {self.per_s:.2g}/s{f', {text}' if text else ''}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, description=shown)
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + _LINE_S
            left = f", about {(self._total - done) / self.per_s / 60:.1f} min left" if self.per_s else ""
            sys.stderr.write(f"{done} of {self._total} {shown}{left}\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        """As `ProgressSink`, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @property
    def per_s(self) -> float:
        """Of late."""
        began_s, done = self._marks[0]
        passed_s = time.monotonic() - began_s
        return (self._done - done) / passed_s if passed_s else 0.0

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def show_progress(total: int, unit: str, done: int = 0) -> Iterator[WorkProgress]:
    """A progress of `total` units, gone in the end."""
    progress = WorkProgress(total, unit, done)
    try:
        yield progress
    finally:
        progress.close()


# --- of a process elsewhere ------------------------------------------------------------------------------------------


class ProgressNote(msgspec.Struct, frozen=True):
    """How far it is."""

    done: int = 0
    text: str = ""
    ended: str = ""
    """what became of it, '' while it goes on"""
    pid: int = 0
    """of the process that wrote this"""


class NotedProgress:
    """In a file, twice a second, for `show_noted_progress` in another process."""

    def __init__(self, path: Path) -> None:
        """Raises `StorageError` where it cannot be written."""
        self._path, self._next_s = path, 0.0
        self._stop, self._look_s, self._stops = _stop_file(path), 0.0, False
        with storage_errors("writing the progress", path):
            path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, done: int) -> None:
        """As `ProgressSink`."""
        self._write(ProgressNote(done))

    def update(self, done: int, text: str = "") -> None:
        """As `ProgressSink`."""
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + _NOTE_S
            self._write(ProgressNote(done, text))

    def say(self, text: str) -> None:
        """As `ProgressSink`."""
        say_beside(self._path, text)

    def end(self, said: str) -> None:
        """It is done, and `said` tells what became of it."""
        self._write(ProgressNote(ended=said))

    @property
    def stop_requested(self) -> bool:
        """Whether somebody called `request_stop`; it is looked at twice a second."""
        if (now_s := time.monotonic()) >= self._look_s:
            self._look_s, self._stops = now_s + _NOTE_S, self._stop.exists()
        return self._stops

    def _write(self, note: ProgressNote) -> None:
        data = msgspec.json.encode(msgspec.structs.replace(note, pid=os.getpid()))
        write_durably(self._path, data, "writing the progress")


def read_progress(path: Path) -> ProgressNote:
    """What was noted last; nothing done where nothing can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=ProgressNote)
    return ProgressNote()


def request_stop(path: Path) -> None:
    """Tell whoever notes its progress in `path` to end. Raises `StorageError`."""
    with storage_errors("requesting the end", path):
        _stop_file(path).touch()


def say_beside(path: Path, text: str) -> None:
    """Tell people who are shown the progress noted in `path`. Raises `StorageError`."""
    with storage_errors("writing what people are told", path), _lines_file(path).open("a") as file:
        file.write(f"{text}\n")


def _stop_file(path: Path) -> Path:
    return path.with_suffix(".stop")


def _lines_file(path: Path) -> Path:
    return path.with_suffix(".lines")


@contextlib.contextmanager
def show_noted_progress(path: Path, total: int, unit: str) -> Iterator[None]:
    """What a `NotedProgress` notes in `path` and what is said beside it, shown by a thread until the block ends."""
    with storage_errors("showing the progress", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in (path, _stop_file(path), _lines_file(path)):
            old.unlink(missing_ok=True)
        _lines_file(path).touch()

    def follow(ended: threading.Event) -> None:
        pid, going = 0, True
        with show_progress(total, unit) as progress, _lines_file(path).open() as lines:
            while going:
                going = not ended.wait(_NOTE_S)
                for line in lines:
                    progress.say(line.rstrip())
                note = read_progress(path)
                if note.pid and note.pid != pid:
                    pid = note.pid
                    progress.begin(note.done)
                elif not note.ended:
                    progress.update(note.done, note.text)

    with beside(follow):
        yield


@contextlib.contextmanager
def beside(follow: Callable[[threading.Event], None]) -> Iterator[None]:
    """Have a thread `follow` what goes on in the block, until the event that it is given is set."""
    ended = threading.Event()
    thread = threading.Thread(target=follow, args=(ended,), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
