"""Actions of three robots, as float32[T, da] per episode, and 1-second chunks of them.

- 4 dimensions: MetaWorld's scripted experts in its simulator, 80 Hz.
- 14 dimensions: the joints of the two arms of gym-aloha's MuJoCo model, 50 Hz, as position servos follow smooth
  set-points: what a leader arm that a person moves would give.
- 25 dimensions: a whole body that exists only as joint-space minimum-jerk reaches (Flash and Hogan 1985) of parts that
  begin, rest and end at their own times, with jitter as of a teleoperation device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK_S = 1.0


@dataclass(frozen=True, slots=True)
class BodyPart:
    """Dimensions that move together: all begin a reach at the same time."""

    name: str
    dimensions: int
    reach_s: tuple[float, float]
    """how long one reach takes, from and to"""
    rest_s: float
    """mean rest between two"""
    stray_s: float = 0.15
    """each dimension begins up to so much later, and ends up to so much earlier: a short reach may become a snap"""
    returns: bool = False
    """velocities: each reach ends at 0 again"""


WHOLE_BODY = (
    BodyPart("left arm", 7, (0.7, 1.8), 0.5),
    BodyPart("right arm", 7, (0.7, 1.8), 0.5),
    BodyPart("left gripper", 1, (0.3, 0.6), 2.0),
    BodyPart("right gripper", 1, (0.3, 0.6), 2.0),
    BodyPart("head", 2, (0.4, 0.9), 1.0),
    BodyPart("torso", 4, (1.2, 2.5), 2.0),
    BodyPart("base velocity", 3, (1.5, 3.0), 2.5, returns=True),
)
"""25 dimensions"""

ALOHA = (
    BodyPart("left arm", 6, (0.7, 1.8), 0.4),
    BodyPart("left gripper", 1, (0.3, 0.6), 1.5),
    BodyPart("right arm", 6, (0.7, 1.8), 0.4),
    BodyPart("right gripper", 1, (0.3, 0.6), 1.5),
)
"""14 dimensions"""


def minimum_jerk(parts: tuple[BodyPart, ...], steps: int, hz: float, rng: np.random.Generator) -> np.ndarray:
    """float64[steps, da] in [-1, 1]: reaches of all parts, s(u) = 10 u^3 - 15 u^4 + 6 u^5 of each way."""
    return np.concatenate([_part(part, steps, hz, rng) for part in parts], 1)


def _part(part: BodyPart, steps: int, hz: float, rng: np.random.Generator) -> np.ndarray:
    times = np.arange(steps) / hz
    gripper = part.dimensions == 1
    place = np.zeros(part.dimensions) if part.returns else _target(part, rng, gripper, None)
    path = np.tile(place, (steps, 1))
    now = rng.exponential(part.rest_s) * rng.random()
    while now < times[-1]:
        length, target = rng.uniform(*part.reach_s), _target(part, rng, gripper, place)
        for dimension in range(part.dimensions):
            begin, end = now + rng.uniform(0, part.stray_s), now + length - rng.uniform(0, part.stray_s)
            u = np.clip((times - begin) / (end - begin), 0, 1)
            if part.returns:
                # up and down again: the bell of a minimum-jerk reach's speed, at most 1
                path[:, dimension] += target[dimension] * 16 * u**2 * (1 - u) ** 2
            else:
                path[:, dimension] += (target[dimension] - place[dimension]) * u**3 * (10 - 15 * u + 6 * u**2)
        place = place if part.returns else target
        now += length + rng.exponential(part.rest_s)
    return path


def _target(part: BodyPart, rng: np.random.Generator, gripper: bool, place: np.ndarray | None) -> np.ndarray:
    if gripper and place is not None:
        # open or close, never quite the same
        return np.where(place > 0, -1, 1) * rng.uniform(0.7, 1.0, 1)
    return rng.uniform(-1, 1, part.dimensions)


def whole_body(episodes: int, seconds: float, hz: float, jitter: float, seed: int) -> list[np.ndarray]:
    """25 dimensions in [-1, 1]; `jitter` is the deviation of white noise on each number, as a share of that range."""
    made = []
    for episode in range(episodes):
        rng = np.random.default_rng([25, seed, episode])
        path = minimum_jerk(WHOLE_BODY, round(seconds * hz), hz, rng)
        made.append((path + rng.normal(0, 2 * jitter, path.shape)).astype(np.float32))
    return made


def aloha(episodes: int, seconds: float, seed: int) -> list[np.ndarray]:
    """14 dimensions at 50 Hz: arm joints in rad and gripper opening in m, as the simulated servos followed."""
    import gym_aloha
    import mujoco

    assets = Path(gym_aloha.__file__).parent / "assets"
    model = mujoco.MjModel.from_xml_path(str(assets / "bimanual_viperx_transfer_cube.xml"))
    # via points are drawn blindly: arms that met would stop each other, as no operator lets them
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
    hz = 50.0
    every = round(1 / (hz * model.opt.timestep))
    # actuators of one arm: six joints and two mirrored fingers, of which one is an action
    driven = np.r_[0:6, 6, 8:14, 14]
    low, high = model.actuator_ctrlrange[driven].T
    places = model.jnt_qposadr[model.actuator_trnid[driven, 0]]
    made = []
    for episode in range(episodes):
        rng = np.random.default_rng([14, seed, episode])
        # the middle half of each joint's travel, the gripper's whole
        share = np.where([part in (6, 13) for part in range(14)], 1.0, 0.5)
        wanted = (low + high) / 2 + share * (high - low) / 2 * minimum_jerk(ALOHA, round(seconds * hz), hz, rng)
        data = mujoco.MjData(model)
        data.qpos[places] = wanted[0]
        data.qpos[places[[6, 13]] + 1] = -wanted[0, [6, 13]]
        path = np.zeros((len(wanted), 14), np.float32)
        for step, target in enumerate(wanted):
            data.ctrl[driven] = target
            data.ctrl[[7, 15]] = -target[[6, 13]]
            for _ in range(every):
                mujoco.mj_step(model, data)
            path[step] = data.qpos[places]
        made.append(path)
    return made


def metaworld(episodes: int, seed: int) -> list[np.ndarray]:
    """4 dimensions at 80 Hz: what MetaWorld's experts did, in the tasks of the recipes `pixels` and `state` in turn."""
    from hal.drivers.metaworld.expert import MetaWorldExpert
    from hal.drivers.metaworld.robot import MetaWorldConfig, MetaWorldRobot
    from hal.drivers.metaworld.tasks import PIXEL_TASKS, STATE_TASKS

    tasks = (*PIXEL_TASKS, *STATE_TASKS)
    robot = MetaWorldRobot(MetaWorldConfig(tasks=tasks, observation="state"))
    robot.connect()
    expert = MetaWorldExpert(robot)
    made = []
    for episode in range(episodes):
        robot.reset(tasks[episode % len(tasks)], 1000 * seed + episode)
        actions: list[np.ndarray] = []
        left = 40
        while len(actions) < 400 and left:
            action = expert.propose(robot.read())
            assert action is not None
            feedback = robot.write(action)
            actions.append(feedback.executed)
            # a little longer than it takes, as people do
            left -= bool(feedback.success)
        made.append(np.array(actions, np.float32))
    robot.close()
    return made


def chunks(episodes: list[np.ndarray], horizon: int, stride: int) -> np.ndarray:
    """float32[m, H, da]: windows of each episode, never across two."""
    windows = [
        episode[first : first + horizon]
        for episode in episodes
        for first in range(0, len(episode) - horizon + 1, stride)
    ]
    return np.stack(windows)
