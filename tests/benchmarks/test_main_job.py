"""The benchmark of the main job: its figures from reports, its rows by commit, its processes by kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import table
from benchmarks.common.processes import ProcessTree, kind_of
from benchmarks.main_job import __main__ as main_job
from benchmarks.main_job import run as main_job_run
from benchmarks.main_job.__main__ import MainJobOptions

ROOT = Path(__file__).resolve().parents[2]
WANTED = MainJobOptions("pixels", 10.0, 3, 4.0)


def report(seed: int = 0, success: float = 0.95, first: float = 3.0) -> dict[str, Any]:
    quarter = {"episodes": 9, "steps": 900, "human_share": 0.5, "unaided_success": 0.25}
    return {
        "seed": seed,
        "success_before": 0.2,
        "success_during": [{"minute": 4.0, "version": 40, "mean": 0.8, "success": {"a": 0.8}}],
        "success_after": success,
        "quarters": [quarter | {"interventions_per_episode": n} for n in (first, 2.0, 1.0, 0.5)],
        "ingest_latency_s": {"p50": 0.05, "p99": 0.4, "count": 9},
        "publish_to_applied_s": {"p50": 0.2, "p99": 2.0, "count": 9},
        "trained_to_applied_s": {"p50": 0.3, "p99": 2.1, "count": 9},
        "ticks": 100_000,
        "missed_ticks": 100,
        "steps_lost": 0,
        "steps_duplicated": 0,
        "version_lag": {"0": 900, "2": 3},
        "outside": {
            "machine_ms": 9.5,
            "gradient_steps": 6000,
            "gradient_steps_per_s": 10.0,
            "trainer_cores": 0.7,
            "memory_bytes": 2**31,
            "cpu_ms_per_tick": {"control": 1.5, "trainer": 2.0},
            "cpu_s": {"control": 150.0, "trainer": 400.0},
        },
    }


def test_a_row_sums_up_the_seeds_and_goals_take_the_worst() -> None:
    runs = [report(0), report(1, success=0.75)]
    row = main_job.row_of(WANTED, runs)
    assert row["at the end"] == "0.85 (0.75 to 0.95)"
    assert row["at 4 min"] == "0.80 (0.80 to 0.80)"
    assert row["interventions per episode, first/last"] == "3.00/0.50"
    assert row["publish to applied p50/p99 s"] == "0.20/2.00"
    assert row["trained to applied p50/p99 s"] == "0.30/2.10"
    assert (row["missed ticks %"], row["versions behind at most"], row["memory GiB (PSS)"]) == (0.1, 2, 2.0)
    goals = {goal.name: goal.holds for goal in main_job.goals_of(WANTED, runs)}
    assert [name for name, holds in goals.items() if not holds] == [
        "mean success at the end",
        "lowest success of a seed",
        "publish to applied p99, s",
    ]
    assert not any("success" in g.name for g in main_job.goals_of(MainJobOptions("pixels", 1.0, 3, None), runs))


def test_a_quarter_without_an_episode_is_no_figure_and_no_goal_held() -> None:
    empty = report() | {"quarters": [], "success_during": [], "success_before": None}
    row = main_job.row_of(WANTED, [empty])
    assert row["human share, first/last quarter"] == "nan/nan"
    assert row["success at start"] == row["at 4 min"] == "–"


def test_one_row_is_kept_for_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    for commit, success in (("aaaaaaa", 0.5), ("bbbbbbb", 0.6), ("aaaaaaa", 0.7)):
        monkeypatch.setattr(main_job, "commit", lambda commit=commit: commit)
        monkeypatch.setattr(main_job, "run_once", lambda wanted, seed, success=success: report(seed, success))
        assert main_job.main(["--seeds", "5", "--write", "--json", str(tmp_path / "out.json")]) == 1
    rows = json.loads((tmp_path / "main_job.json").read_text())["rows"]
    assert [(row["commit"], row["at the end"]) for row in rows] == [("bbbbbbb", "0.60"), ("aaaaaaa", "0.70")]
    text = (tmp_path / "main_job.md").read_text()
    assert "`python -m benchmarks.main_job`" in text and str(tmp_path) not in text
    assert text.count("| bbbbbbb |") == 3, "in the table, and in both of processor time"
    kept = json.loads((tmp_path / "demo_pixels.json").read_text())
    assert kept["success_after"] == 0.7
    assert not {"outside", "seed"} & kept.keys()
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["seed"] == 5


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/x/bin/python -m fleet.cli trainer --recipe pixels", "trainer"),
        ("/x/bin/python -m fleet.cli edge-part robot --name r", "driver"),
        ("/x/bin/python -m fleet.cli edge-part control --name r", "control"),
        ("/x/bin/python /x/bin/vla-fleet up --recipe pixels", "up"),
        ("/x/bin/python -c from multiprocessing import spawn", ""),
        ("bash", ""),
    ],
)
def test_a_process_is_of_the_kind_its_command_says(command: str, kind: str) -> None:
    assert kind_of(command) == kind


@pytest.mark.parametrize(("part", "kind"), [("robot", "driver"), ("inference", "inference"), ("uplink", "uplink")])
def test_a_fork_whose_command_line_was_cut_is_of_its_own_kind(part: str, kind: str) -> None:
    code = (
        "import sys\nfrom robot_edge.runtime.forking import rename\n"
        f"rename([sys.executable, '-m', 'fleet.cli', 'edge-part', {part!r}, '--name', 'r'])\n"
        "while sum(i * i for i in range(1000)) and __import__('time').process_time() < 0.2: pass\n"
        "print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    tree = ProcessTree(process.pid)
    tree.look()
    process.stdin.close()
    process.wait()
    process.stdout.close()
    assert list(tree.cpu_seconds()) == [kind]
    assert kind_of("/x/bin/python -m fleet.cli edge --name r edge-pa", part) == kind


def test_what_a_process_used_still_counts_when_it_has_ended() -> None:
    # it spins for a while, tells, and waits to be ended
    spin = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    tree = ProcessTree(process.pid)
    process.stdout.readline()
    tree.look()
    assert tree.memory_bytes()["other"] > 0
    process.stdin.close()
    process.wait()
    process.stdout.close()
    tree.look()
    assert tree.cpu_seconds()["other"] >= 0.19
    assert not tree.memory_bytes()


def test_who_is_interrupted_ends_the_run_and_waits_for_it(tmp_path: Path) -> None:
    told = tmp_path / "ended"
    # as `up` does: what it has to do at its end is done
    run = "import pathlib, sys, time\ntry: print('up', file=sys.stderr, flush=True); time.sleep(60)\n"
    run += f"except KeyboardInterrupt: pathlib.Path({str(told)!r}).touch()"
    with pytest.raises(KeyboardInterrupt), main_job_run._started([sys.executable, "-c", run]) as process:
        assert process.stderr is not None
        process.stderr.readline()
        raise KeyboardInterrupt
    assert told.exists()
    assert process.returncode == 0
