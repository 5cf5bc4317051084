"""Runs one edge for a while and brings back what its robot recorded."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.edge_latency.arm import CONTROL_HZ, TASK, ArmRecord
from benchmarks.edge_latency.children import ChildFailedError, Children
from benchmarks.edge_latency.ours import UplinkStandIn
from benchmarks.edge_latency.vla import CHUNK
from fleet.launch.backend import free_port

START_S = 240.0
"""how long a process may take to load its policy on a busy machine"""

Moving = Callable[[], None]
"""called as soon as the robot gets actions"""


@dataclass(frozen=True, slots=True)
class LeRobotSettings:
    """What lerobot's command line is given; the defaults are its own, but for the rate."""

    name: str
    threshold: float = 0.5
    """--chunk_size_threshold: observations are sent when the queue is this full or less"""
    aggregate: str = "weighted_average"
    least_latency_s: float = 1 / 30
    """--inference_latency: an answer takes at least this long"""


USUAL = LeRobotSettings("lerobot async, as it comes")
FASTEST = LeRobotSettings("lerobot async, made fast", threshold=1.0, aggregate="latest_only", least_latency_s=0.0)


def run_sync(place: Path, model: Path, seconds: float, moving: Moving) -> ArmRecord:
    """The synchronous loop."""
    record = place / "record.npz"
    with Children(place) as children:
        children.start("sync", "benchmarks.edge_latency.sync", str(model), str(record))
        _until_moving(children, record, seconds, moving)
        children.stop("sync")
    return _recorded(record, "the synchronous loop")


def run_lerobot(place: Path, model: Path, seconds: float, moving: Moving, settings: LeRobotSettings) -> ArmRecord:
    """`policy_server` and `robot_client`, ended with Ctrl-C as a user ends them."""
    record, address = place / "record.npz", ("127.0.0.1", free_port(0, "127.0.0.1"))
    with Children(place) as children:
        server = children.start(
            "server",
            "benchmarks.edge_latency.lerobot",
            "server",
            f"--host={address[0]}",
            f"--port={address[1]}",
            f"--fps={CONTROL_HZ:.0f}",
            f"--inference_latency={settings.least_latency_s}",
        )
        children.wait_for("server", server, "PolicyServer started", START_S)
        children.start(
            "client",
            "benchmarks.edge_latency.lerobot",
            "client",
            "--robot.type=stand_in",
            f"--robot.record={record}",
            "--robot.id=stand_in",
            f"--robot.calibration_dir={place}",
            f"--server_address={address[0]}:{address[1]}",
            "--policy_type=smolvla",
            f"--pretrained_name_or_path={model / 'policy'}",
            f"--actions_per_chunk={CHUNK}",
            f"--fps={CONTROL_HZ:.0f}",
            f"--task={TASK}",
            f"--chunk_size_threshold={settings.threshold}",
            f"--aggregate_fn_name={settings.aggregate}",
        )
        _until_moving(children, record, seconds, moving)
        children.stop("client", how=signal.SIGINT)
        children.stop("server", how=signal.SIGINT, grace_s=5.0)
    return _recorded(record, "lerobot's client")


class Own(NamedTuple):
    """What only our edge says of itself."""

    swaps: int = 0
    """weight swaps that inference carried out meanwhile"""
    missed: int = 0
    """ticks that control counts as missed, over its whole life"""
    late_p99_ms: float = 0.0
    """how late control woke, to 1% of the period"""


def run_ours(
    place: Path, model: Path, seconds: float, moving: Moving, swap_every_s: float = 0.0
) -> tuple[ArmRecord, Own]:
    """Driver, control, inference and thinking: the record, and what they say of themselves."""
    record, weights = place / "record.npz", model / "version.safetensors"
    with Children(place) as children, _run_directory() as run_directory:
        uplink = UplinkStandIn(run_directory)
        try:
            # as `robot_edge.runtime.process_group.run_edge` starts them
            children.start(
                "inference", "benchmarks.edge_latency.ours", "inference", str(run_directory), str(model), nice=-5
            )
            children.start("think", "benchmarks.edge_latency.ours", "think", str(run_directory), str(model))
            children.start("robot", "benchmarks.edge_latency.ours", "robot", str(run_directory), str(record), nice=-10)
            children.start(
                "control", "benchmarks.edge_latency.ours", "control", str(run_directory), str(record), nice=-10
            )
            number, announced = 1, 0.0
            begun: float | None = None
            deadline = time.monotonic() + START_S
            next_swap = float("inf")
            while begun is None or time.monotonic() < begun + seconds:
                uplink.poll()
                children.check()
                now = time.monotonic()
                if begun is None and _started(record):
                    moving()
                    begun, next_swap = now, now + (swap_every_s or float("inf"))
                if begun is None and now > deadline:
                    raise ChildFailedError(
                        f"our control did not begin to act within {START_S:.0f} s; see the logs in {place}."
                    )
                if uplink.ready and not uplink.applied and now > announced + 5.0:
                    uplink.swap(number, weights)
                    announced = now
                if now > next_swap:
                    number, next_swap = number + 1, next_swap + swap_every_s
                    uplink.swap(number, weights)
                time.sleep(0.02)
            swaps = len({version for version, _ in uplink.applied}) - 1
            children.stop("control")
            children.stop("robot", "inference", "think")
        finally:
            uplink.close()
    assert uplink.status is not None
    return _recorded(record, "our control"), Own(swaps, uplink.status.missed_ticks, 1e3 * uplink.status.late_p99_s)


def _started(record: Path) -> bool:
    """Whether the arm behind `record` has been given a first action."""
    return record.with_suffix(".moving").exists()


def _until_moving(children: Children, record: Path, seconds: float, moving: Moving) -> None:
    """Wait until the robot gets actions, then `seconds` more."""
    deadline = time.monotonic() + START_S
    while not _started(record):
        children.rest(0.1)
        if time.monotonic() > deadline:
            raise ChildFailedError(f"no action came within {START_S:.0f} s; see the logs in {record.parent}.")
    moving()
    children.rest(seconds)


def _recorded(record: Path, who: str) -> ArmRecord:
    if not record.exists():
        raise ChildFailedError(f"{who} ended without a record; see the logs in {record.parent}.")
    return ArmRecord.load(record)


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    """Sockets need a short path."""
    directory = Path(tempfile.mkdtemp(prefix="edge-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
