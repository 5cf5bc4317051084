"""A thread that works off what a loop hands to it, and hands back what came of it: so the loop waits for no disk."""

from __future__ import annotations

import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

_FAILED_S = 0.1
Result = Callable[[], None]
"""what the loop has to do about something that is done"""


def _ignore(_: object) -> None:
    """Nobody has to know."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to do that may have to wait."""

    run: Callable[[], Any]
    """in the thread"""
    done: Callable[[Any], None] = _ignore
    """in the loop, with what `run` returned"""
    failed: Callable[[Exception], None] = _ignore
    """in the loop, each time that it could not be done"""
    wakes: bool = True
    """whether the loop is told that it is done; else it hears of it when it polls the next time"""


class TaskThread(ABC):
    """Calls `step` in a thread once it is started; without one, whoever polls calls it. Subclasses say what a step is.

    Their own state is guarded by `lock`.
    """

    def __init__(self, name: str) -> None:
        self.on_result: Callable[[], None] = lambda: None
        """called by the thread when there is something to `pop_result`"""
        self.lock = threading.Condition()
        self._name = name
        self._results: deque[Result] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._began_s = 0.0
        """when the step that is being done began, 0.0 when none is"""

    @property
    def inline(self) -> bool:
        """Whether there is no thread: then `step` has to be called."""
        return self._thread is None

    @property
    def busy_s(self) -> float:
        """For how long the step has taken that is being done now."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    def start(self) -> None:
        """Have a thread do the work from now on. A daemon: a disk or database that is silent must not keep
        the process."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """End when nothing is left to do, or give up after `timeout_s`; whether nothing was left."""
        with self.lock:
            self._closing = True
            self.lock.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def pop_result(self) -> Result | None:
        """The next thing that the loop has to do."""
        return self._results.popleft() if self._results else None

    @abstractmethod
    def step(self) -> bool:
        """Do what can be done at once; False when there was nothing."""

    @abstractmethod
    def pause_s(self) -> float | None:
        """For how long there is nothing to do: 0.0: there is something, None: until more comes. With `lock` held."""

    def hand_back(self, *results: Result, wakes: bool = True) -> None:
        """Let the loop have these."""
        self._results.extend(results)
        if wakes:
            self.on_result()

    def _run(self) -> None:
        while True:
            self._began_s = time.monotonic()
            try:
                went_on = self.step()
            except Exception:
                # Whatever it is: what comes next is to be done.
                log.exception("the thread '%s' failed; it goes on.", self._name)
                went_on = False
                time.sleep(_FAILED_S)
            self._began_s = 0.0
            if went_on:
                continue
            with self.lock:
                if (pause_s := self.pause_s()) == 0.0:
                    continue
                if self._closing:
                    return
                self.lock.wait(pause_s)


class TaskQueue(TaskThread):
    """One task after the other. `submit` and `poll` are for the loop."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        with self.lock:
            self._tasks.append(task)
            self.lock.notify()

    def poll(self) -> None:
        """Handle what came back; without a thread do before that what waits, one after the other."""
        while True:
            if self._thread is None:
                self.step()
            if not self._results:
                return
            self._results.popleft()()

    def step(self) -> bool:
        with self.lock:
            if not self._tasks:
                return False
            task = self._tasks.popleft()
        try:
            found = task.run()
        except Exception as error:  # noqa: BLE001 - whoever submitted it says what it means
            self.hand_back(functools.partial(task.failed, error), wakes=task.wakes)
        else:
            self.hand_back(functools.partial(task.done, found), wakes=task.wakes)
        return True

    def pause_s(self) -> float | None:
        return 0.0 if self._tasks else None
