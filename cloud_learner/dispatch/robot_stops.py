"""What the gateway knows of one robot's stops: those that were given here, and those that the robot shows.

The robot decides: a stop lasts until it shows it no more. One that it has not shown yet may have been lost on its way
and is sent again, under its own id; a release is not, for whoever gave it sees that the stop stands.
"""

from __future__ import annotations

import msgspec

from wire.stop_state import StopState

BESIDE = "beside the robot"
"""holder of a robot that somebody stops or drives without the gateway"""
_SETTLE_NS = 2_000_000_000
"""a status may be older than the release that it does not show yet, or of a control process that has just begun"""
_RESEND_NS = 100_000_000
"""a stop is sent again no sooner"""


class _Stop(msgspec.Struct):
    who: str
    sent_ns: int | None = None
    """when it was sent last; None: it was not given here"""
    shown: bool = False
    """the robot has shown it"""
    missing_ns: int | None = None
    """since when the robot shows it no more"""
    released_ns: int | None = None
    """when it was released here"""


class RobotStops:
    """Times are of the gateway's clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Stop] = {}
        self._shown = StopState()

    @property
    def state(self) -> StopState:
        """What people should see: the stops that nobody has released, or that the robot waits to be started."""
        left = {stop: known.who for stop, known in self._known.items() if known.released_ns is None}
        return StopState(left, ready=self._shown.ready and not self._known, last=self._shown.last)

    @property
    def holder(self) -> str:
        """Who stops it, '' when nobody does."""
        left = (known for known in self._known.values() if known.released_ns is None)
        first = next(left, None)
        return "" if first is None else BESIDE if first.sent_ns is None else first.who

    @property
    def over(self) -> bool:
        """Whether nothing keeps the robot from moving."""
        return not self._known and self._shown.free

    @property
    def unshown(self) -> dict[str, str]:
        """By id, who gave those that the robot has not shown yet."""
        return {stop: known.who for stop, known in self._known.items() if not known.shown and known.released_ns is None}

    def add(self, stop: str, who: str, now_ns: int) -> None:
        """It is being sent to the robot."""
        known = self._known.get(stop)
        if known is None or known.released_ns is not None:
            self._known[stop] = _Stop(who, now_ns)

    def release(self, stop: str, now_ns: int) -> None:
        """Its release is being sent to the robot."""
        self._known[stop].released_ns = now_ns

    def doubt(self) -> None:
        """The robot's processes are new ones: what was given here has to be shown anew."""
        for known in self._known.values():
            known.shown = known.shown and known.sent_ns is None

    def show(self, shown: StopState, now_ns: int) -> None:
        """What the robot says."""
        self._shown = shown
        for stop, who in shown.stops.items():
            known = self._known.setdefault(stop, _Stop(who))
            known.shown, known.missing_ns = True, None
            if known.released_ns is not None and now_ns - known.released_ns >= _SETTLE_NS:
                # The release was lost: the stop stands.
                known.released_ns = None
        for stop, known in list(self._known.items()):
            # Who has just begun and asked nobody yet says that nothing stops the robot: that has to last.
            if stop not in shown.stops and ((known.shown and not shown.free) or self._ended(known, now_ns)):
                del self._known[stop]

    def resend(self, now_ns: int) -> dict[str, str]:
        """By id, who gave those that are to be sent again now."""
        due = {}
        for stop, who in self.unshown.items():
            known = self._known[stop]
            if known.sent_ns is None or now_ns - known.sent_ns >= _RESEND_NS:
                known.sent_ns, due[stop] = now_ns, who
        return due

    def _ended(self, known: _Stop, now_ns: int) -> bool:
        """Whether one that the robot does not show now has been released."""
        if known.released_ns is not None:
            return known.shown or now_ns - known.released_ns >= _SETTLE_NS
        if not known.shown:
            return False
        if known.missing_ns is None:
            known.missing_ns = now_ns
        return now_ns - known.missing_ns >= _SETTLE_NS
