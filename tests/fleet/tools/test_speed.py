"""`vla-fleet speed`: a robot of this computer, slowed by its host."""

from __future__ import annotations

from pathlib import Path

from hal.safety.stop_latch import StopLatch
from robot_edge.runtime.robot_host import STOP_FILE
from tests.command_line import vla_fleet
from tests.fleet.tools.test_stop import Computer, computer  # noqa: F401
from tests.hal.driver_host.test_stop_line import SLOWABLE


def speed(root: Path, *words: str) -> tuple[int, str]:
    done = vla_fleet("speed", *words, cwd=root)
    return done.returncode, done.stdout + done.stderr


def test_a_robot_that_runs_is_slowed_and_let_go(computer: Computer) -> None:  # noqa: F811
    robot = computer.edge("left", limits=SLOWABLE)
    robot.limit_speed("ros", 0.5)
    assert speed(computer.root, "left") == (0, "left: 0.5 of its velocity limits (0.5 by ros)\n")
    assert speed(computer.root, "left", "0.25")[1] == "left: 0.25 of its velocity limits (0.5 by ros, 0.25 by cli)\n"
    assert robot.stop_state().speed_limit == 0.25
    assert speed(computer.root, "left", "1")[1] == "left: 0.5 of its velocity limits (0.5 by ros)\n"
    assert robot.stop_state().speed_limits == {"ros": 0.5}


def test_what_cannot_be_is_refused(computer: Computer) -> None:  # noqa: F811
    robot = computer.edge("left")
    status, said = speed(computer.root, "left", "0.5")
    assert status == 1
    assert "no velocity limit of gripper_effort" in said
    for wrong in ("2", "0"):
        status, said = speed(computer.root, "left", wrong)
        assert status == 1
        assert "above 0 up to 1" in said
    status, said = speed(computer.root, "lft", "0.5")
    assert status == 1
    assert "Did you mean 'left'?" in said
    assert robot.stop_state().speed_limits == {}


def test_one_that_does_not_run_starts_slow(computer: Computer) -> None:  # noqa: F811
    home = computer.home("left")
    assert speed(computer.root, "left", "0.25")[1].endswith(
        "0.25 of its velocity limits (0.25 by cli) when it starts\n"
    )
    assert StopLatch(home / STOP_FILE).state.speed_limit == 0.25
    assert speed(computer.root, "left")[1] == "left: 0.25 of its velocity limits (0.25 by cli)\n"
