"""Reads what is configured of a policy, and says what could have been meant where it does not fit. Imports no torch."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from wire.errors import ConfigError, suggest

T = TypeVar("T", bound=msgspec.Struct)

_PLACE, _UNKNOWN = re.compile(r"at `\$\.([\w.]+)`$"), re.compile(r"unknown field `([^`]*)`")


def read_options(config: dict[str, Any], kind: type[T], what: str) -> T:
    """`config` as the struct `kind`. Raises `ConfigError` that begins with `what` and names the place and what is known
    there: the fields of a struct, the words of a choice."""
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}.{_known(str(error), kind)}") from error


def _known(error: str, kind: type[msgspec.Struct]) -> str:
    place, unknown = _PLACE.search(error), _UNKNOWN.search(error)
    found: inspect.Type | None = inspect.type_info(kind)
    for name in place[1].split(".") if place else ():
        struct = _struct(found)
        found = next((field.type for field in struct.fields if field.encode_name == name), None) if struct else None
    if unknown and (struct := _struct(found)):
        names = [field.encode_name for field in struct.fields]
        return f"{suggest(unknown[1], names)} It has {', '.join(names)}."
    words = [str(value) for one in _members(found) if isinstance(one, inspect.LiteralType) for value in one.values]
    return f" Known: {', '.join(words)}." if words else ""


def _struct(found: inspect.Type | None) -> inspect.StructType | None:
    return next((one for one in _members(found) if isinstance(one, inspect.StructType)), None)


def _members(found: inspect.Type | None) -> tuple[inspect.Type, ...]:
    """The types that are possible there."""
    if found is None:
        return ()
    return found.types if isinstance(found, inspect.UnionType) else (found,)
