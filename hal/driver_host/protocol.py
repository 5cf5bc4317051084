"""What control and a robot's host say to each other: small packets over a local socket, pictures by their numbers.

One request is answered by one reply, so frames are put in only by a read; a command may ask for the next reading
too, which then comes when its time has come. A packet that comes late is known by its number. No pickle: packets are
typed MessagePack.

The host puts each picture into shared memory once (`FrameWriter`), control looks at it where it lies (`FrameReader`).
Those files stand beside the host's socket. They stay when host or control dies, so that a successor counts on and
nobody takes a new frame for an old one; they go with their directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from wire import errors
from wire.errors import ConfigError, FleetError, InvalidDataError, RobotError, StorageError, storage_error
from wire.stop_state import StopState
from wire.transport.frame_ring import FrameRing, ring_path, with_preview
from wire.types import CameraSpec, Frame, RobotSpec

log = logging.getLogger(__name__)

PACKET_BYTES = 1 << 16
_PATH_BYTES = 107
"""what the operating system takes as a socket's path"""
_TEXT_CHARS = 2000
"""of an error: a packet must have room for it"""
_PREVIEW_S = 0.05
"""how long a larger picture stays: control sends it on, or copies it, in the tick that reads it"""

_encode = msgspec.msgpack.Encoder().encode

# --- packets ----------------------------------------------------------------------------------------------------------


class DriverRequest(msgspec.Struct, frozen=True, array_like=True):
    """Control asks."""

    number: int
    call: str
    """attach, connect, reset, read, write, hold, propose or close"""
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
    """with `write` and `hold`: `read` then (CLOCK_MONOTONIC) and send what came of it under the next number, unless
    control asks for anything before; 0: do not"""


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
    executed: bytes = b""
    """float32[da]: what the robot did with a command"""
    time_ns: int = 0
    state: bytes = b""
    shape: tuple[int, ...] = ()
    views: dict[str, FrameView] = {}
    task: str = ""
    reward: float = 0.0
    success: bool = False
    still: bool = True
    held_ticks: int = 0
    stop: StopState | None = None
    action: bytes = b""
    """float32[da]: the scripted operator's, empty for none"""
    progress: float | None = 0.0
    """None in the answer to a read without a proposal: it has to be asked for by itself"""
    spec: RobotSpec | None = None
    pid: int = 0
    terminated: bool = False
    truncated: bool = False
    rest: tuple[bytes, float, float] | None = None
    """of a reset: the `RestPose`, its action as float32[da]"""


def decode_error(reply: Reply) -> FleetError:
    """The error that the driver raised, of the same class."""
    kind = getattr(errors, reply.kind, None)
    if isinstance(kind, type) and issubclass(kind, FleetError):
        return kind(reply.error)
    return RobotError(reply.error)


def encode_reply(reply: Reply, what: str, call: str) -> bytes:
    """`reply` as it is sent. Raises `RobotError` when `what` gave more in `call` than a packet has room for."""
    data = _encode(reply)
    if len(data) > PACKET_BYTES:
        raise RobotError(
            f"{what}: what {call}() gave takes {len(data)} bytes besides the pictures, and {PACKET_BYTES} at most can "
            "be sent. Shorten the task, or measure fewer dimensions."
        )
    return data


def error_text(error: object) -> str:
    """What `error` says, whatever it says, as a packet can carry it: not too long, a question mark for what is not
    Unicode."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - it comes from a driver
        text = "it cannot say what is wrong"
    cut = text if len(text) <= _TEXT_CHARS else text[:_TEXT_CHARS] + " ..."
    return cut.encode(errors="replace").decode()


# --- sockets ----------------------------------------------------------------------------------------------------------


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


def set_timeout(connection: socket.socket, option: int, duration_s: float) -> None:
    """Have `connection` raise `BlockingIOError` after so long: SO_RCVTIMEO when nothing came, SO_SNDTIMEO when nothing
    could be sent. The kernel waits, not Python's `settimeout`, which costs a poll before each call."""
    # No less than a microsecond, for 0 means no end.
    microseconds = max(1, round(duration_s * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(microseconds, 1_000_000)))


