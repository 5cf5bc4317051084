"""Clocks of peers: stored when that is news, and told when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.gateway.peer_clock import PeerClocks
from tests import samples
from tests.cloud_learner.dispatch.hall import Hall
from tests.cloud_learner.fake_edge import SPEC
from wire.clock import clock_name
from wire.errors import RejectedError
from wire.identity.refusals import RefusalReason
from wire.messages.gateway import Heartbeat, Hello, HelloAck, Rejection

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


def test_a_clock_that_jumps_at_each_beat_is_stored_once_a_second(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.hello()
    scene.beat()
    for number in range(400):
        # two hundred beats a second; one that spans a jump says nothing
        scene.ahead_ns += SECOND * (number % 2)
        scene.now_ns += 5 * MS - SECOND - MS
        scene.beat()
    assert len(scene.ledger.clock_offsets("robot-0")) <= 6
    scene.now_ns += SECOND
    found = scene.beat()
    robot = scene.ledger.robot("robot-0")
    assert found is not None and robot is not None and robot.clock_offset_ns == found


def test_a_robot_with_more_clocks_than_boots_is_let_in_once_a_minute(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    bad, good = hall.server.connect("robot-1"), hall.edge("robot-0")

    def says_hello(clock: str) -> bool:
        bad.send(Hello("robot-1", "edge", clock, hall.clock.now_ns() + int(clock.split()[1]) * MS, 7, SPEC, ("reach",)))
        hall.gateway.poll()
        answers = hall.received(bad)
        assert any(isinstance(one, Rejection) and "more clocks" in one.reason for one in answers) != any(
            isinstance(one, HelloAck) for one in answers
        )
        return any(isinstance(one, HelloAck) for one in answers)

    let_in = [says_hello(f"boot {n}") for n in range(100)]
    assert let_in == [True] * 9 + [False] * 91
    assert hall.gateway.refused == {RefusalReason.too_often: 91}
    assert len({row.clock for row in hall.ledger.clock_offsets("robot-1")}) <= 9
    # The clock that it has, and others, are none of the matter; a real boot waits for a minute at most.
    assert says_hello("boot 8") and not says_hello("boot 100")
    hall.clock.advance(60 * SECOND)
    assert says_hello("boot 100") and not says_hello("boot 101")
    good.episode()
    hall.gateway.poll()
    good.poll()
    assert not good.spool
    told = [event["text"] for event in hall.view.snapshot()["events"] if "more clocks" in event["text"]]
    assert len(told) <= 3
    hall.ledger.close()


def test_an_offset_that_waited_is_noted_of_the_clock_that_it_was_measured_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall = Hall(tmp_path)
    robot = hall.server.connect("robot-1")

    def says_hello(clock: str, sent_ns: int) -> None:
        robot.send(Hello("robot-1", "edge", clock, sent_ns, 7, SPEC, ("reach",)))
        hall.gateway.poll()

    now_ns = hall.clock.now_ns()
    says_hello("first", now_ns - 5_000)
    with monkeypatch.context() as away:
        away.setattr(hall.gateway._storage, "step", lambda: False)
        robot.send(Heartbeat(now_ns - 4_000, now_ns, now_ns + 1_000))
        hall.gateway.poll()
        # its computer starts again
        says_hello("second", 5)
    hall.gateway.poll()
    clocks = [row.clock for row in hall.ledger.clock_offsets("robot-1")]
    assert clocks == ["first", "second"]
    hall.ledger.close()
