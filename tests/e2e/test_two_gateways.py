"""Two sites, a gateway each, on one PostgreSQL and one object store: real processes, one of them killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wire.samples import RECIPE, SEGMENTS, SPEC, TASKS, robot_names, segments_of, status
from cloud_learner.buffer.location import BufferLocation
from fleet.config.data_directory import DataDirectory
from tests import postgres, samples
from wire.clock import clock_name
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    FetchWeights,
    Hello,
    HelloAck,
    Publish,
    Published,
    Rejection,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import PolicyVersion, Role

pytestmark = pytest.mark.slow
pytest_plugins = ["tests.s3"]
ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = robot_names(2)
RUN = "two-site"
WAIT_S = 120.0


@pytest.fixture
def ledger_url() -> Iterator[str]:
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(postgres.server())
        except postgres.UnavailableError as error:
            pytest.skip(f"no PostgreSQL: {error}")
        yield opened.enter_context(server.database())


class Site:
    """A gateway of its own."""

    def __init__(self, root: Path, name: str, ledger: str, store: str) -> None:
        self.data, self.log = DataDirectory(root / name), root / f"{name}.log"
        self._words = ["gateway", "--recipe", RECIPE, "--data", str(self.data.root), "--ledger", ledger]
        self._words += ["--store", store, "--gateway-name", name, "--port", "0", "--web-port", "0"]
        self.data.root.mkdir()
        # who may connect, and the key that robots know a gateway by, are the fleet's
        self.data.keys.symlink_to(root / "keys")

    def start(self) -> None:
        with self.log.open("w") as output:
            words = [sys.executable, "-m", "fleet.cli", *self._words]
            self.process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        until(lambda: "robots connect to" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Peer:
    """Who says hello to a site."""

    def __init__(self, site: Site, name: str, role: Role) -> None:
        self.channel = ZmqClient(site.data.gateway, name, site.data.keys)
        # each a process of its own
        spec, tasks = (SPEC, TASKS) if role == Role.edge else (None, ())
        self.hello = Hello(name, role, clock_name(), time.monotonic_ns(), time.monotonic_ns() % 2**30, spec, tasks)
        self.came: list[Message] = []

    def wait(
        self,
        kind: type,
        again: Message | None = None,
        where: Callable[[Any], bool] = lambda _: True,
        beside: Peer | None = None,
    ) -> Any:
        """The next message of that kind; `again` is said each second meanwhile, and a robot `beside` reports."""
        deadline_s, due_s = time.monotonic() + WAIT_S, 0.0
        while time.monotonic() < deadline_s:
            if again is not None and time.monotonic() > due_s and self.channel.send(again):
                due_s = time.monotonic() + 1.0
            wait_any([self.channel], 0.05)
            if beside is not None:
                beside.report()
            while (message := self.channel.recv()) is not None:
                self.came.append(message)
            for message in self.came:
                if isinstance(message, kind) and where(message):
                    self.came.remove(message)
                    return message
        raise AssertionError(f"no {kind.__name__} came, but {self.came[-5:]}")

    def greet(self) -> Peer:
        self.wait(HelloAck, self.hello)
        return self

    def report(self) -> None:
        """As a robot does five times a second."""
        self.channel.socket.send(status(self.hello.name))

    def report_for(self, seconds: float) -> None:
        """So long that its gateway has noted it."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.report()
            time.sleep(0.1)

    def record(self, episode: int, *indices: int) -> None:
        """Send segments of an episode until they are acknowledged."""
        segments = segments_of(self.hello.name, RUN, episode)
        left = {segments[index].id for index in indices}
        for index in indices:
            self.channel.socket.send(segments[index].data)
        while left:
            left -= set(self.wait(Ack).segments)


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def publish(trainer: Peer, number: int) -> bytes:
    data = samples.weights(number, 300_000)
    version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), number - 1, 1, 1, 1)
    trainer.channel.send(Publish(version))
    trainer.channel.send(WeightBytes(number, 0, data))
    trainer.wait(Published)
    return data


def test_two_sites_share_what_they_record_and_what_is_learned(tmp_path: Path, ledger_url: str, s3: str) -> None:
    make_keys(tmp_path / "keys", [GATEWAY, FIRST, SECOND, "trainer"])
    sites = [Site(tmp_path, name, ledger_url, s3) for name in ("north", "south")]
    north, south = sites
    with contextlib.ExitStack() as ends:
        for site in sites:
            site.start()
            ends.callback(site.end)
        every = range(SEGMENTS)
        first, second = Peer(north, FIRST, Role.edge).greet(), Peer(south, SECOND, Role.edge).greet()
        first.record(0, *every)
        second.record(0, *every)

        # What is learned at one site reaches the robots of both.
        trainer = Peer(north, "trainer", Role.trainer).greet()
        data = publish(trainer, 1)
        for robot in (first, second):
            robot.wait(VersionAvailable, where=lambda message: message.version.number == 1)
            assert robot.wait(WeightBytes, FetchWeights(1, 0, 2**20)).data == data

        # Who learns reads what both have recorded, though a journal is on one machine.
        learner = BufferLocation(tmp_path / "learner", ledger_url, s3)
        ledger, store = learner.open_reader()
        ends.callback(ledger.close)
        rows = [row.row for row in ledger.segments_after(0)]
        assert len(rows) == 2 * SEGMENTS
        assert {place.gateway for place in ledger.places(rows).values()} == {1, 2}
        until(lambda: not store.read(rows).elsewhere)
        found = store.read(rows)
        assert {segment.episode.robot for segment in found.segments.values()} == {FIRST, SECOND}
        assert found.damaged == {}

        # A robot is at one of them.
        moving = Peer(south, FIRST, Role.edge)
        first.report_for(3.0)
        assert "is at gateway 'north'" in moving.wait(Rejection, moving.hello, beside=first).reason
        first.record(1, 0, 1)

        # One dies; the other goes on, and takes its robots and their versions.
        north.kill()
        second.record(1, *every)
        moving.greet()
        moving.record(1, *every)  # it never heard whether the first two were stored
        publish(Peer(south, "trainer", Role.trainer).greet(), 2)
        moving.wait(VersionAvailable, where=lambda message: message.version.number == 2)
        assert ledger.totals().segments == 4 * SEGMENTS
        assert ledger.totals().duplicated_steps == 0
        assert ledger.totals().missing_steps == 0

        # What lay on its disk comes when it is back; its robot stays where it is.
        north.start()
        rows = [row.row for row in ledger.segments_after(0)]
        until(lambda: len(store.read(rows).segments) == 4 * SEGMENTS)
        assert store.read(rows).damaged == {}
        back = Peer(north, FIRST, Role.edge)
        moving.report_for(3.0)
        assert "is at gateway 'south'" in back.wait(Rejection, back.hello, beside=moving).reason
