"""A script that drives as a person would: rows of times and actions from a file, or a function.

JSON: [{"time_s": 0.0, "action": [0.1, 0, 0, 1]}, {"time_s": 1.0, "move_x": 0.5}, {"time_s": 2.0}]
CSV:  time_s,move_x,move_y
      0.0,0.1,0

A row holds until the time of the next; a row without any action holds the robot; after the last the robot is handed
back and the device put away.
"""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hal.interfaces.teleop import TeleopCommand
from hal.safety.limiter import limit_action
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError, suggest
from wire.types import CommandType, RobotSpec
from wire.untrusted import MAX_JSON_BYTES, read_file

TIME = "time_s"


@dataclass(frozen=True, slots=True)
class ScriptConfig:
    """One of the two. Raises `ConfigError` for both or none."""

    path: str = ""
    """a .json or .csv file"""
    function: str = ""
    """'module:function': called with the time in seconds and the robot's pose, float32[da] with NaN where it is not
    measured; gives da numbers, None to hold, and raises StopIteration at the end"""
    repeat: int = 1
    """so often the file is played"""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.function):
            raise ConfigError("ScriptConfig: give either path or function.")
        if self.repeat < 1:
            raise ConfigError(f"ScriptConfig: repeat must be at least 1, not {self.repeat}.")


class ScriptedDevice:
    """Keeps the `TeleopDevice` protocol. Its time begins with the first reading."""

    def __init__(self, config: ScriptConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or MonotonicClock()
        self._act: Callable[[float, np.ndarray], Any] | None = None
        self._spec: RobotSpec | None = None
        self._begun_ns: int | None = None
        self._over = False

    def connect(self, spec: RobotSpec) -> None:
        """Read the whole script. Raises `ConfigError` naming file and row for what cannot be played."""
        self._act = self._load_function() if self.config.function else self._load_file(spec)
        self._spec = spec
        self._begun_ns, self._over = None, False

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        """See `TeleopDevice.read`. Raises `RobotError` when the function fails."""
        assert self._act is not None, "connect() comes first"
        assert self._spec is not None
        if self._over:
            return TeleopCommand(quit=True)
        now_ns = self._clock.now_ns()
        self._begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        try:
            action = self._act((now_ns - self._begun_ns) / 1e9, np.array(pose, np.float32))
            if action is None:
                return TeleopCommand(engaged=True)
            return TeleopCommand(engaged=True, action=limit_action(self._spec, np.asarray(action, np.float32)))
        except StopIteration:
            self._over = True
            return TeleopCommand(quit=True)
        except Exception as error:
            name = self.config.function or self.config.path
            raise RobotError(f"the script {name} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._act = self._spec = None

    def _load_function(self) -> Callable[[float, np.ndarray], Any]:
        module, _, name = self.config.function.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the script '{self.config.function}' cannot be loaded: {error}. Give MODULE:FUNCTION; the module must "
                "be on PYTHONPATH."
            ) from error

    def _load_file(self, spec: RobotSpec) -> Callable[[float, np.ndarray], Any]:
        path = Path(self.config.path)
        try:
            text = read_file(path, MAX_JSON_BYTES).decode()
        except (ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(f"the script {path} cannot be read: {error}") from error
        if path.suffix == ".csv":
            rows: Any = list(csv.DictReader(text.splitlines()))
        else:
            try:
                rows = msgspec.json.decode(text, type=list[dict[str, Any]])
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"the script {path} is not a JSON list of rows: {error}.") from error
        if not rows:
            raise ConfigError(f"the script {path} has no row.")
        times: list[float] = []
        actions: list[np.ndarray | None] = []
        for number, row in enumerate(rows, 1):
            time_s, action = _row(spec, row, f"{path}, row {number}")
            if times and time_s <= times[-1]:
                raise ConfigError(f"{path}, row {number}: {TIME} {time_s:g} is not after {times[-1]:g}.")
            times.append(time_s)
            actions.append(action)
        # The last row lasts as long as the one before it.
        whole_s = times[-1] + (times[-1] - times[-2] if len(times) > 1 else 1.0)

        def act(time_s: float, pose: np.ndarray) -> np.ndarray | None:
            if time_s >= whole_s * self.config.repeat:
                raise StopIteration
            index = int(np.searchsorted(times, time_s % whole_s, "right")) - 1
            return actions[index] if index >= 0 else None

        return act


def _row(spec: RobotSpec, row: Mapping[str, Any], where: str) -> tuple[float, np.ndarray | None]:
    given = {str(name): value for name, value in row.items() if value not in (None, "")}
    if TIME not in given:
        raise ConfigError(f"{where}: no {TIME}.")
    time_s = _number(given.pop(TIME), TIME, where)
    names = [d.name for d in spec.action]
    if "action" in given:
        values = given.pop("action")
        if not isinstance(values, list) or len(values) != spec.action_dim:
            raise ConfigError(f"{where}: 'action' must be {spec.action_dim} numbers: {', '.join(names)}.")
        given |= dict(zip(names, values, strict=True))
    if not given:
        return time_s, None
    for name in given:
        if name not in names:
            raise ConfigError(f"{where}: no action '{name}'.{suggest(name, names)} There are: {', '.join(names)}.")
    action = []
    for d in spec.action:
        if d.name not in given and d.meaning is CommandType.absolute:
            raise ConfigError(f"{where}: '{d.name}' is an absolute target; every row that moves must give it.")
        number = _number(given.get(d.name, 0.0), d.name, where)
        if not d.low <= number <= d.high:
            raise ConfigError(f"{where}: '{d.name}' is outside its limits [{d.low:g}, {d.high:g}].")
        action.append(number)
    return time_s, np.array(action, np.float32)


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: '{name}' is {value!r}, which is no number.")
    return number
