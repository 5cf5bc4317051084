"""From one who drives to the next: no jump, whoever stands where."""

from __future__ import annotations

import numpy as np
import pytest

from robot_edge.control.config import LoopConfig
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.operators.blend import HandBackBlend
from tests.people import Person
from wire.clock import ManualClock
from wire.errors import ConfigError
from wire.types import CommandType, Dimension, Mode, RobotSpec

HZ, BLEND_S = 50.0, 0.5
TICKS = round(HZ * BLEND_S)
SPEC = RobotSpec(
    "arm",
    (Dimension("pan", "deg", -180, 180),),
    (
        Dimension("pan", "deg", -180, 180),
        Dimension("move", "m/step", -1, 1, CommandType.delta),
        Dimension("grip", "1", -1, 1),
    ),
    (),
    HZ,
)
"""a joint, something that is pushed, and a gripper's effort that nobody measures"""


class Arm:
    """A robot that does what it is told; each tick says where it went, in `pan`."""

    def __init__(self, **config: float) -> None:
        self.clock = ManualClock(10**9)
        self.human = OperatorOverride(SPEC, self.clock, LoopConfig(**config))  # type: ignore[arg-type]
        self.person = Person(self.clock)
        self.executed = np.array([0, 0, -1], np.float32)
        self.waited = False

    def say(self, kind: str, *action: float) -> None:
        self.human.handle_command(self.person(kind, *action))

    def tick(self, policy: tuple[float, ...] | None = None, hold: bool = False, waits: bool = False) -> np.ndarray:
        """A control period; `policy`: what it plans; `hold`: by control; `waits`: its host holds it instead."""
        self.clock.advance(round(1e9 / HZ))
        wanted = self.human.action(self.executed) if self.human.in_control else policy and np.float32(policy)
        mode = Mode.hold if wanted is None or hold else Mode.human if self.human.in_control else Mode.policy
        action = self.human.blend(mode, None if mode is Mode.hold else wanted, self.executed, self.waited)
        self.executed = self.executed * [1, 0, 1] if action is None or waits else action
        self.waited = waits
        return self.executed


def test_a_leader_that_is_elsewhere_is_approached_in_the_stated_time() -> None:
    arm = Arm()
    arm.say("take_over")
    arm.say("command", 90, 0, -1)
    assert arm.tick()[0] == 0, "it has only said where it is"
    pans = []
    for n in range(40):
        arm.say("command", 90.01 + 0.02 * (n % 2), 0, -1)  # a hand that hardly moves
        pans.append(arm.tick()[0])
    steps = np.diff([0, *pans])
    assert np.abs(steps).max() <= 90 / TICKS + 0.05
    assert pans[TICKS - 1 :] == pytest.approx([90] * (40 - TICKS + 1), abs=0.05)


def test_what_the_person_moves_meanwhile_is_followed_at_once() -> None:
    arm = Arm()
    arm.say("take_over")
    arm.say("command", 90, 0, -1)
    arm.tick()
    pans = []
    for n in range(1, 30):
        arm.say("command", 90 + 2 * n, 0, -1)
        pans.append(arm.tick()[0])
    assert pans[0] == pytest.approx(2 + 90 / TICKS)
    assert pans[-1] == pytest.approx(90 + 2 * 29)


def test_a_leader_that_stands_still_is_reached_and_then_the_robot_holds() -> None:
    arm = Arm()
    arm.say("take_over")
    arm.say("command", 90, 0, -1)
    arm.tick()
    for _ in range(60):
        arm.say("command", 91, 0, -1)
        arm.tick()
    assert arm.executed[0] == pytest.approx(91)
    assert arm.human.action(arm.executed) is None


def test_a_gripper_that_is_told_to_close_does_so_at_once() -> None:
    arm = Arm()
    arm.say("take_over")
    arm.say("command", 0, 0, -1)
    arm.tick()
    arm.say("command", 0, 0, 1)
    assert arm.tick()[2] == 1


def test_a_joint_is_toggled_at_once_by_who_knows_where_it_is() -> None:
    """A page's slider: what the person has changed is no difference between device and robot."""
    arm = Arm()
    arm.say("take_over")
    for _ in range(3):
        arm.say("command", 0, 0, -1)
        arm.tick()
    arm.say("command", 30, 0, -1)
    assert arm.tick()[0] == 30


def test_after_the_commands_broke_off_it_approaches_anew() -> None:
    arm = Arm()
    arm.say("take_over")
    for n in range(40):
        arm.say("command", 0.1 * n, 0, -1)
        arm.tick()
    here = arm.executed[0]
    for _ in range(20):  # the link stalls, and the leader goes elsewhere
        arm.tick()
    assert arm.executed[0] == here
    for n in range(TICKS + 5):
        before = arm.executed[0]
        arm.say("command", 80 + 0.1 * (n % 2), 0, -1)
        assert abs(arm.tick()[0] - before) <= (80 - here) / TICKS + 0.2
    assert arm.executed[0] == pytest.approx(80, abs=0.2)


