"""What a fleet is busy with while somebody stops a robot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from benchmarks.stop_latency.fleet import OTHER, ROBOT, StopFleet
from benchmarks.stop_latency.robot import CONFIG, DISK_FULL
from cloud_learner.training.uploader import PART_BYTES, WeightUploader
from hal.drivers.fake import fake_spec
from robot_edge.uplink.segments import SegmentBuilder
from wire.clock import MonotonicClock, clock_name
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.gateway import Ack, Hello, HelloAck, Published, Rejection, Segment
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import Actor, Episode, PolicyVersion, Role, Step

SEGMENTS = 200
_STEPS = 80


class Peer:
    """Somebody who has said hello to the gateway."""

    def __init__(self, fleet: StopFleet, hello: Hello) -> None:
        self.channel = ZmqClient(fleet.data.gateway, hello.name, fleet.data.keys, queue=10_000)
        self.wait(HelloAck, hello)

    def wait(self, kind: type, again: Message | None = None, seconds: float = 300.0) -> Any:
        """The next message of that kind; `again` is sent meanwhile."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            if again is not None:
                self.channel.send(again)
            if isinstance(message := self.next(0.1), kind):
                return message
        raise TimeoutError(f"no {kind.__name__} came")

    def next(self, seconds: float) -> Message | None:
        """What came, waited for no longer than that; raises `RejectedError` for a refusal."""
        message = self.channel.recv()
        if message is None:
            wait_any([self.channel], seconds)
            message = self.channel.recv()
        if isinstance(message, Rejection):
            raise RejectedError(message.reason)
        return message

    def send(self, message: Message) -> None:
        while not self.channel.send(message):
            time.sleep(0.001)


def publish(trainer: Peer, fleet: StopFleet, size: int) -> int:
    """The number of a new version, of random bytes."""
    number = fleet.version = fleet.version + 1
    data = os.urandom(PART_BYTES) * max(1, size // PART_BYTES) + number.to_bytes(8, "little")
    version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), number - 1, 0, 0, 0)
    uploader = WeightUploader(version, data, frozenset(), trainer.channel, MonotonicClock())
    while True:
        uploader.poll()
        match trainer.next(0.1):
            case HelloAck(echo_ns=echo_ns):
                uploader.on_heartbeat_answered(echo_ns)
            case Published():
                return number


@contextlib.contextmanager
def _beside(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """`work` in a thread, until `over`; what it raises is raised here: a load that is none measures nothing."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            over.set()
        working.result()


@contextlib.contextmanager
def idle(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Nothing but the robot at work."""
    yield lambda: None


@contextlib.contextmanager
def weights(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Versions of `size` bytes are published and fetched one after the other."""
    over = threading.Event()
    trainer = Peer(fleet, Hello("trainer", Role.trainer, clock_name(), time.monotonic_ns(), os.getpid()))
    cache = fleet.data.edge(ROBOT) / "weights"

    def upload() -> None:
        while not over.is_set():
            number = publish(trainer, fleet, size)
            while not over.wait(0.05) and not any(cache.glob(f"{number:08d}-*.safetensors")):
                pass
            # A disk is not what is measured; the version that waits to be fetched stays.
            for old in fleet.data.weights.glob("*.safetensors"):
                if int(old.name.partition("-")[0]) < number:
                    old.unlink()

    with _beside(upload, over):
        yield lambda: None
    trainer.channel.close()


@contextlib.contextmanager
def full_disk(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Each write of the robot's spool blocks for a second, and then fails."""
    flag = fleet.place / DISK_FULL
    flag.touch()
    try:
        time.sleep(3.0)
        yield lambda: None
    finally:
        flag.unlink()


@contextlib.contextmanager
def segments(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Before each stop another robot sends `SEGMENTS` segments at once."""
    spec = fake_spec(CONFIG)
    hello = Hello(OTHER, Role.edge, clock_name(), time.monotonic_ns(), os.getpid(), spec, CONFIG.tasks)
    peer, count = Peer(fleet, hello), 0
    builder = SegmentBuilder(Episode("e", OTHER, spec.hash, CONFIG.tasks[0], 500_000, "online", 1), _STEPS)
    image = np.random.default_rng(0).integers(0, 255, (CONFIG.image_px, CONFIG.image_px, 3), np.uint8)
    made: Segment | None = None
    for tick in range(_STEPS):
        if tick % CONFIG.camera_every_ticks == 0:
            frame_ns = 1 + tick
            builder.frame("front", frame_ns, image)
        zero = np.zeros(spec.action_dim, np.float32)
        state = np.zeros(spec.state_dim, np.float32)
        step = Step(tick, 1 + tick, state, zero, zero, Actor.policy, {"front": frame_ns}, tick, 0, 1, 0.0)
        made = builder.step(msgspec.structs.replace(step, truncated=tick == _STEPS - 1)) or made
    made = builder.end("failure", 100) or made
    assert made is not None
    template = made

    left: set[str] = set()

    def send() -> None:
        nonlocal count
        stored()
        for _ in range(SEGMENTS):
            count += 1
            episode = msgspec.structs.replace(template.episode, id=f"{OTHER}-{hello.sent_ns}-{count}")
            left.add(f"{episode.id}/0")
            peer.send(msgspec.structs.replace(template, id=f"{episode.id}/0", episode=episode))

    def stored() -> None:
        """Those of the time before are."""
        while left:
            left.difference_update(peer.wait(Ack).segments)

    try:
        yield send
        stored()
    finally:
        peer.channel.close()


@contextlib.contextmanager
def locked_ledger(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Somebody else holds the ledger's lock for a second and a half out of two."""
    over = threading.Event()

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(fleet.data.root / "ledger.sqlite", isolation_level=None)) as ledger:
            while not over.is_set():
                with contextlib.suppress(sqlite3.OperationalError):
                    ledger.execute("BEGIN IMMEDIATE")
                    over.wait(1.5)
                    ledger.execute("ROLLBACK")
                over.wait(0.5)

    with _beside(hold, over):
        yield lambda: None


LOADS = {
    "idle": idle,
    "weights arrive": weights,
    "the robot's disk is full": full_disk,
    f"{SEGMENTS} segments wait": segments,
    "the ledger is locked": locked_ledger,
}
