"""What `--robot-config` says: a driver's configuration, and beside it the limits of a real robot.

{"type": "koch_follower", "fields": {...}, "safety": {"velocity": {"elbow_flex.pos": 60}, "acceleration": {...}}}
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from hal.safety.limits import SafetyLimits
from policies.interface.registry import read_object
from wire.errors import ConfigError, suggest
from wire.untrusted import MAX_CONFIG_BYTES, read_file

SAFETY = "safety"
"""the key that is the limits'; every other one is the driver's"""


@dataclass(frozen=True, slots=True)
class RobotConfigText:
    """What was given, taken apart."""

    driver: dict[str, Any] = field(default_factory=dict)
    """the driver's fields, for `hal.registry.read_config`"""
    safety: dict[str, Any] = field(default_factory=dict)
    """fields of `SafetyLimits`"""

    def limits(self, usual: SafetyLimits) -> SafetyLimits:
        """`usual` with what is given here in its place, table by table. Raises `ConfigError`."""
        known = [one.name for one in fields(SafetyLimits)]
        for name in self.safety:
            if name not in known:
                raise ConfigError(f"--robot-config: {SAFETY} has no '{name}'.{suggest(name, known)}")
        try:
            given = msgspec.convert(self.safety, SafetyLimits)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--robot-config: {SAFETY}: {error}.") from error
        return replace(usual, **{name: getattr(given, name) for name in self.safety})


def read_robot_config(text: str) -> RobotConfigText:
    """What `--robot-config` says, itself or in the file it names. Raises `ConfigError`."""
    given = read_json(text)
    safety = given.pop(SAFETY, {})
    if not isinstance(safety, Mapping):
        raise ConfigError(f"--robot-config: {SAFETY} must be an object of limits, such as velocity.")
    return RobotConfigText(given, dict(safety))


def read_json(text: str, option: str = "--robot-config") -> dict[str, Any]:
    """What `option` says, itself or in the file of JSON or TOML that it names. Raises `ConfigError`."""
    named = ""
    if not text.lstrip().startswith(("{", "[", '"')):
        named = f" {text}:"
        try:
            content = read_file(Path(text), MAX_CONFIG_BYTES).decode()
            if text.endswith(".toml"):
                # once more through JSON, which knows neither dates nor infinity
                content = json.dumps(tomllib.loads(content), default=str, allow_nan=False)
        except ConfigError as error:
            raise ConfigError(f"{option} {error} Give JSON, or a file of JSON or TOML.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{option}{named} {error}. Give JSON, or a file of JSON or TOML.") from error
        text = content
    return read_object(text, f"{option}{named}".rstrip(":"))
