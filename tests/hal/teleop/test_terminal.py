"""A device with the terminal's keys beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.teleop.pose import pose_of
from hal.teleop.terminal import WithKeys
from wire.types import RobotSpec

SPEC = fake_spec(FakeConfig())
UNKNOWN = pose_of(SPEC, None)


class Leader:
    """Always wants to drive."""

    hint = "follow me"

    def __init__(self) -> None:
        self.let_gos = 0
        self.open = False
        self.wants = TeleopCommand(engaged=True, action=np.float32([1, 0, 0, 0]))

    def connect(self, spec: RobotSpec) -> None:
        self.open = True

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        self.let_gos += not driving
        return self.wants

    def close(self) -> None:
        self.open = False


class Desk:
    def __init__(self, armed: bool = False) -> None:
        self.master, self.slave = os.openpty()
        self.leader = Leader()
        self.device = WithKeys(self.leader, os.ttyname(self.slave), armed)
        self.device.connect(SPEC)

    def type(self, keys: str) -> TeleopCommand:
        os.write(self.master, keys.encode())
        return self.device.read(UNKNOWN, True)

    def close(self) -> None:
        self.device.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()
    assert not desk.leader.open


def test_keys_say_how_an_episode_ended_whoever_drives(desk: Desk) -> None:
    assert desk.type("v").episode == ("success",)
    said = desk.type("\r\x1b[C")
    assert (said.engaged, said.episode, desk.type("").episode) == (True, ("next",), ())
    said = desk.type("bq")
    assert (said.quit, said.episode) == (True, ("rerecord",))


def test_enter_lets_it_drive_and_takes_that_back(desk: Desk) -> None:
    assert isinstance(desk.device, TeleopDevice)
    assert not desk.device.read(UNKNOWN, True).engaged
    assert desk.leader.let_gos == 1, "it may not begin where it left off"
    assert desk.type("\r").action is not None
    assert "follow me" in desk.device.hint
    assert desk.leader.let_gos == 1
    assert not desk.type("\r").engaged
    assert desk.leader.let_gos == 2


def test_space_holds_until_it_is_pressed_again(desk: Desk) -> None:
    desk.type("\r")
    held = desk.type(" ")
    assert held.engaged
    assert held.action is None
    assert desk.leader.let_gos == 1
    assert "held" in desk.device.hint
    assert desk.type(" ").action is not None


def test_stop_and_quit(desk: Desk) -> None:
    desk.type("\r")
    assert desk.type("e").estop
    assert not desk.device.read(UNKNOWN, True).engaged
    assert desk.type("q").quit


def test_what_the_device_says_goes_through(desk: Desk) -> None:
    desk.leader.wants = TeleopCommand(quit=True)
    assert desk.device.read(UNKNOWN, True).quit
    desk.leader.wants = TeleopCommand(estop=True)
    assert desk.device.read(UNKNOWN, True).estop


def test_armed_from_the_start() -> None:
    desk = Desk(armed=True)
    assert desk.device.read(UNKNOWN, True).action is not None
    desk.close()
