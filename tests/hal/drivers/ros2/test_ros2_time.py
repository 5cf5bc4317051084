"""Clocks that drift, stand still and jump; stamps that come late, twice and out of order."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from hal.drivers.fake import FakeConfig, fake_spec
from hal.drivers.ros2.config import ImageTopic, Ros2Config
from hal.drivers.ros2.synchronizer import ReceivedPictures
from hal.drivers.ros2.time import ClockMap, StampOrder, read_together
from wire.types import CameraSpec, Frame

S = 1_000_000_000
MS = 1_000_000


def test_ros_time_becomes_machine_time_and_follows_small_corrections() -> None:
    clock = ClockMap(simulated=False, jump_s=0.5)
    assert clock.note(1000 * S, 5 * S) == ""
    assert clock.to_machine(999 * S) == 4 * S
    # read noise does not move what a stamp is mapped to
    assert clock.note(1001 * S + 20_000, 6 * S) == ""
    assert clock.to_machine(999 * S) == 4 * S
    # the system clock was slewed by 2 ms
    assert clock.note(1002 * S + 2 * MS, 7 * S) == ""
    assert clock.to_machine(1002 * S + 2 * MS) == 7 * S


def test_a_jump_of_the_system_clock_is_named_once_in_either_direction() -> None:
    clock = ClockMap(simulated=False, jump_s=0.5)
    clock.note(1000 * S, 5 * S)
    assert clock.note(1003 * S, 6 * S) == "this computer's system clock jumped by +2.000 s"
    assert clock.note(1004 * S, 7 * S) == ""
    assert clock.to_machine(1004 * S) == 7 * S
    assert clock.note(904 * S, 8 * S) == "this computer's system clock jumped by -101.000 s"
    assert clock.note(905 * S, 9 * S) == ""


def test_a_simulation_may_be_slow_or_paused_but_its_clock_going_back_is_named() -> None:
    clock = ClockMap(simulated=True, jump_s=0.5)
    assert clock.note(10 * S, 100 * S) == ""
    assert clock.note(11 * S, 104 * S) == ""
    assert clock.note(11 * S, 120 * S) == ""
    assert clock.to_machine(11 * S) == 120 * S
    assert clock.note(0, 121 * S).startswith("the ROS clock (/clock) jumped by -")


def test_late_and_repeated_messages_are_dropped() -> None:
    order = StampOrder("states", jump_s=0.5)
    said = [order.note(stamp * MS) for stamp in (100, 110, 110, 105, 120)]
    assert said == [(True, ""), (True, ""), (False, ""), (False, ""), (True, "")]


def test_messages_that_were_held_up_are_no_jump_and_going_back_is_one() -> None:
    order = StampOrder("states", jump_s=0.5)
    assert [order.note(stamp * S) for stamp in (1, 9, 19)] == [(True, "")] * 3
    assert order.note(2 * S) == (True, "the stamps of 'states' jumped by -17.000 s")
    assert order.note(3 * S) == (True, "")


def test_a_sender_that_starts_again_a_little_behind_is_believed_after_a_few_messages() -> None:
    order = StampOrder("states", jump_s=0.5)
    order.note(1000 * MS)
    said = [order.note((800 + tick) * MS) for tick in range(6)]
    jump = "the stamps of 'states' jumped by -0.196 s"
    assert said == [(False, "")] * 4 + [(True, jump), (True, "")]
    # messages that overtake each other are not a sender that starts again
    order = StampOrder("states", jump_s=0.5)
    order.note(1000 * MS)
    assert {order.note((900 - tick) * MS) for tick in range(8)} == {(False, "")}


def test_a_state_gets_the_newest_picture_that_is_not_newer() -> None:
    front = CameraSpec("front", 1, 1, 1.0)
    pictures = ReceivedPictures(front, Ros2Config(fake_spec(FakeConfig())), "front", ImageTopic())
    frames = {stamp: Frame(stamp, np.full((1, 1, 3), stamp, np.uint8)) for stamp in (10, 20, 30, 40, 50)}
    assert pictures.at(10) is None
    assert not any(pictures.add(stamp, frames[stamp]) for stamp in (10, 30, 20))
    assert pictures.add(20, frames[10]) == ""
    assert pictures.at(29) == 20
    assert pictures.frames[20] is frames[20], "the first of a stamp stays"
    assert pictures.at(30) == 30
    assert pictures.at(9) is None
    pictures.add(40, frames[40])
    pictures.add(50, frames[50])
    assert pictures.at(19) is None, "the oldest makes room"
    pictures.clear_before(30)
    assert pictures.at(29) is None
    assert pictures.newest == 50


def test_two_clocks_are_read_as_of_one_moment() -> None:
    ros_ns, machine_ns = read_together(time.monotonic_ns)
    assert abs(ros_ns - machine_ns) < 50 * MS


def test_rclpy_is_imported_behind_one_door_and_only_when_it_is_opened() -> None:
    root = Path(__file__).resolve().parents[4]
    named = [str(path.relative_to(root)) for path in sorted((root / "hal").rglob("*.py")) if _imports_rclpy(path)]
    assert named == ["hal/drivers/ros2/wrapper.py"]
    code = "import sys, hal.drivers.ros2.robot, hal.drivers.ros2.sim_node; print('rclpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


def _imports_rclpy(path: Path) -> bool:
    return re.search(r"^\s*(import|from) rclpy\b", path.read_text(), re.MULTILINE) is not None
