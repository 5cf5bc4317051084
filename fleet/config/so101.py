"""The SO-101 arm (TheRobotStudio's SO-ARM100 project): six STS3215 servos, counted in degrees, the gripper 0 to 100."""

from __future__ import annotations

from pathlib import Path

from fleet.config.arm import ArmModel, JointModel, arm_recipe
from fleet.config.recipe import Recipe

# A servo turns at 270 deg/s (12 V) to 310 deg/s (7.4 V) without load, by its data sheet (0.22 and 0.19 s for 60 deg).
# A third of that is a fast person's pace, and leaves torque for gravity and load. It is reached in a quarter of a
# second. An emergency stop has each servo stay where it is measured, which it does as hard as it can; twice the
# deceleration is for when its bus does not take that and the host brakes instead.
_DEG_S, _DEG_S2, _STOP_DEG_S2 = 90.0, 360.0, 720.0
# The gripper opens by 110 degrees from 0 to 100.
_GRIPPER = 100 / 110


def _joint(name: str, low: float, high: float, rest: float) -> JointModel:
    return JointModel(name, low, high, _DEG_S, _DEG_S2, _STOP_DEG_S2, rest)


SO101 = ArmModel(
    follower="so101_follower",
    leader="so101_leader",
    joints=(
        # Ranges of the project's URDF (so101_new_calib: zero in the middle of each range), rounded outwards to 5
        # degrees; a calibration that reaches less narrows them. Rest: folded back, as the arm lies without torque.
        _joint("shoulder_pan", -110, 110, 0),
        _joint("shoulder_lift", -100, 100, -95),
        _joint("elbow_flex", -100, 100, 90),
        _joint("wrist_flex", -95, 95, 70),
        _joint("wrist_roll", -165, 165, 0),
        JointModel("gripper", 0, 100, _DEG_S * _GRIPPER, _DEG_S2 * _GRIPPER, _STOP_DEG_S2 * _GRIPPER, 5, "%"),
    ),
    modules=("lerobot.robots.so_follower", "lerobot.motors.feetech", "hal.drivers.lerobot.robot"),
)


def so101(seed: int = 0, config: Path | None = None) -> Recipe:
    """An SO-101 arm with a leader arm and cameras, taught by people; its bench stands in --config FILE.toml."""
    return arm_recipe("so101", SO101, config)
