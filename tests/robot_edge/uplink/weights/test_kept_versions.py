"""What acts and what inference was told to load is on the disk, wherever the gateway goes back and forth to."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from robot_edge.uplink.server import Uplink
from robot_edge.uplink.weights.client import WeightClient
from wire.clock import ManualClock
from wire.messages.gateway import FetchWeights, VersionActivated, VersionAvailable, WeightBytes
from wire.messages.local import LoadWeights
from wire.transport.memory_channel import memory_pair
from wire.types import PolicyVersion

SECOND = 1_000_000_000
KEPT, WAITING = 3, 8
"""versions that are kept anyway, and those that inference may not have come to yet"""


def weights(number: int) -> bytes:
    return b"version %d" % number * 50


def version(number: int) -> PolicyVersion:
    data = weights(number)
    return PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 1, 1, 1)


class Robot:
    """An uplink whose gateway has every version, and an inference that comes to what it was told when the test says."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, ManualClock(SECOND)
        self.acts = 0
        self.told: list[LoadWeights] = []
        """since it acts by what it acts by"""
        self.fetched: list[int] = []
        self.start()

    def start(self) -> None:
        """As after a kill of all of it."""
        self.told.clear()
        self.gateway, channel = memory_pair()
        self.inference, inference = memory_pair()
        self.uplink = Uplink("robot-0", self.root, channel, memory_pair()[0], inference, self.clock)
        self.poll()

    def announce(self, number: int) -> None:
        self.gateway.send(VersionAvailable(version(number), 1))
        self.poll()

    def poll(self) -> None:
        for _ in range(4):
            self.uplink.poll()
            while (asked := self.gateway.recv()) is not None:
                if isinstance(asked, FetchWeights):
                    self.fetched.append(asked.number)
                    data = weights(asked.number)[asked.offset : asked.offset + asked.size]
                    self.gateway.send(WeightBytes(asked.number, asked.offset, data))
            while (message := self.inference.recv()) is not None:
                if isinstance(message, LoadWeights):
                    self.told.append(message)

    def activate(self, later: int = 0) -> None:
        """It acts by one of those that it was told, the newest but for so many."""
        index = len(self.told) - 1 - min(later, WAITING - 1, len(self.told) - 1)
        self.acts, self.told = self.told[index].version.number, self.told[index + 1 :]
        self.inference.send(VersionActivated("robot-0", self.acts, 1))
        self.poll()

    @property
    def files(self) -> dict[int, bytes]:
        found = (self.root / "weights").glob("*.safetensors")
        return {int(path.name.partition("-")[0]): path.read_bytes() for path in found}

    def check(self) -> None:
        files, ready = self.files, self.uplink.weights.ready
        needed = {self.acts} if self.acts else set()
        needed |= {ready[0].number} if ready is not None else set()
        needed |= {message.version.number for message in self.told[-WAITING:]}
        for number in needed:
            assert files.get(number) == weights(number), f"version {number} is needed, and {sorted(files)} are here"
        assert len(files) <= max(KEPT, 1 + WAITING)


Event = tuple[str, int]
EVENTS = st.lists(
    st.tuples(st.sampled_from(("announce",) * 4 + ("activate",) * 2 + ("start",)), st.integers(0, 9)),
    min_size=5,
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(EVENTS)
def test_whatever_is_announced_and_called_back_what_acts_and_what_was_offered_is_here(events: Sequence[Event]) -> None:
    with tempfile.TemporaryDirectory() as root:
        robot = Robot(Path(root))
        for kind, number in events:
            if kind == "announce":
                robot.announce(number + 1)
            elif kind == "start":
                robot.uplink.close()
                robot.start()
                assert [message.version.number for message in robot.told] == [robot.acts] * bool(robot.acts)
            elif robot.told:
                robot.activate(number)
            robot.check()
        robot.uplink.close()


def test_a_version_that_was_called_back_to_outlives_those_that_were_rolled_back(tmp_path: Path) -> None:
    robot = Robot(tmp_path)
    for number in (1, 2, 3):
        robot.announce(number)
        robot.activate()
    robot.announce(1)
    robot.activate()
    for number in (4, 5):
        robot.announce(number)
        robot.check()
    assert robot.acts == 1 and 1 in robot.files, "inference has come to neither 4 nor 5"
    robot.fetched.clear()
    robot.announce(1)
    assert robot.fetched == []
    robot.uplink.close()


def test_so_many_versions_are_kept_as_are_to_be(tmp_path: Path) -> None:
    _gateway, channel = memory_pair()
    client = WeightClient(tmp_path, channel, ManualClock(SECOND), keep=9)
    for number in range(1, 12):
        client.fetch(version(number))
        client.add_part(WeightBytes(number, 0, weights(number)))
        assert client.poll()
        assert len(list(tmp_path.iterdir())) == min(number, 9)
