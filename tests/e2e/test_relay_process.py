"""A relay as a process with a disk, killed with -9 again and again: what it acknowledged comes to the gateway, once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak.fleet import SoakPublisher
from cloud_learner.buffer.ledger.rows import HeldState
from cloud_learner.buffer.location import BufferLocation
from fleet.config.recipes import get_recipe
from robot_edge.uplink.relay_link import RelayLink
from robot_edge.uplink.server import Uplink
from tests.cloud_learner.buffer.synthetic import fake_episode
from tests.e2e.test_processes import ROOT
from wire.clock import MonotonicClock
from wire.identity.sealing import Sealer
from wire.messages.gateway import Hello, Segment
from wire.transport.keys import GATEWAY, load_pair, load_public, make_keys
from wire.transport.memory_channel import memory_pair
from wire.transport.zmq_channel import ZmqClient

pytestmark = pytest.mark.slow

RECIPE = "benchmarks.wire.samples:recipe"
"""of robots with two cameras, which none of these drives"""
WORKING = "benchmarks.soak.robot:recipe"
"""of a simulated robot with episodes of two seconds"""
RELAY = "relay"


class Process:
    """One command of ours, started again after each `kill`."""

    def __init__(self, log: Path, ready: str, *words: str) -> None:
        self._log, self._ready, self._words = log, ready, words
        self.start()

    def start(self) -> None:
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fleet.cli", *self._words],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, "COLUMNS": "400"},
            )
        until(lambda: self._ready in self.text(), self.text)
        self.endpoint = self.text().split(self._ready)[1].split()[0].rstrip(",")

    def text(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def until(done: Callable[[], object], said: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


@pytest.fixture
def cloud(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    """The gateway of a recipe, then whatever a test adds."""
    make_keys(tmp_path / "keys", [GATEWAY, RELAY, "trainer", "robot-0", "robot-1"])
    (tmp_path / "cloud").mkdir()
    (tmp_path / "cloud" / "keys").symlink_to(tmp_path / "keys")
    ports = ("--port", "0", "--web-port", "0", "--stop-port", "0")
    started = ("gateway", "--recipe", getattr(request, "param", RECIPE), "--data", str(tmp_path / "cloud"), *ports)
    made = [Process(tmp_path / "gateway.log", "robots connect to ", *started)]
    yield made
    for process in made:
        process.kill()


def relay_process(root: Path, gateway: str, port: str, *words: str) -> Process:
    place = ("--recipe", RECIPE, "--data", str(root / "site"), "--keys", str(root / "keys"))
    started = ("relay", *place, "--gateway", gateway, "--port", port, *words)
    return Process(root / "relay.log", "robots of this site connect to ", *started)


class Recorder:
    """A robot of which only the uplink runs."""

    def __init__(self, root: Path, name: str, gateway: str, relay: str) -> None:
        self.name, self.clock, keys = name, MonotonicClock(), root / "keys"
        self.gateway, self.relay = ZmqClient(gateway, name, keys), ZmqClient(relay, name, keys, RELAY)
        sealer = Sealer(load_pair(keys, name).secret, load_public(keys, GATEWAY))
        self.control, control = memory_pair()
        link = RelayLink(name, self.relay, sealer, self.clock)
        self.uplink = Uplink(name, root / name, self.gateway, control, memory_pair()[0], self.clock, relay=link)
        self.uplink.start()
        recipe = get_recipe(RECIPE)
        self.control.send(Hello(name, "edge", "c", 1, 7, recipe.spec, recipe.tasks))

    def put(self, *segments: Segment) -> None:
        for segment in segments:
            self.uplink.spool.put(segment)

    def poll(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.uplink.poll()
            time.sleep(0.005)

    def close(self) -> None:
        self.uplink.close()
        for channel in (self.gateway, self.relay):
            channel.close()


def recorded(name: str, count: int) -> list[tuple[Segment, ...]]:
    recipe = get_recipe(RECIPE)
    return [
        fake_episode(
            recipe.spec, f"{name}-e{n}", robot=name, task=recipe.tasks[0], steps=60, segment_steps=20, actor=[0] * 60
        )
        for n in range(count)
    ]


@pytest.mark.timeout(300)
def test_killed_at_any_point_it_loses_nothing_that_it_acknowledged(tmp_path: Path, cloud: list[Process]) -> None:
    gateway = cloud[0].endpoint
    cloud.append(relay := relay_process(tmp_path, gateway, "0", "--hold-cameras", "all"))
    port = relay.endpoint.rpartition(":")[2]
    # The gateway has heard of the robots; from now on nothing of theirs reaches it but by the relay.
    for name in ("robot-0", "robot-1"):
        known = Recorder(tmp_path, name, gateway, "tcp://127.0.0.1:1")
        until(lambda known=known: known.poll(0.1) or known.uplink.accepted, cloud[0].text)
        known.close()
    robots = [Recorder(tmp_path, name, "tcp://127.0.0.1:1", relay.endpoint) for name in ("robot-0", "robot-1")]
    draw, sent = np.random.default_rng(4), dict[str, Segment]()
    for round_ in range(6):
        relay.kill()
        cloud[1] = relay = relay_process(tmp_path, gateway, port, "--hold-cameras", "all")
        for robot in robots:
            for segments in recorded(robot.name, 5 * (round_ + 1))[5 * round_ :]:
                robot.put(*segments)
                sent |= {segment.id: segment for segment in segments}
        # While it takes them, brings them and is told that they are stored.
        deadline = time.monotonic() + draw.uniform(0.2, 1.8)
        while time.monotonic() < deadline:
            for robot in robots:
                robot.poll(0.02)
    relay.kill()
    cloud[1] = relay_process(tmp_path, gateway, port, "--hold-cameras", "all")

    def spools_empty() -> bool:
        for robot in robots:
            robot.poll(0.05)
        return not any(len(robot.uplink.spool) for robot in robots)

    until(spools_empty, cloud[1].text, 120)
    ledger, store = BufferLocation(tmp_path / "cloud").open_reader()
    until(lambda: ledger.totals().segments >= len(sent), cloud[1].text, 60)
    found = [row.id for episode in ledger.episodes() for row in ledger.segments_of(episode.id)]
    assert sorted(found) == sorted(sent), "all of it, and each once"
    assert ledger.held_counts() == {HeldState.held: len(sent)}
    # What it holds back outlasts it as well.
    command = ["buffer", "ask", "--data", str(tmp_path / "cloud")]
    subprocess.run([sys.executable, "-m", "fleet.cli", *command], cwd=ROOT, check=True, timeout=60)
    until(lambda: ledger.held_counts() == {}, cloud[1].text, 60)
    rows = [row.row for episode in ledger.episodes() for row in ledger.segments_of(episode.id)]
    for segment in store.read(rows).segments.values():
        for camera, frames in segment.frames.items():
            assert frames.encoded == sent[segment.id].frames[camera].encoded
    assert "quarantine" not in cloud[0].text()
    for robot in robots:
        robot.close()
    store.close()
    ledger.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cloud", [WORKING], indirect=True)
def test_a_robot_that_works_is_heard_by_its_relay_and_has_its_weights_by_it(
    tmp_path: Path, cloud: list[Process]
) -> None:
    gateway = cloud[0].endpoint
    cloud.append(relay := relay_process(tmp_path, gateway, "0"))
    trainer = ZmqClient(gateway, "trainer", tmp_path / "keys")
    publisher = SoakPublisher(trainer, every_s=1000.0)
    place = (
        "--recipe",
        WORKING,
        "--name",
        "robot-0",
        "--data",
        str(tmp_path / "robot"),
        "--keys",
        str(tmp_path / "keys"),
    )
    words = ("edge", *place, "--gateway", gateway, "--relay", relay.endpoint, "--no-operator")
    with (tmp_path / "edge.log").open("w") as output:
        command = [sys.executable, "-m", "fleet.cli", *words]
        robot = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:

        def brought() -> bool:
            publisher.poll()
            found = re.findall(r"([0-9.]+) MB handed out; segments: [0-9]+ taken, ([0-9]+) brought", relay.text())
            return any(float(megabytes) > 0 and int(count) > 1 for megabytes, count in found)

        until(brought, lambda: relay.text() + (tmp_path / "edge.log").read_text(), 60)
    finally:
        robot.send_signal(signal.SIGINT)
        robot.wait(30)
        trainer.close()
    ledger, store = BufferLocation(tmp_path / "cloud").open_reader()
    episodes = ledger.episodes("robot-0")
    assert episodes and all(episode.outcome for episode in episodes[1:])
    store.close()
    ledger.close()
