"""`vla-fleet plan` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import vla_fleet

KNOWN = ("plan", "--gradient-step", "0.05", "--version-mb", "1.7")


def test_it_says_what_is_enough_and_what_limits() -> None:
    done = vla_fleet(*KNOWN)
    assert done.returncode == 0, done.stderr
    for text in ("64 robots keep the trainer busy", "Bottleneck: trainer.", "recipe pixels", "given", "ECHO-2"):
        assert text in done.stdout
    found = json.loads(vla_fleet(*KNOWN, "--max-lag", "2", "--robots", "3", "--json").stdout)
    assert found["plan"]["busy_robots"] == 64
    assert [row["robots"] for row in found["plan"]["rows"]] == [3]
    assert found["figures"]["max_lag"] == {"value": 2.0, "source": "given"}


def test_a_link_that_is_too_slow_is_named_with_a_way_out() -> None:
    text = vla_fleet(*KNOWN, "--gateway-up", "2", "--steps-per-publish", "20").stdout
    assert "Bottleneck: link." in text and "No number of robots keeps the trainer busy at S = 6" in text
    assert "--relay-fanout" in text and "> S" in text
    none = vla_fleet(*KNOWN, "--max-lag", "0").stdout
    assert "Not even one robot has a lag within S = 0" in none
    assert "grows" in vla_fleet(*KNOWN, "--robot-up", "0.1", "--robots", "4").stdout


def test_impossible_figures_are_said(tmp_path: Path) -> None:
    for words, text in (
        (("plan",), "nobody has said how long a gradient step takes"),
        ((*KNOWN, "--active", "2"), "active is 2"),
        ((*KNOWN, "--step-kb", "0"), "step_bytes is 0; it must be above 0"),
        ((*KNOWN, "--data", str(tmp_path / "none")), "there is no data directory"),
        ((*KNOWN, "--recipe", "pixel"), "pixel"),
    ):
        done = vla_fleet(*words)
        assert done.returncode == 1 and text in done.stderr
