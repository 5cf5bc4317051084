"""The drill: a seed comes to the same in every run, and a run that was interrupted goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.safety_drill import __main__ as safety_drill
from benchmarks.safety_drill.bench import HORIZON, calm_path
from benchmarks.safety_drill.plant import CALM, PERIOD_S
from benchmarks.safety_drill.progress import Progress

ROOT = Path(__file__).resolve().parents[2]


def drilled(hash_seed: str) -> str:
    code = "import json\nfrom benchmarks.safety_drill.__main__ import drill\n"
    code += "print(json.dumps([drill(seed, 400) for seed in (3, 8)]))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_seed_comes_to_the_same_in_every_run() -> None:
    first, again = drilled("1"), drilled("2")
    assert first == again
    one, other = json.loads(first)
    assert one["modes"] != other["modes"] and one["writes"] > 100 and not one["violations"]


def test_a_calm_chunk_is_continued_by_one_from_where_it_leads() -> None:
    state = np.array([30.0, 0.1, -0.2])
    rows = calm_path(state)
    assert rows.shape == (HORIZON, 3)
    later = np.array([rows[9, 0], state[1] + rows[:10, 1].sum(), state[2] + PERIOD_S * rows[:10, 2].sum()])
    assert np.allclose(calm_path(later)[:14], rows[10:])
    speeds = np.abs(
        np.column_stack([np.diff(rows[:, 0], prepend=state[0]) / PERIOD_S, rows[:, 1] / PERIOD_S, rows[:, 2]])
    )
    assert (speeds <= CALM * 0.9 * (1 + 1e-9)).all() and (speeds.max(0) > 0).all()


def run(path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int, only: int) -> list[str]:
    """What was reckoned in a run that is interrupted after `only` pieces."""
    done: list[str] = []

    def piece(name: str, ticks: int) -> dict[str, object]:
        if len(done) >= only:
            raise KeyboardInterrupt
        done.append(name)
        return {"ticks": ticks, "strategy": "aligned", "limited": True, "writes": 1, "modes": {}, "violations": {},
                "examples": {}} if name != "m" else {"without it": "m", "seen after ticks": 1, "as": "x"}  # fmt: skip

    class Pool:
        """In this process, one after the other."""

        def __init__(self, cores: int) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        def shutdown(self, cancel_futures: bool) -> None: ...

        def submit(self, function: object, name: object, ticks: int) -> Call:
            return Call(str(name), ticks)

    class Call:
        def __init__(self, name: str, ticks: int) -> None:
            self._given = name, ticks

        def result(self) -> dict[str, object]:
            return piece(*self._given)

    monkeypatch.setattr(safety_drill, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(safety_drill, "as_completed", lambda asked: asked)
    monkeypatch.setattr(safety_drill, "MUTATIONS", {"m": None})
    monkeypatch.setattr(safety_drill, "commit", lambda: "abc")
    try:
        result = safety_drill.measure(False, seeds * 5000, path)
    except KeyboardInterrupt:
        return done
    assert result.rows[0]["ticks"] == seeds * 5000 and all(goal.holds for goal in result.goals)
    return done


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress"
    assert run(path, monkeypatch, 4, 2) == ["0", "1"]
    with path.open("a") as file:
        file.write('{"piece": "seed 2", "ti')
    assert run(path, monkeypatch, 4, 2) == ["2", "3"]
    assert run(path, monkeypatch, 4, 9) == ["m"]
    assert run(path, monkeypatch, 5, 9) == ["4"], "a longer run takes over what a shorter one did"


def test_what_another_commit_did_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    Progress(path, "abc").add("seed 0", {"ticks": 1})
    assert Progress(path, "abc").done == {"seed 0": {"ticks": 1}}
    with pytest.raises(SystemExit, match="another commit than abd"):
        Progress(path, "abd")
    with pytest.raises(SystemExit, match="needs a commit without changes"):
        Progress(path, "abc+")
