"""A robot's host watches control, which must command in time, and its driver, which must not block."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Iterator

_RENEW_S = 0.5
_PER_TIMEOUT = 4
"""a shorter timeout is renewed so often while it runs"""
_SOON_S = 1e-3
_TIMEOUT_TICKS = 2
"""control periods without a command after which hold is due"""


class CallDeadline:
    """Ends this process, with a trace of where it was on standard error and exit status 1, when a driver blocks.

    Nothing in Python can be counted on then, for the driver may hold the interpreter: `faulthandler` watches from
    outside, in C.
    """

    def __init__(self, quick_s: float = 0.0, slow_s: float = 0.0, coasting_s: float = 0.0) -> None:
        """How long may pass between two calls of `renew`, and in what is `slow`; 0: as long as it takes.

        `coasting_s`: instead of `quick_s`, while the robot moves on until it is told otherwise.
        """
        self._quick_s, self._slow_s, self._coasting_s = quick_s, slow_s, coasting_s or quick_s
        self._armed_s = self._renewed_s = 0.0
        self._held_s, self._slow = 0.0, False
        self._due_s = self._every_s = self._until_s = self._guarded_s = 0.0
        self._lock = threading.Lock()

    def guard_interpreter(self, held_s: float = 0.0) -> None:
        """From now on a thread calls `guard`, as it can while nobody holds the interpreter: held for `held_s` this
        process ends, also if the driver might still take its time; 0: in no less time than the driver has.
        """
        self._held_s = held_s or self._quick_s
        self._due_s = time.monotonic() + self._quick_s

    def guard(self) -> None:
        """The interpreter is free; to be called by another thread several times a second, whatever the driver does."""
        with self._lock:
            if self._held_s and not self._slow:
                self._arm()

    @property
    def coasting_s(self) -> float:
        """How long a driver may block whose robot moves on meanwhile."""
        return self._coasting_s

    def _arm(self) -> None:
        """End this process when its time is over, or when `guard` is not called again in time."""
        now_s = time.monotonic()
        until_s = min(self._due_s, now_s + self._held_s + self._every_s)
        if until_s < self._until_s or now_s - self._guarded_s > self._every_s:
            self._until_s, self._guarded_s = until_s, now_s
            faulthandler.dump_traceback_later(max(_SOON_S, until_s - now_s), exit=True)

    def renew(self, coasting: bool = False) -> None:
        """This process goes on; to be called several times a second. It ends no later than half a second after its
        time, and a quarter of it.
        """
        timeout_s = self._coasting_s if coasting else self._quick_s
        every_s = min(_RENEW_S, timeout_s / _PER_TIMEOUT)
        now_s = time.monotonic()
        if self._held_s:
            self._due_s = now_s + timeout_s + every_s
            self._every_s = min(every_s, self._held_s / _PER_TIMEOUT)
            if self._due_s < self._until_s:
                # It has begun to coast. Not by the next `guard`: the next call may hold the interpreter.
                self.guard()
        elif timeout_s and (timeout_s != self._armed_s or now_s - self._renewed_s > every_s):
            self._armed_s, self._renewed_s = timeout_s, now_s
            faulthandler.dump_traceback_later(timeout_s + every_s, exit=True)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """What happens meanwhile may take longer."""
        if self._slow_s:
            with self._lock:
                self._slow = True
                faulthandler.dump_traceback_later(self._slow_s, exit=True)
        try:
            yield
        finally:
            self._armed_s = self._guarded_s = 0.0
            self._slow = False
            self.renew()
            self.guard()

    def cancel(self) -> None:
        """Nothing is watched any more."""
        with self._lock:
            self._held_s = 0.0
        if self._quick_s:
            faulthandler.cancel_dump_traceback_later()


class CommandWatchdog:
    """When hold must be commanded. Times are ns of one monotonic clock; before the first command nothing is due."""

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self.timeout_ns = _TIMEOUT_TICKS * period_ns
        self._commanded_ns = 0
        self._due_ns: int | None = None

    def pause(self) -> None:
        """The robot stands and is not commanded: while it resets, and after it is closed."""
        self._due_ns = None

    def on_command(self, now_ns: int) -> None:
        """Control commanded the robot."""
        self._commanded_ns, self._due_ns = now_ns, now_ns + self.timeout_ns

    def on_disconnect(self, now_ns: int) -> None:
        """Control is gone: no reason to wait for more than the period that has begun."""
        if self._due_ns is not None:
            self._due_ns = min(self._due_ns, max(now_ns, self._commanded_ns + self._period_ns))

    def on_stop(self, now_ns: int) -> None:
        """Somebody stops the robot: hold is due now, and from then on once in a period, whatever is commanded."""
        if self._due_ns is not None:
            self._due_ns = now_ns

    def on_hold(self, now_ns: int) -> None:
        """Hold was commanded; again in a period. Deadlines that passed meanwhile are skipped."""
        if self._due_ns is not None:
            self._due_ns += (max(0, now_ns - self._due_ns) // self._period_ns + 1) * self._period_ns

    def overdue_s(self, now_ns: int) -> float:
        """Since hold was due, 0 when it is not; for any thread."""
        due_ns = self._due_ns
        return 0.0 if due_ns is None else max(0, now_ns - due_ns) / 1e9

    def left_s(self, now_ns: int) -> float:
        """Until hold is due: 0 when it is now, infinite when it is not to come."""
        return float("inf") if self._due_ns is None else max(0, self._due_ns - now_ns) / 1e9
