"""What a loop knows between two ticks, as plain values: the place where a replay may begin.

It walks whatever the loop is made of (chunk scheduler, gate, limits, counters, waiting messages) instead of asking each
class, so that a new strategy needs nothing extra. Reading one back never runs code that the file names: objects are
filled in where the freshly built loop has them, and only data types of this project (and objects of its classes,
without their constructors) are made.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import gc
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from robot_edge.flight_recorder.borders import RecordedBoundary
from wire.errors import CorruptDataError

_ROOMS = ("wire", "hal", "policies", "robot_edge")
_LEAVE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
"""what the new loop has of its own, equal by construction"""
_KEEP = ["k"]
_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}


def capture(root: Any) -> tuple[Any, list[str]]:
    """`root` as nested lists for MessagePack (arrays are left as they are, so that large ones need no copy), and
    the paths of what cannot be carried."""
    walk = _Capture()
    return walk.node(root, ""), walk.left_out


class _Capture:
    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def node(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, float, str, bytes):
            return value
        if type(value) is int:
            return value if -(2**63) <= value < 2**63 else ["i", str(value)]
        if isinstance(value, enum.Enum):
            return ["e", _name(type(value)), value.value]
        if isinstance(value, (RecordedBoundary, *_LEAVE)):
            return _KEEP
        if isinstance(value, np.generic):
            return ["n", value.dtype.str, value.tobytes()]
        if (index := self._seen.get(id(value))) is not None:
            return ["r", index]
        index = self._seen[id(value)] = len(self._alive)
        self._alive.append(value)
        if isinstance(value, np.ndarray):
            return ["a", index, value]
        if type(value) in (dict, OrderedDict):
            items = [[self.node(k, path), self.node(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return ["m", index, items, type(value) is OrderedDict]
        plain = type(value) in _SEQUENCES.values()
        if plain or (isinstance(value, tuple) and hasattr(value, "_fields")):
            items = [self.node(v, f"{path}[{i}]") for i, v in enumerate(value)]
            kind = type(value).__name__ if plain else _name(type(value))
            return ["s", index, items, kind, getattr(value, "maxlen", None)]
        names = _attributes(value)
        if names is None:
            self.left_out.append(f"{path} ({type(value).__name__})")
            return _KEEP
        return ["o", index, _name(type(value)), {n: self.node(getattr(value, n), f"{path}.{n}") for n in names}]


def restore(root: Any, node: list[Any], array: Callable[[Any], np.ndarray]) -> None:
    """Bring a freshly built `root` to the captured state; `array` brings an array back from what the file holds.

    Raises `CorruptDataError` for what cannot be read.
    """
    try:
        _Restore(array).node(node, root)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"the snapshot does not fit this version of the loop: {error!r}.") from error


class _Restore:
    def __init__(self, array: Callable[[Any], np.ndarray]) -> None:
        self._made: dict[int, Any] = {}
        self._array = array

    def node(self, node: Any, there: Any) -> Any:
        if not isinstance(node, list):
            return node
        match node:
            case ["i", digits]:
                return int(digits)
            case ["k"]:
                return there
            case ["e", name, value]:
                return _find(name, enum.Enum)(value)
            case ["n", dtype, data]:
                return np.frombuffer(data, dtype)[0]
            case ["r", index]:
                return self._made[index]
            case ["a", index, array]:
                return self._keep(index, self._array(array))
            case ["m", index, items, ordered]:
                made = self._keep(index, OrderedDict() if ordered else {})
                old = there if isinstance(there, dict) else {}
                for key, value in items:
                    name = self.node(key, None)
                    made[name] = self.node(value, old.get(name))
                return made
            case ["s", index, items, kind, maxlen]:
                many: Any = self._keep(index, deque(maxlen=maxlen) if kind == "deque" else [])
                same_length = isinstance(there, (list, tuple, deque)) and len(there) == len(items)
                olds = list(there) if same_length else [None] * len(items)
                many.extend(self.node(item, old) for item, old in zip(items, olds, strict=True))
                if kind in ("list", "deque"):
                    return many
                return self._keep(index, _SEQUENCES[kind](many) if kind in _SEQUENCES else _find(kind, tuple)(*many))
            case ["o", index, name, fields]:
                return self._object(index, name, fields, there)
        raise ValueError(f"unknown node {node[:1]}")

    def _object(self, index: int, name: str, fields: dict[str, Any], there: Any) -> Any:
        fits = there is not None and _name(type(there)) == name
        olds = {field: getattr(there, field, None) if fits else None for field in fields}
        if fits and not _is_frozen(type(there)):
            made = self._keep(index, there)
        else:
            kind = _find(name, object)
            if issubclass(kind, msgspec.Struct):
                return self._keep(index, kind(**{f: self.node(value, olds[f]) for f, value in fields.items()}))
            made = self._keep(index, kind.__new__(kind))
        for field, value in fields.items():
            # Past a frozen dataclass's guard, which is there for everybody else: nobody knows this object yet.
            object.__setattr__(made, field, self.node(value, olds[field]))
        return made

    def _keep(self, index: int, value: Any) -> Any:
        self._made[index] = value
        return value


def _is_frozen(kind: type) -> bool:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _attributes(value: Any) -> list[str] | None:
    """Names of what an object holds; None when it keeps it out of sight."""
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    has_dict = type(value).__dictoffset__ != 0
    names = _own_names(value) if has_dict else []
    slotted = False
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        slotted |= "__slots__" in kind.__dict__
        names += [n for n in ((slots,) if isinstance(slots, str) else slots) if n != "__dict__" and hasattr(value, n)]
    return names if slotted or has_dict else None


def _own_names(value: Any) -> list[str]:
    """What `__dict__` names, without a look at it: whoever looks makes the object slower for good.

    CPython keeps an object's attributes beside it until somebody asks for its dictionary. A control tick cost a tenth
    more after a snapshot that did.
    """
    names = [name for name in _assigned(type(value)) if _has(value, name)]  # type: ignore[arg-type]
    # Its attributes and its class: if that is not all, something was assigned from outside.
    return names if len(names) + 1 == len(gc.get_referents(value)) else list(value.__dict__)


@functools.cache
def _assigned(kind: type) -> tuple[str, ...]:
    """Names that methods of `kind` assign to."""
    methods = [m for base in kind.__mro__ for m in vars(base).values() if isinstance(m, types.FunctionType)]
    assigned = {i.argval: None for m in methods for i in dis.get_instructions(m) if i.opname == "STORE_ATTR"}
    return tuple(name for name in assigned if not hasattr(kind, name))


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str, base: type) -> Any:
    """A class of this project by name. Raises `LookupError` for any other, and for a module nobody has loaded."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.split(".")[0] in _ROOMS else None
    for part in path.split("."):
        found = getattr(found, part, None)
    # what a module of ours has imported is not ours: some classes of others act when an object of them is thrown away
    if not isinstance(found, type) or not issubclass(found, base) or _name(found) != name:
        raise LookupError(f"'{name}' is not a class of this project: a replay can only begin before there was one")
    return found
