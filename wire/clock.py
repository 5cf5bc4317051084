"""Time as the fleet counts it: integer nanoseconds of a named clock.

Robots stamp with their own monotonic clock. The gateway measures each robot's offset and stores it beside the
data; stamps are never rewritten.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also be slept on, so that tests can own time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        ...

    def sleep_until(self, deadline_ns: int) -> None:
        """Return at `deadline_ns` or as soon after it as the machine allows."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC of this machine."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep_until(self, deadline_ns: int) -> None:
        remaining_ns = deadline_ns - time.monotonic_ns()
        if remaining_ns > 0:
            time.sleep(remaining_ns / 1e9)


class ManualClock:
    """A clock that stands still until somebody sleeps on it or moves it: for tests."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)

    def advance(self, duration_ns: int) -> None:
        self._now_ns += duration_ns


class SimulatedClock(ManualClock):
    """Begins with the machine's time and then only moves by being slept on: a loop runs as fast as the machine allows,
    and what it stamps is as far apart as if it had run at its rate."""

    def __init__(self) -> None:
        super().__init__(time.monotonic_ns())


def clock_name() -> str:
    """The name of this machine's monotonic clock; it changes at every boot, as the clock's origin does."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown-boot"
    return f"monotonic:{boot}"
