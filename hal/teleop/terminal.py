"""A terminal read key by key: works over ssh and needs no display."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty

from wire.errors import RobotError

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
}
_NAMES = {b" ": "space", b"\r": "enter", b"\n": "enter"}


class Terminal:
    """Gives keys as they are pressed; what a terminal repeats while a key is held comes as further presses."""

    def __init__(self, path: str = "/dev/tty") -> None:
        """`path`: of the terminal; /dev/tty is the one this process was started from."""
        self._path = path
        self._fd = -1
        self._before: list | None = None
        self._buffer = b""

    def open(self) -> None:
        """Turn off echo and lines; Ctrl-C goes on to interrupt. Raises `RobotError` when it is no terminal."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSANOW)
        except (OSError, termios.error) as error:
            self.close()
            raise RobotError(
                f"keys cannot be read from {self._path}: {error.args[-1]}. Start it in a terminal; over ssh: ssh -t."
            ) from error

    def pressed(self) -> list[str]:
        """Keys pressed since the last call: a character, or up, down, left, right, space, enter. Never waits.

        Raises `RobotError` when the terminal is gone.
        """
        if self._fd < 0:
            raise RobotError(f"keys are read from {self._path} before it is opened.")
        try:
            while select.select([self._fd], [], [], 0)[0]:
                data = os.read(self._fd, 1024)
                if not data:
                    raise RobotError(f"the terminal {self._path} was closed.")
                self._buffer += data
        except BlockingIOError:
            pass
        except OSError as error:
            raise RobotError(f"the terminal {self._path} is gone: {error.strerror}.") from error
        return self._pop_keys()

    def close(self) -> None:
        """Leave it as it was. May be called twice."""
        if self._fd >= 0:
            if self._before is not None:
                # A terminal that is gone took its settings with it.
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
            os.close(self._fd)
        self._fd, self._before, self._buffer = -1, None, b""

    def _pop_keys(self) -> list[str]:
        keys, data = [], self._buffer
        while data:
            if data[:1] == b"\x1b":
                # A sequence may come in two parts over a slow line: wait for the rest of it.
                if any(sequence.startswith(data) and sequence != data for sequence in _SEQUENCES):
                    break
                if data[:3] in _SEQUENCES:
                    keys.append(_SEQUENCES[data[:3]])
                    data = data[3:]
                else:
                    data = data[1:]
                continue
            keys.append(_NAMES.get(data[:1], data[:1].decode("ascii", "replace")))
            data = data[1:]
        self._buffer = data
        return keys
