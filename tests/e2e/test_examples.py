"""The examples of the documentation, as whole fleets of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_processes import ROOT, Job, robot


@pytest.mark.slow
def test_a_robot_of_ones_own_works_in_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "docs" / "examples"))
    job = Job(tmp_path / "fleet", recipe="tests.e2e.small_recipes:slider", robots=1)
    try:
        job.wait("two episodes", lambda now: robot(now, "robot-0").get("episodes", 0) >= 2, 240)
        assert job.stop(180) == 0
    finally:
        job.end()
    logs = tmp_path / "fleet" / "logs"
    # Its driver answers with numpy's own numbers; the process that hosts it must not mind.
    assert "Traceback" not in (logs / "robot-0.robot.log").read_text()
    assert "robot-0.robot ended" not in (logs / "robot-0.log").read_text()
