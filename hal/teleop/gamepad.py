"""A gamepad or joystick through Linux' joystick interface, /dev/input/jsN.

Eight bytes an event (Documentation/input/joydev/joystick-api.rst): time u32 ms, value s16, type u8 (1 button, 2 axis,
| 0x80 the state when it was opened), number u8. No library, display or window is needed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

import numpy as np

from hal.interfaces.teleop import TeleopCommand
from hal.teleop.pose import Jog, check_rest, read_binding
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError
from wire.types import CommandType, RobotSpec

EVENT = struct.Struct("<IhBB")
BUTTON, AXIS, INITIAL = 1, 2, 0x80
_FULL = 32767.0

_STICKS = ("+0", "-1", "-4", "+3", "-7", "+6")
"""axes for the dimensions that move, in the spec's order, when no axes are given: of a pad with Xbox layout the left
stick, the right stick and the cross; up and right are positive"""
_GRIP = ("0", "3")
"""buttons that close and open a gripper (A and Y)"""
_GRIPPER_WORDS = ("grip", "effort", "finger")


@dataclass(frozen=True, slots=True)
class GamepadConfig:
    """Which stick and button moves what. Numbers are the kernel's: `jstest /dev/input/js0` shows them.

    Raises `ConfigError` for what cannot be.
    """

    device: str = "/dev/input/js0"
    axes: dict[str, str] = field(default_factory=dict)
    """'+name' or '-name' of an action dimension by axis number; none: the sticks, in the spec's order"""
    buttons: dict[str, str] = field(default_factory=dict)
    """the same by button number"""
    deadzone: float = 0.12
    """share of a stick's way that counts as none"""
    speed: float = 0.5
    """share of full speed at a stick's end"""
    range_s: float = 4.0
    """seconds for the whole range of an absolute dimension at full speed"""
    dead_man: int = 5
    """button that must be held for any motion (RB); pressing it takes over. -1: none, it drives from the start"""
    hand_back: int = 7
    """button (Start)"""
    estop: int = 1
    """button (B)"""
    quit: int = 6
    """button (Back)"""

    def __post_init__(self) -> None:
        if not 0 <= self.deadzone < 1 or not 0 < self.speed <= 1 or self.range_s <= 0:
            raise ConfigError("GamepadConfig: deadzone must be in [0, 1), speed in (0, 1], range_s positive.")
        for what, names in (("axes", self.axes), ("buttons", self.buttons)):
            for name in names:
                if not name.isdecimal():
                    raise ConfigError(f"GamepadConfig: {what} has '{name}'; give its number, as jstest shows it.")
        taken = {self.dead_man, self.hand_back, self.estop, self.quit}
        for name in self.buttons:
            if int(name) in taken:
                raise ConfigError(f"GamepadConfig: button {name} is dead-man, hand-back, e-stop or quit already.")


