"""What control and a robot's host say to each other: small packets over a local socket, pictures by their numbers.

One request is answered by one reply, so frames are put in only by a read; a command may ask for the next reading
too, which then comes when its time has come. A packet that comes late is known by its number. No pickle: packets are
typed MessagePack.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import struct
from pathlib import Path

import msgspec
import numpy as np

from hal.interfaces.robot import Feedback
from wire.errors import ConfigError, FleetError, InvalidDataError, RobotError, storage_error
from wire.types import Observation, RobotSpec

PACKET_BYTES = 1 << 16
_PATH_BYTES = 107
"""what the operating system takes as a socket's path"""
_TIME_BITS = 63
"""of a time that a packet surely takes"""
_TEXT_CHARS = 2000
"""of an error: a packet must have room for it"""

_encode = msgspec.msgpack.Encoder().encode


class DriverRequest(msgspec.Struct, frozen=True, array_like=True):
    """Control asks."""

    number: int
    call: str
    """attach, connect, reset, read, write, propose or close"""
    sent_ns: int = 0
    """CLOCK_MONOTONIC, which both sides share"""
    action: bytes = b""
    """float32[da]"""
    task: str = ""
    seed: int = 0
    previews: bool = False
    """with `read`: whether anybody looks at larger pictures"""
    propose: bool = False
    """with `read`: answer with the scripted operator's proposal for what was read too"""
    read_at_ns: int = 0
    """with `write`: `read` then (CLOCK_MONOTONIC) and send what came of it under the next number, unless control asks
    for anything before; 0: do not"""


class FrameView(msgspec.Struct, frozen=True, array_like=True):
    """A camera's newest frame, by its number in the ring of frames: another number is another frame."""

    number: int
    preview: int = 0
    """number of its larger picture, 0 for none"""
    preview_shape: tuple[int, ...] = ()
    """height and width"""


class Reply(msgspec.Struct, array_like=True):
    """The host answers. What a call does not give stays empty."""

    number: int
    """the request's; 0 answers whatever was asked"""
    error: str = ""
    """what the driver raised"""
    kind: str = ""
    """the class of wire.errors it raised"""
    held: int = 0
    """periods since the host started in which it commanded hold by itself"""
    executed: bytes = b""
    """float32[da]: what the robot did last, empty before the first command of a scene"""
    time_ns: int = 0
    state: bytes = b""
    shape: tuple[int, ...] = ()
    views: dict[str, FrameView] = {}
    task: str = ""
    reward: float = 0.0
    success: bool = False
    action: bytes = b""
    """float32[da]: the scripted operator's, empty for none"""
    progress: float | None = 0.0
    """None in the answer to a read without a proposal: it has to be asked for by itself"""
    spec: RobotSpec | None = None
    pid: int = 0


def decode_error(reply: Reply) -> FleetError:
    """The error that the driver raised, of the same class."""
    known: dict[str, type[FleetError]] = {}
    new: list[type[FleetError]] = [FleetError]
    while new:
        kind = new.pop()
        known[kind.__name__] = kind
        new += kind.__subclasses__()
    return known.get(reply.kind, RobotError)(reply.error)


def encode_observation(number: int, seen: Observation, views: dict[str, FrameView], what: str) -> Reply:
    """The reply to a read. Raises `InvalidDataError`, which begins with `what` and names the field."""
    state = np.ascontiguousarray(seen.state, np.float32)
    time_ns, task = seen.time_ns, seen.task
    if type(time_ns) is not int or time_ns.bit_length() > _TIME_BITS:
        time_ns = require_int(f"{what} time_ns", time_ns)
    if type(task) is not str or not task.isascii():
        task = require_text(f"{what} the task", task)
    return Reply(
        number,
        progress=None,
        time_ns=time_ns,
        state=state.tobytes(),
        shape=state.shape,
        views=views,
        task=task,
    )


def encode_feedback(number: int, done: Feedback, what: str) -> Reply:
    """The reply to a write; what was executed is in every reply. Raises as `encode_observation`."""
    reward, success = done.reward, done.success
    if type(reward) is not float:
        reward = require_float(f"{what} the reward", reward)
    if type(success) is not bool:
        success = require_bool(f"{what} success", success)
    return Reply(number, reward=reward, success=success)


