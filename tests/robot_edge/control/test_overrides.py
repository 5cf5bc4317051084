"""The small pure pieces of the edge."""

from __future__ import annotations

import numpy as np
import pytest

from robot_edge.control.config import GateConfig
from robot_edge.control.rate import Rate
from robot_edge.control.takeover import Gate
from wire.clock import ManualClock

MS = 1_000_000


class TestRate:
    def test_deadlines_are_absolute(self) -> None:
        clock = ManualClock()
        rate = Rate(10 * MS, clock)
        assert rate.wait() == 0
        clock.advance(3 * MS)
        rate.wait()
        assert clock.now_ns() == 20 * MS

    @pytest.mark.parametrize(("work_ms", "missed"), [(9, 0), (19, 0), (20, 1), (35, 1)])
    def test_missed_is_a_whole_period_late(self, work_ms: int, missed: int) -> None:
        clock = ManualClock()
        rate = Rate(10 * MS, clock)
        rate.wait()
        clock.advance(work_ms * MS)
        rate.wait()
        assert rate.missed == missed
        before = clock.now_ns()
        rate.wait()
        assert clock.now_ns() > before
        assert clock.now_ns() % (10 * MS) == 0

    def test_lateness_quantile(self) -> None:
        clock = ManualClock()
        rate = Rate(10 * MS, clock)
        assert rate.late_s(0.99) == 0.0
        for _ in range(99):
            rate.wait()
        clock.advance(15 * MS)
        rate.wait()
        assert rate.late_s(0.5) < 0.001
        assert 0.004 < rate.late_s(0.999) < 0.006

    def test_restart_forgives(self) -> None:
        clock = ManualClock()
        rate = Rate(10 * MS, clock)
        clock.advance(500 * MS)
        rate.restart()
        rate.wait()
        assert rate.missed == 0


class TestGate:
    config = GateConfig(disagreement=0.4, disagreement_ticks=3, min_ticks=5, stall_ticks=20, stall_progress=0.01)

    def run(self, policies: list[np.ndarray | None], progress: list[float]) -> list[bool]:
        gate = Gate(self.config)
        return [gate.update(p, np.zeros(4, np.float32), d) for p, d in zip(policies, progress, strict=True)]

    def test_it_waits_out_a_moment_and_fires_on_a_while(self) -> None:
        far, near = np.ones(4, np.float32), np.zeros(4, np.float32)
        falling = [1 - 0.02 * i for i in range(12)]
        assert not any(self.run([far, far, near] * 4, falling))
        took = self.run([far] * 12, falling)
        assert took[:2] == [False, False]
        assert all(took[2:7])

    def test_it_hands_back_after_its_least_time(self) -> None:
        far, near = np.ones(4, np.float32), np.zeros(4, np.float32)
        took = self.run([far] * 3 + [near] * 9, [1 - 0.02 * i for i in range(12)])
        assert took == [False] * 2 + [True] * 5 + [False] * 5

    def test_it_fires_when_nothing_advances(self) -> None:
        near = np.zeros(4, np.float32)
        took = self.run([near] * 40, [1.0] * 40)
        assert not any(took[:19])
        assert took[20]

    def test_it_does_not_hand_back_to_nobody(self) -> None:
        far = np.ones(4, np.float32)
        took = self.run([far] * 3 + [None] * 10, [1 - 0.02 * i for i in range(13)])
        assert all(took[2:])