class Gamepad:
    """Keeps the `TeleopDevice` protocol."""

    def __init__(self, config: GamepadConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or GamepadConfig()
        self._clock = clock or MonotonicClock()
        self._fd = -1
        self._jog: Jog | None = None
        self._axes: dict[int, tuple[int, float]] = {}
        self._buttons: dict[int, tuple[int, float]] = {}
        self._clear()

    def _clear(self) -> None:
        self._buffer = b""
        self._at: dict[int, float] = {}
        self._down: set[int] = set()
        self._pushed: set[int] = set()
        self._engaged = self.config.dead_man < 0

    @property
    def hint(self) -> str:
        """What the person can do, in a few words."""
        c = self.config
        begin = f"hold button {c.dead_man} to drive   " if c.dead_man >= 0 else ""
        return f"{begin}{c.hand_back}: hand back   {c.estop}: stop   {c.quit}: quit"

    def connect(self, spec: RobotSpec) -> None:
        check_rest(spec, "a gamepad")
        self._bind(spec)
        self.close()
        self._clear()
        self._jog = Jog(spec, self._clock, self.config.range_s)
        try:
            self._fd = os.open(self.config.device, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise RobotError(
                f"no gamepad at {self.config.device}: {error.strerror}. Plug it in, load joydev (`modprobe joydev`) "
                "or give its file: device='/dev/input/js1'. You may have to be in the group 'input'."
            ) from error

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        assert self._jog is not None, "connect() comes first"
        self._jog.follow(pose, driving)
        self._read_events()
        pushed, self._pushed = self._pushed, set()
        if pushed & {self.config.estop, self.config.quit}:
            self._engaged, stops = False, self.config.estop in pushed
            return TeleopCommand(estop=stops, quit=not stops)
        held = self.config.dead_man < 0 or self.config.dead_man in self._down
        if self.config.dead_man in pushed:
            self._engaged = True
            self._jog.stop()
        if self.config.hand_back in pushed:
            # With the dead-man button still down: it has to be pressed anew.
            self._engaged = False
        if not self._engaged:
            return TeleopCommand()
        if not held:
            # A released dead-man button holds; the policy goes on only when it is asked to.
            self._jog.stop()
            return TeleopCommand(engaged=True)
        sticks = [(i, sign * self._outside_deadzone(self._at.get(n, 0.0))) for n, (i, sign) in self._axes.items()]
        pressed = [move for number, move in self._buttons.items() if number in self._down]
        return self._jog.command([*sticks, *pressed], self.config.speed)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._jog = -1, None

    def _outside_deadzone(self, value: float) -> float:
        """What of a stick's way is beyond the dead zone, again from 0 to 1."""
        zone = self.config.deadzone
        return float(np.sign(value) * max(0.0, abs(value) - zone) / (1 - zone))

    def _read_events(self) -> None:
        try:
            while data := os.read(self._fd, 64 * EVENT.size):
                self._buffer += data
            raise RobotError(f"the gamepad at {self.config.device} was unplugged; plug it in and start again.")
        except BlockingIOError:
            pass
        except OSError as error:
            raise RobotError(f"the gamepad at {self.config.device} is gone: {error.strerror}; plug it in.") from error
        whole = len(self._buffer) - len(self._buffer) % EVENT.size
        for _, value, kind, number in EVENT.iter_unpack(self._buffer[:whole]):
            if kind & ~INITIAL == AXIS:
                self._at[number] = max(-1.0, value / _FULL)
            elif kind & ~INITIAL == BUTTON and value:
                self._down.add(number)
                # One that is down already when the device is opened must be let go first.
                self._pushed |= set() if kind & INITIAL else {number}
            elif kind & ~INITIAL == BUTTON:
                self._down.discard(number)
        self._buffer = self._buffer[whole:]

    def _bind(self, spec: RobotSpec) -> None:
        axes, buttons = dict(self.config.axes), dict(self.config.buttons)
        if not axes and not buttons:
            grips = [
                d.name
                for d in spec.action
                if d.meaning is CommandType.absolute and any(word in d.name.lower() for word in _GRIPPER_WORDS)
            ][:1]
            movers = [d.name for d in spec.action if d.name not in grips]
            if len(movers) > len(_STICKS):
                raise ConfigError(
                    f"a gamepad has no sticks for {', '.join(movers[len(_STICKS) :])} of robot '{spec.embodiment}'; "
                    "give all: axes={'0': '+NAME', ...}."
                )
            axes = {stick[1:]: stick[0] + name for stick, name in zip(_STICKS, movers, strict=False)}
            buttons = {number: sign + name for name in grips for number, sign in zip(_GRIP, "+-", strict=True)}
        self._axes = {int(n): read_binding(spec, text, f"GamepadConfig: axis {n}") for n, text in axes.items()}
        self._buttons = {int(n): read_binding(spec, text, f"GamepadConfig: button {n}") for n, text in buttons.items()}
