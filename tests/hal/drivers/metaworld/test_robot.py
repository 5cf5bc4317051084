"""On the real simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.drivers.metaworld.camera import _FrameMaker
from hal.drivers.metaworld.expert import MetaWorldExpert
from hal.drivers.metaworld.render import Renderer, coarsen_meshes
from hal.drivers.metaworld.robot import MetaWorldConfig, MetaWorldRobot
from hal.drivers.metaworld.simulation import Simulation
from hal.drivers.metaworld.tasks import KNOWN_TASKS, PIXEL_TASKS, STATE_TASKS
from tests.extras import needs
from wire.clock import ManualClock
from wire.errors import ConfigError, RenderError, RobotError
from wire.types import Frame

pytestmark = needs("metaworld")

ALL = MetaWorldConfig(tasks=(*PIXEL_TASKS, *STATE_TASKS), observation="state")


@pytest.fixture(scope="module")
def pixels() -> Iterator[MetaWorldRobot]:
    robot = MetaWorldRobot()
    robot.connect()
    yield robot
    robot.close()


@pytest.fixture(scope="module")
def state() -> Iterator[MetaWorldRobot]:
    robot = MetaWorldRobot(ALL)
    robot.connect()
    yield robot
    robot.close()


def run(robot: MetaWorldRobot, task: str, seed: int, ticks: int) -> list[bytes]:
    """All that was seen, as bytes, while fixed actions were written."""
    robot.reset(task, seed)
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(ticks):
        observation = robot.read()
        frames = [frame.image.tobytes() for frame in observation.images.values()]
        seen.append(b"".join([observation.state.tobytes(), *frames]))
        robot.write(rng.uniform(-1, 1, 4).astype(np.float32))
    return seen


@pytest.mark.parametrize(
    ("config", "task"),
    [(MetaWorldConfig(), "door-open"), (MetaWorldConfig(tasks=STATE_TASKS, observation="state"), "push")],
    ids=["pixels", "state"],
)
@pytest.mark.slow
def test_it_keeps_the_contract(config: MetaWorldConfig, task: str) -> None:
    report = check_robot(lambda: MetaWorldRobot(config), task, clock=ManualClock())
    assert report.passed, str(report)


@pytest.mark.slow
def test_it_keeps_the_contract_while_a_thread_films() -> None:
    config = MetaWorldConfig(render_in_thread=True)
    report = check_robot(lambda: MetaWorldRobot(config), "door-open", ticks=12)
    assert report.passed, str(report)


@pytest.mark.parametrize("task", ALL.tasks)
def test_a_seed_fixes_the_trajectory_whatever_came_before(state: MetaWorldRobot, task: str) -> None:
    first = run(state, task, 5, 30)
    run(state, task, 6, 40)
    assert run(state, task, 5, 30) == first
    assert run(state, task, 6, 30) != first


@pytest.mark.slow
def test_pictures_are_deterministic_too(pixels: MetaWorldRobot) -> None:
    # To and fro: models that share a GL context must not draw into each other's buffers.
    first = {task: run(pixels, task, 5, 12) for task in PIXEL_TASKS}
    for task in (*PIXEL_TASKS, *reversed(PIXEL_TASKS), *PIXEL_TASKS[::2]):
        assert run(pixels, task, 5, 5) == first[task][:5]


@pytest.mark.parametrize("task", ALL.tasks)
def test_the_expert_succeeds_and_its_progress_shrinks(state: MetaWorldRobot, task: str) -> None:
    expert = MetaWorldExpert(state)
    wins = 0
    for seed in (11, 12, 13):
        state.reset(task, seed)
        progress = []
        for _ in range(200):
            progress.append(expert.progress())
            action = expert.propose(state.read())
            assert action is not None and action.dtype == np.float32 and np.abs(action).max() <= 1
            done = state.write(action).success
            if done:
                break
        wins += done
        if not done:
            continue  # the door's expert misses about one scene in ten
        best, since, longest = float("inf"), 0, 0
        for value in progress:
            best, since = (value, 0) if value < best - 0.01 else (best, since + 1)
            longest = max(longest, since)
        assert progress[-1] < 0.6 * progress[0]
        # A gate that steps in when nothing advances for 80 ticks must not mistake an expert's detour for that.
        assert longest < 60
    assert wins >= 2


def test_the_first_observation_is_of_this_scene(state: MetaWorldRobot) -> None:
    # MetaWorld alone reports where the drawer was before it was placed.
    state.reset("drawer-open", 21)
    before = state.read().state
    state.write(np.zeros(4, np.float32))
    assert np.abs(state.read().state[4:7] - before[4:7]).max() < 0.01
    assert np.array_equal(before[:18], before[18:36])


@pytest.mark.parametrize("task", KNOWN_TASKS)
@pytest.mark.slow
def test_a_step_is_the_environments_own_bit_for_bit(task: str) -> None:
    ours, theirs = Simulation(task), Simulation(task)
    rng = np.random.default_rng(1)
    for seed in (3, 4):
        ours.reset(seed)
        theirs.reset(seed)
        for _ in range(40):
            action = rng.uniform(-1.2, 1.2, 4).astype(np.float32)
            observation, reward, _, _, info = theirs._env.step(action)
            assert ours.step(action) == (float(reward), bool(info["success"] > 0.5))
            assert ours.observation.tobytes() == observation.tobytes()
            assert ours.data.qpos.tobytes() == theirs.data.qpos.tobytes()
    ours.close()
    theirs.close()


@pytest.mark.slow
def test_it_is_the_environment_that_metaworld_makes() -> None:
    import metaworld

    family = metaworld.MT1("pick-place-v3", seed=42)
    env = family.train_classes["pick-place-v3"]()
    env.set_task(family.train_tasks[0])
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    env.seed(3)
    env.reset()
    ours = Simulation("pick-place")
    ours.reset(3)
    rng = np.random.default_rng(0)
    for _ in range(40):
        action = rng.uniform(-1, 1, 4).astype(np.float32)
        theirs, reward, *_ = env.step(action)
        assert ours.step(action)[0] == pytest.approx(reward)
        assert np.allclose(ours.observation[:18], theirs[:18], atol=1e-9)
        assert np.allclose(ours.observation[36:], theirs[36:])


def test_an_episode_may_last_longer_than_metaworlds_500_steps(state: MetaWorldRobot) -> None:
    state.reset("drawer-open", 0)
    for _ in range(520):
        state.write(np.zeros(4, np.float32))
    assert np.isfinite(state.read().state).all()


def test_frames_come_every_fourth_tick_and_upright(pixels: MetaWorldRobot) -> None:
    pixels.reset("drawer-open", 1)
    times, observation = [], pixels.read()
    for _ in range(9):
        observation = pixels.read()
        times.append(observation.images["corner2"].time_ns)
        pixels.write(np.zeros(4, np.float32))
    assert [i for i in range(1, 9) if times[i] != times[i - 1]] == [4, 8]
    frame = observation.images["corner2"]
    assert frame.image.shape == (64, 64, 3)
    # The wall behind is grey and even; table and floor are below it.
    assert frame.image[:10].std() < 3 < frame.image[-20:].std()


def test_larger_pictures_come_when_they_are_asked_for_and_change_nothing_else() -> None:
    clock = ManualClock()
    robot = MetaWorldRobot(MetaWorldConfig(tasks=("drawer-open",)), clock)
    robot.connect()

    def first(wanted: bool) -> Frame:
        clock.advance(1_000_000_000)
        robot.request_previews(wanted)
        robot.reset("drawer-open", 1)
        return robot.read().images["corner2"]

    frame, plain = first(True), first(False)
    robot.close()
    assert plain.preview is None and frame.preview is not None and frame.preview.shape == (128, 128, 3)
    shrunk = frame.preview.reshape(64, 2, 64, 2, 3).mean((1, 3))
    assert np.abs(shrunk - frame.image).max() <= 1
    assert np.array_equal(plain.image, frame.image)


def test_not_every_frame_brings_a_larger_picture() -> None:
    framing = _FrameMaker(2)
    frames = [framing.frame(n * 50_000_000, np.zeros((4, 4, 3), np.uint8), True) for n in range(6)]
    assert [frame.preview is not None for frame in frames] == [True, False] * 3


@pytest.mark.slow
def test_a_reset_never_shows_the_episode_before() -> None:
    robot = MetaWorldRobot(MetaWorldConfig(tasks=("drawer-open", "door-open"), render_in_thread=True))
    robot.connect()
    robot.connect()
    try:
        first: dict[str, np.ndarray] = {}
        for round_ in range(3):
            for task in robot.tasks:
                before_ns = robot._clock.now_ns()
                robot.reset(task, 4)
                observation = robot.read()
                frame = observation.images["corner2"]
                assert before_ns < frame.time_ns <= observation.time_ns
                assert np.array_equal(first.setdefault(task, frame.image), frame.image), (round_, task)
                for _ in range(5):
                    robot.write(np.ones(4, np.float32))
        inline = MetaWorldRobot(MetaWorldConfig(tasks=("drawer-open",)))
        inline.connect()
        inline.reset("drawer-open", 4)
        assert np.array_equal(inline.read().images["corner2"].image, first["drawer-open"])
        inline.close()
    finally:
        robot.close()
    robot.close()
    with pytest.raises(RobotError):
        robot.read()


def test_coarser_meshes_look_the_same(pixels: MetaWorldRobot, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels.reset("door-open", 2)
    coarse = pixels.read().images["corner2"].image
    simulation = Simulation("door-open")
    simulation.reset(2)
    faces = int(simulation.model.mesh_facenum.sum())
    assert int(coarsen_meshes(simulation.model, 0.02).mesh_facenum.sum()) < faces / 10
    assert int(simulation.model.mesh_facenum.sum()) == faces, "the model that computes contacts stays as it is"
    monkeypatch.setattr(
        "hal.drivers.metaworld.render.coarsen_meshes", lambda model, cell: __import__("copy").copy(model)
    )
    renderer = Renderer("corner2", 128)
    exact = renderer.render(simulation.model, simulation.data).reshape(64, 2, 64, 2, 3).mean((1, 3))
    renderer.close()
    renderer.close()
    assert np.abs(exact - coarse).mean() < 1


def test_an_unknown_camera_is_named() -> None:
    for in_thread in (False, True):
        robot = MetaWorldRobot(MetaWorldConfig(tasks=("push",), camera="corner9", render_in_thread=in_thread))
        robot.connect()
        with pytest.raises(RenderError, match=r"no camera 'corner9'; it has .*corner2"):
            robot.reset("push", 0)
        robot.close()


@pytest.mark.slow
def test_a_machine_that_cannot_draw_says_what_to_install() -> None:
    code = (
        "from hal.drivers.metaworld.robot import *\n"
        "from wire.errors import RenderError\n"
        "state = MetaWorldRobot(MetaWorldConfig(tasks=('push',), observation='state'))\n"
        "state.connect(); state.reset('push', 0); state.read(); state.close()\n"
        "for thread in (False, True):\n"
        "    robot = MetaWorldRobot(MetaWorldConfig(render_in_thread=thread))\n"
        "    try:\n"
        "        robot.connect(); robot.reset('door-open', 0)\n"
        "    except RenderError as error:\n"
        "        print(error)\n"
        "    robot.close()\n"
    )
    # An EGL device that does not exist is what a machine without Mesa looks like to mujoco.
    environment = {**os.environ, "MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "99"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("libegl1 libgl1 libgl1-mesa-dri libgles2 libosmesa6") == 2
    assert done.stdout.count("MUJOCO_GL=egl") == 2


def test_order_of_calls_and_tasks(state: MetaWorldRobot) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'drawer-open'"):
        state.reset("drawer-opn", 0)
    with pytest.raises(ConfigError, match="negative"):
        state.reset("push", -1)
    expert = MetaWorldExpert(MetaWorldRobot())
    assert expert.progress() == float("inf")
