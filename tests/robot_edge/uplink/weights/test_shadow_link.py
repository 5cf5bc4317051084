"""A shadow is fetched beside the version that acts: never in its way, and never given to inference."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from robot_edge.uplink.server import Uplink
from robot_edge.uplink.weights.client import WeightClient
from tests.cloud_learner.dispatch.hall import SPEC
from tests.robot_edge.uplink.weights.fleet import Fleet, small_chunks
from wire.clock import clock_name
from wire.errors import RejectedError
from wire.messages.gateway import Hello, ShadowReport, ShadowRequest, VersionAvailable
from wire.messages.local import LoadShadow, LoadWeights
from wire.transport.memory_channel import memory_pair
from wire.weights.action_difference import BINS, ActionDifference

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def chunks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


class ShadowFleet(Fleet):
    """With the whole uplink of a robot, and its shadow process by hand. New versions wait: versions are frozen."""

    process = True
    """whether the robot has such a process"""

    def start_robot(self) -> None:
        if hasattr(self, "uplink"):
            self.killed.append(self.uplink)
        channel = self.server.connect("robot-0")
        control, ours = memory_pair()
        self.inference, inference = memory_pair()
        self.shadow, process = memory_pair()
        self.uplink = Uplink("robot-0", self.here, channel, ours, inference, self.clock)
        self.uplink.shadow.process = process if self.process else None
        control.send(Hello("robot-0", "edge", clock_name(), 0, 7, SPEC, ("reach",)))
        self.loaded: list[int] = []
        """what inference was told to load"""
        self.computed: list[LoadShadow] = []
        """what the shadow process was told to"""

    @property
    def client(self) -> WeightClient:
        return self.uplink.weights

    def step(self) -> None:
        self.clock.advance(SECOND // 100)
        self.hall.gateway.poll()
        self.uplink.poll()
        while (message := self.inference.recv()) is not None:
            if isinstance(message, LoadWeights):
                self.loaded.append(message.version.number)
        while (message := self.shadow.recv()) is not None:
            assert isinstance(message, LoadShadow)
            self.computed.append(message)

    def has(self, number: int) -> bool:
        return number in self.loaded

    def wish(self, number: int) -> None:
        """As a person at a page."""
        self.hall.gateway._rollout.change("anna", "shadow", number)

    def computes(self, number: int) -> None:
        """Until the process is told to; its file is right."""
        self.until(lambda: self.computed and self.computed[-1].version is not None)
        told = self.computed[-1]
        assert told.version is not None and told.version.number == number
        assert Path(told.path).read_bytes() == self.files[number]

    def report(self, number: int, **more: object) -> None:
        self.shadow.send(ShadowReport("robot-0", number, **more))  # type: ignore[arg-type]
        self.run(0.1)

    def found(self, number: int) -> object:
        """What people see."""
        statuses = self.hall.gateway._rollout.statuses()
        return next(one.shadow for one in statuses if one.version.number == number)


def made(root: Path, versions: int = 2, **more: object) -> ShadowFleet:
    """The robot acts by version 1; others wait."""
    fleet = ShadowFleet(root, **more)  # type: ignore[arg-type]
    fleet.run(0.5)
    fleet.publish()
    fleet.until(lambda: fleet.has(1))
    fleet.hall.gateway._rollout.change("anna", "freeze", 0)
    for _ in range(versions - 1):
        fleet.publish()
    fleet.run(0.5)
    assert fleet.loaded == [1]
    return fleet


ONE = ActionDifference(2, 1.0, (0,) * (BINS - 1) + (8,), (0.5, 0.25, 0.125, 0.0))


def test_it_is_fetched_as_a_delta_and_given_to_the_shadow_process_alone(tmp_path: Path) -> None:
    fleet = made(tmp_path)
    fleet.wish(2)
    fleet.computes(2)
    assert fleet.uplink.shadow.weights.fetched_bytes == len(fleet.deltas[2])
    assert fleet.loaded == [1] and fleet.client.ready is not None and fleet.client.ready[0].number == 1
    assert [path.name[:8] for path in (fleet.here / "shadow").iterdir()] == ["00000002"]
    fleet.report(2, difference=ONE)
    fleet.report(2, difference=ONE, faults=3, fault="not finite")
    shown = fleet.found(2)
    assert (shown.robots, shown.chunks, shown.faults) == (("robot-0",), 4, 3)  # type: ignore[attr-defined]
    assert shown.problems == {"robot-0": "not finite"}  # type: ignore[attr-defined]
    assert (shown.mean, shown.most) == (0.125, 0.5)  # type: ignore[attr-defined]
    assert list(shown.largest.values()) == [0.5, 0.25, 0.125, 0.0]  # type: ignore[attr-defined]
    fleet.wish(0)
    fleet.run(0.5)
    assert fleet.computed[-1].version is None and list((fleet.here / "shadow").iterdir()) == []
    assert fleet.found(2).chunks == 4 and fleet.found(2).robots == ()  # type: ignore[attr-defined]
    assert fleet.loaded == [1]


def test_it_is_kept_when_gateway_robot_or_process_are_killed(tmp_path: Path) -> None:
    fleet = made(tmp_path)
    fleet.wish(2)
    fleet.computes(2)
    fleet.report(2, difference=ONE)
    fleet.restart_gateway()
    fleet.run(3)
    assert fleet.hall.gateway._rollout.controller.shadow == 2 and fleet.found(2).chunks == 2  # type: ignore[attr-defined]
    count = len(fleet.computed)
    fleet.report(2, difference=ONE)
    assert fleet.found(2).chunks == 4 and len(fleet.computed) == count  # type: ignore[attr-defined]
    # the process
    fleet.shadow.send(Hello("robot-0", "inference", "", 1, 77))
    fleet.run(0.1)
    assert len(fleet.computed) == count + 1
    fleet.computes(2)
    # the uplink: what its process still computes is said to be over until it is fetched
    fleet.start_robot()
    fleet.shadow.send(Hello("robot-0", "inference", "", 1, 77))
    fleet.run(0.1)
    assert fleet.computed[0].version is None
    fleet.computes(2)
    # ended while nobody heard: the next report is answered
    fleet.hall.gateway._rollout.controller.set_shadow(0)
    fleet.report(2, difference=ONE)
    fleet.run(0.5)
    assert fleet.computed[-1].version is None
    assert set(fleet.loaded) == {1}


def test_it_waits_while_the_version_to_act_by_comes(tmp_path: Path) -> None:
    fleet = made(tmp_path, versions=1, count=60_000)
    for _ in range(2):
        fleet.publish(whole=True)
    fleet.wish(2)
    shadow = fleet.uplink.shadow.weights
    fleet.until(lambda: shadow._requests.received > 20_000)
    assert shadow.fetching == 2
    fleet.hall.gateway._rollout.change("anna", "promote", 3)
    fleet.until(lambda: fleet.client.fetching)
    fleet.step()
    began, most = shadow.fetched_bytes, 256 * 1024
    while fleet.client.fetching:
        fleet.step()
        assert shadow.fetched_bytes - began <= most, "at most the part that was under way"
    assert fleet.loaded == [1, 3]
    fleet.computes(2)
    # once it acts itself there is nothing to compare
    fleet.hall.gateway._rollout.change("anna", "promote", 2)
    fleet.until(lambda: fleet.has(2))
    fleet.run(0.5)
    assert fleet.computed[-1].version is None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_inference_loads_only_what_is_to_act(tmp_path: Path, seed: int) -> None:
    """Shadows, promotions, rollbacks and pins at random, with restarts."""
    fleet, draw, allowed = made(tmp_path, versions=5), random.Random(seed), {1}
    rollout = lambda: fleet.hall.gateway._rollout  # noqa: E731
    for _ in range(25):
        what, number = (
            draw.choice(("shadow", "shadow", "promote", "rollback", "pin", "restart", "gateway")),
            draw.randint(1, 5),
        )
        try:
            match what:
                case "restart":
                    fleet.start_robot()
                case "gateway":
                    fleet.restart_gateway()
                case _:
                    rollout().change("anna", what, number if what != "shadow" else draw.randint(0, 5))
        except RejectedError:
            continue
        allowed.add(rollout().controller.version_for("robot-0"))
        told = len(fleet.computed)
        fleet.run(draw.choice((0.02, 0.3, 3)))
        allowed.add(rollout().controller.version_for("robot-0"))
        assert set(fleet.loaded) <= allowed
        for one in fleet.computed[told:]:
            assert one.version is None or Path(one.path).parent.name == "shadow"


def test_a_robot_that_cannot_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShadowFleet, "process", False)
    fleet = made(tmp_path)
    fleet.wish(2)
    fleet.run(0.5)
    assert fleet.found(2).problems == {"robot-0": "this robot runs no process for it."}  # type: ignore[attr-defined]


def test_a_process_that_ends_again_and_again_is_left(tmp_path: Path) -> None:
    fleet = made(tmp_path)
    fleet.wish(2)
    fleet.computes(2)
    for pid in range(1, 6):
        fleet.shadow.send(Hello("robot-0", "inference", "", 1, pid))
        fleet.run(0.1)
    assert len([one for one in fleet.computed if one.version is not None]) == 4
    assert "ended 3 times" in fleet.found(2).problems["robot-0"]  # type: ignore[attr-defined]
    fleet.publish()
    fleet.wish(3)
    fleet.run(1)
    fleet.computes(3)


def test_no_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = made(tmp_path)
    monkeypatch.setattr("robot_edge.uplink.weights.cache.STAYS_FREE_BYTES", 2**62)
    fleet.wish(2)
    fleet.run(0.5)
    assert "free some room" in fleet.found(2).problems["robot-0"]  # type: ignore[attr-defined]
    assert not [one for one in fleet.computed if one.version is not None]


def test_a_shadow_that_is_not_signed_by_the_fleet_is_not_fetched(tmp_path: Path) -> None:
    fleet = made(tmp_path)
    offer = fleet.hall.gateway._versions._weights.offer(2)
    assert offer is not None
    forged = VersionAvailable(offer.version, 1, offer.manifest, b"x" * 64, offer.delta)
    fleet.server.send("robot-0", ShadowRequest(forged))
    fleet.run(0.5)
    assert fleet.uplink.shadow.weights.refused["manifest"] == 1
    assert not [one for one in fleet.computed if one.version is not None]
