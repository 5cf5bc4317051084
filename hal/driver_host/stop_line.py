"""The way of a stop into a robot's host: one datagram, which no other call, disk or picture stands in front of.

    whoever stops ── StopOrder ──► `<host's socket>.stop` ──► a thread of the host ──► the robot's limits and driver

The host answers with the `StopState` that follows.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from hal.driver_host.protocol import socket_address
from hal.safety.limited_robot import LimitedRobot
from wire.errors import FleetError, RejectedError, RobotError, storage_error
from wire.stop_state import StopState

log = logging.getLogger(__name__)

_BYTES = 1 << 16
_POLL_S = 0.5
_FAILED_S = 0.1
_NAME_CHARS = 200
"""of who stops it and of the stop's id, as they are kept: all of them have to fit into one answer"""
ANSWER_S = 0.1
"""how long a host that is there takes to answer, with much to spare"""


class StopOrder(msgspec.Struct, frozen=True, array_like=True):
    """What a person wants."""

    kind: Literal["stop", "release", "start", "slow", "ask"]
    stop: str = ""
    """id of the stop; `release` takes back that one, and `start` is given after it"""
    who: str = ""
    share: float = 1.0
    """`slow`: as `StopLatch.limit_speed` has it"""
    expires_ns: int = 0
    """with `start` and `slow`, by the clock of this computer: nothing comes of it later. `send_order` says it"""


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(StopOrder).decode
_decode_answer = msgspec.msgpack.Decoder(StopState | str).decode
"""what follows from an order, or why it is not followed"""


def stop_address(path: Path) -> Path:
    """Where the host at `path` is stopped."""
    return path.with_name(path.name + ".stop")


def send_order(path: Path, order: StopOrder, timeout_s: float) -> StopState:
    """Give `order` to the host at `path`; what follows from it. Raises `RejectedError` when the host refuses it,
    `RobotError` when nobody answers in time: then nothing comes of a start or a speed limit any more, while a stop or
    a release still counts when the host gets to it.
    """
    order = msgspec.structs.replace(order, expires_ns=time.monotonic_ns() + round(1e9 * timeout_s))
    address = stop_address(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            # Connected, so that nobody else answers it; then an address of the system's choice, which is no file: a
            # full disk has no room for one.
            line.connect(socket_address(address))
            line.bind("")
            line.settimeout(timeout_s)
            line.send(_encode(order))
            answer = _decode_answer(line.recv(_BYTES))
    except OSError as error:
        raise RobotError(
            f"no host of a robot answers at {address} ({error.strerror or error}). Is the robot's edge running on this "
            "computer? If the robot moves nevertheless, cut its power."
        ) from error
    if isinstance(answer, str):
        raise RejectedError(answer)
    return answer


class StopListener:
    """A thread of the host that does what comes in, whatever the host's other threads do."""

    def __init__(self, path: Path, robot: LimitedRobot, save: Callable[[], None]) -> None:
        """`save`: keeps what came; in a thread of its own, for a disk may take its time and the next order may be a
        stop. Raises `StorageError` when nobody could be heard there.
        """
        self._path, self._robot, self._save = stop_address(path), robot, save
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(socket_address(self._path))
            self._path.chmod(0o600)
        except OSError as error:
            self._socket.close()
            raise storage_error(error, "listening for stops", self._path) from error
        self._socket.settimeout(_POLL_S)
        self._closing = False
        self.refused: Counter[str] = Counter()
        """what was no order, or was not followed, by reason"""
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stops", daemon=True)
        self._thread.start()
        self._saver = threading.Thread(target=self._save_changes, name="stop file", daemon=True)
        self._saver.start()

    def save_soon(self) -> None:
        """What is to be kept was changed by something else than an order."""
        self._changed.set()

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._changed.set()
        self._saver.join()
        self._path.unlink(missing_ok=True)
        self._socket.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._receive()
            except TimeoutError:
                continue
            except Exception:
                # Whatever it is: the next stop must be heard.
                log.exception("the way of stops at %s failed; it goes on.", self._path)
                self.refused["failed"] += 1
                time.sleep(_FAILED_S)

    def _receive(self) -> None:
        data, sender = self._socket.recvfrom(_BYTES)
        try:
            order = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.error("what came in at %s is no order to stop: %s", self._path, error)
            self.refused["malformed"] += 1
            return
        answer: StopState | str
        try:
            answer = self._follow(order)
        except FleetError as error:
            log.warning("%s", error)
            self.refused["rejected"] += 1
            answer = str(error)
        if sender:
            with contextlib.suppress(OSError):
                self._socket.sendto(msgspec.msgpack.encode(answer), socket.MSG_DONTWAIT, sender)
        self._changed.set()

    def _follow(self, order: StopOrder) -> StopState:
        # A stop counts whatever it is called.
        order = msgspec.structs.replace(order, stop=order.stop[:_NAME_CHARS], who=order.who[:_NAME_CHARS])
        match order.kind:
            case "stop":
                log.warning("stopped by %s.", order.who)
                self._robot.stop(order.stop, order.who)
            case "release":
                self._robot.release(order.stop)
            case "start" | "slow" if time.monotonic_ns() > order.expires_ns:
                log.error("'%s' of %s waited too long here; nothing comes of it.", order.kind, order.who)
            case "start":
                self._robot.start(order.stop)
            case "slow":
                log.info("%s limits its speed to %g.", order.who, order.share)
                self._robot.limit_speed(order.who, order.share)
        return self._robot.stop_state()

    def _save_changes(self) -> None:
        while not self._closing:
            self._changed.wait()
            self._changed.clear()
            self._save()
        # What came while it was saved.
        self._save()
