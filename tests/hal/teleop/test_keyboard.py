"""The keyboard, typed at through a real pseudo-terminal."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.teleop.keyboard import Keyboard, KeyboardConfig
from hal.teleop.pose import pose_of
from tests.samples import spec as sample_spec
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError
from wire.types import Dimension, RobotSpec

SPEC = fake_spec(FakeConfig())
UNKNOWN = pose_of(SPEC, None)


class Desk:
    """A person at a terminal."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.clock = ManualClock(10**9)
        self.pose = UNKNOWN
        self.keyboard = Keyboard(KeyboardConfig(terminal=os.ttyname(self.slave)), self.clock)

    def type(self, text: str) -> TeleopCommand:
        os.write(self.master, text.encode())
        # The line discipline hands bytes over in order; they are there when select says so.
        return self.keyboard.read(self.pose, True)

    def later(self, seconds: float) -> TeleopCommand:
        self.clock.advance(round(seconds * 1e9))
        return self.keyboard.read(self.pose, True)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.keyboard.connect(SPEC)
    yield desk
    desk.keyboard.close()
    os.close(desk.slave)
    if desk.master >= 0:
        os.close(desk.master)


def action(intent: TeleopCommand) -> list[float]:
    assert intent.action is not None
    assert intent.action.dtype == np.float32
    return [round(float(value), 4) for value in intent.action]


def test_it_is_a_device_that_drives_nothing_until_enter(desk: Desk) -> None:
    assert isinstance(desk.keyboard, TeleopDevice)
    assert not desk.type("ddww").engaged
    assert desk.type("\r").engaged
    assert not desk.type("\r").engaged


def test_a_tap_moves_for_a_moment_and_a_held_key_moves_on(desk: Desk) -> None:
    desk.type("\r")
    assert action(desk.type("d")) == [0.25, 0, 0, 0]
    assert action(desk.later(0.09)) == [0.25, 0, 0, 0]
    assert desk.later(0.02).action is None, "a tap is over"
    desk.later(0.3)
    for _ in range(20):  # the terminal repeats what is held
        assert action(desk.type("d")) == [0.25, 0, 0, 0]
        assert action(desk.later(0.033)) == [0.25, 0, 0, 0]
    assert desk.later(0.16).action is None


def test_keys_together_opposite_keys_and_arrows(desk: Desk) -> None:
    desk.type("\r")
    assert action(desk.type("dw")) == [0.25, 0.25, 0, 0]
    assert action(desk.type("s")) == [0.25, 0, 0, 0]
    desk.later(1.0)
    assert action(desk.type("\x1b[A\x1bOBa")) == [-0.25, 0, 0, 0]


def test_an_arrow_may_come_in_two_parts(desk: Desk) -> None:
    desk.type("\r")
    assert desk.type("\x1b[").action is None
    assert action(desk.type("A")) == [0, 0.25, 0, 0]


def test_keys_say_how_an_episode_ended_whoever_drives(desk: Desk) -> None:
    said = desk.type("v")
    assert (said.engaged, said.episode) == (False, ("success",))
    desk.type("\r")
    said = desk.type("dxczbn12\x1b[C\x1b[D")
    words = ("failure", "end", "discard", "rerecord", "scene_ready", "recover", "correct", "next", "rerecord")
    assert said.episode == words
    assert action(said) == [0.25, 0, 0, 0]
    assert desk.later(0.01).episode == (), "each once"


def test_esc_quits_once_it_is_no_arrow(desk: Desk) -> None:
    desk.type("\r")
    assert not desk.type("\x1b").quit
    assert not desk.later(0.2).quit, "the rest of an arrow may be on its way"
    assert desk.later(0.1).quit


def test_speed_keys(desk: Desk) -> None:
    desk.type("\r")
    assert action(desk.type("++d")) == [1.0, 0, 0, 0]
    assert action(desk.type("---")) == [0.1, 0, 0, 0]
    assert "speed 10%" in desk.keyboard.hint


def test_space_holds_at_once_and_enter_hands_back(desk: Desk) -> None:
    desk.type("\r")
    assert action(desk.type("d"))
    held = desk.type(" ")
    assert held.engaged
    assert held.action is None
    assert not desk.type("d\r").engaged


def test_a_gripper_is_set_and_stays(desk: Desk) -> None:
    desk.type("\r")
    assert action(desk.type("t"))[3] == 1
    desk.later(1.0)
    assert action(desk.type("d")) == [0.25, 0, 0, 1]
    desk.later(1.0)
    assert action(desk.type("g"))[3] == -1


