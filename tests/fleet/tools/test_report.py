"""What a report and the statistics say of people's part."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from cloud_learner.buffer.control import HUMAN, POLICY
from cloud_learner.buffer.maintenance.stats import collect, render
from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import get_recipe
from fleet.tools.report import RunCounters, make_report
from tests.cloud_learner.buffer.stored import SPEC, Buffer
from tests.cloud_learner.buffer.synthetic import fake_episode


def test_recoveries_and_corrections_are_counted(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    buffer = Buffer(data.buffer)
    (plain,) = fake_episode(SPEC, "e", steps=40, actor=[POLICY] * 10 + [HUMAN] * 25 + [POLICY] * 5)
    buffer.add((msgspec.structs.replace(plain, recovery=np.arange(40) // 10 == 1),))
    said = render(collect(buffer.store))
    buffer.ledger.close()
    report = make_report(data, get_recipe("fake"), RunCounters(), 1.0)
    assert [report[name] for name in ("interventions", "recoveries", "recovery_steps", "correction_steps")] == [
        1,
        1,
        10,
        15,
    ]
    assert "1 recoveries of 10 steps, and 15 steps of corrections" in said
