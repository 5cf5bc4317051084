"""An SO-100 or SO-101 arm on a simulated bus: its calibration file, and configurations that open it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from hal.drivers.lerobot.spec import LeRobotConfig
from tests.hal.drivers.lerobot.feetech_bus import FeetechBus

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
RANGE = (1000, 3000)
PATIENCE_MS = 1500
TASKS = {"pick": "pick up the cube"}


def calibrated(bus: FeetechBus, directory: Path, name: str = "arm", offset: int = 0) -> dict[str, Any]:
    """Servos and file calibrated alike; the fields of lerobot's configuration for them."""
    directory.mkdir(parents=True, exist_ok=True)
    joints = {
        joint: {"id": n, "drive_mode": 0, "homing_offset": offset, "range_min": RANGE[0], "range_max": RANGE[1]}
        for n, joint in enumerate(JOINTS, 1)
    }
    (directory / f"{name}.json").write_text(json.dumps(joints))
    bus.calibrate(dict.fromkeys(range(1, 7), RANGE))
    return {"port": bus.port, "id": name, "calibration_dir": str(directory)}


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the simulated servos seconds to answer instead of 50 ms: the machine may be busy with something else."""
    feetech = importlib.import_module("lerobot.motors.feetech.feetech")
    usual = feetech.patch_setPacketTimeout

    def patient(self: Any, length: int) -> None:
        usual(self, length)
        self.packet_timeout += PATIENCE_MS

    monkeypatch.setattr(feetech, "patch_setPacketTimeout", patient)


def follower(fields: dict[str, Any], kind: str = "so101_follower", **options: Any) -> LeRobotConfig:
    return LeRobotConfig(kind, fields, TASKS, **options)
