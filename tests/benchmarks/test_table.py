"""The form of all benchmarks, and that each of them can be run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks.common import table
from benchmarks.common.table import Goal, Result

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"__init__", "table", "machine", "cpu", "processes", "main_job_run", "prefix_scene"}
PARTS |= {f"async_{part}" for part in ("data", "policy", "rollout", "statistics")}
PARTS |= {f"buffer_{part}" for part in ("data", "growth", "ours", "peers")}
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in PARTS)


def sample(quick: bool) -> Result:
    rows = [{"arm": "a", "value": 0.12345}, {"arm": "b", "value": 2 if quick else 3}]
    more = {"More of it": [{"size": 10, "took": 0.5}]}
    return Result("A title", rows, [Goal("a above b", -1.0, "above 0", False)], ["a note"], more)


def test_a_run_prints_writes_and_says_whether_goals_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    code = table.run("sample", sample, ["--quick", "--write", "--json", str(tmp_path / "r.json")])
    assert code == 1
    printed = capsys.readouterr().out
    assert "| a | 0.123 |" in printed
    assert "| b | 2 |" in printed
    assert (tmp_path / "results" / "sample.md").read_text() == printed
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["command"] == "python -m benchmarks.sample --quick"
    assert found["machine"].endswith(f"calibration {found['calibration_ms']:.1f} ms")
    assert found["machine"] in printed
    assert "## More of it\n\n| size | took |\n| --- | --- |\n| 10 | 0.5 |\n" in printed
    assert found["more"] == {"More of it": [{"size": 10, "took": 0.5}]}
    assert found["notes"] == ["a note"]
    assert found["rows"][0] == {"arm": "a", "value": 0.12345}
    assert found["goals"] == [{"name": "a above b", "value": -1.0, "target": "above 0", "holds": False}]


def test_what_is_not_installed_is_said_first() -> None:
    table.require("json", "numpy", extra="peers")
    with pytest.raises(SystemExit, match=r"needs nowhere_to_be_found: pip install -e '\.\[peers\]'"):
        table.require("json", "nowhere_to_be_found", extra="peers")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_keeps_the_form_and_has_its_table(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert callable(module.measure)
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    assert f"`python -m benchmarks.{name}`" in text


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda path: path.stem)
def test_the_command_of_every_table_is_there(path: Path) -> None:
    for name in set(re.findall(r"python -m (benchmarks[\w.]*\w)", path.read_text())):
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.submodule_search_locations is None or importlib.util.find_spec(f"{name}.__main__"), name


def test_a_module_in_a_room_is_named_as_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    table.run("buffer.scale", sample, ["--write"])
    assert "`python -m benchmarks.buffer.scale` on" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["buffer_scale.md"]


@pytest.mark.slow
def test_the_corrections_benchmark_measures_all_arms_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import corrections

    size = corrections.CorrectionsSize("fake", 60, 160, 1, robots=1, seeds=(0,))
    monkeypatch.setattr(corrections, "QUICK", (size,))
    found = corrections._seed(tmp_path, size, 0)
    assert set(found) == set(corrections.ARMS)
    assert found["offline"]["expert_steps"] >= found["online"]["expert_steps"] > found["no corrections"]["expert_steps"]
    monkeypatch.setattr(corrections, "_arm", lambda *arguments: pytest.fail("what is kept is measured again"))
    assert corrections._seed(tmp_path, size, 0) == found
    assert all(0.0 <= one["success"] <= 1.0 for one in found.values())
