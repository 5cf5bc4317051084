"""`./run test`: side by side, what failed once more alone, and what may not run beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import side_by_side
from tests.groups import GROUPS, group_of

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pathlib, pytest
SEEN = pathlib.Path(__file__).with_name("seen")

@pytest.mark.parametrize("name", ["c d", "a@b"])
def test_by_chance(name):
    first = not SEEN.exists()
    SEEN.touch()
    assert not (first and name == "c d")

@pytest.mark.slow
def test_always():
    assert False
"""


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n    browser: x\n")
    (place / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "tests.side_by_side", "-p", "no:zarr", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_XDIST_WORKER": ""}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_test_that_only_passes_alone_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "--quick", "-n1", "test_it.py", "-v")
    assert done.returncode == 0, done.stdout
    assert "passed alone, failed beside others: test_it.py::test_by_chance[c d]: a flaky test" in done.stdout
    assert done.stdout.count("a flaky test") == 1
    assert "1 passed" in done.stdout, "nothing else is run again"
    assert "test_always" not in done.stdout, "the slow one is left out"


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    done = run(tmp_path, "-n0")
    assert done.returncode == 1
    assert "a flaky test" not in done.stdout
    assert done.stdout.count("FAILED test_it.py::test_always") == 2


@pytest.mark.slow
def test_a_run_that_stopped_early_is_not_repeated(tmp_path: Path) -> None:
    done = run(tmp_path, "-n0", "-x")
    assert done.returncode == 1
    assert "once more" not in done.stdout
    (tmp_path / "conftest.py").write_text("1 / 0")
    assert run(tmp_path, "-n0").returncode not in (0, 1)


def test_bytecode_is_kept_even_where_none_may_lie_beside_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PYTHONDONTWRITEBYTECODE": "1"})
    side_by_side._compile_once()
    code = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    said = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", str(side_by_side.BYTECODE)]


def test_every_group_is_of_files_that_are_there() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert {group_of(f"{file}::test_x[a::b]") for file in files} >= set(GROUPS)
    assert group_of("tests/wire/test_codec.py::test_a") == "tests/wire/test_codec.py"
