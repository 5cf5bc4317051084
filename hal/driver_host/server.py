"""A robot's driver in a small process of its own, which holds the robot when its control dies.

    control process (RobotProxy)   ── requests over a local socket ──►  host process ──► driver ──► robot
                                   ◄─ replies; frames in a ring ─────

A command must come in every control period. When none came for some periods, or control is gone, the host commands hold
itself, in every period, and goes on until a control process commands the robot again, the old one or a new one. Before
it closes the driver, because control says so or it is asked to end, it brings the robot to hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from hal.driver_host.priority import yielding
from hal.driver_host.protocol import (
    PACKET_BYTES,
    DriverRequest,
    FrameWriter,
    Reply,
    encode_reply,
    error_text,
    listen,
    peer_pid,
)
from hal.driver_host.real_time import GarbageCollector, become_real_time
from hal.driver_host.stop_line import StopListener
from hal.driver_host.stuck_driver import StuckDriverWatch
from hal.driver_host.watchdog import CallDeadline
from hal.driver_host.watched_robot import WatchedRobot
from hal.interfaces.robot import Robot, Teleoperator, validate_observation, validate_outcome
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from hal.safety.stop_latch import StopLatch
from hal.stop_devices.watch import STARTED, Beside, DeviceWatch
from wire.errors import FleetError, RejectedError, RobotError
from wire.types import Observation

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""how long a host that is asked to end leaves a control process that is still there the time to end by itself"""

_SLOW = ("connect", "reset")
_STEP_S = 0.1

_decode = msgspec.msgpack.Decoder(DriverRequest).decode


