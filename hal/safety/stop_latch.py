"""Who stopped or slowed a robot, and whether a person has let it go on: kept by whoever touches the driver.

    running ──stop──► stopped ──the last release──► ready ──start──► running

Each stop has an id, and only a release that names it takes it back: one that comes late cannot take back a newer stop.
A robot that is ready may be approached but does not move: that it does again takes a start of its own (ISO 13850).
A stop whose cause goes on, a pedal that is down or a cable that is cut, cannot be released.

Each person and program has one speed limit of its own, and the smallest of all counts.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from wire.errors import InvalidDataError
from wire.stop_state import StopState

log = logging.getLogger(__name__)
MOST_STOPS = 32
"""remembered by name at once"""
MORE = "more"
"""id of the stop that stands for all beyond those: it is released last"""


class StopLatch:
    """Safe to use from several threads. With a `file`, which `save` writes, all but what causes a stop outlives its
    process.
    """

    def __init__(self, file: Path | None = None) -> None:
        """A `file` that cannot be read stands for a stop: nobody knows that it was none."""
        self._file = file
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._state = StopState()
        self._causes: set[str] = set()
        """stops whose cause goes on"""
        if file is not None and file.exists():
            try:
                self._state = msgspec.json.decode(file.read_bytes(), type=StopState)
                for who, share in self._state.speed_limits.items():
                    check_speed_limit(who, share)
            except (OSError, InvalidDataError, msgspec.DecodeError) as error:
                log.error("what stopped the robot cannot be read from %s: %s; it stays stopped.", file, error)
                self._state = StopState({"before": "a stop that cannot be read"}, last="before")
        self._noted = self._state

    @property
    def state(self) -> StopState:
        return self._state

    def stop(self, stop: str, who: str, lasting: bool = False) -> None:
        """`who` stops the robot, under the id `stop`; saying it again changes nothing.

        `lasting`: its cause goes on, so that it cannot be released before `end_cause`.
        """
        with self._lock:
            if lasting:
                self._causes.add(stop)
            stops = self._state.stops
            if stop not in stops:
                if not lasting and len(stops) >= MOST_STOPS:
                    self._replace(stops={**stops, MORE: "others"}, ready=False, last=stop)
                else:
                    self._replace(stops={**stops, stop: who}, ready=False, last=stop)

    def end_cause(self, stop: str) -> None:
        """What caused it is over: it stands until it is released."""
        with self._lock:
            self._causes.discard(stop)

    def release(self, stop: str) -> None:
        """Take back that stop; with the last one the robot is ready. An id that is none is passed over, and so is one
        whose cause goes on, and `MORE` while there are others.
        """
        with self._lock:
            last = stop != MORE or len(self._state.stops) == 1
            if stop in self._state.stops and stop not in self._causes and last:
                left = {other: who for other, who in self._state.stops.items() if other != stop}
                self._replace(stops=left, ready=not left)

    def start(self, after: str = "") -> None:
        """The robot may move again, if it is ready and `after` is its newest stop; '': whichever that is."""
        with self._lock:
            if not self._state.stops and after in ("", self._state.last):
                self._replace(ready=False, last="")

    def limit_speed(self, who: str, share: float) -> None:
        """`who` wants the robot at `share` of its velocity limits, above 0 up to 1, which takes back what `who` said
        before. Raises `InvalidDataError` for any other number, and for more people than can be remembered.
        """
        check_speed_limit(who, share)
        with self._lock:
            others = {other: said for other, said in self._state.speed_limits.items() if other != who}
            if share < 1:
                if len(others) >= MOST_STOPS:
                    raise InvalidDataError(f"{len(others)} others slow the robot already; one of them must let it go.")
                others[who] = share
            self._replace(speed_limits=others)

    def _replace(self, **changed: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changed)

    def save(self) -> None:
        """Bring the file up to date: after everything else, for a slow or full disk must keep no robot moving."""
        if self._file is None:
            return
        with self._writing:
            if (state := self._state) == self._noted:
                return
            try:
                if state == StopState():
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


def check_speed_limit(who: str, share: float) -> None:
    """Raise `InvalidDataError` for what is no share of a robot's speed."""
    if not 0 < share <= 1:
        raise InvalidDataError(
            f"speed limit {share:g} of {who}: give a share of the robot's velocity limits, above 0 up to 1, such as "
            "0.25. To stop a robot, stop it."
        )
