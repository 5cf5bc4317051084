"""From pushes to actions, and what must not come of them."""

from __future__ import annotations

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from hal.teleop.pose import Jog, check_rest, neutral_action, pose_of, read_binding
from robot_edge.control.operator_override import OperatorOverride
from tests.people import Person
from wire.clock import ManualClock
from wire.errors import ConfigError
from wire.types import CommandType, Dimension, RobotSpec

ARM = RobotSpec(
    "arm",
    state=(Dimension("pan", "deg", -100, 100), Dimension("lift", "deg", -100, 100)),
    action=(
        Dimension("pan", "deg", -100, 100),
        Dimension("lift", "deg", 0, 100),
        Dimension("speed", "m/s", -2, 1, CommandType.velocity),
        Dimension("grip", "1", -1, 1),
    ),
    cameras=(),
    control_hz=50,
)


def push(**pushes: float) -> np.ndarray:
    return np.array([pushes.get(d.name, 0.0) for d in ARM.action])


def test_a_pose_says_what_is_measured_and_what_is_not() -> None:
    pose = pose_of(ARM, np.float32([20, -30]))
    assert pose[:3] == pytest.approx([20, 0, 0]), "within the limits of the action"
    assert np.isnan(pose[3])


def test_a_push_moves_from_the_pose_at_the_speed_it_should() -> None:
    clock = ManualClock()
    jog = Jog(ARM, clock, range_s=4.0)
    jog.follow(np.float32([20, 50, 0, np.nan]), True)
    for _ in range(10):
        clock.advance(50_000_000)
        jog.follow(jog.action(push(pan=1), 0.5), True)
    assert jog.action(push(), 0.5) == pytest.approx([20 + 200 / 4 * 0.5 * 0.5, 50, 0, 0], abs=1e-3)


def test_a_pause_is_no_push() -> None:
    clock = ManualClock()
    jog = Jog(ARM, clock, range_s=4.0)
    jog.follow(np.float32([0, 50, 0, np.nan]), True)
    clock.advance(60_000_000_000)
    assert jog.action(push(pan=1), 1.0)[0] <= 200 / 4 * 0.1 + 1e-3


def test_a_target_does_not_follow_noise_or_sagging() -> None:
    clock = ManualClock()
    jog = Jog(ARM, clock, range_s=4.0)
    jog.follow(np.float32([20, 50, 0, np.nan]), True)
    first = jog.action(push(pan=1), 1.0)
    jog.follow(np.float32([20.4, 48.9, 0, np.nan]), False)
    assert jog.action(push(), 1.0) == pytest.approx(first)
    jog.follow(np.float32([60, 20, 0, np.nan]), False)
    assert jog.action(push(), 1.0)[:2] == pytest.approx([60, 20]), "somebody else has moved it meanwhile"


def test_a_blocked_joint_keeps_its_target_near() -> None:
    clock = ManualClock()
    jog = Jog(ARM, clock, range_s=1.0)
    jog.follow(np.float32([0, 50, 0, np.nan]), True)
    for _ in range(100):
        clock.advance(50_000_000)
        action = jog.action(push(pan=1), 1.0)
    assert action[0] == pytest.approx(0.2 * 200)


def test_a_rate_is_pushed_to_its_own_limit_and_rests_at_zero() -> None:
    jog = Jog(ARM, ManualClock(), range_s=4.0)
    assert jog.action(push(speed=-1), 0.5)[2] == -1.0
    assert jog.action(push(speed=1), 0.5)[2] == 0.5
    assert jog.action(push(), 0.5)[2] == 0.0


def test_what_is_not_measured_is_set_and_stays() -> None:
    jog = Jog(ARM, ManualClock(), range_s=4.0)
    assert jog.action(push(grip=1), 0.1)[3] == 1
    assert jog.action(push(), 0.1)[3] == 1
    assert jog.action(push(grip=-1), 0.1)[3] == -1


def test_a_robot_does_what_the_second_command_says_and_keeps_the_rest() -> None:
    """The edge's own rules for a person's commands, after the first one that asks for nothing."""
    clock = ManualClock(10**9)
    human = OperatorOverride(ARM, clock)
    person = Person(clock)
    human.handle_command(person("take_over"))
    executed = np.float32([20, 50, 0, -1])
    pose = np.float32([20.5, 49, 0, np.nan])
    action = np.float32([60, 49.5, 0, 1])
    first = neutral_action(ARM, pose, action)
    assert np.abs(first - action).max() <= 0.001 * 200 + 1e-3, "harmless if it were executed"
    human.handle_command(person("command", *first))
    assert human.action(executed) is None
    human.handle_command(person("command", *action))
    assert human.action(executed) == pytest.approx([60, 50, 0, 1]), "lift was there: it stays as it was executed"
    human.handle_command(person("command"))
    assert human.action(executed) is None, "a released key holds"


def test_neutral_stays_within_the_limits() -> None:
    for action in (ARM.action_low(), ARM.action_high()):
        first = neutral_action(ARM, np.full(4, np.nan, np.float32), action)
        assert (first >= ARM.action_low()).all()
        assert (first <= ARM.action_high()).all()
        assert (first[[0, 1, 3]] != action[[0, 1, 3]]).all()


def test_bindings_name_what_is_wrong() -> None:
    spec = fake_spec(FakeConfig())
    assert read_binding(spec, "-move_y", "key 's'") == (1, -1.0)
    assert read_binding(spec, "gripper_effort", "key 'g'") == (3, 1.0)
    with pytest.raises(ConfigError, match=r"key 's' moves 'move_q'.*Did you mean 'move_"):
        read_binding(spec, "+move_q", "key 's'")


def test_a_robot_without_rest_is_refused() -> None:
    spec = RobotSpec("drill", (), (Dimension("spin", "rad/s", 5, 9, CommandType.velocity),), (), 20)
    with pytest.raises(ConfigError, match=r"0 is outside the limits \[5, 9\] of 'spin'"):
        check_rest(spec, "a keyboard")