def peer_pid(connection: socket.socket) -> int:
    """Process id of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


# --- pictures ---------------------------------------------------------------------------------------------------------


class FrameWriter:
    """The host's side."""

    def __init__(self, socket: Path, spec: RobotSpec) -> None:
        """`socket`: where the host listens. Raises as `FrameRing`."""
        self._socket, self._spec = socket, spec
        self._ring = FrameRing(ring_path(socket, spec), spec, write=True)
        self._previews: dict[str, FrameRing] = {}
        self._failed_previews: set[str] = set()
        self._written: dict[str, tuple[Frame, FrameView]] = {}

    def write(self, images: Mapping[str, Frame]) -> dict[str, FrameView]:
        """Put in what is new of `images` and say where it lies.

        Raises `InvalidDataError` for a camera that the spec does not name and an image of another shape than it says.
        """
        views = {}
        for camera, frame in images.items():
            last = self._written.get(camera)
            if last is None or last[0] is not frame:
                last = self._written[camera] = frame, self._put(camera, frame)
            views[camera] = last[1]
        return views

    def _put(self, camera: str, frame: Frame) -> FrameView:
        try:
            number = self._ring.put(camera, frame)
        except InvalidDataError as error:
            raise InvalidDataError(f"robot '{self._spec.embodiment}': read() gave {error}") from error
        if frame.preview is None:
            return FrameView(number)
        try:
            return FrameView(number, self._put_preview(camera, frame.time_ns, frame.preview), frame.preview.shape[:2])
        except (ConfigError, InvalidDataError, StorageError) as error:
            # A robot must not stand still because somebody would like to look at it.
            if camera not in self._failed_previews:
                log.warning("robot '%s': larger pictures are left out: %s", self._spec.embodiment, error)
            self._failed_previews.add(camera)
            return FrameView(number)

    def _put_preview(self, camera: str, time_ns: int, image: np.ndarray) -> int:
        """The first one says what shape they have, for as long as this process lives."""
        if camera not in self._previews:
            if not isinstance(image, np.ndarray) or image.ndim != 3:
                raise InvalidDataError(f"camera '{camera}' gave no uint8[H, W, 3] as preview.")
            self._previews[camera] = _preview_ring(self._socket, self._spec, camera, image.shape[:2], write=True)
        number = self._previews[camera].put(camera, Frame(time_ns, image))
        self._failed_previews.discard(camera)
        return number


class FrameReader:
    """Control's side; the same frame is the same object."""

    def __init__(self, socket: Path, spec: RobotSpec) -> None:
        """`socket`: where the host listens. Raises as `FrameRing`."""
        self._socket, self._spec = socket, spec
        self._ring = FrameRing(ring_path(socket, spec), spec, write=False)
        self._previews: dict[tuple[str, tuple[int, ...]], FrameRing] = {}
        self._seen: dict[str, tuple[FrameView, Frame]] = {}

    def read(self, views: Mapping[str, FrameView]) -> dict[str, Frame]:
        """The frames of a reply. No more than the next reading is put in before control asks again: they stay whole.

        Raises `RobotError` for one that is not there.
        """
        frames = {}
        for camera, view in views.items():
            seen = self._seen.get(camera)
            if seen is None or seen[0] != view:
                seen = self._seen[camera] = view, self._frame(camera, view)
            frames[camera] = seen[1]
        return frames

    def _frame(self, camera: str, view: FrameView) -> Frame:
        frame = self._ring.view(camera, view.number)
        if frame is None:
            raise RobotError(
                f"robot '{self._spec.embodiment}': frame {view.number} of camera '{camera}' is not in the memory that "
                f"its host at {self._socket} shares. Restart the processes of this robot."
            )
        if not view.preview:
            return frame
        key = camera, view.preview_shape
        if key not in self._previews:
            self._previews[key] = _preview_ring(self._socket, self._spec, *key, write=False)
        preview = self._previews[key].view(camera, view.preview)
        return frame if preview is None else with_preview(frame, preview)


def _preview_ring(socket: Path, spec: RobotSpec, camera: str, shape: tuple[int, ...], *, write: bool) -> FrameRing:
    """A ring for the larger pictures of one camera, which no spec knows; its name holds their shape."""
    rate_hz = next(known.rate_hz for known in spec.cameras if known.name == camera)
    height, width = shape
    seen = msgspec.structs.replace(spec, cameras=(CameraSpec(camera, height, width, rate_hz),))
    return FrameRing(ring_path(socket, seen), seen, write=write, keep_s=_PREVIEW_S)
