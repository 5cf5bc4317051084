"""ROS 2 for tests: its own domain, this machine only, logs in `tmp_path`; skipped with a reason where it is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

needs_ros = pytest.mark.skipif(
    importlib.util.find_spec("rclpy") is None, reason="rclpy is not installed; pip install 'vla-fleet[ros]'"
)

_DOMAINS = 101
"""1 to 101: above, the ports of a domain lie in the range that the system gives to anybody"""
_claims: dict[str, socket.socket] = {}
"""by domain; each is this process's until it is closed"""
_turn = 0


def _claim_domain() -> str:
    """A domain that no other process of this machine has claimed, not the one of a moment ago if that can be.

    Tests that run side by side heard each other's robots when they drew the same one.
    """
    global _turn
    for _ in range(_DOMAINS):
        _turn += 1
        domain = str((os.getpid() + 17 * _turn) % _DOMAINS + 1)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0vla-fleet-test-ros-domain-{domain}")
        except OSError:
            claim.close()
            continue
        _claims[domain] = claim
        return domain
    raise AssertionError("every ROS 2 domain of this machine is claimed by a test")


def ros_environment(tmp_path: Path) -> dict[str, str]:
    """The variables for one test and the processes it starts: a domain that no other test of this machine uses now."""
    logs = tmp_path / "ros-logs"
    logs.mkdir(exist_ok=True)
    return {
        "ROS_DOMAIN_ID": _claim_domain(),
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "ROS_LOG_DIR": str(logs),
    }


@pytest.fixture
def ros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, str]]:
    """Sets `ros_environment` for this process; give `{**os.environ, **ros}` to children."""
    variables = ros_environment(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # What a test before this one may have left set would be kept as the user's own.
    for name in ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield variables
    _claims.pop(variables["ROS_DOMAIN_ID"]).close()


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
