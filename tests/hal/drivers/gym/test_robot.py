"""The Gymnasium driver on an environment of its own, and on the real ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium
from gymnasium import spaces

from hal.conformance import check_robot
from hal.drivers.gym.presets import aloha, fetch, metaworld, pusht
from hal.drivers.gym.robot import GymRobot
from hal.drivers.gym.spec import GymCamera, GymConfig, GymPart, GymTask
from hal.registry import make_robot, read_config
from wire.clock import ManualClock
from wire.errors import ConfigError, InvalidDataError, RobotError
from wire.types import CommandType, Observation

ID = "vla_fleet_test/Cart-v3"


class Cart(gymnasium.Env):
    """A cart on a line that succeeds at 0.9 and ends there; its goal and its flaws are arguments."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode: str = "", goal: float = 0.9, fail_at: int = 0, flat: bool = False) -> None:
        self.render_mode, self.goal, self.fail_at, self.flat = render_mode, goal, fail_at, flat
        inner = {
            "arm": spaces.Dict({"place": spaces.Box(-1.0, 1.0, (1,), np.float64)}),
            "goal": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "mode": spaces.Discrete(3),
            "pixels": spaces.Box(0, 255, (12, 16, 3), np.uint8),
        }
        self.observation_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float64) if flat else spaces.Dict(inner)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.place = float(self.np_random.uniform(-0.5, 0.0)) + (options or {}).get("shift", 0.0)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: np.ndarray):
        self.steps += 1
        if self.steps == self.fail_at:
            raise ValueError("the physics exploded")
        assert action.dtype == np.float32
        self.place = min(1.0, self.place + 0.1 * float(action[0]))
        action *= 0  # some environments do that
        done = self.place >= self.goal
        return self._seen(), self.place, done, False, {"is_success": done, "late": False}

    def render(self) -> np.ndarray:
        return np.full((24, 32, 3), 128 + round(100 * self.place), np.uint8)

    def _seen(self):
        if self.flat:
            return np.array([self.place])
        pixels = np.full((12, 16, 3), self.steps, np.uint8)
        return {"arm": {"place": np.array([self.place])}, "goal": np.zeros(2), "mode": 1, "pixels": pixels}


gymnasium.register(ID, entry_point=lambda **kwargs: Cart(**kwargs), max_episode_steps=40)

FAR = "vla_fleet_test/Far-v3"
gymnasium.register(FAR, entry_point=lambda **kwargs: Cart(goal=2.0, **kwargs), max_episode_steps=40)

PLACE = GymPart("arm.place", ("cart",), ("m",), (-1.0,), (1.0,))
CONFIG = GymConfig(
    ID,
    tasks=(GymTask("ahead", "drive to the mark"), GymTask("shifted", options={"shift": 0.2})),
    state=(PLACE,),
    action=GymPart("", ("drive",), ("0.1 m/step",), meaning=(CommandType.delta,)),
    cameras=(GymCamera("eye", 12, 16, 10.0), GymCamera("film", 6, 8, source="pixels")),
)


def ready(config: GymConfig, task: str = "", seed: int = 0) -> tuple[GymRobot, ManualClock]:
    clock = ManualClock(10**9)
    robot = GymRobot(config, clock)
    robot.connect()
    robot.reset(task or robot.tasks[0], seed)
    return robot, clock


def play(robot: GymRobot, clock: ManualClock, ticks: int, action: float = 1.0) -> list[tuple[Observation, Any]]:
    found = []
    for _ in range(ticks):
        found.append((robot.read(), robot.write(np.full(robot.spec.action_dim, action, np.float32))))
        clock.advance(robot.spec.period_ns)
    return found


def check(config: GymConfig, task: str, ticks: int = 24):
    clock = ManualClock(10**12)
    report = check_robot(lambda: GymRobot(config, clock), task, ticks=ticks, clock=clock)
    assert report.passed, str(report)
    assert len(report.checks) >= 14


def test_it_keeps_the_contract() -> None:
    check(CONFIG, "ahead")


