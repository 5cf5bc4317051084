"""Where whoever stops a robot on its own computer finds its host, and where the host keeps its stops."""

from __future__ import annotations

import contextlib
from pathlib import Path

from robot_edge.runtime.lifecycle import run_directories
from wire.errors import storage_errors

HOST = "robot"
"""the host's socket in the run directory; the robot's frames lie beside it"""
STOP_FILE = "estop"
"""what stops a robot, in its own directory; one of an older version is empty, which is a stop too"""
_HOME = "home"


def announce_host(run_directory: Path, home: Path) -> None:
    """The robot whose own directory is `home` has its host in `run_directory`. Raises `StorageError`."""
    link = run_directory / _HOME
    with storage_errors("saying whose host this is", link), contextlib.suppress(FileExistsError):
        link.symlink_to(home.resolve())


def announced_hosts(parent: Path | None = None) -> list[tuple[Path, Path]]:
    """(the robot's own directory, whose name is the robot's; the host's socket) of each on this computer.

    Those of robots that were killed may be among them.
    """
    links = (directory / _HOME for directory in run_directories(parent))
    return [(link.readlink(), link.with_name(HOST)) for link in links if link.is_symlink()]
