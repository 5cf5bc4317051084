"""For `plugins`: gives the simulated servos seconds to answer instead of 50 ms, in the process that talks to them."""

from __future__ import annotations

from typing import Any

from lerobot.motors.feetech import feetech

PATIENCE_MS = 1500
_usual = feetech.patch_setPacketTimeout


def _patient(self: Any, length: int) -> None:
    _usual(self, length)
    self.packet_timeout += PATIENCE_MS


feetech.patch_setPacketTimeout = _patient