def test_a_hold_in_between_is_no_jump_either() -> None:
    """Something else holds the robot while the person goes on moving the leader."""
    arm = Arm()
    arm.say("take_over")
    for n in range(80):
        arm.say("command", float(n), 0, -1)
        before = arm.executed[0]
        arm.tick(hold=30 <= n < 60)
        assert abs(arm.executed[0] - before) <= 1 + 31 / TICKS + 1e-3
    assert arm.executed[0] == pytest.approx(79, abs=8)


def test_a_robot_that_its_host_holds_meanwhile_makes_up_for_nothing_at_once() -> None:
    """Of a leader that is elsewhere, then of a policy that comes in after the person."""
    arm = Arm()
    arm.say("take_over")
    arm.say("command", 90, 0, -1)
    arm.tick()
    for n in range(90):
        arm.say("command", 90.01 + 0.02 * (n % 2), 0, -1)
        before = arm.executed[0]
        arm.tick(waits=n in (5, 20, 21, 22, 23))
        assert abs(arm.executed[0] - before) <= 90 / TICKS + 0.05
    assert arm.executed[0] == pytest.approx(90, abs=0.05)
    arm.say("hand_back")
    for n in range(90):
        before = arm.executed[0]
        arm.tick((-10, 0, -1), waits=n in (5, 20, 21, 22, 23))
        assert abs(arm.executed[0] - before) <= 100 / TICKS + 0.05
    assert arm.executed[0] == -10


def test_without_a_time_everything_is_at_once() -> None:
    arm = Arm(takeover_blend_s=0, hand_back_blend_s=0)
    arm.say("take_over")
    arm.say("command", 90, 0, -1)
    arm.say("command", 91, 0, -1)
    assert arm.tick()[0] == 91
    arm.say("hand_back")
    assert arm.tick((20, 0.5, 1)).tolist() == [20, 0.5, 1]


@pytest.mark.parametrize("name", ["takeover_blend_s", "hand_back_blend_s"])
@pytest.mark.parametrize("seconds", [-0.1, float("nan"), 61.0])
def test_a_time_that_is_none_is_named(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=name):
        LoopConfig(**{name: seconds})  # type: ignore[arg-type]


def test_the_policy_comes_in_over_the_stated_time() -> None:
    arm = Arm()
    arm.say("take_over")
    arm.say("command", 0, 0.3, -1)
    arm.tick()
    arm.say("hand_back")
    rows = np.array([arm.tick((10, 1.0, 1)) for _ in range(TICKS + 2)])
    assert rows[:, 1] == pytest.approx(np.minimum(np.arange(1, TICKS + 3) / TICKS, 1))
    assert np.diff([0, *rows[:TICKS, 0]]) == pytest.approx([10 / TICKS] * TICKS, abs=1e-4)
    assert rows[TICKS - 1 :].tolist() == [[10, 1, 1]] * 3


def test_it_does_so_after_a_person_under_whom_the_robot_only_held() -> None:
    """Nothing was asked of the blend meanwhile."""
    arm = Arm()
    arm.say("take_over")
    arm.say("hand_back")
    assert arm.tick((0, 1.0, -1))[1] == pytest.approx(1 / TICKS)


def test_an_interrupted_hand_back_begins_again() -> None:
    arm = Arm()
    arm.say("take_over")
    arm.tick()
    arm.say("hand_back")
    for _ in range(20):
        arm.tick((0, 1.0, -1))
    arm.tick(None)
    assert arm.tick((0, 1.0, -1))[1] == pytest.approx(1 / TICKS)


@pytest.mark.parametrize("ticks", [1, 2, 3, 10, 25, 200])
def test_a_plan_that_moves_on_is_reached_in_the_stated_time(ticks: int) -> None:
    blend, executed = HandBackBlend(SPEC, ticks), np.float32([0, 0, 0])
    blend.on_person()
    for n in range(ticks):
        action = blend.action(Mode.policy, np.float32([40 + n, 0, 0]), executed)
        assert action is not None and 0 <= action[0] - executed[0] <= 1 + 40 / ticks + 1e-4
        executed = action
    assert executed[0] == 40 + n


@pytest.mark.parametrize("seed", range(10))
def test_whoever_comes_and_goes_no_step_is_a_jump(seed: int) -> None:
    """Leaders and policies that are anywhere, and move by up to a degree a tick."""
    rng, arm = np.random.default_rng(seed), Arm()
    leader = plan = 0.0
    farthest = 0.0
    for _ in range(3000):
        if rng.random() < 0.02:
            arm.say("hand_back" if arm.human.in_control else "take_over")
            leader = float(rng.uniform(-150, 150))
        leader += rng.uniform(-1, 1)
        if rng.random() < 0.7:
            arm.say("command", leader, 0, -1)
        plan = arm.executed[0] + rng.uniform(-1, 1)
        before = arm.executed[0]
        holds, waits = rng.random(2) < 0.02
        arm.tick((plan, 0, -1) if rng.random() < 0.95 else None, holds, waits)
        assert abs(arm.executed[0] - before) <= 330 / TICKS + 8
        farthest = max(farthest, abs(arm.executed[0]))
    assert farthest > 50
