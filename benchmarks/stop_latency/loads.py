"""What a fleet is busy with while somebody stops a robot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.weights_file import random_weights
from benchmarks.stop_latency.fleet import OTHER, ROBOT, StopFleet
from benchmarks.stop_latency.robot import CONFIG, DISK_FULL
from cloud_learner.training.publishing.uploader import WeightUploader
from fleet.config.data_directory import DataDirectory
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

    def __init__(self, data: DataDirectory, hello: Hello) -> None:
        self.channel = ZmqClient(data.gateway, hello.name, data.keys, queue=10_000)
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


def publish(data: DataDirectory, number: int, weights: bytearray) -> None:
    """Publish version `number`, which `weights` becomes, as a trainer does."""
    weights[-8:] = number.to_bytes(8, "little")
    version = PolicyVersion(number, hashlib.sha256(weights).hexdigest(), len(weights), number - 1, 0, 0, 0)
    trainer = Peer(data, Hello("trainer", Role.trainer, clock_name(), time.monotonic_ns(), os.getpid()))
    uploader = WeightUploader(version, weights, frozenset(), trainer.channel, MonotonicClock())
    published = False
    while not published:
        uploader.poll()
        match trainer.next(0.1):
            case HelloAck(echo_ns=echo_ns):
                uploader.on_heartbeat_answered(echo_ns)
            case Published():
                published = True
    trainer.channel.close()


def publish_until(over: Path, data: DataDirectory, number: int, size: int) -> int:
    """Publish versions of `size` bytes from `number` on, each when the robot has the one before, until there is a file
    `over`; the number of the last one."""
    weights, cache = random_weights(size), data.edge(ROBOT) / "weights"
    while True:
        publish(data, number, weights)
        while not over.exists() and not any(cache.glob(f"{number:08d}-*.safetensors")):
            time.sleep(0.05)
        # A disk is not what is measured; the version that waits to be fetched stays.
        for old in data.weights.glob("*.safetensors"):
            if int(old.name.partition("-")[0]) < number:
                old.unlink()
        if over.exists():
            return number
        number += 1


@contextlib.contextmanager
def idle(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Nothing but the robot at work."""
    yield lambda: None


@contextlib.contextmanager
def weights(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Versions of `size` bytes are published and fetched one after the other."""
    over = fleet.notes / "no-more-weights"
    # in a process of its own, as a trainer is: a thread here would keep whoever presses waiting for the interpreter
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        publishing = pool.submit(publish_until, over, fleet.data, fleet.version + 1, size)
        try:
            yield lambda: None
        finally:
            over.touch()
        # what it raises is raised here: a load that is none measures nothing
        fleet.version = publishing.result()
    over.unlink()


@contextlib.contextmanager
def full_disk(fleet: StopFleet, size: int) -> Iterator[Callable[[], None]]:
    """Each write of the robot's spool blocks for a second, and then fails."""
    flag = fleet.notes / DISK_FULL
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
    peer, count = Peer(fleet.data, hello), 0
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

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield lambda: None
    finally:
        over.set()
        thread.join()


LOADS = {
    "idle": idle,
    "weights arrive": weights,
    "the robot's disk is full": full_disk,
    f"{SEGMENTS} segments wait": segments,
    "the ledger is locked": locked_ledger,
}
