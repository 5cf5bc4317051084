"""The processes of one robot computer and the small one that keeps them running.

Control, inference, uplink and, where a recipe asks for them, driver and slow path are separate so that each may die and
come back while the others go on; control and uplink share nothing but messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from hal.driver_host.real_time import GarbageCollector, become_real_time
from hal.driver_host.watchdog import CallDeadline
from hal.interfaces.robot import ROBOT
from robot_edge.control.loop import ControlLoop
from robot_edge.flight_recorder.recorder import FlightRecorder
from robot_edge.inference.latent_server import LatentWorker
from robot_edge.inference.server import Inference
from robot_edge.runtime.forking import start_fork, start_program
from robot_edge.runtime.lifecycle import ShutdownSignal, run_directory
from robot_edge.runtime.rejection_log import RejectionLogTail
from robot_edge.runtime.supervisor import Child, Supervisor
from robot_edge.shadow.runner import ShadowRunner
from robot_edge.uplink.server import Uplink
from wire.clock import Clock, clock_name
from wire.errors import RobotError
from wire.messages.gateway import Hello, Stop
from wire.transport.channel import Channel
from wire.transport.shared_channel import SharedChannel
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import RobotSpec, Role

log = logging.getLogger(__name__)

POLL_S = 0.04
"""how often the uplink looks what control has recorded: three ticks at 80 Hz; a wake-up costs more than a step"""
_RECORD_BYTES = 4 * 2**20
_MESSAGE_BYTES = 2**20
"""of each direction: more than any reason for which a policy cannot load its weights"""
_REPEAT_S = 0.5
DRAIN_S = 15.0
"""how long an edge that is asked to stop waits for the gateway to take what is left; the rest stays in the spool"""


def uplink_channel(directory: Path, peer: str, *, uplink: bool = False) -> SharedChannel:
    """The end of `peer` of its connection to the uplink, or the uplink's: `peer` is "inference", the "shadow", a
    local "operator" or the "keys" that the host watches.

    An end that comes later replaces the one that is there.
    """
    return SharedChannel(directory / f"uplink-{peer}", bind=uplink, capacity_bytes=_MESSAGE_BYTES)


def record_channel(directory: Path, spec: RobotSpec, *, uplink: bool) -> SharedChannel:
    """The uplink's or control's end of the connection between them, over which all that is recorded goes.

    Both look at their own pace: at every tick, and every `POLL_S`. There is room for half a second of pictures with
    previews of four times their size.
    """
    pictures = sum(camera.height * camera.width * 3 for camera in spec.cameras)
    return SharedChannel(
        directory / "uplink-control", bind=uplink, capacity_bytes=_RECORD_BYTES + 40 * pictures, polls=True
    )


def control_hello(loop: ControlLoop, tasks: tuple[str, ...], site: str = "") -> Hello:
    """How control introduces its robot to the uplink, which passes it on to the gateway."""
    return Hello(loop.name, Role.edge, clock_name(), time.monotonic_ns(), os.getpid(), loop.robot.spec, tasks, site)


class StatusKeepalive:
    """Repeats the loop's last status to the uplink.

    While connecting or a reset takes its time no tick comes, and nobody could tell a slow robot from one that is gone.
    """

    def __init__(self, loop: ControlLoop, uplink: Channel, clock: Clock) -> None:
        """`uplink` and `clock`: not recorded ones, for a replay has nothing to wait for."""
        self._loop, self._uplink, self._clock = loop, uplink, clock
        self._sent_ns = 0

    def poll(self) -> None:
        """Send it with the time it is now, if none was sent for a while."""
        status, now_ns = self._loop.status, self._clock.now_ns()
        if status is not None and now_ns - max(status.time_ns, self._sent_ns) > _REPEAT_S * 1e9:
            self._sent_ns = now_ns
            self._uplink.send(msgspec.structs.replace(status, time_ns=now_ns))


def run_control(
    loop: ControlLoop,
    uplink: Channel,
    tasks: tuple[str, ...],
    flight: FlightRecorder | None = None,
    site: str = "",
    cpu: int | None = None,
) -> None:
    """The control process: tick until asked to stop; the first tick connects the robot. `flight` records each tick.

    `site`: where the robot stands; `cpu`: the only core control runs on.
    """
    shutdown = ShutdownSignal()
    loop.driver.start_disconnected()
    hello = control_hello(loop, tasks, site)
    garbage = GarbageCollector()
    garbage.start()
    become_real_time(cpu)
    next_hello = 0.0
    # The connection to the process of the driver may block.
    bound = CallDeadline(2 * (loop.config.driver.reset_s + loop.config.driver.stuck_s))
    try:
        while not (shutdown.requested or loop.inbox.stopping):
            # Repeated, because an uplink that was killed and came back knows nothing.
            if time.monotonic() >= next_hello:
                uplink.send(hello)
                next_hello = time.monotonic() + 2.0
            if flight is None:
                loop.tick()
            else:
                flight.tick(loop)
            bound.renew()
            garbage.poll((loop.rate.next_ns - time.monotonic_ns()) / 1e9)
    finally:
        bound.cancel()
        garbage.stop()
        loop.close()
        uplink.send(Stop())


def run_inference(inference: Inference, channels: Sequence[SharedChannel | ZmqClient]) -> None:
    """The inference process; a message on one of `channels` wakes it."""
    shutdown = ShutdownSignal()
    next_hello = 0.0
    while not shutdown.requested:
        if time.monotonic() >= next_hello:
            inference.hello()
            next_hello = time.monotonic() + 2.0
        wait_any(channels, 0.1)
        inference.poll()


def run_latent_worker(worker: LatentWorker, channel: SharedChannel) -> None:
    """The slow path in a process of its own."""
    shutdown = ShutdownSignal()
    while not shutdown.requested:
        wait_any([channel], 0.1)
        worker.poll()


def run_shadow(runner: ShadowRunner, *channels: SharedChannel | ZmqClient) -> None:
    """The shadow process: it looks at its channels as they ring, and twice a second."""
    shutdown = ShutdownSignal()
    next_hello = 0.0
    while not shutdown.requested:
        if time.monotonic() >= next_hello:
            runner.hello()
            next_hello = time.monotonic() + 2.0
        wait_any([*channels], 0.5)
        runner.poll()


def run_uplink(uplink: Uplink, gateway: ZmqClient, *local: SharedChannel | ZmqClient | int) -> None:
    """The uplink process; asked to stop, it stays until the spool is empty or `DRAIN_S` have passed.

    `local`: its channels to other processes of this computer but control, or what can be read when they have
    something; a message on any of them wakes it.
    """
    shutdown = ShutdownSignal()
    early = False
    uplink.start()
    while not shutdown.requested:
        wait_any([gateway, uplink.wakeup.fd, *local], 0.0 if early else POLL_S)
        early = uplink.poll()
    while uplink.poll():
        pass
    uplink.control_gone()
    deadline = time.monotonic() + DRAIN_S
    while not uplink.drained and time.monotonic() < deadline:
        wait_any([gateway, uplink.wakeup.fd], 0.02)
        uplink.poll()
    if not uplink.drained:
        log.warning("robot '%s': %d segments stay in the spool until next time.", uplink.name, len(uplink.spool))
    uplink.report_drained()
    uplink.close()


class EdgeProcesses:
    """The processes of one robot, for whoever keeps them: a command line, a ROS 2 node.

    `poll` a few times a second between `start` and `stop`, which may each be called again; as a context manager it
    starts and stops.
    """

    def __init__(
        self, name: str, commands: dict[str, list[str]], logs: Path, unforked: frozenset[str] = frozenset()
    ) -> None:
        """Only stores. Each of `commands` (by role: robot, control, inference, shadow, thinker, uplink) gets
        `--run-dir DIR` added, where their channels lie; `logs`: directory of one log for each; `unforked`: roles that
        are always started as new programs, where the others may be forks of this process
        (`robot_edge.runtime.forking`)."""
        self.name = name
        self.supervisor = Supervisor([])
        self._commands = commands
        self._logs = logs
        self._unforked = unforked
        self._held = contextlib.ExitStack()
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        """Where the channels of the running processes lie (`uplink_channel`). Raises `RobotError` while none run."""
        if self._directory is None:
            raise RobotError(f"robot '{self.name}': its processes do not run; call start() first.")
        return self._directory

    def log_file(self, role: str) -> Path:
        """Where the process of that role writes what it says."""
        return self._logs / f"{self.name}.{role}.log"

    @property
    def fault(self) -> str:
        """How a process that does not run steadily ended last, with its last word, '' while all do."""
        return next((child.fault for child in self.supervisor.children.values() if child.fault), "")

    def start(self) -> None:
        """Start them all. Raises `StorageError` when there is no room for their channels or logs."""
        if self._directory is not None:
            return
        self._directory = self._held.enter_context(run_directory())
        self.supervisor = Supervisor([self._child(role, command) for role, command in self._commands.items()])
        try:
            for child in self.supervisor.children:
                self.supervisor.start(child)
        except BaseException:
            self.stop()
            raise

    def poll(self) -> list[str]:
        """Start the dead ones again; roles of those that died since the last call."""
        return [child.removeprefix(f"{self.name}.") for child in self.supervisor.poll()]

    def stop(self) -> None:
        """End them in order: control first, for its last words go through the uplink, which then drains."""
        if self._directory is None:
            return
        control = f"{self.name}.control"
        self.supervisor.stop([child for child in self.supervisor.children if child == control], 5.0)
        self.supervisor.stop([child for child in self.supervisor.children if child != control], DRAIN_S + 5.0)
        self._directory = None
        self._held.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _child(self, role: str, command: list[str]) -> Child:
        return Child(
            f"{self.name}.{role}",
            [*command, "--run-dir", str(self.directory)],
            self.log_file(role),
            environment={ROBOT: self.name},
            nice={"robot": -10, "control": -10, "inference": -5}.get(role, 0),
            # A robot that is switched off for an hour comes back by itself.
            give_up_after=0,
            start=start_program if role in self._unforked else start_fork,
        )


def run_edge(edge: EdgeProcesses) -> None:
    """Start the processes of one robot and keep them running until asked to stop.

    What a person must know and only the inference process says comes to this terminal too: versions it refuses.
    """
    shutdown = ShutdownSignal()
    refusals = RejectionLogTail(edge.name, edge.log_file("inference"))
    with edge:
        while not shutdown.requested:
            edge.poll()
            for line in refusals.lines():
                log.error("%s", line)
            time.sleep(0.1)
