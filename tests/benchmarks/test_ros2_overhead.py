"""The ROS 2 benchmark measures what it says, on a small scale."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks import ros2_overhead
from benchmarks.ros2_overhead import ARMS, DIRECT, OURS, QUICK, BenchArm, OverheadSize, compare, drive, number_of
from tests.ros import needs_ros
from wire.types import Frame


def test_the_robot_numbers_its_pictures_and_goes_where_it_is_told() -> None:
    arm = BenchArm(100.0)
    arm.connect()
    arm.reset("follow", 0)
    first = arm.read().images["front"]
    assert number_of(first) == 1
    time.sleep(0.04)
    assert number_of(arm.read().images["front"]) > 1
    assert first.image.shape == (480, 640, 3)
    action = np.linspace(-1, 1, 7).astype(np.float32)
    assert arm.write(action).executed.tolist() == action.tolist()
    assert arm.read().state.tolist() == action.tolist()


def test_a_picture_that_does_not_come_is_counted() -> None:
    class Lossy(BenchArm):
        """Half of its pictures are never heard of."""

        def heard(self, camera: str) -> tuple[int, Frame | None]:
            return self._number // 2, self._frame

    robot = Lossy(100.0)
    robot.connect()
    found = drive(robot, 100.0, 0.6)
    assert found["shown"] > 0
    assert 0 < found["lost"] <= found["shown"] / 2 + 1
    assert found["refused"] == 0


def test_the_table_says_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(arm, rate_hz, seconds):
        ms = 1.0 if arm is DIRECT else 3.0
        figures = {f"{name} p{q}": ms * q for name in ("read", "write", "age", "picture") for q in (50, 99)}
        return {**figures, "pictures/s": 30.0, "shown": 10, "lost": 2 if arm is OURS else 0, "refused": 0}

    monkeypatch.setattr(ros2_overhead, "_apart", apart)
    result = compare(OverheadSize(rounds=2))
    assert [row["way"] for row in result.rows] == [arm.name for arm in ARMS] * 2
    assert result.rows[-1]["added p50/p99 (ms)"] == "200.00/396.00"
    assert result.rows[-1]["pictures lost"] == "4 of 20"
    assert [goal.holds for goal in result.goals] == [False, True, False]
    assert QUICK.rounds == 1


@pytest.mark.slow
@needs_ros
def test_two_processes_are_measured() -> None:
    result = compare(OverheadSize(arms=(DIRECT, OURS), rates_hz=(100.0,), seconds=1.0, rounds=1))
    direct, ours = result.rows
    assert direct["ticks failed"] == ""
    assert ours["pictures/s"] > 0
    assert float(ours["write p50/p99 (ms)"].split("/")[0]) > 0
