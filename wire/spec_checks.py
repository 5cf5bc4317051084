"""What names, numbers and rates a robot's spec may have."""

from __future__ import annotations

from wire.errors import ConfigError

MAX_NAME = 100
MAX_NAMES = 1024
"""dimensions, or cameras, of one robot"""
SLOWEST_HZ, FASTEST_HZ = 1e-3, 1e5


def check_names(what: str, kind: str, names: list[str]) -> None:
    """Raise `ConfigError` for a name that is none or stands twice."""
    if len(names) > MAX_NAMES:
        raise ConfigError(f"{what} has {len(names)} of kind {kind}; a robot has at most {MAX_NAMES}.")
    for name in names:
        check_text(f"{what}: a {kind} name", name)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{what}: the {kind} name '{twice}' stands twice in {names}.")


def check_text(what: str, value: str) -> None:
    """Raise `ConfigError` for what is no name."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{what} is {'empty' if isinstance(value, str) else repr(value)}; give it a name.")
    if not value.isprintable() or len(value) > MAX_NAME:
        raise ConfigError(f"{what} {value[:40]!r}: a name is at most {MAX_NAME} printable characters.")


def check_number(what: str, value: float) -> None:
    """Raise `ConfigError` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what} is {value!r}; give a number.")


def check_rate(what: str, value: float) -> None:
    """Raise `ConfigError` for a rate that cannot be."""
    check_number(what, value)
    if not SLOWEST_HZ <= value <= FASTEST_HZ:
        raise ConfigError(f"{what} is {value}; it must be positive, from {SLOWEST_HZ:g} to {FASTEST_HZ:g} Hz.")