class DriverServer:
    """One robot, and one control process at a time. `step` again and again; `close` at the end."""

    def __init__(
        self,
        robot: Robot,
        path: Path,
        safety: SafetyLimits | None = None,
        operator: Teleoperator | None = None,
        deadline: CallDeadline | None = None,
        stop_file: Path | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Listens at `path`, beside which its frames lie: choose a directory in memory. `stop_file`: keeps what stops
        and slows the robot beyond this process.

        Raises `ConfigError` when another host listens there, or `path` is too long for a socket, for a robot that
        cannot be slowed as it must, and `StorageError`.
        """
        latch, beside = StopLatch(stop_file), beside or Beside()
        latch.limit_speed(STARTED, beside.speed_limit)
        self.robot = LimitedRobot(robot, safety, latch)
        self._wake, self._woken = socket.socketpair()
        self.robot.on_stop = self._wake_up
        self._what = f"robot '{robot.spec.embodiment}'"
        self._path = path
        self._operator = operator
        self._watched = WatchedRobot(self.robot)
        self._deadline = deadline or CallDeadline()
        self.robot.on_write = self._renew_deadline
        self._stuck_watch = StuckDriverWatch(self._watched, self._deadline)
        self._seen: Observation | None = None
        self._traced_fault = ""
        self._garbage = GarbageCollector()
        self._ahead: DriverRequest | None = None
        """the command whose `read_at_ns` is to come"""
        self._packet = memoryview(bytearray(PACKET_BYTES))
        self._control: socket.socket | None = None
        self._pid = 0
        self._previews = False
        self._listener = listen(path)
        # Only now is it sure that nobody else writes there.
        self._frames = FrameWriter(path, robot.spec)
        self._stops = StopListener(path, self.robot, latch.save)
        self._devices = DeviceWatch(beside.devices, self.robot, self._stops.save_soon, beside.on_command)

    def _wake_up(self) -> None:
        # One that is full wakes as well, and whoever stops must not wait for a driver.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"!", socket.MSG_DONTWAIT)

    def _renew_deadline(self) -> None:
        self._deadline.renew(self.robot.coasting)

    @property
    def _silence(self) -> str:
        """Why no command comes, if none does."""
        return "no control process" if self._control is None else f"control process {self._pid} sends no command"

    @property
    def attached(self) -> bool:
        """Whether a control process is there."""
        return self._control is not None

    def start(self, cpu: int | None = None) -> None:
        """Before the first `step`, in the thread that will call it: be real-time as far as that is permitted, on the
        core `cpu` or any but the first; watch a driver that blocks."""
        self._garbage.start()
        become_real_time(cpu)
        # They are more urgent than this thread, by which they are started.
        self._stuck_watch.start()
        # From now on nobody who stops it waits for its driver.
        self.robot.stop_driver = self._stuck_watch.stopper.ask
        self._devices.start()

    def step(self) -> None:
        """Answer what control asks, or hold when that is due; waits for at most a tenth of a second."""
        self._renew_deadline()
        wait_s = min(_STEP_S, self._watched.left_s())
        if self._ahead is not None:
            wait_s = min(wait_s, max(0, self._ahead.read_at_ns - time.monotonic_ns()) / 1e9)
        self._garbage.poll(wait_s)
        sockets = [self._woken, self._listener, *([] if self._control is None else [self._control])]
        ready, _, _ = select.select(sockets, [], [], wait_s)
        if self._woken in ready:
            self._woken.recv(64)
            self._watched.on_stop()
        elif self._control is not None and self._control in ready:
            self._answer(self._control)
        elif self._control is not None and self._ahead is not None:
            self._read_ahead(self._control, self._ahead)
        # After control was answered: one that has just died makes room for the one that knocks.
        if self._listener in ready:
            self._accept()
        self._watched.poll(self._silence)

    def close(self) -> None:
        """Bring the robot to hold, close its driver, give the socket back. May be called twice."""
        try:
            self._close_robot(self._silence)
        finally:
            self._disconnect()
            if self._listener.fileno() >= 0:
                self._path.unlink(missing_ok=True)
            self._listener.close()
            self._devices.close()
            self._stops.close()
            self._stuck_watch.close()
            self._wake.close()
            self._woken.close()
            self._deadline.cancel()
            self._garbage.stop()

    # --- control --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid = peer_pid(connection)
        if self._control is not None:
            text = f"{self._what} at {self._path} is in the hands of process {self._pid}; end that one first."
            with contextlib.suppress(OSError):
                refusal = Reply(0, error_text(text), RejectedError.__name__)
                connection.send(encode_reply(refusal, self._what, "attach"), socket.MSG_DONTWAIT)
            connection.close()
            return
        self._control, self._pid = connection, pid
        log.info("%s: control process %d attached.", self._what, pid)

    def _answer(self, connection: socket.socket) -> None:
        try:
            size = connection.recv_into(self._packet)
            if not size:
                raise ConnectionResetError("the connection was closed")
            request = _decode(self._packet[:size])
            self._ahead = None
            # A control process that does not listen must not stop its host.
            connection.send(self._handle(request), socket.MSG_DONTWAIT)
            if request.read_at_ns:
                self._ahead = request
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._on_connection_lost(error)

    def _read_ahead(self, connection: socket.socket, command: DriverRequest) -> None:
        """Control wants the reading at the beginning of its next period: it need not ask once more."""
        if time.monotonic_ns() < command.read_at_ns:
            return
        self._ahead = None
        read = DriverRequest(command.number + 1, "read", previews=command.previews, propose=command.propose)
        try:
            connection.send(self._handle(read), socket.MSG_DONTWAIT)
        except OSError as error:
            self._on_connection_lost(error)

    def _on_connection_lost(self, error: Exception) -> None:
        log.log(
            logging.WARNING if self._watched.commanded else logging.INFO,
            "%s: control process %d is gone (%s)%s.",
            self._what,
            self._pid,
            error,
            "; the robot is held until one attaches" if self._watched.commanded else "",
        )
        self._disconnect()
        self._watched.on_disconnect()

    def _disconnect(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, self._pid, self._ahead = None, 0, None

    def _handle(self, request: DriverRequest) -> bytes:
        """The reply to `request` as it is sent."""
        try:
            if request.call in _SLOW:
                with self._deadline.slow():
                    reply = self._call(request)
            else:
                reply = self._call(request)
            return encode_reply(reply, self._what, request.call)
        except FleetError as error:
            failed = Reply(request.number, error_text(error), type(error).__name__)
        # Whatever a driver raises, and be it SystemExit, must not end the process that guards its robot.
        except BaseException as error:
            name = type(error).__name__
            text = f"{self._what}: its driver failed in {request.call}(): {name}: {error_text(error)}"
            if text != self._traced_fault:
                # Once: it is called many times a second.
                log.exception("%s: its driver failed in %s().", self._what, request.call)
            self._traced_fault = text
            failed = Reply(request.number, text, RobotError.__name__)
        return encode_reply(failed, self._what, request.call)

    def _call(self, request: DriverRequest) -> Reply:
        number = request.number
        match request.call:
            case "read":
                if request.previews != self._previews:
                    self._previews = request.previews
                    self.robot.request_previews(request.previews)
                seen = validate_observation(self.robot.spec, self.robot.read())
                reply = Reply(
                    number,
                    progress=None,
                    time_ns=seen.time_ns,
                    state=seen.state.tobytes(),
                    shape=seen.state.shape,
                    views=self._frames.write(seen.images),
                    task=seen.task,
                )
                self._seen = seen
                return self._with_proposal(reply) if request.propose else reply
            case "write" | "hold":
                action = np.frombuffer(request.action, np.float32) if request.call == "write" else None
                done = self._watched.execute(action, request.sent_ns)
                reward, success, terminated, truncated = validate_outcome(self.robot.spec, done)
                return Reply(
                    number,
                    executed=done.executed.tobytes(),
                    reward=reward,
                    success=success,
                    terminated=terminated,
                    truncated=truncated,
                    still=done.still,
                    held_ticks=done.held_ticks,
                    stop=done.stop,
                )
            case "attach":
                return Reply(number, spec=self.robot.spec, pid=os.getpid())
            case "propose":
                return self._propose(number)
            case "connect":
                with yielding():
                    self.robot.connect()
            case "reset":
                self._seen = None
                with yielding():
                    pose = self._watched.reset(request.task, request.seed)
                if pose is not None:
                    rest = np.asarray(pose.action, np.float32).tobytes(), pose.speed, pose.tolerance
                    return Reply(number, rest=rest)
            case "close":
                self._seen = None
                self._close_robot("it is to be closed")
            case _:
                raise RobotError(f"{self._what}: its host does not understand '{request.call}'; install one version.")
        return Reply(number)

    def _close_robot(self, why: str) -> None:
        """What moves comes to hold first, watched as always; what comes next starts from rest."""
        self._watched.come_to_hold(why)
        self._watched.end_scene()
        with self._deadline.slow():
            self.robot.close()

    def _propose(self, number: int) -> Reply:
        if self._operator is None:
            raise RobotError(f"{self._what}: its host was started without a scripted operator.")
        if self._seen is None:
            return Reply(number, progress=float("inf"))
        action = self._operator.propose(self._seen)
        data = b"" if action is None else np.asarray(action, np.float32).tobytes()
        return Reply(number, action=data, progress=float(self._operator.progress()))

    def _with_proposal(self, reply: Reply) -> Reply:
        """`reply` to a read with the operator's proposal: half of control's questions are saved so."""
        try:
            proposed = self._propose(reply.number)
        except Exception:  # noqa: BLE001 - it must not cost the reading; asked by itself the operator says what is wrong
            return reply
        reply.action, reply.progress = proposed.action, proposed.progress
        return reply


def run_driver_server(
    robot: Robot,
    path: Path,
    stop: Callable[[], bool],
    safety: SafetyLimits | None = None,
    operator: Teleoperator | None = None,
    deadline: CallDeadline | None = None,
    stop_file: Path | None = None,
    beside: Beside | None = None,
    cpu: int | None = None,
) -> None:
    """Host `robot` at `path` until `stop()`: asked to end, or the supervisor is gone.

    Whoever handles signals has `stop` answer: an exception out of a handler would be taken for one of the driver.

    A control process that is still there then gets `GRACE_S` to end by itself. While the driver blocks it is stopped by
    its own way, if it has one (`StuckDriverWatch`); when it blocks for longer than `deadline` this process ends, with a
    trace in its log and exit status 1, so that a new one can have the robot. `cpu`: as `DriverServer.start`. Raises as
    `DriverServer`.
    """
    server = DriverServer(robot, path, safety, operator, deadline, stop_file, beside)
    try:
        server.start(cpu)
        while not stop():
            server.step()
        deadline_s = time.monotonic() + GRACE_S
        while server.attached and time.monotonic() < deadline_s:
            server.step()
    finally:
        server.close()
