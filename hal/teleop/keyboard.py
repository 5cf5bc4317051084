"""The keyboard of a terminal as a teleoperation device.

A terminal tells presses, not releases: a tap moves for `tap_s`, and a key that is held moves on once the terminal
begins to repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from hal.interfaces.teleop import TeleopCommand
from hal.teleop.pose import Jog, check_rest, read_binding
from hal.teleop.terminal import DRIVING_HINT, EPISODE_KEYS, Terminal
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError
from wire.types import OperatorCommandKind, RobotSpec

_PAIRS = (("d", "a"), ("w", "s"), ("r", "f"), ("t", "g"), ("y", "h"), ("u", "j"), ("i", "k"), ("o", "l"))
"""up and down of each action dimension, in the spec's order, when no keys are given"""
_ARROWS = {"up": "w", "down": "s"}
RESERVED = {
    "enter": "take over, hand back",
    "space": "hold",
    "e": "emergency stop",
    "q": "quit",
    "esc": "quit",
    **{key: f"{kind} of an episode" for key, kind in EPISODE_KEYS.items()},
    "+": "faster",
    "-": "slower",
}
_REPEAT_WITHIN_S = 0.8
"""longest that a terminal waits before it repeats a key that is held"""


@dataclass(frozen=True, slots=True)
class KeyboardConfig:
    """Which key moves what. Raises `ConfigError` for what cannot be."""

    keys: dict[str, str] = field(default_factory=dict)
    """'+name' or '-name' of an action dimension by key; none: d/a, w/s, r/f, t/g, ... in the spec's order"""
    speeds: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    """shares of full speed that + and - step through"""
    speed: int = 1
    """which of them to begin with"""
    range_s: float = 4.0
    """seconds for the whole range of an absolute dimension at full speed"""
    tap_s: float = 0.1
    """so long a single press moves"""
    repeat_s: float = 0.15
    """so long a repeated press moves: a little more than the terminal's repeat period"""
    terminal: str = "/dev/tty"

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < speed <= 1 for speed in self.speeds):
            raise ConfigError(f"KeyboardConfig: speeds must be in (0, 1], not {self.speeds}.")
        if not 0 <= self.speed < len(self.speeds):
            raise ConfigError(f"KeyboardConfig: speed {self.speed} is no index of its {len(self.speeds)} speeds.")
        if min(self.range_s, self.tap_s, self.repeat_s) <= 0:
            raise ConfigError("KeyboardConfig: range_s, tap_s and repeat_s must be positive.")
        for key in self.keys:
            if key in RESERVED or (len(key) != 1 and key not in _ARROWS):
                why = f"is '{RESERVED[key]}'" if key in RESERVED else "is no single character, up or down"
                raise ConfigError(f"KeyboardConfig: the key '{key}' {why}; choose another.")


class Keyboard:
    """Keeps the `TeleopDevice` protocol."""

    def __init__(self, config: KeyboardConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or KeyboardConfig()
        self._clock = clock or MonotonicClock()
        self._terminal = Terminal(self.config.terminal, self._clock)
        self._moves: dict[str, tuple[int, float]] = {}
        self._jog: Jog | None = None
        self._clear()

    def _clear(self) -> None:
        self._engaged = False
        self._speed = self.config.speed
        self._presses: dict[str, tuple[int, int]] = {}
        """by key: when it was pressed last, and until when that moves"""

    @property
    def hint(self) -> str:
        """What the person can do, in a few words."""
        share = f"{100 * self.config.speeds[self._speed]:.0f}%"
        if not self._engaged:
            return "enter: take over   e: stop   q: quit"
        names = [d.name for d in self._jog.spec.action] if self._jog else []
        by_name: dict[str, list[str]] = {}
        for key, (index, sign) in self._moves.items():
            if key not in _ARROWS:
                by_name.setdefault(names[index], []).insert(0 if sign > 0 else 1, key)
        moves = " ".join(f"{'/'.join(keys)} {name}" for name, keys in by_name.items())
        return f"speed {share}   {moves}   +/-: speed   space: hold   {DRIVING_HINT}"

    def connect(self, spec: RobotSpec) -> None:
        check_rest(spec, "a keyboard")
        self._moves, self._jog = self._bind(spec), Jog(spec, self._clock, self.config.range_s)
        self._clear()
        self._terminal.open()

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        assert self._jog is not None, "connect() comes first"
        self._jog.follow(pose, driving)
        now_ns = self._clock.now_ns()
        said: list[OperatorCommandKind] = []
        for key in self._terminal.pressed():
            match key:
                case "q" | "esc" | "e":
                    self._engaged = False
                    return TeleopCommand(quit=key != "e", estop=key == "e", episode=tuple(said))
                case _ if key in EPISODE_KEYS:
                    said.append(EPISODE_KEYS[key])
                case "enter":
                    self._engaged = not self._engaged
                    self._release()
                case "space":
                    self._release()
                case "+" | "=":
                    self._speed = min(len(self.config.speeds) - 1, self._speed + 1)
                case "-":
                    self._speed = max(0, self._speed - 1)
                case _ if key in self._moves:
                    self._press(key, now_ns)
        if not self._engaged:
            return TeleopCommand(episode=tuple(said))
        held = [self._moves[key] for key, (_, until_ns) in self._presses.items() if now_ns < until_ns]
        command = self._jog.command(held, self.config.speeds[self._speed])
        return msgspec.structs.replace(command, episode=tuple(said))

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""
        self._terminal.close()
        self._jog = None

    def _press(self, key: str, now_ns: int) -> None:
        repeated = key in self._presses and now_ns - self._presses[key][0] < _REPEAT_WITHIN_S * 1e9
        self._presses[key] = now_ns, now_ns + int(1e9 * (self.config.repeat_s if repeated else self.config.tap_s))

    def _release(self) -> None:
        self._presses.clear()
        assert self._jog is not None
        self._jog.stop()

    def _bind(self, spec: RobotSpec) -> dict[str, tuple[int, float]]:
        keys = self.config.keys
        if not keys:
            if spec.action_dim > len(_PAIRS):
                left = ", ".join(d.name for d in spec.action[len(_PAIRS) :])
                raise ConfigError(
                    f"a keyboard has no keys of its own for {left} of robot '{spec.embodiment}'; "
                    "give all keys: keys={'w': '+NAME', 's': '-NAME', ...}."
                )
            pairs = zip(_PAIRS, spec.action, strict=False)
            keys = {key: sign + d.name for pair, d in pairs for key, sign in zip(pair, "+-", strict=True)}
            keys |= {arrow: keys[key] for arrow, key in _ARROWS.items() if key in keys}
        return {key: read_binding(spec, text, f"KeyboardConfig: the key '{key}'") for key, text in keys.items()}
