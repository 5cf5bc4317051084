"""A moment of benchmarks.soak: real processes, a bad network, kills; nothing is lost or stored twice."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import soak, table
from benchmarks.soak.faults import FaultKind, plan_faults

ROBOTS = 2
SECONDS = 20.0
KINDS = (FaultKind.silent, FaultKind.uplink, FaultKind.gateway)
"""what costs little; the rest has tests of its own"""


@pytest.mark.slow
def test_nothing_that_fails_costs_a_step(tmp_path: Path) -> None:
    names = tuple(f"robot-{number}" for number in range(ROBOTS))
    plan = plan_faults(SECONDS, 1, names, KINDS, settle_s=1.0, rest_s=5.0)
    seen = soak(tmp_path, plan, SECONDS, ROBOTS, None, seed=1)
    truth = seen.truth
    assert truth.acknowledged_segments >= ROBOTS * 5
    assert truth.recorded_steps == truth.stored_steps > 0
    assert (truth.lost_steps, truth.doubled_steps, truth.damaged, truth.set_aside, truth.unlike) == (0, 0, 0, 0, [])
    assert seen.restarts == {"gateway": 1} and seen.published >= 1
    # How soon all is as it was is the benchmark's to say; here, that it is at all.
    rows = table(seen, SECONDS / 60, ROBOTS, 1, "").rows
    assert [row["fault"] for row in rows] == [str(fault.kind) for fault in plan]
    assert math.isfinite(rows[-1]["recording (s)"])
