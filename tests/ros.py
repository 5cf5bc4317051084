"""ROS 2 for tests: its own domain, this machine only, logs in `tmp_path`; skipped with a reason where it is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

needs_ros = pytest.mark.skipif(
    importlib.util.find_spec("rclpy") is None, reason="rclpy is not installed; pip install 'vla-fleet[ros]'"
)

_turn = 0


def ros_environment(tmp_path: Path) -> dict[str, str]:
    """The variables for one test and the processes it starts: a domain that no other test of this machine uses now."""
    global _turn
    _turn += 1
    logs = tmp_path / "ros-logs"
    logs.mkdir(exist_ok=True)
    return {
        # 1 to 101: above, the ports of a domain lie in the range that the system gives to anybody
        "ROS_DOMAIN_ID": str((os.getpid() + 17 * _turn) % 101 + 1),
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "ROS_LOG_DIR": str(logs),
    }


@pytest.fixture
def ros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Sets `ros_environment` for this process; give `{**os.environ, **ros}` to children."""
    variables = ros_environment(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # What a test before this one may have left set would be kept as the user's own.
    for name in ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"):
        monkeypatch.delenv(name, raising=False)
    return variables


@contextlib.contextmanager
def sim_node(robot: str, config: Mapping[str, object] | None = None, *ros_arguments: str) -> Iterator[subprocess.Popen]:
    """`sim_robot_node` in a process of its own, in this process's ROS environment; ended at the end."""
    command = [sys.executable, "-m", "hal.drivers.ros2.sim_node", "--robot", robot]
    command += ["--robot-config", json.dumps(config)] if config else []
    command += ["--ros-args", *ros_arguments] if ros_arguments else []
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


def wait_until(done: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Fails the test when `done` is not true in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
