"""The processes of one robot computer and the small one that keeps them running.

Control, inference, uplink and, where a recipe asks for them, driver and slow path are separate so that each may die and
come back while the others go on; control and uplink share nothing but messages.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

from hal.priority import real_time
from robot_edge.flight.recorder import FlightRecorder
from robot_edge.inference import Inference
from robot_edge.loop import ControlLoop
from robot_edge.process import Lifeline
from robot_edge.run_directory import run_directory
from robot_edge.supervisor import Child, Supervisor
from robot_edge.think_server import ThinkProcess
from robot_edge.uplink import Uplink
from wire.channel import Channel
from wire.clock import clock_name
from wire.errors import RobotError
from wire.messages import Hello, Stop
from wire.zmq_channel import ZmqClient, ZmqPair, wait_any

log = logging.getLogger(__name__)

DRAIN_S = 15.0
"""how long an edge that is asked to stop waits for the gateway to take what is left; the rest stays in the spool"""


def lines(directory: Path) -> dict[str, str]:
    """Local endpoints: `<server>-<client>`, the server binds."""
    return {
        "uplink-control": f"ipc://{directory}/uplink-control",
        "uplink-inference": f"ipc://{directory}/uplink-inference",
    }


def control_hello(loop: ControlLoop, tasks: tuple[str, ...]) -> Hello:
    """How control introduces its robot to the uplink, which passes it on to the gateway."""
    return Hello(loop.name, "edge", clock_name(), time.monotonic_ns(), os.getpid(), loop.robot.spec, tasks)


def run_control(
    loop: ControlLoop, uplink: Channel, tasks: tuple[str, ...], flight: FlightRecorder | None = None
) -> None:
    """The control process: connect the robot, then tick until asked to stop. `flight` records each tick."""
    lifeline = Lifeline()
    loop.robot.connect()
    hello = control_hello(loop, tasks)
    # Imports leave so many objects behind that one full collection takes longer than a tick; they will not go away.
    gc.collect()
    gc.freeze()
    real_time()
    next_hello = 0.0
    try:
        while not (lifeline.cut or loop.stopping):
            # Repeated, because an uplink that was killed and came back knows nothing.
            if time.monotonic() >= next_hello:
                uplink.send(hello)
                next_hello = time.monotonic() + 2.0
            if flight is None:
                loop.tick()
            else:
                flight.tick(loop)
    except RobotError as error:
        log.error("robot '%s' stops: %s", loop.name, error)
        raise
    finally:
        loop.close()
        uplink.send(Stop())


def run_inference(inference: Inference, lines: list[Any]) -> None:
    """The inference process; a message on one of `lines` wakes it."""
    lifeline = Lifeline()
    next_hello = 0.0
    while not lifeline.cut:
        if time.monotonic() >= next_hello:
            inference.hello()
            next_hello = time.monotonic() + 2.0
        wait_any(lines, 0.1)
        inference.turn()


def run_thinker(thinker: ThinkProcess, line: Any) -> None:
    """The slow path in a process of its own."""
    lifeline = Lifeline()
    while not lifeline.cut:
        wait_any([line], 0.1)
        thinker.turn()


def run_uplink(uplink: Uplink, gateway: ZmqClient, control: ZmqPair, inference: ZmqPair) -> None:
    """The uplink process; asked to stop, it stays until the spool is empty or `DRAIN_S` have passed."""
    lifeline = Lifeline()
    while not lifeline.cut:
        wait_any([gateway, control, inference], 0.02)
        uplink.turn()
    uplink.turn()
    uplink.control_gone()
    deadline = time.monotonic() + DRAIN_S
    while not uplink.drained and time.monotonic() < deadline:
        wait_any([gateway], 0.02)
        uplink.turn()
    if not uplink.drained:
        log.warning("robot '%s': %d segments stay in the spool until next time.", uplink.name, len(uplink.spool))
    uplink.report_drained()
    uplink.close()


def run_edge(name: str, commands: dict[str, list[str]], logs: Path) -> int:
    """Start control, inference and uplink of one robot from `commands` and keep them running until asked to stop.

    Each command gets `--run-dir DIR` added, where their lines meet. Returns the exit status.
    """
    lifeline = Lifeline()
    with run_directory() as place:
        children = Supervisor(
            [
                Child(
                    f"{name}.{role}",
                    [*command, "--run-dir", str(place)],
                    logs / f"{name}.{role}.log",
                    nice={"robot": -10, "control": -10, "inference": -5}.get(role, 0),
                )
                for role, command in commands.items()
            ]
        )
        try:
            for child in children.children:
                children.start(child)
            while not lifeline.cut:
                children.turn()
                if any(child.failed for child in children.children.values()):
                    return 1
                time.sleep(0.1)
            return 0
        finally:
            # Control first: its last words go through the uplink, which then drains.
            children.stop([f"{name}.control"], 5.0)
            children.stop([child for child in children.children if child != f"{name}.control"], DRAIN_S + 5.0)
