"""A robot whose driver lives in a process of its own (`hal.driver_host.server`), as control sees it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hal.driver_host.protocol import (
    PACKET_BYTES,
    DriverRequest,
    FrameReader,
    Reply,
    decode_error,
    new_socket,
    set_timeout,
    socket_address,
)
from hal.driver_host.stop_line import StopOrder, send_order
from hal.interfaces.robot import Feedback, RestPose
from hal.safety.limiter import limit_action
from wire.errors import RobotDisconnectedError, RobotError
from wire.stop_state import StopState
from wire.types import Observation, RobotSpec

_ORDER_S = 0.1
"""how long the host's answer to a stop is waited for; an order that is not answered is given again"""
_SLICE_S = 0.2
"""how often `meanwhile` is called"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


class RobotProxy:
    """Keeps the `Robot` protocol. When this process dies, the host holds the robot until another one attaches.

    Keeps the `Teleoperator` protocol too: the scripted operator runs beside the driver, whose inside it may need.
    """

    def __init__(
        self,
        spec: RobotSpec,
        path: Path,
        attach_s: float = 20.0,
        call_s: float = 1.0,
        slow_call_s: float = 120.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Only stores. `spec`: what the driver's robot is known to be; `path`: the host's socket.

        attach_s: how long `connect` waits for the host; call_s: for a read or write; slow_call_s: for the other calls.
        `meanwhile` is called several times a second while one of those takes its time.
        """
        self.spec = spec
        self.host_pid = 0
        self._path = path
        self._attach_s = attach_s
        self._call_s = call_s
        self._slow_call_s = slow_call_s
        self.meanwhile = meanwhile
        self._blocked = False
        self._number = 0
        """of the last request"""
        self._expected_ns = 0
        self._ahead, self._ahead_ns = 0, 0
        """number and time of the reading that comes by itself, number 0 for none"""
        self._ahead_late_ns = spec.period_ns // 8
        self._packet = memoryview(bytearray(PACKET_BYTES))
        self._socket: socket.socket | None = None
        self._frames: FrameReader | None = None
        self._progress: float | None = None
        self._previews = False
        self._proposes = False
        self._proposed: Reply | None = None

    def connect(self) -> None:
        """Attach to the host and have it connect its driver.

        Raises `RobotError` when there is no host or another process is attached, `SpecMismatchError` when it hosts
        another robot, and what the driver raises.
        """
        if self._socket is None:
            self._attach()
        self._call("connect", self._slow_call_s)

    def reset(self, task: str, seed: int) -> RestPose | None:
        """As `Robot.reset`; the host waits with it, its watchdog does not bite meanwhile."""
        self._proposed = None
        rest = self._call("reset", self._slow_call_s, task=task, seed=seed).rest
        return None if rest is None else RestPose(np.frombuffer(rest[0], np.float32), rest[1], rest[2])

    def read(self) -> Observation:
        """As `Robot.read`. Images lie in shared memory (`SharedFrame`) for a second, previews until the next read.
        Raises `RobotError` when the host is gone or its driver blocks."""
        self._proposed = None
        now_ns = time.monotonic_ns()
        if self._ahead and 0 <= now_ns - self._ahead_ns < self._ahead_late_ns:
            reply = self._receive_reply("read", self._ahead, now_ns, self._call_s)
        else:
            reply = self._call("read", self._call_s, previews=self._previews, propose=self._proposes)
        # Whoever asked for a proposal last time gets the next one with what it is for.
        self._proposed, self._proposes = reply if reply.progress is not None else None, False
        assert self._frames is not None
        state = np.frombuffer(reply.state, np.float32).reshape(reply.shape)
        return Observation(reply.time_ns, state, self._frames.read(reply.views), reply.task)

    def write(self, action: np.ndarray) -> Feedback:
        """As `Robot.write`. An action that reaches the driver too late is not executed: the robot holds instead, and
        `Feedback.executed` says so. Raises as `read`, and `InvalidDataError` for what is no action."""
        return self._command("write", limit_action(self.spec, action).tobytes())

    def hold(self) -> Feedback:
        """As `LimitedRobot.hold`, by what the host knows of the robot's motion. Raises as `read`."""
        return self._command("hold", b"")

    def stop_state(self) -> StopState:
        """Who keeps the robot from moving, past whatever the host is doing. Raises as `stop`."""
        return send_order(self._path, StopOrder("ask"), _ORDER_S)

    def stop(self, stop: str, who: str) -> StopState:
        """At once, past whatever the host is doing. Raises `RobotError` when there is none that answers."""
        return send_order(self._path, StopOrder("stop", stop, who), _ORDER_S)

    def release(self, stop: str) -> StopState:
        return send_order(self._path, StopOrder("release", stop), _ORDER_S)

    def start(self, after: str = "") -> StopState:
        return send_order(self._path, StopOrder("start", after), _ORDER_S)

    def _command(self, call: str, action: bytes) -> Feedback:
        self._proposed = None
        at_ns, self._expected_ns = self._expected_ns, 0
        reply = self._call(
            call, self._call_s, action=action, previews=self._previews, propose=self._proposes, read_at_ns=at_ns
        )
        if at_ns:
            self._ahead, self._ahead_ns = self._number + 1, at_ns
        return Feedback(
            np.frombuffer(reply.executed, np.float32),
            reply.reward,
            reply.success,
            reply.terminated,
            reply.truncated,
            still=reply.still,
            held_ticks=reply.held_ticks,
            stop=reply.stop,
        )

    def expect_read(self, at_ns: int) -> None:
        """It will be read at `at_ns` (CLOCK_MONOTONIC): the next command tells the host, which reads then, unasked.

        A `read` before that time, or more than an eighth of a period after it, asks for a newer one.
        """
        self._expected_ns = at_ns

    def request_previews(self, wanted: bool) -> None:
        """As `hal.interfaces.robot`: the next read takes it to the host, and so does each one after it."""
        self._previews = wanted

    def close(self) -> None:
        """Have the driver closed and let the host go. May be called twice, and with the host gone.

        A driver that blocks cannot be closed: the host is let go at once.
        """
        if self._socket is None:
            return
        try:
            if not self._blocked:
                self._call("close", self._slow_call_s)
        finally:
            self._detach()

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[da]: what the host's scripted operator wants now. Raises `RobotError` when the host has none."""
        self._proposes = True
        reply, self._proposed = self._proposed or self._call("propose", self._call_s), None
        self._progress = reply.progress
        return np.frombuffer(reply.action, np.float32) if reply.action else None

    def progress(self) -> float:
        """`Teleoperator.progress` as of the last proposal; infinite before the first."""
        return float("inf") if self._progress is None else self._progress

    # --- the connection -------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        deadline_s = time.monotonic() + self._attach_s
        while True:
            connection = new_socket()
            try:
                connection.connect(socket_address(self._path))
                break
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline_s:
                    raise RobotError(
                        f"robot '{self.spec.embodiment}': no host at {self._path} ({error.strerror}). "
                        "Is its process running? Its log says why it ended."
                    ) from error
            self.meanwhile()
            time.sleep(0.02)
        set_timeout(connection, socket.SO_SNDTIMEO, self._call_s)
        set_timeout(connection, socket.SO_RCVTIMEO, min(_SLICE_S, self._call_s))
        self._socket, self._blocked = connection, False
        try:
            reply = self._call("attach", max(0.1, deadline_s - time.monotonic()))
            if reply.spec is None:
                raise RobotError(f"robot '{self.spec.embodiment}': {self._path} answered, but it is no robot's host.")
            self.spec.require(reply.spec, f"the robot hosted at {self._path}")
            self._frames = FrameReader(self._path, self.spec)
        except BaseException:
            self._detach()
            raise
        self.host_pid = reply.pid

    def _detach(self) -> None:
        if self._socket is not None:
            self._socket.close()
        # Frames that somebody still looks at keep their memory.
        self._socket = self._frames = None
        self._ahead = 0

    def _call(self, call: str, timeout_s: float, **parts: Any) -> Reply:
        """The reply to `call`; `parts` of the `DriverRequest`."""
        connection = self._connected(call)
        # The number between is that of a reading that comes by itself, also after a command that failed.
        self._number += 2
        self._ahead = 0
        sent_ns = time.monotonic_ns()
        try:
            connection.send(_encode(DriverRequest(self._number, call, sent_ns, **parts)))
        except BrokenPipeError:
            # A host that closed the connection may have said why before.
            pass
        except OSError as error:
            raise self._connection_error(call, timeout_s, error) from error
        return self._receive_reply(call, self._number, sent_ns, timeout_s)

    def _receive_reply(self, call: str, number: int, sent_ns: int, timeout_s: float) -> Reply:
        connection = self._connected(call)
        self._ahead = 0
        try:
            try:
                reply = self._receive(connection, call, sent_ns, timeout_s)
            except ConnectionResetError:
                # The host closed before it read our call; what it said before that is still there.
                reply = self._receive(connection, call, sent_ns, timeout_s)
            # What an earlier call did not wait for.
            while reply.number not in (number, 0):
                reply = self._receive(connection, call, sent_ns, timeout_s)
        except OSError as error:
            raise self._connection_error(call, timeout_s, error) from error
        self._blocked = False
        if reply.kind:
            raise decode_error(reply)
        return reply

    def _connected(self, call: str) -> socket.socket:
        if self._socket is None:
            raise RobotError(f"robot '{self.spec.embodiment}': {call} before connect(); call connect() first.")
        return self._socket

    def _connection_error(self, call: str, timeout_s: float, error: OSError) -> RobotError:
        if isinstance(error, BlockingIOError):
            self._blocked = True
            return RobotError(
                f"robot '{self.spec.embodiment}': its driver blocks: no answer to {call}() within {timeout_s:g} s"
                f"{self._host_text()}. Check the robot's cable and power; restart the host if it stays so."
            )
        self._detach()
        return RobotDisconnectedError(f"robot '{self.spec.embodiment}': {self._gone_text(call)} ({error.strerror}).")

    def _receive(self, connection: socket.socket, call: str, sent_ns: int, timeout_s: float) -> Reply:
        """Raises `BlockingIOError` when no reply came within `timeout_s` of `sent_ns`, to the next `_SLICE_S`; or
        `call_s`, if that is shorter."""
        while True:
            try:
                size = connection.recv_into(self._packet)
            except BlockingIOError:
                if (time.monotonic_ns() - sent_ns) / 1e9 >= timeout_s:
                    raise
                self.meanwhile()
                continue
            if size:
                return _decode(self._packet[:size])
            self._detach()
            raise RobotDisconnectedError(f"robot '{self.spec.embodiment}': {self._gone_text(call)}.")

    def _gone_text(self, call: str) -> str:
        return (
            f"its host ended during {call}(){self._host_text()}; nobody commands the robot until a new host runs at "
            f"{self._path} and this process attaches again"
        )

    def _host_text(self) -> str:
        return f" (host process {self.host_pid})" if self.host_pid else ""
