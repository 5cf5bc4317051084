"""What can be wrong with a message: one thing at a time, by a seed, in what a valid one is encoded as.

The tree of a message is decoded to plain values, one of which is replaced; or its bytes are cut, turned or repeated.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from wire.codec import PROTOCOL_VERSION

_WRONG_TYPES: tuple[Any, ...] = (None, True, 0, 1.5, "x", b"x", [], {}, [1, 2], {"a": 1})
_WHOLE = (-1, -(2**63), 2**31, 2**63 - 1, 2**64 - 1)
_NUMBERS = (*_WHOLE, math.nan, math.inf, -math.inf, 1e308, -0.0, 10**18)
_TEXTS = (
    "",
    "\0",
    "../../../etc/passwd",
    "gateway",
    "web-1",
    "name@2",
    "\u202egnp",
    "'; DROP TABLE segments; --",
    "{0.__class__}%s%n",
    "a" * 300,
    "é" * 1000,
    "\n" * 50,
)
_ARRAYS = (
    ["<f4", [0, 2**63], b""],
    ["<f4", [0, 2**40], b""],
    ["<f4", [-1], b""],
    ["<f4", [2**40], b"1234"],
    ["<f4", [1] * 100, b"1234"],
    ["|O", [1], b"12345678"],
    ["<U8", [1], b"0" * 32],
    ["<f8", [3], b"0" * 24],
    ["<f4", [3], b"\xff\xff\xff\xff" * 3],
    ["<f4", [1, 3], b"0" * 12],
)


_REMEMBERED, _REMEMBERED_BYTES = 500, 16 * 1024
"""what can be said again"""


class Mutation(StrEnum):
    """What is done to a message."""

    none = "valid, of a role or about a robot that it is not for"
    type = "a value of another type"
    number = "a number out of range, or none"
    text = "a text that means something elsewhere"
    large = "a text, list or table that is too large"
    nested = "lists in lists"
    array = "an array of an impossible shape or type"
    missing = "a field less"
    extra = "a field more"
    tag = "the type of another message"
    cut = "cut off"
    turned = "some bits turned"
    noise = "no message at all"
    version = "another protocol version"
    replayed = "one of those before, again, perhaps by another key"


class Format(NamedTuple):
    """How messages are encoded."""

    head: bytes
    """what stands before the tree"""
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    nested: Callable[[int], bytes]
    """lists in lists, so deep"""
    largest: msgspec.Raw
    """the largest whole number that it can say, and that nobody else can"""


MESSAGES = Format(
    bytes([PROTOCOL_VERSION]),
    msgspec.msgpack.encode,
    msgspec.msgpack.decode,
    lambda depth: b"\x91" * depth + b"\xc0",
    msgspec.Raw(b"\xcf" + b"\xff" * 8),
)
BARE = MESSAGES._replace(head=b"")
JSON = Format(
    b"", msgspec.json.encode, msgspec.json.decode, lambda depth: b"[" * depth + b"]" * depth, msgspec.Raw(b"9" * 30)
)


class Mutator:
    """The same seed gives the same messages."""

    def __init__(self, seed: int, form: Format = MESSAGES) -> None:
        self._random, self._form = random.Random(seed), form
        self._kinds = list(Mutation)
        self._made: deque[bytes] = deque(maxlen=_REMEMBERED)

    def mutate(self, data: bytes, tags: list[str]) -> tuple[Mutation, bytes]:
        """What was done to the message in `data`, and what came of it. `tags`: of all messages."""
        kind, made = self._mutated(data, tags)
        if len(made) <= _REMEMBERED_BYTES:
            self._made.append(made)
        return kind, made

    def _mutated(self, data: bytes, tags: list[str]) -> tuple[Mutation, bytes]:
        kind, head = self._random.choice(self._kinds), self._form.head
        # Those cost a hundred times as much as others.
        if kind is Mutation.large and self._random.random() < 0.9:
            kind = Mutation.text
        match kind:
            case Mutation.none:
                return kind, data
            case Mutation.replayed:
                return kind, self._random.choice(self._made or [data])
            case Mutation.cut:
                return kind, data[: self._random.randrange(len(data))]
            case Mutation.turned:
                turned = bytearray(data)
                for _ in range(self._random.randint(1, 8)):
                    turned[self._random.randrange(len(head), len(data))] ^= 1 << self._random.randrange(8)
                return kind, bytes(turned)
            case Mutation.noise:
                return kind, head + self._random.randbytes(self._random.randrange(200))
            case Mutation.version:
                return kind, bytes([self._random.choice([0, 3, PROTOCOL_VERSION + 1, 255])]) + data[len(head) :]
        tree = self._form.decode(data[len(head) :])
        match kind:
            case Mutation.tag if isinstance(tree, dict):
                tree["type"] = self._random.choice([*tags, "Message", "", 5])
            case Mutation.extra if isinstance(tree, dict):
                tree[self._random.choice(["secret", "role", "x" * 100])] = self._random.choice(_WRONG_TYPES)
            case Mutation.missing:
                del tree[self._random.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))]
            case _:
                tree = self._replace(tree, kind)
        return kind, head + self._form.encode(tree)

    def _replace(self, tree: Any, kind: Mutation) -> Any:
        """`tree` with one of its values changed, at any depth, of those that this can be done to."""
        fits = _FITS.get(kind, lambda value: True)
        places = [(path, value) for path, value in _values(tree) if fits(value)]
        if not places:
            return tree
        path, old = self._random.choice(places)
        return _with(tree, path, self._changed(kind, old))

    def _changed(self, kind: Mutation, old: Any) -> Any:
        draw = self._random.choice
        match kind:
            case Mutation.number:
                return draw([*(_NUMBERS if isinstance(old, float) else _WHOLE), self._form.largest])
            case Mutation.text:
                return draw(_TEXTS)
            case Mutation.array:
                return draw(_ARRAYS)
            case Mutation.nested:
                return msgspec.Raw(self._form.nested(draw([3, 600, 20_000])))
            case Mutation.large:
                return _enlarged(old, draw([3_000, 70_000, 300_000]))
        return draw(_WRONG_TYPES)


_FITS: dict[Mutation, Callable[[Any], bool]] = {
    Mutation.number: lambda value: isinstance(value, int | float),
    Mutation.text: lambda value: isinstance(value, str),
    Mutation.array: lambda value: isinstance(value, list) and len(value) == 3 and isinstance(value[2], bytes),
    Mutation.large: lambda value: isinstance(value, str | bytes | list | dict),
}
"""what a mutation can be done to, where that is not everything"""


def _enlarged(old: Any, size: int) -> Any:
    match old:
        case str():
            return "A" * size
        case bytes():
            return b"\0" * size
        case dict():
            return {f"{number}": next(iter(old.values()), 1) for number in range(size // 10)}
    return (old or [1]) * size


def _values(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of all that is in `tree`, but what names its type."""
    pairs: Iterable[tuple[Any, Any]] = ()
    match tree:
        case dict():
            pairs = tree.items()
        case list():
            pairs = enumerate(tree)
    for key, value in pairs:
        if path or key != "type":
            yield (*path, key), value
            yield from _values(value, (*path, key))


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `tree` with `value` at `path`."""
    if not path:
        return value
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[path[0]] = _with(tree[path[0]], path[1:], value)
    return changed
