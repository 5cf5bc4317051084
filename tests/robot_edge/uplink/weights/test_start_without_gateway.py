"""A robot that starts while its gateway is away acts by the version that acted last, if that is still what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robot_edge.inference.server import Inference
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.weights.client import WeightClient
from tests.cloud_learner.fake_edge import SPEC
from tests.robot_edge.inference.thinking import Scripted, seen
from tests.robot_edge.uplink.weights.fleet import Fleet
from wire.clock import clock_name
from wire.messages.gateway import Hello, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest
from wire.transport.memory_channel import memory_pair
from wire.weights.manifest import Signer

SECOND = 1_000_000_000


class WholeFleet(Fleet):
    """With the uplink and the inference of a robot, and its control by hand."""

    def start_robot(self) -> None:
        if hasattr(self, "uplink"):
            self.killed += [self.uplink, self.inference]
        channel = self.connect()
        self.control, control = memory_pair()
        loop, self.asking = memory_pair()
        near, far = memory_pair()
        self.uplink = Uplink("robot-0", self.here, channel, control, near, self.clock)
        self.inference = Inference("robot-0", Scripted(), loop, far, self.clock)
        self.inference.hello()
        self.control.send(Hello("robot-0", "edge", clock_name(), 0, 7, SPEC, ("reach",)))
        self.activated: list[int] = []

    @property
    def client(self) -> WeightClient:
        return self.uplink.weights

    @property
    def note(self) -> Path:
        return self.here / "weights" / "acting"

    def file(self, number: int) -> Path:
        (found,) = (self.here / "weights").glob(f"{number:08d}-*.safetensors")
        return found

    def step(self) -> None:
        self.clock.advance(SECOND // 100)
        self.hall.gateway.poll()
        self.uplink.poll()
        self.inference.poll()
        while (message := self.control.recv()) is not None:
            if isinstance(message, VersionActivated):
                self.activated.append(message.number)

    def has(self, number: int) -> bool:
        return self.acts == number

    @property
    def acts(self) -> int:
        """The version that makes a chunk now, 0: none does."""
        observation = seen(self.clock.now_ns())
        self.asking.send(ChunkRequest(1, observation, 1, observation.state))
        self.inference.poll()
        reply = self.asking.recv()
        assert isinstance(reply, ChunkReply)
        return reply.chunk.version if reply.chunk is not None else 0

    def start_alone(self) -> None:
        """After a kill, while the gateway is away."""
        self.server.cut.add("robot-0")
        self.start_robot()
        self.run(3)


@pytest.fixture
def fleet(tmp_path: Path) -> WholeFleet:
    """The robot acts by version 2 of 3."""
    fleet = WholeFleet(tmp_path)
    for _ in range(3):
        fleet.fetch(fleet.publish())
    fleet.call_back(2)
    fleet.until(lambda: fleet.has(2))
    fleet.run(0.1)
    return fleet


def test_it_acts_by_what_acted_last_and_goes_on_as_ever_once_the_gateway_is_back(fleet: WholeFleet) -> None:
    fleet.start_alone()
    assert fleet.acts == 2 and fleet.activated == [2], "not the newest one: it was called back from that"
    number = fleet.publish()
    fleet.server.cut.clear()
    before = fleet.client.fetched_bytes
    fleet.until(lambda: fleet.has(number))
    assert fleet.client.fetched_bytes - before == fleet.size(number), "the delta from a file that is here"
    fleet.run(0.1)
    fleet.start_alone()
    assert fleet.acts == number
    # what the gateway says is not fetched or loaded again when it is the same
    before = fleet.client.fetched_bytes
    fleet.server.cut.clear()
    fleet.run(3)
    assert fleet.acts == number and fleet.client.fetched_bytes == before and fleet.activated == [number]


def test_what_was_handed_out_and_never_acted_is_not_loaded(fleet: WholeFleet) -> None:
    fleet.inference.poll = lambda: None  # type: ignore[method-assign]
    number = fleet.publish()
    fleet.until(lambda: fleet.client.ready is not None and fleet.client.ready[0].number == number)
    fleet.start_alone()
    assert fleet.acts == 2


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def turned(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [torn, turned, empty, Path.unlink])
@pytest.mark.parametrize("what", ["note", "file"])
def test_what_is_damaged_is_told_and_as_if_it_were_not_there(
    fleet: WholeFleet, what: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = fleet.note if what == "note" else fleet.file(2)
    damage(path)
    fleet.start_alone()
    assert fleet.acts == 0 and fleet.client.ready is None
    gone = damage is Path.unlink and what == "note"
    assert (str(path) in caplog.text and "until the gateway announces a version" in caplog.text) != gone
    fleet.server.cut.clear()
    fleet.until(lambda: fleet.has(3))
    fleet.call_back(2)
    fleet.until(lambda: fleet.has(2))
    fleet.run(0.1)
    fleet.start_alone()
    assert fleet.acts == 2


def test_a_robot_that_changed_its_fleet_does_not_act_by_a_version_of_the_other_one(
    fleet: WholeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.server.cut.add("robot-0")
    fleet.start_robot()
    fleet.client.check.key = Signer(b"y" * 32).public
    fleet.run(3)
    assert fleet.acts == 0 and "did not sign" in caplog.text


def test_the_key_is_known_again_before_the_gateway_says_it(fleet: WholeFleet) -> None:
    fleet.start_alone()
    assert fleet.client.check.key == Signer(b"x" * 32).public


def test_a_disk_that_cannot_note_it_is_told_and_keeps_what_is_noted(
    fleet: WholeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    full = fleet.note.with_suffix(".tmp")
    full.mkdir()
    for _ in range(5):
        number = fleet.publish()
        fleet.fetch(number)
        fleet.run(0.1)
    assert fleet.activated[-1] == number
    assert f"noting version {number}" in caplog.text and str(fleet.note) in caplog.text
    full.rmdir()
    fleet.start_alone()
    assert fleet.acts == 2
