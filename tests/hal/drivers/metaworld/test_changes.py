"""What can be other in a simulated world, on the real simulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hal.drivers.metaworld.changes import UNCHANGED, WorldChanges
from hal.drivers.metaworld.render import Renderer
from hal.drivers.metaworld.robot import MetaWorldConfig, MetaWorldRobot, metaworld_spec
from hal.drivers.metaworld.simulation import Simulation
from hal.registry import read_config
from tests.extras import needs
from wire.errors import ConfigError

pytestmark = needs("metaworld")


def ahead(changes: WorldChanges, ticks: int = 4) -> np.ndarray:
    """Where the hand is after it was told to go ahead, float64[ticks, 3], from where it was."""
    simulation = Simulation("push", changes)
    simulation.reset(3)
    start = simulation.observation[:3].copy()
    found = []
    for _ in range(ticks):
        simulation.step(np.array([0.0, 1.0, 0.0, 0.0], np.float32))
        found.append(simulation.observation[:3] - start)
    return np.array(found)


def picture(changes: WorldChanges) -> np.ndarray:
    simulation = Simulation("door-open", changes)
    simulation.reset(2)
    renderer = Renderer("corner2", 64)
    try:
        return renderer.render(simulation.model, simulation.data).astype(float)
    finally:
        renderer.close()


def contact(task: str, changes: WorldChanges, at_m: np.ndarray) -> bool:
    """Whether a hand that comes from above touches the handle that is told to be at `at_m` from where it was."""
    simulation = Simulation(task, changes)
    simulation.reset(5)
    model, data = simulation.model, simulation.data
    handle = simulation.observation[4:7] + at_m
    fingers = {model.geom(name).id for name in ("rightclaw_it", "leftclaw_it", "rightpad_geom", "leftpad_geom")}
    for part in (np.array([0.0, 0.0, 0.15]), np.zeros(3)):
        for _ in range(60):
            data.mocap_pos[0] = handle + part
            simulation.advance(np.array([0.0, 0.0, 0.0, 1.0]))
            own = {model.body(name).id for name in ("door_link", "windowb_a") if name in body_names(model)}
            for one in data.contact:
                bodies = {model.geom_bodyid[one.geom1], model.geom_bodyid[one.geom2]}
                if bodies & own and {one.geom1, one.geom2} & fingers:
                    return True
    return False


def body_names(model: object) -> set[str]:
    return {model.body(number).name for number in range(model.nbody)}  # type: ignore[attr-defined]


def test_nothing_is_changed_without_more() -> None:
    assert np.array_equal(ahead(UNCHANGED), ahead(WorldChanges(tasks=("reach",), lag=3.0, gain=0.5)))


def test_a_slower_arm_gets_there_later_and_a_weaker_one_less_far() -> None:
    usual, slow, weak = (ahead(one)[:, 1] for one in (UNCHANGED, WorldChanges(lag=3.0), WorldChanges(gain=0.5)))
    assert (slow[1:] < 0.6 * usual[1:]).all()
    assert weak == pytest.approx(0.5 * usual, abs=1e-3)


def test_what_slides_has_another_friction_and_the_rest_has_not() -> None:
    usual, slippery = (Simulation("push", one).model.geom_friction for one in (UNCHANGED, WorldChanges(friction=0.3)))
    assert slippery[:, 0] == pytest.approx(0.3 * usual[:, 0])
    assert np.array_equal(slippery[:, 1:], usual[:, 1:])


@pytest.mark.slow
def test_the_picture_shows_it() -> None:
    usual, dark = picture(UNCHANGED), picture(WorldChanges(light=0.4))
    assert dark[32:].mean() < 0.7 * usual[32:].mean(), "the sky, which no lamp lights, is above"
    for moved in (WorldChanges(camera_m=(0.0, 0.0, 0.1)), WorldChanges(camera_deg=(0.0, 5.0, 0.0))):
        other = picture(moved)
        assert np.abs(other - usual).mean() > 5
        assert other.mean() == pytest.approx(usual.mean(), rel=0.2)
    higher = picture(WorldChanges(handle_m=(0.0, 0.0, 0.08)))
    share = (np.abs(higher - usual).max(-1) > 3).mean()
    assert 0.001 < share < 0.1, "a small part of it"


@pytest.mark.parametrize("task", ["door-open", "window-open"])
def test_the_handle_is_where_it_is_said_to_be(task: str) -> None:
    shift = (-0.02, 0.0, 0.07)
    usual, moved = Simulation(task), Simulation(task, WorldChanges(handle_m=shift))
    for one in (usual, moved):
        one.reset(5)
    assert moved.observation[4:7] - usual.observation[4:7] == pytest.approx(shift, abs=2e-3)
    assert contact(task, WorldChanges(handle_m=shift), np.zeros(3))
    far = WorldChanges(handle_m=(0.0, 0.0, 0.3))
    assert contact(task, far, np.zeros(3)), "what may touch is looked for in boxes made before"


def test_a_robot_is_made_with_it_and_says_nothing_of_it() -> None:
    config = read_config("metaworld", {"tasks": ["push"], "observation": "state", "changes": {"gain": 0.5}})
    assert config == MetaWorldConfig(tasks=("push",), observation="state", changes=WorldChanges(gain=0.5))
    assert metaworld_spec(config) == metaworld_spec(MetaWorldConfig(tasks=("push",), observation="state"))
    robot = MetaWorldRobot(config)
    robot.connect()
    robot.reset("push", 3)
    start = robot.read().state
    for _ in range(4):
        robot.write(np.array([0.0, 1.0, 0.0, 0.0], np.float32))
    assert robot.read().state[1] - start[1] == pytest.approx(ahead(config.changes)[3, 1], abs=1e-4)
    robot.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WorldChanges(light=-1.0), "light"),
        (lambda: WorldChanges(friction=0.0), "friction"),
        (lambda: WorldChanges(gain=0.0), "gain"),
        (lambda: WorldChanges(lag=0.1), "lag"),
        (lambda: WorldChanges(camera_m=(0.0, float("nan"), 0.0)), "camera_m"),
        (lambda: WorldChanges(tasks=("door-opne",)), "door-open"),
        (lambda: WorldChanges(tasks=("push",), handle_m=(0.0, 0.0, 0.1)), "push"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], WorldChanges], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
