"""Any device with a few keys of the terminal beside it: take over, hold, stop, quit."""

from __future__ import annotations

import numpy as np

from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.teleop.terminal import Terminal
from wire.types import RobotSpec


class WithKeys:
    """Keeps the `TeleopDevice` protocol. Enter lets the device drive and takes that back, space holds until it is
    pressed again, e stops, q quits."""

    def __init__(self, device: TeleopDevice, terminal: str = "/dev/tty", armed: bool = False) -> None:
        """`armed`: the device may drive from the start."""
        self._device = device
        self._terminal = Terminal(terminal)
        self._armed = self._begins_armed = armed
        self._held = False

    @property
    def hint(self) -> str:
        """What the person can do, in a few words."""
        if not self._armed:
            return "enter: take over   e: stop   q: quit"
        own = getattr(self._device, "hint", "")
        hold = "held, space: go on" if self._held else "space: hold"
        return "   ".join(filter(None, (own, hold, "enter: hand back   e: stop   q: quit")))

    def connect(self, spec: RobotSpec) -> None:
        """See `TeleopDevice.connect`."""
        self._device.connect(spec)
        self._armed, self._held = self._begins_armed, False
        self._terminal.close()
        self._terminal.open()

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        """See `TeleopDevice.read`."""
        for key in self._terminal.pressed():
            if key == "q":
                return TeleopCommand(quit=True)
            if key == "e":
                self._armed = False
                return TeleopCommand(estop=True)
            if key == "enter":
                self._armed, self._held = not self._armed, False
            elif key == "space":
                self._held = not self._held
        command = self._device.read(pose, driving and self._armed and not self._held)
        if command.estop or command.quit or not command.engaged:
            return command
        if not self._armed:
            return TeleopCommand()
        return TeleopCommand(engaged=True) if self._held else command

    def close(self) -> None:
        """See `TeleopDevice.close`."""
        self._terminal.close()
        self._device.close()