def encode_reply(reply: Reply, held: int, executed: np.ndarray | None, what: str, call: str = "") -> bytes:
    """`reply` with what every reply says, as it is sent. Raises `RobotError` when it is too long for a packet: then
    `what` gave too much in `call`."""
    reply.held, reply.executed = held, b"" if executed is None else executed.tobytes()
    data = _encode(reply)
    if len(data) > PACKET_BYTES:
        gave = f"{what}: what {call}() gave" if call else what
        raise RobotError(
            f"{gave} takes {len(data)} bytes besides the pictures, and {PACKET_BYTES} at most can be sent. "
            "Shorten the task, or measure fewer dimensions."
        )
    return data


def require_int(what: str, value: object) -> int:
    """`value`, of numpy or not, for a packet. Raises `InvalidDataError` naming `what` unless it is whole."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
        if -(2**63) <= number < 2**63:
            return number
    except TypeError:
        pass
    raise InvalidDataError(f"{what} {value_text(value)}; a whole number of 64 bits is expected.")


def require_float(what: str, value: object) -> float:
    """`value`, of numpy or not, as a packet can carry it. Raises `InvalidDataError` naming `what` unless it is a
    number.
    """
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidDataError(f"{what} {value_text(value)}; a number is expected.") from error


def require_bool(what: str, value: object) -> bool:
    """`value`, of numpy or not, as a packet can carry it. Raises `InvalidDataError` naming `what` if it is many."""
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        raise InvalidDataError(f"{what} {value_text(value)}; True or False is expected.") from error


def require_text(what: str, value: object) -> str:
    """`value` as a packet can carry it. Raises `InvalidDataError` naming `what` unless it is a text in Unicode."""
    try:
        if isinstance(value, str):
            return value.encode().decode()
    except UnicodeEncodeError:
        pass
    raise InvalidDataError(f"{what} {value_text(value)}; a text in Unicode is expected.")


def value_text(value: object) -> str:
    """`value` as an error may show it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - it comes from a driver
        text = "something that cannot be shown"
    return f"{text[:80]} ({type(value).__name__})"


def error_text(error: BaseException, before: str = "") -> str:
    """What `error` says, whatever it says, as a packet can carry it: not too long, and in Unicode."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - it comes from a driver
        text = "it cannot say what is wrong"
    return sendable_text(before + text)


def sendable_text(text: str) -> str:
    """`text`, not too long, with a question mark for what is not Unicode."""
    cut = text if len(text) <= _TEXT_CHARS else text[:_TEXT_CHARS] + " ..."
    return cut.encode(errors="replace").decode()


def socket_address(path: Path) -> str:
    """The socket's path as the operating system takes it. Raises `ConfigError` when it is too long."""
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise ConfigError(f"{path} is too long for a local socket: {_PATH_BYTES} bytes at most. Choose a shorter one.")
    return str(path)


def new_socket() -> socket.socket:
    """A local socket that keeps packets whole."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def listen(path: Path) -> socket.socket:
    """The socket at `path` where control processes attach. Raises `ConfigError` when another host listens there."""
    listener = new_socket()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(new_socket()) as probe:
            if path.exists() and probe.connect_ex(socket_address(path)) == 0:
                raise ConfigError(f"another host runs at {path}; end it first or give this one another path.")
        # What a host that was killed left behind.
        path.unlink(missing_ok=True)
        listener.bind(socket_address(path))
        path.chmod(0o600)
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise storage_error(error, "hosting a robot", path) from error
    except ConfigError:
        listener.close()
        raise
    return listener


def set_receive_timeout(connection: socket.socket, duration_s: float) -> None:
    """Have `connection`, which blocks, raise `BlockingIOError` when nothing comes for so long.

    The kernel waits, not Python's `settimeout`, which costs a poll before each call.
    """
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(duration_s))


def timeval(duration_s: float) -> bytes:
    """A time as the operating system takes it; no less than a microsecond, for 0 means no end."""
    microseconds = max(1, round(duration_s * 1e6))
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))


def peer_pid(connection: socket.socket) -> int:
    """Process id of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")
