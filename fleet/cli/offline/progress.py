"""How long work has got: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

_LINE_S = 10.0
_SPEED_S = 30.0
"""over how much of late the speed is taken"""


class WorkProgress:
    """Call `update` as often as you like."""

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        self._total, self._unit, self._done = total, unit, done
        now_s = time.monotonic()
        self._marks = [(now_s, done)]
        self._next_line_s = now_s + _LINE_S
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=_SPEED_S)
            self._task = self._bar.add_task(unit, total=total, completed=done)
            self._bar.start()

    def update(self, done: int, text: str = "") -> None:
        """So many are done; `text` stands beside it."""
        self._done, now_s = done, time.monotonic()
        if now_s - self._marks[-1][0] > 0.5:
            self._marks = [one for one in self._marks if now_s - one[0] < _SPEED_S] or self._marks[-1:]
            self._marks.append((now_s, done))
        shown = f"{self._unit}, {self.per_s:.2g}/s{f', {text}' if text else ''}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=shown)
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + _LINE_S
            left_s = (self._total - done) / self.per_s if self.per_s else 0.0
            sys.stderr.write(f"{done} of {self._total} {shown}, about {left_s / 60:.1f} min left\n")
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
