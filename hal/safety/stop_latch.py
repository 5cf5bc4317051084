"""Who stopped a robot, and whether a person has let it go on: kept by whoever touches the driver.

    running ──stop──► stopped ──the last release──► ready ──start──► running

Each stop has an id, and only a release that names it takes it back: one that comes late cannot take back a newer stop.
A robot that is ready may be approached but does not move: that it does again takes a start of its own (ISO 13850).
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec

from wire.stop_state import StopState

log = logging.getLogger(__name__)
MOST_STOPS = 32
"""remembered at once: any one of them keeps the robot stopped"""


class StopLatch:
    """Safe to use from several threads. With a `file`, which `save` writes, it outlives its process."""

    def __init__(self, file: Path | None = None) -> None:
        """A `file` that cannot be read stands for a stop: nobody knows that it was none."""
        self._file = file
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._state = StopState()
        if file is not None and file.exists():
            try:
                self._state = msgspec.json.decode(file.read_bytes(), type=StopState)
            except (OSError, msgspec.DecodeError) as error:
                log.error("what stopped the robot cannot be read from %s: %s; it stays stopped.", file, error)
                self._state = StopState({"before": "a stop that cannot be read"})
        self._noted = self._state

    @property
    def state(self) -> StopState:
        return self._state

    def stop(self, stop: str, who: str) -> None:
        """`who` stops the robot, under the id `stop`; saying it again changes nothing."""
        with self._lock:
            if stop not in self._state.stops and len(self._state.stops) < MOST_STOPS:
                self._state = StopState({**self._state.stops, stop: who})

    def release(self, stop: str) -> None:
        """Take back that stop; with the last one the robot is ready. An id that is none is passed over."""
        with self._lock:
            if stop in self._state.stops:
                left = {other: who for other, who in self._state.stops.items() if other != stop}
                self._state = StopState(left, ready=not left)

    def start(self) -> None:
        """The robot may move again, if it is ready."""
        with self._lock:
            if not self._state.stops:
                self._state = StopState()

    def save(self) -> None:
        """Bring the file up to date: after everything else, for a slow or full disk must keep no robot moving."""
        if self._file is None:
            return
        with self._writing:
            if (state := self._state) == self._noted:
                return
            try:
                if state.free:
                    self._file.unlink(missing_ok=True)
                else:
                    temporary = self._file.with_suffix(".part")
                    with temporary.open("wb") as file:
                        file.write(msgspec.json.encode(state))
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(temporary, self._file)
                self._noted = state
            except OSError as error:
                log.error("what stopped the robot could not be noted in %s: %s", self._file, error)
