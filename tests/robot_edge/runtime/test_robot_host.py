"""Finding the hosts of this computer."""

from __future__ import annotations

from pathlib import Path

from robot_edge.runtime.lifecycle import run_directory
from robot_edge.runtime.robot_host import HOST, announce_host, announced_hosts


def test_hosts_that_announced_themselves_are_found_by_their_robots_directory(tmp_path: Path) -> None:
    home = tmp_path / "data" / "edges" / "robot-7"
    home.mkdir(parents=True)
    with run_directory(tmp_path) as first, run_directory(tmp_path) as second:
        assert announced_hosts(tmp_path) == []
        announce_host(first, home)
        announce_host(first, home)  # a host that was started again
        announce_host(second, home.with_name("robot-8"))
        assert dict(announced_hosts(tmp_path)) == {home: first / HOST, home.with_name("robot-8"): second / HOST}
    assert announced_hosts(tmp_path) == []