def test_stop_and_quit_go_before_everything(desk: Desk) -> None:
    desk.type("\r")
    stopped = desk.type("de")
    assert stopped.estop
    assert not stopped.engaged
    assert not desk.later(0.01).engaged
    assert desk.type("q").quit


def test_an_absolute_robot_moves_from_where_it_is(desk: Desk) -> None:
    pan = Dimension("pan", "deg", -100, 100)
    desk.keyboard.connect(RobotSpec("arm", (pan,), (pan,), (), 50))
    desk.pose = np.float32([30])
    desk.type("\r")
    desk.later(0.05)
    desk.type("d")
    assert 30 < action(desk.later(0.05))[0] < 31


def test_a_quicker_arm_and_a_slower_terminal(desk: Desk) -> None:
    pan = Dimension("pan", "deg", -100, 100)
    config = KeyboardConfig(range_s=1.0, repeat_s=0.4, terminal=os.ttyname(desk.slave))
    quick = Keyboard(config, desk.clock)
    quick.connect(RobotSpec("arm", (pan,), (pan,), (), 50))
    os.write(desk.master, b"\rd")
    quick.read(np.float32([0]), True)
    desk.clock.advance(50_000_000)
    assert action(quick.read(np.float32([0]), True)) == pytest.approx([0.25 * 200 * 0.05])
    os.write(desk.master, b"d")
    quick.read(np.float32([0]), True)
    desk.clock.advance(390_000_000)
    assert quick.read(np.float32([0]), True).action is not None
    desk.clock.advance(20_000_000)
    assert quick.read(np.float32([0]), True).action is None
    quick.close()


def test_the_terminal_is_left_as_it_was(desk: Desk) -> None:
    desk.keyboard.close()
    before = termios.tcgetattr(desk.slave)
    desk.keyboard.connect(SPEC)
    assert not termios.tcgetattr(desk.slave)[3] & (termios.ECHO | termios.ICANON)
    assert termios.tcgetattr(desk.slave)[3] & termios.ISIG, "Ctrl-C still interrupts"
    desk.keyboard.close()
    desk.keyboard.close()
    assert termios.tcgetattr(desk.slave) == before


def test_a_terminal_that_goes_is_named(desk: Desk) -> None:
    os.close(desk.master)
    desk.master = -1
    with pytest.raises(RobotError, match=r"terminal /dev/pts/.* (was closed|is gone)"):
        desk.keyboard.read(UNKNOWN, True)


def test_what_is_no_terminal_is_named(tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RobotError, match=r"keys cannot be read from .*over ssh: ssh -t"):
        Keyboard(KeyboardConfig(terminal=str(file))).connect(SPEC)


def test_keys_of_ones_own(desk: Desk) -> None:
    own = Keyboard(KeyboardConfig(keys={"p": "+z", "up": "-grip"}, terminal=os.ttyname(desk.slave)), desk.clock)
    with pytest.raises(ConfigError, match=r"the key 'p' moves 'z'.*Its actions: dx, dy, dz, grip"):
        own.connect(sample_spec())
    own = Keyboard(KeyboardConfig(keys={"p": "+dz"}, terminal=os.ttyname(desk.slave)), desk.clock)
    own.connect(sample_spec())
    os.write(desk.master, b"\rp")
    assert action(own.read(UNKNOWN, True)) == [0, 0, 0.25, 0]
    own.close()


def test_more_dimensions_than_keys_are_named() -> None:
    many = tuple(Dimension(f"joint_{n}", "rad", -1, 1) for n in range(10))
    with pytest.raises(ConfigError, match=r"no keys of its own for joint_8, joint_9"):
        Keyboard().connect(RobotSpec("two-arms", many, many, (), 20))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keys": {"e": "+dx"}}, "the key 'e' is 'emergency stop'"),
        ({"keys": {"left": "+dx"}}, "the key 'left' is 'rerecord of an episode'"),
        ({"keys": {"ctrl": "+dx"}}, "no single character"),
        ({"speeds": (0.0, 1.0)}, "speeds must be in"),
        ({"speed": 9}, "no index"),
        ({"tap_s": 0.0}, "must be positive"),
        ({"repeat_s": 0.0}, "must be positive"),
    ],
)
def test_a_wrong_configuration_is_named(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeyboardConfig(**wrong)
