"""The way of a stop into a robot's host: one datagram, which no other call, disk or picture stands in front of.

    whoever stops ── StopOrder ──► `<host's socket>.stop` ──► a thread of the host ──► the robot's limits and driver

The host answers with the `StopState` that follows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from hal.driver_host.protocol import socket_address
from hal.interfaces.robot import HoldingRobot
from wire.errors import RobotError, storage_error
from wire.stop_state import StopState

log = logging.getLogger(__name__)

_BYTES = 1 << 16
_POLL_S = 0.5
ANSWER_S = 0.1
"""how long a host that is there takes to answer, with much to spare"""


class StopOrder(msgspec.Struct, frozen=True, array_like=True):
    """What a person wants."""

    kind: Literal["stop", "release", "start", "ask"]
    stop: str = ""
    """id of the stop; `release` takes back that one"""
    who: str = ""


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(StopOrder).decode


def stop_address(path: Path) -> Path:
    """Where the host at `path` is stopped."""
    return path.with_name(path.name + ".stop")


def send_order(path: Path, order: StopOrder, timeout_s: float) -> StopState:
    """Give `order` to the host at `path`; what follows from it. Raises `RobotError` when nobody answers in time."""
    own = Path(tempfile.gettempdir()) / f"vla-fleet-{os.getpid()}-{secrets.token_hex(4)}"
    address = stop_address(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            line.bind(socket_address(own))
            line.settimeout(timeout_s)
            line.sendto(_encode(order), socket_address(address))
            return msgspec.msgpack.decode(line.recv(_BYTES), type=StopState)
    except OSError as error:
        raise RobotError(
            f"no host of a robot answers at {address} ({error.strerror or error}). Is the robot's edge running on this "
            "computer? If the robot moves nevertheless, cut its power."
        ) from error
    finally:
        own.unlink(missing_ok=True)


class StopListener:
    """A thread of the host that does what comes in, whatever the host's other threads do."""

    def __init__(self, path: Path, robot: HoldingRobot, save: Callable[[], None]) -> None:
        """`save`: keeps what came; called last, for it may take its time. Raises `StorageError` when nobody could be
        heard there.
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
        self._thread = threading.Thread(target=self._run, name="stops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._path.unlink(missing_ok=True)
        self._socket.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                data, sender = self._socket.recvfrom(_BYTES)
            except TimeoutError:
                continue
            try:
                order = _decode(data)
            except msgspec.MsgspecError as error:
                log.error("what came in at %s is no order to stop: %s", self._path, error)
                continue
            match order.kind:
                case "stop":
                    log.warning("stopped by %s.", order.who)
                    self._robot.stop(order.stop, order.who)
                case "release":
                    self._robot.release(order.stop)
                case "start":
                    self._robot.start()
            if sender:
                with contextlib.suppress(OSError):
                    state = msgspec.msgpack.encode(self._robot.stop_state())
                    self._socket.sendto(state, socket.MSG_DONTWAIT, sender)
            self._save()
