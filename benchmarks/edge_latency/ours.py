"""This project's edge for `benchmarks.edge_latency`: its real processes around the stand-in arm.

    python -m benchmarks.edge_latency.ours control RUN_DIR RECORD
    python -m benchmarks.edge_latency.ours inference RUN_DIR MODEL
    python -m benchmarks.edge_latency.ours think RUN_DIR MODEL

Control, the fast path and the slow path. Only the uplink is a stand-in (`UplinkStandIn`, in the benchmark's process):
it takes every step and frame as the real one does, and hands out the job and the weights.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.edge_latency.arm import TASK, Arm, arm_spec
from hal.driver_host.priority import real_time
from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import run_driver_server
from hal.interfaces.robot import Feedback
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.scheduler import ChunkScheduler
from robot_edge.control.config import LoopConfig
from robot_edge.control.loop import ControlLoop
from robot_edge.flight_recorder.events import FlightHeader
from robot_edge.flight_recorder.recorder import FlightRecorder
from robot_edge.inference.latent_server import LatentEncoder, LatentWorker
from robot_edge.inference.server import Inference
from robot_edge.inference.slow_path import ProcessSlowPath
from robot_edge.runtime.lifecycle import ShutdownSignal
from robot_edge.runtime.process_group import (
    record_channel,
    run_control,
    run_inference,
    run_latent_worker,
    uplink_channel,
)
from wire.clock import MonotonicClock
from wire.messages.gateway import EdgeStatus, Hello, Job, VersionActivated
from wire.messages.local import LoadWeights
from wire.transport.frame_ring import FrameRing, ring_path
from wire.transport.shared_channel import SharedChannel
from wire.types import Frame, Observation, PolicyCapabilities, PolicyVersion

NAME = "arm"
CHUNKING = ChunkingConfig("auto", execute_ticks=1)
"""ask for the next chunk one tick after the running one's first action: as often as inference can answer"""
WRITE_AFTER_S = 0.016
"""of the 20 ms period: an answer that takes less is executed in the tick it was asked in"""


class StandInRobot:
    """The arm of `arm`, keeping the `Robot` protocol."""

    def __init__(self, record: Path) -> None:
        self.spec = arm_spec()
        self._arm = Arm(record)
        self._open = False

    def connect(self) -> None:
        self._open = True

    def reset(self, task: str, seed: int) -> None:
        pass

    def read(self) -> Observation:
        now_ns, state, frame_ns, frames = self._arm.read()
        return Observation(now_ns, state, {name: Frame(frame_ns, image) for name, image in frames.items()}, TASK)

    def write(self, action: np.ndarray) -> Feedback:
        self._arm.write(action)
        return Feedback(action)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._arm.save()


class UplinkStandIn:
    """The uplink's end of both lines."""

    def __init__(self, run_directory: Path) -> None:
        self._control = record_channel(run_directory, arm_spec(), uplink=True)
        self._inference = uplink_channel(run_directory, "inference", uplink=True)
        self._introduced = False
        self._job_due = 0.0
        self.status: EdgeStatus | None = None
        """control's newest: its own count of missed ticks and how late it woke"""
        self.applied: list[tuple[int, int]] = []
        """(version, when inference ran it, ns)"""

    def poll(self) -> None:
        """Take what came; call it some twenty times a second."""
        while (said := self._control.recv()) is not None:
            if isinstance(said, EdgeStatus):
                self.status = said
        while (message := self._inference.recv()) is not None:
            if isinstance(message, VersionActivated):
                self.applied.append((message.number, message.applied_ns))
                self._control.send(message)
            elif isinstance(message, Hello):
                self._introduced = True
        if time.monotonic() > self._job_due:
            self._job_due = time.monotonic() + 1.0
            self._control.send(Job("benchmark", (TASK,), 0))

    @property
    def ready(self) -> bool:
        """Whether inference is there."""
        return self._introduced

    def swap(self, number: int, weights: Path) -> None:
        """Announce version `number`, which lies in `weights`."""
        data = weights.read_bytes()
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), number - 1, 0, 0, 0)
        self._inference.send(LoadWeights(version, str(weights)))

    def close(self) -> None:
        self._control.close()
        self._inference.close()


def _scheduler(trained: PolicyCapabilities) -> ChunkScheduler:
    return make_scheduler(CHUNKING, arm_spec(), trained)


def _line(run_directory: Path, name: str, *, bind: bool, polls: bool = False) -> SharedChannel:
    """One end of a line through shared memory; the driver's host alone writes frames."""
    ring = FrameRing(ring_path(run_directory / "robot", arm_spec()), arm_spec(), write=False)
    return SharedChannel(run_directory / name, bind=bind, polls=polls, ring=ring)


def robot(run_directory: Path, record: Path) -> None:
    """The process that has the driver, and holds the robot if control dies."""
    shutdown = ShutdownSignal()
    run_driver_server(StandInRobot(record), run_directory / "robot", lambda: shutdown.requested)


def control(run_directory: Path, record: Path) -> None:
    """The control process, with one endless episode."""
    uplink = record_channel(run_directory, arm_spec(), uplink=False)
    inference = _line(run_directory, "inference-control", bind=False, polls=True)
    config = LoopConfig(max_ticks=10**9, write_after_s=WRITE_AFTER_S)
    header = FlightHeader(NAME, "0", arm_spec(), config, CHUNKING)
    flight = FlightRecorder(record.parent / "flight", header)
    flight.start()
    loop = ControlLoop(
        NAME,
        "0",
        flight.border("robot", RobotProxy(arm_spec(), run_directory / "robot")),
        flight.border("uplink", uplink),
        flight.border("inference", inference),
        _scheduler,
        flight.border("clock", MonotonicClock()),
        config,
    )
    try:
        run_control(loop, uplink, (TASK,), flight)
    finally:
        flight.close()
    uplink.close()
    inference.close()


def inference(run_directory: Path, model: Path) -> None:
    """The inference process: the fast path, and new weights loaded beside the ones that act."""
    from benchmarks.edge_latency.policy import EdgeVla

    clock, policy, standby = MonotonicClock(), EdgeVla(model), EdgeVla(model)
    line = _line(run_directory, "inference-control", bind=True)
    uplink = uplink_channel(run_directory, "inference")
    thinker = _line(run_directory, "thinker", bind=True)
    slow = ProcessSlowPath(thinker, clock)
    fast = Inference(NAME, policy, line, uplink, clock, standby=standby, slow=slow)
    run_inference(fast, [line, uplink, thinker])
    fast.close()
    line.close()
    uplink.close()


def think(run_directory: Path, model: Path) -> None:
    """The thinking process: the slow path."""
    from benchmarks.edge_latency.policy import EdgeVla

    # it keeps two versions; building a network would hold it up while weights are swapped
    policies = [EdgeVla(model), EdgeVla(model)]
    line = _line(run_directory, "thinker", bind=False)
    run_latent_worker(LatentWorker(line, LatentEncoder(lambda: policies.pop())), line)
    line.close()


def real_time_permitted() -> bool:
    """Whether a process here may have real-time priority; asks in a thread of its own, which then ends."""
    import threading

    answer: list[bool] = []
    thread = threading.Thread(target=lambda: answer.append(real_time()))
    thread.start()
    thread.join()
    return answer[0]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    {"robot": robot, "control": control, "inference": inference, "think": think}[sys.argv[1]](
        Path(sys.argv[2]), Path(sys.argv[3])
    )
