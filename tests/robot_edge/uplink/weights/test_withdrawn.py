"""A version that was withdrawn while a robot was fetching it does not come to act there."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from cloud_learner.gateway.versions.rollout_service import RolloutService
from tests.cloud_learner.fake_edge import SPEC
from tests.robot_edge.uplink.weights.fleet import SECOND, small_chunks
from tests.robot_edge.uplink.weights.test_start_without_gateway import WholeFleet
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.fleet import VersionAction
from wire.messages.gateway import EdgeStatus, VersionAvailable
from wire.transport.faults import FaultWindow


@pytest.fixture(autouse=True)
def chunks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


class WatchedFleet(WholeFleet):
    """Whatever begins to act is what the robot was told of last, or an older one that was not withdrawn by then."""

    def start_robot(self) -> None:
        super().start_robot()
        self.told: VersionAvailable | None = None
        self.began: list[int] = []
        gateway = self.uplink._gateway
        recv = gateway.recv

        def spied() -> Message | None:
            message = recv()
            if isinstance(message, VersionAvailable):
                self.told = message
            return message

        gateway.recv = spied  # type: ignore[method-assign]

    @property
    def rollout(self) -> RolloutService:
        return self.hall.gateway._rollout

    def change(self, action: str, number: int = 0) -> None:
        self.rollout.change("anna", action, number, "robot-0" if action == VersionAction.pin else "")

    def step(self) -> None:
        before = len(self.activated)
        if self.clock.now_ns() % (SECOND // 5) == 0:
            version = self.began[-1] if self.began else 0
            state = np.zeros(SPEC.state_dim, np.float32)
            self.control.send(
                EdgeStatus("robot-0", 1, "policy", "", "", "", 1, state, version, 1, 0, 0.0, 0, 0, 0, 0, 0)
            )
        super().step()
        for number in self.activated[before:]:
            if self.began[-1:] != [number]:
                self.began.append(number)
                self.check(number)

    def check(self, number: int) -> None:
        if self.told is not None:
            assert number <= self.told.version.number, "it was called back from that"
            assert number not in self.told.withdrawn


@pytest.fixture
def fleet(tmp_path: Path) -> WatchedFleet:
    """A robot that acts by version 1, on a line that takes 3 s for a version."""
    fleet = WatchedFleet(tmp_path, count=30_000, faults=FaultWindow(bytes_per_s=40_000))
    fleet.publish()
    fleet.until(lambda: fleet.began == [1])
    return fleet


def begin_fetching(fleet: WatchedFleet) -> int:
    number = fleet.publish(whole=True)
    fleet.until(lambda: fleet.client.fetching == number)
    fleet.run(0.5)
    return number


def replaced_while_away(fleet: WatchedFleet) -> int:
    """The newest is rolled back and another one promoted, while nothing reaches the robot."""
    fleet.server.cut.add("robot-0")
    fleet.change(VersionAction.rollback)
    good = fleet.publish(whole=True)
    fleet.change(VersionAction.promote, good)
    fleet.run(3)
    fleet.server.cut.clear()
    return good


def test_what_was_rolled_back_while_the_line_was_away_is_not_finished(fleet: WatchedFleet) -> None:
    begin_fetching(fleet)
    good = replaced_while_away(fleet)
    fleet.until(lambda: fleet.began[-1] == good, 60)
    assert fleet.began == [1, good]


def test_what_is_only_older_is_finished_and_acts_first(fleet: WatchedFleet) -> None:
    first = begin_fetching(fleet)
    fleet.run(1)
    last = [fleet.publish(whole=True) for _ in range(3)][-1]
    fleet.until(lambda: fleet.began[-1] == last, 60)
    assert fleet.began == [1, first, last]


def test_what_waits_to_be_loaded_is_given_up_for_what_acts(fleet: WatchedFleet) -> None:
    poll, fleet.inference.poll = fleet.inference.poll, lambda: None  # type: ignore[method-assign]
    bad = fleet.publish()
    fleet.until(lambda: fleet.client.ready is not None and fleet.client.ready[0].number == bad)
    good = replaced_while_away(fleet)
    fleet.until(lambda: fleet.told is not None and fleet.told.version.number == good)
    assert fleet.client.ready is not None and fleet.client.ready[0].number == 1
    fleet.inference.poll = poll  # type: ignore[method-assign]
    fleet.until(lambda: fleet.began[-1] == good, 60)
    assert fleet.began == [1, good]


def test_what_waits_to_be_loaded_is_given_up_for_what_is_still_to_come(
    fleet: WatchedFleet,
) -> None:
    """It was away while version 2 acted elsewhere, and has 3 when that is rolled back to 2."""
    fleet.server.cut.add("robot-0")
    good = fleet.publish(whole=True)
    poll, fleet.inference.poll = fleet.inference.poll, lambda: None  # type: ignore[method-assign]
    bad = fleet.publish(whole=True)
    fleet.run(3)
    fleet.server.cut.clear()
    fleet.until(lambda: fleet.client.ready is not None and fleet.client.ready[0].number == bad, 60)
    fleet.change(VersionAction.rollback)
    fleet.until(lambda: fleet.told is not None and fleet.told.version.number == good)
    assert fleet.client.ready is not None and fleet.client.ready[0].number == 1
    fleet.inference.poll = poll  # type: ignore[method-assign]
    fleet.until(lambda: fleet.began[-1] == good, 60)
    assert fleet.began == [1, good]


def test_what_acted_last_is_not_loaded_after_it_was_withdrawn(fleet: WatchedFleet) -> None:
    bad = fleet.publish()
    fleet.until(lambda: fleet.began == [1, bad])
    fleet.run(0.1)
    fleet.change(VersionAction.rollback)
    good = fleet.publish(whole=True)
    fleet.change(VersionAction.promote, good)
    fleet.server.cut.add("robot-0")
    fleet.start_robot()
    tasks = fleet.client.tasks
    step, tasks.step = tasks.step, lambda: False  # type: ignore[method-assign]
    fleet.server.cut.clear()
    fleet.until(lambda: fleet.told is not None)
    tasks.step = step  # type: ignore[method-assign]
    fleet.until(lambda: fleet.began, 60)
    assert fleet.began == [good]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_published_and_withdrawn_the_robot_ends_on_its_version(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    line = FaultWindow(0, 30, bytes_per_s=draw.choice([5_000, 20_000]), delay_s=0.02, drop=0.02)
    fleet = WatchedFleet(tmp_path, 6000, line, seed)
    fleet.publish()
    while fleet.clock.now_ns() < 30 * SECOND:
        try:
            match draw.randrange(9):
                case 0 | 1:
                    fleet.publish(whole=draw.random() < 0.5)
                case 2 | 3:
                    if draw.random() < 0.5:
                        fleet.server.cut.add("robot-0")
                    fleet.change(VersionAction.rollback)
                    fleet.change(VersionAction.promote, fleet.publish(whole=draw.random() < 0.5))
                    fleet.change(VersionAction.thaw)
                    fleet.run(draw.choice([0.0, 3.0]))
                    fleet.server.cut.clear()
                case 4:
                    fleet.change(VersionAction.pin, draw.randint(0, len(fleet.files)))
                case 5:
                    fleet.change(VersionAction.promote, draw.randint(1, len(fleet.files)))
                case 6:
                    fleet.server.cut.clear()
                case 7 if draw.random() < 0.3:
                    fleet.start_robot()
                case 8 if draw.random() < 0.3:
                    fleet.restart_gateway()
        except RejectedError:
            pass  # there is nothing to go back to, or it is so already
        fleet.run(draw.choice([0.0, 0.05, 0.5, 3.0]))
    fleet.server.cut.clear()
    fleet.run(max(0.0, 31 - fleet.clock.now_ns() / SECOND))
    wanted = fleet.rollout.version_for("robot-0", "edge")
    fleet.until(lambda: fleet.began[-1:] == [wanted], 60)
