"""A terminal read key by key, and any device with a few of its keys beside it: take over, hold, stop, quit, and what
to say of episodes.

It works over ssh and needs no display.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import termios
import tty

import msgspec
import numpy as np

from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from wire.clock import Clock, MonotonicClock
from wire.errors import RobotError
from wire.types import OperatorCommandKind, RobotSpec

_KEY = re.compile(rb"\x1b[\[O][A-D]|.", re.DOTALL)
_UNFINISHED = (b"\x1b", b"\x1b[", b"\x1bO")
"""an arrow may come in two parts over a slow line"""
_ARROWS = {b"A": "up", b"B": "down", b"C": "right", b"D": "left"}
_NAMES = {b" ": "space", b"\r": "enter", b"\n": "enter", b"\x1b": "esc"}
_ESC_NS = 250_000_000
"""what begins like an arrow and does not go on for so long is the key Esc"""
EPISODE_KEYS = {
    "v": OperatorCommandKind.success,
    "x": OperatorCommandKind.failure,
    "c": OperatorCommandKind.end,
    "z": OperatorCommandKind.discard,
    "b": OperatorCommandKind.rerecord,
    "n": OperatorCommandKind.scene_ready,
    "1": OperatorCommandKind.recover,
    "2": OperatorCommandKind.correct,
    "left": OperatorCommandKind.rerecord,
    "right": OperatorCommandKind.next,
}
"""what a key says of the episode, of what the person does in it, and of its scene; the arrows mean what they do in
lerobot-record, as does Esc, which quits"""
EPISODE_HINT = "v: success   x: failure   c: end   b: again   z: discard   n: scene ready"
DRIVING_HINT = "1: recover   2: correct   enter: hand back   e: stop   q: quit"


class Terminal:
    """Gives keys as they are pressed; what a terminal repeats while a key is held comes as further presses."""

    def __init__(self, path: str = "/dev/tty", clock: Clock | None = None) -> None:
        """`path`: of the terminal; /dev/tty is the one this process was started from."""
        self._path = path
        self._clock = clock or MonotonicClock()
        self._heard_ns = 0
        self._fd = -1
        self._before: list | None = None
        self._buffer = b""

    def open(self) -> None:
        """Turn off echo and lines; Ctrl-C goes on to interrupt. Raises `RobotError` when it is no terminal."""
        self.close()
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
        """Keys pressed since the last call: a character, or up, down, left, right, space, enter, esc. Never waits.

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
                self._heard_ns = self._clock.now_ns()
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
        keys = []
        silent = self._clock.now_ns() - self._heard_ns > _ESC_NS
        while (silent or self._buffer not in _UNFINISHED) and (found := _KEY.match(self._buffer)):
            key = found[0]
            self._buffer = self._buffer[len(key) :]
            if len(key) == 3:
                keys.append(_ARROWS[key[2:]])
            elif key != b"\x1b" or not self._buffer:
                keys.append(_NAMES.get(key, key.decode("ascii", "replace")))
        return keys


class WithKeys:
    """Keeps the `TeleopDevice` protocol. Enter lets the device drive and takes that back, space holds until it is
    pressed again, e stops, q and Esc quit; `EPISODE_KEYS` say how an episode ended, whoever drives."""

    def __init__(self, device: TeleopDevice, terminal: str = "/dev/tty", armed: bool = False) -> None:
        """`armed`: the device may drive from the start."""
        self._device = device
        self._terminal = Terminal(terminal)
        self._armed = self._begins_armed = armed
        self._held = False

    @property
    def hint(self) -> str:
        """What the person can do, in a few words."""
        if not self._armed:
            return "enter: take over   e: stop   q: quit"
        own = getattr(self._device, "hint", "")
        hold = "held, space: go on" if self._held else "space: hold"
        return "   ".join(filter(None, (own, hold, DRIVING_HINT)))

    def connect(self, spec: RobotSpec) -> None:
        self._device.connect(spec)
        self._armed, self._held = self._begins_armed, False
        self._terminal.open()

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        said: list[OperatorCommandKind] = []
        for key in self._terminal.pressed():
            if key in ("q", "esc", "e"):
                self._armed = False
                return TeleopCommand(quit=key != "e", estop=key == "e", episode=tuple(said))
            if key in EPISODE_KEYS:
                said.append(EPISODE_KEYS[key])
            elif key == "enter":
                self._armed, self._held = not self._armed, False
            elif key == "space":
                self._held = not self._held
        command = self._device.read(pose, driving and self._armed and not self._held)
        said += command.episode
        if not (command.estop or command.quit) and command.engaged and not self._armed:
            command = TeleopCommand()
        elif not (command.estop or command.quit) and command.engaged and self._held:
            command = TeleopCommand(engaged=True)
        return msgspec.structs.replace(command, episode=tuple(said))

    def close(self) -> None:
        self._terminal.close()
        self._device.close()
