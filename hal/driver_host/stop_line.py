"""The way of a stop into a robot's host: one datagram, which no other call, disk or picture stands in front of.

    whoever stops ── StopOrder ──► `<host's socket>.stop` ──► a thread of the host ──► the robot's limits and driver

The host answers with the `StopState` that follows, if whoever stops has an address of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import threading
from pathlib import Path
from typing import Literal

import msgspec

from hal.driver_host.protocol import socket_address
from hal.interfaces.robot import HoldingRobot
from wire.errors import RobotError, storage_error
from wire.types import StopState

log = logging.getLogger(__name__)

_BYTES = 1 << 16
_POLL_S = 0.5


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


def send_order(path: Path, order: StopOrder, timeout_s: float = 0.0) -> StopState | None:
    """Give `order` to the host at `path`; what follows from it, None if nobody said so within `timeout_s`.

    Without a timeout nothing is waited for. Raises `RobotError` when there is no host.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line, contextlib.ExitStack() as undo:
        if timeout_s:
            own = Path(tempfile.gettempdir()) / f"vla-fleet-{os.getpid()}-{secrets.token_hex(4)}"
            line.bind(socket_address(own))
            undo.callback(own.unlink, missing_ok=True)
            line.settimeout(timeout_s)
        try:
            line.sendto(_encode(order), socket.MSG_DONTWAIT, socket_address(stop_address(path)))
            return msgspec.msgpack.decode(line.recv(_BYTES), type=StopState) if timeout_s else None
        except TimeoutError:
            return None
        except OSError as error:
            raise RobotError(
                f"no host of a robot is listening at {stop_address(path)} ({error.strerror}). Is the robot's edge "
                "running on this computer? If it moves nevertheless, cut its power."
            ) from error


class StopListener:
    """A thread of the host that does what comes in, whatever the host's other threads do."""

    def __init__(self, path: Path, robot: HoldingRobot) -> None:
        """Raises `StorageError` when nobody could be heard there."""
        self._path, self._robot = stop_address(path), robot
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
