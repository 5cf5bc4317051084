"""A fleet to look at: specs, statuses and pictures for the tests of the operator page."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from wire.messages import EdgeStatus
from wire.types import CameraSpec, Dimension, Meaning, RobotSpec


def arm_spec(meaning: Meaning = Meaning.delta) -> RobotSpec:
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


def picture(shade: int) -> bytes:
    """A JPEG of one grey, 192x192."""
    out = io.BytesIO()
    Image.new("RGB", (192, 192), (shade, shade, shade)).save(out, "JPEG")
    return out.getvalue()