def test_what_the_environment_says_need_not_be_said_again() -> None:
    spec = GymRobot(CONFIG).spec
    assert spec.control_hz == 20
    assert [(d.name, d.unit, d.low, d.high) for d in spec.state] == [("cart", "m", -1.0, 1.0)]
    assert [(d.name, d.meaning) for d in spec.action] == [("drive", CommandType.delta)]
    assert [(c.name, c.rate_hz) for c in spec.cameras] == [("eye", 10.0), ("film", 20.0)]
    flat = GymRobot(GymConfig(ID, kwargs={"flat": True})).spec
    assert [(d.name, d.unit, d.high) for d in flat.state] == [("state", "1", 1.0)]
    assert flat.embodiment == ID and GymRobot(GymConfig(ID, kwargs={"flat": True})).tasks == ("Cart",)


def test_a_space_without_limits_names_the_field() -> None:
    everything = GymConfig(ID)
    with pytest.raises(ConfigError, match=r"state\[1\]\.low of 'goal_0' is -inf.*Give its real range in state\[1\]"):
        GymRobot(everything)
    given = replace(everything, state=(GymPart("arm.place"), GymPart("goal", low=(-3.0,), high=(3.0,))))
    assert [d.name for d in GymRobot(given).spec.state] == ["arm_place", "goal_0", "goal_1"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, state=(GymPart("arm.plase"),)), r"state: key 'arm.plase' is not.*Did you mean 'arm.place'"),
        (replace(CONFIG, state=(GymPart("pixels"),)), "'pixels' is a picture"),
        (replace(CONFIG, state=(GymPart("mode"),)), "'mode' is a Discrete"),
        (replace(CONFIG, action=GymPart("", ("a", "b"))), r"action.names has 2 values for 1 numbers"),
        (replace(CONFIG, state=(replace(PLACE, low=(2.0,)),)), r"state\[0\]\.low of 'cart' is 2.0, not below"),
        (replace(CONFIG, cameras=(GymCamera("eye", 8, 8, 7.0),)), "rate_hz 7 must divide.*try 6.66667"),
        (replace(CONFIG, cameras=(GymCamera("eye", 8, 8, source="pixel"),)), "source of 'eye'.*Did you mean 'pixels'"),
        (GymConfig("vla_fleet_test/Kart-v3"), "Set `module`"),
        (GymConfig(ID, kwargs={"speed": 3}), r"cannot be made with kwargs \['speed'\]"),
    ],
)
def test_what_cannot_work_is_named(config: GymConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymRobot(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"env_id": ""}, "env_id is empty"),
        ({"tasks": (GymTask("a"), GymTask("a"))}, "tasks need names"),
        ({"kwargs": {"flat": True}, "cameras": (GymCamera("a", 0, 4),)}, "camera 'a' has height 0"),
        ({"kwargs": {"flat": True}, "control_hz": -1.0}, "control_hz .*-1"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymRobot(GymConfig(**{"env_id": ID, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate_hz": float("nan")}, "has rate_hz nan"),
        ({"rate_hz": -10.0}, "has rate_hz -10"),
        ({"preview_height": 24}, r"preview \(24, 0\): each side is 1 to 4096"),
        ({"preview_height": -24, "preview_width": 32}, "each side is 1 to 4096"),
    ],
)
def test_a_camera_that_cannot_be_is_refused_before_anything_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymConfig(ID, cameras=(GymCamera("eye", 12, 16, **fields),))


def test_a_missing_package_is_named() -> None:
    with pytest.raises(RobotError, match=r"module 'no_such_module' cannot be imported"):
        GymRobot(GymConfig("Thing-v0", module="no_such_module"))


def test_the_state_is_the_environments_and_cameras_keep_their_rates() -> None:
    robot, clock = ready(CONFIG, seed=4)
    seen = play(robot, clock, 6)
    places = [float(observation.state[0]) for observation, _ in seen]
    np.testing.assert_allclose(np.diff(places), 0.1, atol=1e-6)
    assert seen[0][0].task == "drive to the mark"
    films = [observation.images["film"] for observation, _ in seen]
    assert [int(film.image[0, 0, 0]) for film in films] == [0, 1, 2, 3, 4, 5]
    assert films[0].image.shape == (6, 8, 3)
    eyes = [observation.images["eye"] for observation, _ in seen]
    assert [eyes[i].time_ns == eyes[i + 1].time_ns for i in range(5)] == [True, False, True, False, True]
    assert int(eyes[2].image[0, 0, 0]) == 128 + round(100 * places[2])
    assert all(o.images[name].time_ns <= o.time_ns for o, _ in seen for name in o.images)


def test_options_belong_to_their_task() -> None:
    plain, _ = ready(CONFIG, "ahead", seed=2)
    shifted, _ = ready(CONFIG, "shifted", seed=2)
    assert shifted.read().state[0] - plain.read().state[0] == pytest.approx(0.2, abs=1e-6)
    assert shifted.read().task == "shifted"


def test_a_task_may_be_in_another_environment() -> None:
    other = GymTask("far", env_id=FAR)
    robot, clock = ready(replace(CONFIG, tasks=(*CONFIG.tasks, other)), "far")
    assert not any(feedback.success for _, feedback in play(robot, clock, 25))
    robot.reset("ahead", 0)
    assert play(robot, clock, 25)[-1][1].success
    missing = replace(CONFIG, control_hz=20.0, tasks=(GymTask("far", env_id="vla_fleet_test/Fer-v3"),))
    with pytest.raises(ConfigError, match="there is no environment 'vla_fleet_test/Fer-v3'"):
        ready(missing)


@pytest.mark.parametrize(
    ("fields", "done"),
    [
        ({"success_keys": ("there", "is_success")}, True),
        ({"success_keys": ("there",)}, False),
        ({"success_keys": (), "success_when_terminated": True}, True),
        ({"success_keys": ("late", "is_success"), "success_when_terminated": True}, False),
    ],
)
def test_a_configuration_says_what_success_is(fields: dict[str, Any], done: bool) -> None:
    robot, clock = ready(replace(CONFIG, **fields))
    feedback = [feedback.success for _, feedback in play(robot, clock, 25)]
    assert feedback[-1] is done and not feedback[0]


def test_after_the_end_it_keeps_answering_until_it_is_reset() -> None:
    robot, clock = ready(CONFIG)
    seen = play(robot, clock, 25)
    done = [feedback.success for _, feedback in seen]
    end = done.index(True)
    assert 0 < end < 20 and all(done[end:])
    assert len({float(observation.state[0]) for observation, _ in seen[end + 1 :]}) == 1
    assert [float(feedback.executed[0]) for _, feedback in seen[end - 1 : end + 3]] == [1.0, 1.0, 0.0, 0.0]
    assert all(np.isfinite(feedback.reward) for _, feedback in seen)
    assert [feedback.terminated for _, feedback in seen] == done
    assert not any(feedback.truncated for _, feedback in seen)
    robot.reset("ahead", 1)
    assert robot.read().state[0] < 0.1
    again = robot.write(np.zeros(1, np.float32))
    assert not (again.success or again.terminated)


def test_its_own_time_limit_cuts_an_episode_off() -> None:
    robot, clock = ready(replace(CONFIG, tasks=(GymTask("far", env_id=FAR),)), "far")
    ends = [(feedback.terminated, feedback.truncated) for _, feedback in play(robot, clock, 42)]
    assert ends == [(False, False)] * 39 + [(False, True)] * 3
    robot.reset("far", 0)
    assert not robot.write(np.zeros(1, np.float32)).truncated


def test_a_simulator_that_raises_is_reported_and_can_be_reset() -> None:
    robot, clock = ready(replace(CONFIG, kwargs={"fail_at": 3}))
    play(robot, clock, 2)
    with pytest.raises(RobotError, match=r"step\(\) of .*ValueError: the physics exploded.*Reset it"):
        play(robot, clock, 1)
    with pytest.raises(RobotError, match="without a scene"):
        robot.read()
    robot.reset("ahead", 0)
    assert len(play(robot, clock, 2)) == 2


def test_an_action_that_is_none_moves_nothing() -> None:
    robot, _ = ready(CONFIG)
    before = robot.read().state
    for bad in (np.array([np.nan], np.float32), np.zeros(2, np.float32)):
        with pytest.raises(InvalidDataError):
            robot.write(bad)
    assert robot.read().state == before


def test_a_spec_made_for_another_environment_is_refused() -> None:
    full = replace(CONFIG, control_hz=20.0, action=GymPart("", ("a", "b"), ("1",), (-1.0,), (1.0,)))
    robot = GymRobot(full)  # everything is said: no environment was asked
    with pytest.raises(ConfigError, match=r"action.names has 2 values for 1 numbers"):
        robot.connect()


def test_plain_values_make_the_same_robot() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(CONFIG))
    assert make_robot("gymnasium", read_config("gymnasium", plain)).spec.hash == GymRobot(CONFIG).spec.hash
    with pytest.raises(ConfigError, match="needs a configuration with env_id"):
        make_robot("gymnasium")


# --- the real ones ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pusht_keeps_the_contract() -> None:
    pytest.importorskip("gym_pusht")
    check(pusht(), "push-t")
    check(pusht(image_px=0), "push-t")


def test_pusht_moves_to_where_it_is_told() -> None:
    pytest.importorskip("gym_pusht")
    robot, clock = ready(pusht(), seed=3)
    assert robot.read().images["top"].image.shape == (96, 96, 3)
    start = robot.read().state
    goal = np.array([300.0, 250.0], np.float32)
    for _ in range(20):
        executed = robot.write(goal).executed
        clock.advance(robot.spec.period_ns)
    assert executed.tolist() == goal.tolist()
    assert np.linalg.norm(robot.read().state - goal) < 30 < np.linalg.norm(start - goal)


@pytest.mark.parametrize("task", ["reach", "push"])
@pytest.mark.slow
def test_fetch_keeps_the_contract(task: str) -> None:
    pytest.importorskip("gymnasium_robotics")
    check(fetch(task), task)


def test_fetch_reaches_its_goal() -> None:
    pytest.importorskip("gymnasium_robotics")
    robot, clock = ready(fetch(), seed=3)
    names = [d.name for d in robot.spec.state]
    hand, goal = ([names.index(f"{what}_{axis}") for axis in "xyz"] for what in ("hand", "goal"))
    for _ in range(40):
        state = robot.read().state
        action = np.append(np.clip((state[goal] - state[hand]) / 0.05, -1, 1), 0.0).astype(np.float32)
        success = robot.write(action).success
        clock.advance(robot.spec.period_ns)
        if success:
            break
    assert success


def test_metaworld_by_its_id_is_the_drivers_own_simulator() -> None:
    pytest.importorskip("metaworld")
    from hal.drivers.metaworld.robot import MetaWorldConfig, metaworld_spec

    robot, _ = ready(metaworld("push", "reach"), "push", seed=3)
    assert robot.spec == metaworld_spec(MetaWorldConfig(tasks=("push",), observation="state"))
    pushes = [robot.read().state.copy()]
    for seed in (4, 3):
        robot.reset("push", seed)
        pushes.append(robot.read().state.copy())
    assert not np.array_equal(pushes[0], pushes[1])
    assert np.array_equal(pushes[0], pushes[2])
    assert np.abs(pushes[0][-3:]).max() > 0.1  # the goal is seen
    robot.reset("reach", 3)
    assert robot.read().task != "push"


@pytest.mark.slow
def test_metaworld_by_its_id_keeps_the_contract() -> None:
    pytest.importorskip("metaworld")
    check(metaworld(), "push")


@pytest.mark.slow
def test_aloha_moves_and_is_seen() -> None:
    pytest.importorskip("gym_aloha")
    robot, clock = ready(aloha(height=48, width=64), seed=3)
    action = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.0] * 2, np.float32)
    seen = play(robot, clock, 1)
    first = seen[0][0]
    top = first.images["top"]
    assert top.image.shape == (48, 64, 3) and top.image.std() > 10
    assert top.preview is not None and top.preview.shape == (240, 320, 3)
    moved = action.copy()
    moved[0] = 0.3
    robot.write(moved)
    assert robot.read().state[0] > first.state[0] + 0.005
    assert robot.read().task == "hand the cube from the right arm to the left arm"


@pytest.mark.slow
def test_aloha_keeps_the_contract() -> None:
    pytest.importorskip("gym_aloha")
    check(aloha(height=48, width=64), "transfer-cube", ticks=3)


def test_presets_need_no_simulator_for_their_spec() -> None:
    code = (
        "import sys; from hal.registry import make_robot\n"
        "for kind in ('gym-pusht', 'gym-aloha', 'gym-fetch', 'gym-metaworld'): print(make_robot(kind).spec.hash)\n"
        "heavy = {'gymnasium', 'mujoco', 'torch', 'cv2', 'pygame'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 4


def test_an_unknown_preset_task_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'reach'"):
        fetch("rech")
    with pytest.raises(ConfigError, match="no task 'pusch'"):
        metaworld("pusch")
