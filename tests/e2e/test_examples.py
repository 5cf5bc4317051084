"""The examples of the documentation, as whole fleets of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_robot_of_ones_own_learns_in_a_fleet(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["up", "--recipe", "own_robot:slider", "--robots", "1", "--minutes", "0.15", "--headless"]
    command += ["--port", "0", "--web-port", "0", "--data", str(tmp_path / "fleet"), "--report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "fleet.cli", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "docs" / "examples")},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["steps_lost"] == found["steps_duplicated"] == 0 and found["steps_recorded"] > 50
    assert found["episodes"] > 0
    # Its driver answers with numpy's own numbers; the process that hosts it must not mind.
    log = (tmp_path / "fleet" / "logs" / "robot-0.robot.log").read_text()
    assert "Traceback" not in log
    edge = (tmp_path / "fleet" / "logs" / "robot-0.log").read_text()
    assert "robot-0.robot ended" not in edge
