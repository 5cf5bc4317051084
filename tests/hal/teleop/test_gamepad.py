"""A gamepad: the bytes of Linux' joystick interface through a FIFO."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.teleop.gamepad import AXIS, BUTTON, EVENT, INITIAL, Gamepad, GamepadConfig
from hal.teleop.pose import pose_of
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError
from wire.types import Dimension, RobotSpec

SPEC = fake_spec(FakeConfig())
UNKNOWN = pose_of(SPEC, None)
RB, START, B, BACK, A, Y = 5, 7, 1, 6, 0, 3


class Pad:
    def __init__(self, path: Path, **options: object) -> None:
        os.mkfifo(path)
        # Both ends, or a FIFO without a writer would look like a pad that was unplugged.
        self.end = os.open(path, os.O_RDWR)
        self.gamepad = Gamepad(GamepadConfig(device=str(path), **options), ManualClock(10**9))  # type: ignore[arg-type]

    def event(self, kind: int, number: int, value: int) -> TeleopCommand:
        os.write(self.end, EVENT.pack(0, value, kind, number))
        return self.gamepad.read(UNKNOWN, True)

    def press(self, number: int) -> TeleopCommand:
        return self.event(BUTTON, number, 1)

    def release(self, number: int) -> TeleopCommand:
        return self.event(BUTTON, number, 0)

    def stick(self, number: int, share: float) -> TeleopCommand:
        return self.event(AXIS, number, round(share * 32767))


@pytest.fixture
def pad(tmp_path: Path) -> Iterator[Pad]:
    pad = Pad(tmp_path / "js0")
    pad.gamepad.connect(SPEC)
    yield pad
    pad.gamepad.close()
    if pad.end >= 0:
        os.close(pad.end)


def action(intent: TeleopCommand) -> list[float]:
    assert intent.action is not None
    return [round(float(value), 3) for value in intent.action]


def test_nothing_moves_without_the_dead_man_button(pad: Pad) -> None:
    assert isinstance(pad.gamepad, TeleopDevice)
    assert not pad.stick(0, 1.0).engaged
    assert action(pad.press(RB)) == [0.5, 0, 0, 0]
    released = pad.release(RB)
    assert released.engaged, "it holds; the policy does not go on by itself"
    assert released.action is None
    assert action(pad.press(RB)) == [0.5, 0, 0, 0]


def test_sticks_have_a_dead_zone_and_their_own_directions(pad: Pad) -> None:
    pad.press(RB)
    assert pad.stick(0, 0.11).action is None
    assert action(pad.stick(0, 0.56)) == [0.25, 0, 0, 0]
    pad.stick(0, 0.0)
    assert action(pad.stick(1, -1.0)) == [0, 0.5, 0, 0], "up is forward"
    assert action(pad.event(AXIS, 1, -32768)) == [0, 0.5, 0, 0]
    pad.stick(1, 0.0)
    assert action(pad.stick(4, 1.0)) == [0, 0, -0.5, 0]


def test_buttons_work_the_gripper(pad: Pad) -> None:
    pad.press(RB)
    assert action(pad.press(A))[3] == 1
    pad.release(A)
    assert action(pad.stick(0, 1.0)) == [0.5, 0, 0, 1]
    assert action(pad.press(Y))[3] == -1


def test_start_hands_back_until_the_dead_man_is_pressed_anew(pad: Pad) -> None:
    pad.press(RB)
    assert not pad.press(START).engaged
    assert not pad.stick(0, 1.0).engaged
    pad.release(RB)
    assert pad.press(RB).engaged


def test_stop_and_quit(pad: Pad) -> None:
    pad.press(RB)
    stopped = pad.press(B)
    assert stopped.estop
    assert not stopped.engaged
    assert not pad.stick(0, 1.0).engaged
    assert pad.press(BACK).quit


def test_what_is_down_when_it_is_plugged_in_does_not_count(pad: Pad) -> None:
    assert not pad.event(BUTTON | INITIAL, RB, 1).engaged
    assert not pad.event(BUTTON | INITIAL, B, 1).estop
    pad.event(AXIS | INITIAL, 0, 32767)
    pad.release(RB)
    assert action(pad.press(RB)) == [0.5, 0, 0, 0], "a stick's place does"


def test_events_may_come_in_pieces(pad: Pad) -> None:
    pad.press(RB)
    data = EVENT.pack(0, 32767, AXIS, 0) + EVENT.pack(0, 32767, AXIS, 4)
    os.write(pad.end, data[:11])
    assert action(pad.gamepad.read(UNKNOWN, True)) == [0.5, 0, 0, 0]
    os.write(pad.end, data[11:])
    assert action(pad.gamepad.read(UNKNOWN, True)) == [0.5, 0, -0.5, 0]


def test_an_unplugged_pad_is_named(pad: Pad) -> None:
    pad.press(RB)
    os.close(pad.end)
    pad.end = -1
    with pytest.raises(RobotError, match="unplugged"):
        pad.gamepad.read(UNKNOWN, True)


def test_no_pad_is_named(tmp_path: Path) -> None:
    with pytest.raises(RobotError, match=r"no gamepad at .*js9: No such file.*modprobe joydev"):
        Gamepad(GamepadConfig(device=str(tmp_path / "js9"))).connect(SPEC)


def test_sticks_of_ones_own_without_a_dead_man(tmp_path: Path) -> None:
    pad = Pad(tmp_path / "js1", axes={"2": "-move_z"}, buttons={"9": "+move_x"}, dead_man=-1, speed=1.0)
    pad.gamepad.connect(SPEC)
    assert action(pad.stick(2, 1.0)) == [0, 0, -1, 0]
    assert action(pad.press(9)) == [1, 0, -1, 0]
    pad.gamepad.close()
    os.close(pad.end)


def test_more_dimensions_than_sticks_are_named() -> None:
    many = tuple(Dimension(f"joint_{n}", "rad", -1, 1) for n in range(8))
    with pytest.raises(ConfigError, match=r"no sticks for joint_6, joint_7"):
        Gamepad().connect(RobotSpec("arm", many, many, (), 20))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"axes": {"left": "+x"}}, "axes has 'left'"),
        ({"buttons": {"5": "+x"}}, "button 5 is dead-man"),
        ({"deadzone": 1.0}, "deadzone"),
        ({"range_s": 0.0}, "range_s positive"),
    ],
)
def test_a_wrong_configuration_is_named(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GamepadConfig(**wrong)
