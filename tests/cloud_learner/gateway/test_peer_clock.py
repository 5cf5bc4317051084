"""Clocks of peers: stored when that is news, and told when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.gateway.peer_clock import PeerClocks
from tests import samples
from wire.clock import clock_name
from wire.errors import RejectedError
from wire.messages.gateway import Heartbeat, Hello

MS, SECOND, YEAR = 1_000_000, 1_000_000_000, 365 * 86_400 * 1_000_000_000
CLOCK = "the robot's"


class Scene:
    """A robot whose clock is `ahead_ns` of the gateway's, and beats once a second."""

    def __init__(self, root: Path, ahead_ns: int = YEAR) -> None:
        self.ledger = Ledger.open(root / "ledger.sqlite")
        self.told: list[str] = []
        self.stored: list[int] = []
        self.clocks = PeerClocks(
            self.ledger.set_clock_offset, lambda peer, kind, text: self.told.append(text), lambda: YEAR
        )
        self.ahead_ns, self.now_ns, self._answer = ahead_ns, 5 * SECOND, (0, 0)
        self.ledger.see_robot("robot-0", samples.spec(), CLOCK, 1)

    def hello(self, wall_ns: int = 0, clock: str = CLOCK) -> int | None:
        hello = Hello("robot-0", "edge", clock, self.now_ns + self.ahead_ns, wall_ns=wall_ns)
        self.now_ns += MS
        self._answer = self.now_ns, self.now_ns + MS + self.ahead_ns
        return self.clocks.measure("robot-0", clock, hello, self.now_ns)

    def beat(self, there_ns: int = MS, back_ns: int = MS) -> int | None:
        self.now_ns += SECOND
        beat = Heartbeat(self.now_ns + self.ahead_ns, *self._answer)
        self.now_ns += there_ns
        self._answer = self.now_ns, self.now_ns + back_ns + self.ahead_ns
        offset_ns = self.clocks.measure("robot-0", CLOCK, beat, self.now_ns)
        robot = self.ledger.robot("robot-0")
        if robot is not None and self.stored[-1:] != [robot.clock_offset_ns]:
            self.stored.append(robot.clock_offset_ns)
        return offset_ns


def test_an_offset_of_a_year_is_known_at_once_and_right_after_a_round_trip(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.hello() == -YEAR + MS, "and the way took a millisecond"
    robot = scene.ledger.robot("robot-0")
    assert robot is not None and robot.clock_offset_ns == -YEAR + MS
    found = scene.beat()
    assert found is not None and abs(found + YEAR) < MS
    assert scene.stored == [found]
    assert scene.told == []


def test_an_offset_is_stored_when_it_changed_and_not_with_every_beat(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.hello()
    for _ in range(600):
        scene.beat()
    assert len(scene.stored) == 1
    for _ in range(600):
        scene.ahead_ns += 100_000  # 100 ppm
        scene.beat()
    assert 10 < len(scene.stored) < 61
    assert abs(scene.stored[-1] + scene.ahead_ns) < 5 * MS
    assert scene.told == []
    drift = scene.clocks.drift_ppm("robot-0", scene.now_ns)
    assert drift is not None and abs(drift[0] - 100) < drift[1] + 1


def test_a_clock_that_jumps_is_told_within_two_beats_and_stored(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.hello()
    for jump_ns in (3600 * SECOND, -YEAR):
        for _ in range(20):
            scene.beat()
        scene.ahead_ns += jump_ns
        scene.told.clear()
        scene.beat()
        scene.beat()
        assert len(scene.told) == 1
        assert abs(float(scene.told[0].split()[4]) - jump_ns / 1e9) < 0.01
        assert abs(scene.stored[-1] + scene.ahead_ns) < 2 * MS


def test_a_robot_that_lies_about_its_clock_does_not_fill_the_page(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.hello()
    for number in range(100):
        scene.ahead_ns += (number % 3 == 0) * (-1) ** number * YEAR
        scene.beat()
    assert 0 < len(scene.told) <= 11
    with pytest.raises(RejectedError, match="sent_ns"):
        scene.clocks.measure("robot-0", CLOCK, Heartbeat(2**63), scene.now_ns)


def test_a_time_of_day_that_is_a_year_off_is_told_once_with_what_to_do(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for wall_ns in (0, YEAR + 30 * SECOND):
        scene.hello(wall_ns)
    assert scene.told == []
    for wall_ns in (1, 2, 3):
        scene.hello(wall_ns)
    assert len(scene.told) == 1
    assert "365.0 days behind" in scene.told[0] and "timedatectl set-ntp true" in scene.told[0]
    scene.hello(YEAR)
    scene.hello(2 * YEAR)
    assert len(scene.told) == 2 and "365.0 days ahead of" in scene.told[1]


def test_on_one_machine_there_is_nothing_to_measure(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.hello(clock=clock_name()) == 0
