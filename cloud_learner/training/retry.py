"""When to try again what storage did not allow, and how often to speak of it."""

from __future__ import annotations

import logging
from types import TracebackType

from wire.clock import Clock
from wire.errors import FleetError, InvalidDataError, StorageError

log = logging.getLogger(__name__)
_FIRST_NS = 100_000_000


class RetryPause:
    """Something that is tried again and again: `if pause.due: with pause: ...`.

    A `StorageError` or `InvalidDataError` inside is logged once, again when it says something else, and ends there; the
    pause until the next attempt doubles each time.
    """

    def __init__(
        self,
        what: str,
        clock: Clock,
        longest_s: float = 30.0,
        times_attempt: float = 0.0,
        lasting: tuple[type[FleetError], ...] = (),
    ) -> None:
        """`what` is said in front of each error, for people.

        times_attempt: the pause is at least so many times as long as the attempt was, for what keeps others waiting
        lasting: errors that trying again does not mend; they are raised
        """
        self.failing = False
        self._what = what
        self._clock = clock
        self._longest_ns = int(longest_s * 1e9)
        self._times_attempt = times_attempt
        self._lasting = lasting
        self._said = ""
        self._pause_ns = 0
        self._started_ns = self._next_ns = clock.now_ns()

    @property
    def due(self) -> bool:
        """Whether it is time for the next attempt."""
        return self._clock.now_ns() >= self._next_ns

    def __enter__(self) -> None:
        self._started_ns = self._clock.now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            if self.failing:
                log.info("%s: that is over.", self._what)
            self.failing, self._said, self._pause_ns = False, "", 0
            return False
        if isinstance(error, self._lasting) or not isinstance(error, StorageError | InvalidDataError):
            return False
        now_ns = self._clock.now_ns()
        if str(error) != self._said:
            log.error("%s: %s", self._what, error)
        self.failing, self._said = True, str(error)
        self._pause_ns = min(self._longest_ns, max(_FIRST_NS, 2 * self._pause_ns))
        self._next_ns = now_ns + max(self._pause_ns, int(self._times_attempt * (now_ns - self._started_ns)))
        return True
