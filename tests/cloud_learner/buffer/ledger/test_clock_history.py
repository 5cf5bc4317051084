"""What is kept of a robot's clocks: as much as is of use, whatever the robot says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger import clock_history
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import OffsetRow
from tests.cloud_learner.buffer.synthetic import fake_spec

S = 1_000_000_000


def test_a_month_of_drift_is_kept_evenly() -> None:
    # 20 ppm, measured every ten seconds
    rows: list[OffsetRow] = []
    for at in range(30 * 8640):
        rows.append(OffsetRow(at, at * 10 * S, at * 200_000, "a", 7))
        if len(rows) > 2 * clock_history.MEASUREMENTS:
            rows = clock_history.kept(rows)
    steps = [after.offset_ns - before.offset_ns for before, after in itertools.pairwise(rows)]
    assert len(rows) <= 2 * clock_history.MEASUREMENTS
    assert rows[0].id == 0 and rows[-1].id == 30 * 8640 - 1
    assert min(steps) > 0 and max(steps) < 0.4 * S


def test_the_newest_clocks_and_bases_are_kept_each_with_its_first_and_last() -> None:
    rows = [OffsetRow(n, n * S, n % 7 * S, f"{n // 50}", n // 10 % 5) for n in range(5000)]
    left = clock_history.kept(rows)
    assert len(left) <= clock_history.MEASUREMENTS
    assert left == sorted(left, key=lambda row: row.id)
    clocks = clock_history.by_clock(left)
    assert {one[0].clock for one in clocks} == {str(n) for n in range(100 - clock_history.CLOCKS, 100)}
    assert len(clocks) == clock_history.CLOCKS * clock_history.BASES
    assert all((one[0].id % 10, one[-1].id % 10) == (0, 9) for one in clocks)
    assert {one[0].clock for one in clock_history.by_clock(clock_history.kept(rows, 3))} == {"97", "98", "99"}


def test_few_are_kept_as_they_are() -> None:
    rows = [OffsetRow(n, n * S, n, f"{n % 3}", 1) for n in range(clock_history.MEASUREMENTS)]
    assert clock_history.kept(rows) == rows and clock_history.kept([]) == []


@pytest.mark.parametrize("clocks", [1, 1200])
def test_the_ledger_keeps_so_much_of_one_robot_and_all_of_the_others(tmp_path: Path, clocks: int) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    for name in ("r1", "r2"):
        ledger.see_robot(name, fake_spec(0), "a", 1)
    ledger.set_clock_offset("r2", 5, 1)
    with ledger.together():
        for n in range(1200):
            ledger.see_robot("r1", None, f"{n % clocks}", n)
            ledger.set_clock_offset("r1", (n % 2) * S + n, n)
    rows = ledger.clock_offsets("r1")
    assert len(rows) <= (2 * clock_history.MEASUREMENTS if clocks == 1 else clock_history.CLOCKS)
    assert rows[-1].offset_ns == S + 1199 and ledger.clock_offset_at("r1", 10**9) == S + 1199
    assert [row.offset_ns for row in ledger.clock_offsets("r2")] == [5]
    ledger.close()
