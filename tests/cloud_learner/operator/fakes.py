"""A fleet to look at: specs, statuses and pictures for the tests of the operator page."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from hal.resource.capabilities import capabilities_of
from wire.messages.fleet import JobRequest, JobState, RobotState, VersionStatus
from wire.messages.gateway import EdgeStatus
from wire.types import CameraSpec, CommandType, Dimension, Lease, PolicyVersion, RobotSpec


def arm_spec(meaning: CommandType = CommandType.delta) -> RobotSpec:
    """Three motion dimensions and a gripper, as the simulated arms of the fleet have them."""
    move = tuple(Dimension(f"d{axis}", "cm/step", -1.0, 1.0, meaning) for axis in "xyz")
    return RobotSpec(
        embodiment="arm",
        state=(*(Dimension(axis, "m", -1.0, 1.0) for axis in "xyz"), Dimension("gripper", "opening", 0.0, 1.0)),
        action=(*move, Dimension("gripper", "effort", -1.0, 1.0)),
        cameras=(CameraSpec("front", 64, 64, 20.0),),
        control_hz=80.0,
    )


def edge_status(robot: str, **changes: object) -> EdgeStatus:
    """A robot that runs its policy, with `changes`."""
    fields: dict = {
        "robot": robot,
        "time_ns": 0,
        "mode": "policy",
        "reason": "",
        "task": "drawer-open",
        "episode": "e1",
        "tick": 7,
        "state": np.array([0.0, 0.6, 0.2, 1.0], np.float32),
        "version": 3,
        "ticks": 1000,
        "missed_ticks": 5,
        "late_p99_s": 0.002,
        "starved_ticks": 0,
        "episodes": 12,
        "interventions": 2,
        "steps_recorded": 900,
        "spooled": 0,
    }
    return EdgeStatus(**(fields | changes))


def robot_state(robot: str, holder: str = "", purpose: str = "rollout", **changes: object) -> RobotState:
    """A ready robot as the scheduler sees it, held by `holder`, with `changes`."""
    lease = Lease(robot, holder, purpose, {"rollout": 10, "maintenance": 50}.get(purpose, 80), 10**10, 3, 10**9)
    fields: dict = {
        "name": robot,
        "capabilities": capabilities_of(arm_spec(), (), "lab"),
        "health": "ready",
        "lease": lease if holder else None,
        "job": holder if purpose == "rollout" else "",
        "load": 0.5,
    }
    return RobotState(**(fields | changes))


def job_state(job: str, **changes: object) -> JobState:
    """A running evaluation of two tasks, with `changes`."""
    request = JobRequest(job, "evaluation", ("door-open", "drawer-open"), 1, 5, version=7)
    return JobState(**({"request": request, "phase": "running", "episodes": 4, "successes": 3} | changes))


def version_status(number: int, **changes: object) -> VersionStatus:
    """A candidate, with `changes`."""
    version = PolicyVersion(number, "ab" * 32, 10, number - 1, 100 * number, 0, 0)
    return VersionStatus(**({"version": version, "state": "candidate"} | changes))


def picture(shade: int) -> bytes:
    """A JPEG of one grey, 192x192."""
    out = io.BytesIO()
    Image.new("RGB", (192, 192), (shade, shade, shade)).save(out, "JPEG")
    return out.getvalue()
