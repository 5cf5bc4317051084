"""How much memory may still be taken: the system's word, or less where a control group has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from robot_edge.runtime.memory import available_memory


def system(root: Path, available_kb: int, group: str, **limits: tuple[str, int, int]) -> Path:
    """The files of a system whose groups have (most, current, cached) bytes, by directory with - for /."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\nBuffers: 1 kB\n")
    (root / "proc/self/cgroup").write_text(f"4:memory:/old\n0::{group}\n")
    for name, (most, current, cached) in limits.items():
        directory = root / "sys/fs/cgroup" / name.removeprefix("top").replace("_", "/").strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{most}\n")
        (directory / "memory.current").write_text(f"{current}\n")
        stat = f"anon 5\nfile {cached}\ninactive_file {cached - 100}\nactive_file 100\nslab_reclaimable 0\n"
        (directory / "memory.stat").write_text(stat)
    return root


@pytest.mark.parametrize(
    ("available_kb", "groups", "size", "where"),
    [
        (8000, {}, 8_192_000, "/proc/meminfo"),
        (8000, {"top_robot_edge": ("max", 5, 100)}, 8_192_000, "/proc/meminfo"),
        # what files take is given back
        (8000, {"top_robot_edge": ("1000000", 900_000, 300_000)}, 400_000, "/sys/fs/cgroup/robot/edge/memory.max"),
        (300, {"top_robot_edge": ("1000000", 900_000, 300_000)}, 307_200, "/proc/meminfo"),
        # a group above has less; the innermost one may be missing, as in a container
        (
            8000,
            {"top_robot_edge": ("1000000", 0, 100), "top_robot": ("800000", 100, 100), "top": ("max", 1, 100)},
            800_000,
            "/sys/fs/cgroup/robot/memory.max",
        ),
        (8000, {"top": ("500000", 100, 100)}, 500_000, "/sys/fs/cgroup/memory.max"),
        (8000, {"top": ("500000", 600_000, 100)}, 0, "/sys/fs/cgroup/memory.max"),
    ],
)
def test_the_least_of_what_the_system_and_its_groups_have(
    tmp_path: Path, available_kb: int, groups: dict[str, tuple[str, int, int]], size: int, where: str
) -> None:
    found = available_memory(system(tmp_path, available_kb, "/robot/edge", **groups))
    assert (found.size_bytes, found.where) == (size, f"{tmp_path}{where}")


def test_this_computer_has_some() -> None:
    found = available_memory()
    assert 0 < found.size_bytes < 2**50 and Path(found.where).exists()


def test_a_system_that_says_nothing_has_what_it_has_in_all(tmp_path: Path) -> None:
    assert available_memory(tmp_path).size_bytes > 2**27
