"""Messages to bytes and back: one version byte, then MessagePack of the tagged union. No pickle, ever.

An array travels as (dtype, shape, bytes); only the plain numeric types below are accepted.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Set
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from wire.errors import ConfigError, MessageTooLargeError, ProtocolError, ProtocolVersionError
from wire.messages import SHOWN_BYTES, Message, fleet, gateway, joining, local, relaying, versions

PROTOCOL_VERSION = 6
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_DTYPES = {"|u1", "|b1", "<i2", "<i4", "<i8", "<f4", "<f8"}
_NAMES = {np.dtype(name): name for name in _DTYPES}
_MOST_DIMENSIONS = 8
_KEPT_BYTES = 4096
_COPIED_BYTES = 1024
"""a copy of an array up to this size costs less than a view of its bytes"""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype)
        if name is None:
            raise ProtocolError(f"an array of dtype {value.dtype} cannot be sent; use one of {sorted(_DTYPES)}.")
        if value.nbytes <= _COPIED_BYTES:
            return name, value.shape, value.tobytes()
        return name, value.shape, np.ascontiguousarray(value).data.cast("B")
    if isinstance(value, np.generic):
        return value.item()
    raise ProtocolError(f"a {type(value).__name__} cannot be sent.")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise ProtocolError(f"no decoder for {kind.__name__}.")
    try:
        dtype, shape, data = value
        if dtype not in _DTYPES:
            raise ProtocolError(f"an array of dtype {str(dtype)[:40]!r} is not accepted.")
        # Their product takes seconds when there are many.
        if len(shape) > _MOST_DIMENSIONS:
            raise ProtocolError(f"an array of {len(shape)} dimensions is not accepted; {_MOST_DIMENSIONS} are.")
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise ProtocolError(f"an array of shape {shape!r} is not accepted.")
        if math.prod(shape) * np.dtype(dtype).itemsize != len(data):
            raise ProtocolError(f"an array of {len(data)} bytes does not fill shape {shape} of {dtype}.")
        return np.frombuffer(data, dtype).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an array that cannot be read: {error}.") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_MODULES = {module.__name__ for module in (fleet, gateway, joining, local, relaying, versions)}
if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = functools.reduce(operator.or_, (k for k in Message.__subclasses__() if k.__module__ in _MODULES))
    """what a field must be declared as to hold any message, for msgspec to know its kinds"""
_decoder = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_decode_array)

_CAPS = {kind.__name__.encode(): kind.max_bytes for kind in Message.__subclasses__() if kind.__module__ in _MODULES}
_KINDS = {kind.__name__.encode(): kind for kind in Message.__subclasses__() if kind.__module__ in _MODULES}
_TAG = re.compile(rb".(?:[\x80-\x8f]|\xde..)\xa4type[\xa0-\xbf]([A-Za-z]+)", re.DOTALL)
"""how a message begins: what it is stands first, and can be read before anything is allocated for the rest"""


_last: tuple[Message | None, bytes] = None, b""


def encode(message: Message) -> bytes:
    """Bytes of `message`. Raises `MessageTooLargeError` above the cap.

    What is sent may be recorded too: the same small message is not encoded twice in a row.
    """
    global _last
    known, data = _last
    if known is message:
        return data
    data = bytes([PROTOCOL_VERSION]) + _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(
            f"a {type(message).__name__} of {len(data)} bytes is above the cap of {MAX_MESSAGE_BYTES};"
            " send it in parts."
        )
    if len(data) <= _KEPT_BYTES:
        _last = message, data
    return data


def decode(data: bytes | memoryview, *, stored: bool = False) -> Message:
    """The message in `data`; its arrays are read-only views of `data`.

    `stored`: it was kept on a disk, perhaps by a vla-fleet of another protocol version; fields that came later have
    their defaults. Raises `ProtocolError` for anything else that is not a message of this protocol version.
    """
    _check_frame(data, stored)
    try:
        return _decoder.decode(memoryview(data)[1:])
    except ProtocolError:
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ConfigError) as error:
        raise ProtocolError(f"not a message: {error}.") from error


class Undecoded(NamedTuple):
    """A message of which only the beginning was read."""

    kind: type[Message]
    """what it says it is"""
    data: bytes
    """all of it, for `decode`"""


def decode_unless(data: bytes, kinds: Set[type[Message]]) -> Message | Undecoded:
    """As `decode`, but of a message that says to be one of `kinds` only the protocol version and the size are checked:
    for whoever hands it on."""
    found = _TAG.match(data)
    kind = _KINDS.get(found[1]) if found else None
    if kind is None or kind not in kinds:
        return decode(data)
    _check_frame(data, stored=False)
    return Undecoded(kind, data)


def _check_frame(data: bytes | memoryview, stored: bool) -> None:
    """Raise `WireError` for what is of no size, or of no version, that a message of its type has."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(f"{len(data)} bytes received, above the cap of {MAX_MESSAGE_BYTES}.")
    if len(data) < 2:
        raise ProtocolError(f"{len(data)} bytes are no message.")
    if data[0] != PROTOCOL_VERSION and not stored:
        raise ProtocolVersionError(_version_mismatch(data[0]))
    if len(data) > SHOWN_BYTES:
        _check_size(data)


def _version_mismatch(theirs: int) -> str:
    """Which side is to be upgraded, told where that can be done or not."""
    age, where = ("older", "there") if theirs < PROTOCOL_VERSION else ("newer", "here")
    text = f"the other side speaks protocol {theirs}, {age} than this side's {PROTOCOL_VERSION}"
    return f"{text}: upgrade vla-fleet {where}."


def _check_size(data: bytes | memoryview) -> None:
    """Raise `MessageTooLargeError` for a message above the cap of its type."""
    found = _TAG.match(data)
    kind = found[1] if found else b"?"
    if len(data) > (cap := _CAPS.get(kind, SHOWN_BYTES)):
        raise MessageTooLargeError(f"a {kind[:40].decode()} of {len(data)} bytes received, above its cap of {cap}.")
