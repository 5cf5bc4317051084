"""The run directory goes with its robot, also when the robot was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from robot_edge.runtime.lifecycle import run_directory
from wire.errors import StorageError

HOLDER = """
import sys, time
from pathlib import Path
from robot_edge.runtime.lifecycle import run_directory
with run_directory(Path(sys.argv[1])) as place:
    (place / "frames").write_bytes(bytes(1000))
    print(place, flush=True)
    time.sleep(60)
"""


def test_it_is_there_and_then_it_is_not(tmp_path: Path) -> None:
    with run_directory(tmp_path) as place, run_directory(tmp_path) as other:
        assert place.is_dir()
        assert place != other
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_robot_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "vla-fleet-of-others").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        with run_directory(tmp_path):
            assert (left / "frames").exists(), "its robot lives"
    finally:
        holder.kill()
        holder.wait(60)
        holder.stdout.close()  # type: ignore[union-attr]
    assert left.exists()
    with run_directory(tmp_path):
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["vla-fleet-of-others"]


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="making a run directory"), run_directory(tmp_path / "gone"):
        pass
