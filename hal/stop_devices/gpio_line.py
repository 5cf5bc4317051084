"""An emergency stop's contact at a GPIO line (libgpiod): normally closed, so that a cable that is cut is a stop.

contact to ground:      pulled up,   low while closed,  high = pressed or cut
contact to the supply:  pulled down, high while closed, low = pressed or cut    (active-low)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hal.stop_devices.config import read_line
from hal.stop_devices.device import KeyEvent
from wire.errors import ConfigError

LINE_KEY = 0
_CONSUMER = "vla-fleet stop"


def find_chips() -> list[str]:
    """Those that there are, in the order of their names."""
    return sorted(str(path) for path in Path("/dev").glob("gpiochip*"))


def open_line(text: str) -> GpioLine:
    """The line CHIP:LINE[:active-low]. Raises `ConfigError` that says which chips there are."""
    gpiod = _gpiod()
    path, line, active_low = read_line(text)
    settings = gpiod.LineSettings(
        direction=gpiod.line.Direction.INPUT,
        edge_detection=gpiod.line.Edge.BOTH,
        bias=gpiod.line.Bias.PULL_DOWN if active_low else gpiod.line.Bias.PULL_UP,
        active_low=active_low,
    )
    try:
        return GpioLine(gpiod.request_lines(path, consumer=_CONSUMER, config={line: settings}), line)
    # ValueError: no line of that name or number
    except (OSError, ValueError) as error:
        there = ", ".join(find_chips()) or "none"
        raise ConfigError(
            f"--stop-line {text}: {getattr(error, 'strerror', None) or error}. Chips of this computer: {there}; "
            "`gpioinfo` shows their lines and who uses them. The line must be able to interrupt and have a "
            f"pull-{'down' if active_low else 'up'}."
        ) from error


class GpioLine:
    """Keeps the `InputDevice` protocol: its one key is down while the contact is open."""

    def __init__(self, request: Any, line: int | str) -> None:
        """`request`: a `gpiod.LineRequest` of that line, active when open."""
        self._request, self._line = request, line
        gpiod = _gpiod()
        self._rising, self._active = gpiod.EdgeEvent.Type.RISING_EDGE, gpiod.line.Value.ACTIVE

    def fileno(self) -> int:
        return int(self._request.fd)

    def read(self) -> list[KeyEvent]:
        events = [KeyEvent(LINE_KEY, event.event_type == self._rising) for event in self._request.read_edge_events()]
        # The kernel keeps a few events only: what the line is now counts, whatever the last of them says.
        opened = LINE_KEY in self.down()
        if not events or events[-1].down != opened:
            events.append(KeyEvent(LINE_KEY, opened))
        return events

    def down(self) -> set[int]:
        return {LINE_KEY} if self._request.get_value(self._line) == self._active else set()

    def close(self) -> None:
        self._request.release()


def _gpiod() -> Any:
    try:
        import gpiod
    except ImportError as error:
        raise ConfigError("GPIO lines need the package gpiod: pip install 'vla-fleet[beside]'.") from error
    return gpiod
