"""Well-known Gymnasium environments, fully described: their specs need no simulator, so a learner can make them too.

    GymRobot(pusht()), GymRobot(aloha("transfer-cube")), GymRobot(fetch("push")), GymRobot(metaworld("push"))

By name: `vla-fleet doctor --robot gym-pusht`. Other variants are `dataclasses.replace` of what these return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hal.drivers.gym.robot import GymRobot
from hal.drivers.gym.spec import GymCamera, GymConfig, GymPart, GymTask
from hal.drivers.metaworld.robot import MetaWorldConfig, metaworld_spec
from hal.drivers.metaworld.tasks import instruction
from hal.interfaces.robot import check_task
from wire.clock import Clock
from wire.types import CommandType, Dimension

_FETCH = {
    "reach": ("FetchReach-v4", "move the hand to the mark"),
    "push": ("FetchPush-v4", "push the block to the mark"),
}
_ALOHA = {
    "transfer-cube": ("gym_aloha/AlohaTransferCube-v0", "hand the cube from the right arm to the left arm"),
    "insertion": ("gym_aloha/AlohaInsertion-v0", "insert the peg into the socket"),
}
_JOINTS = {
    # ViperX 300: what its simulated joints allow
    "waist": ("rad", -math.pi, math.pi),
    "shoulder": ("rad", -1.86, 1.26),
    "elbow": ("rad", -1.77, 1.61),
    "forearm_roll": ("rad", -math.pi, math.pi),
    "wrist_angle": ("rad", -1.87, 2.24),
    "wrist_rotate": ("rad", -math.pi, math.pi),
    # 0 closed, 1 open; a finger may be pushed a little beyond
    "gripper": ("1", -0.5, 1.5),
}


def pusht(image_px: int = 96, camera_hz: float = 10.0) -> GymConfig:
    """PushT (Chi et al. 2023, "Diffusion Policy", arXiv 2303.04137): a disc pushes a T on a table of 512 px, 10 Hz.

    State: the disc's position. Camera `top`, drawn in 2 ms. Action: where the disc shall go. `image_px=0`: no camera,
    and the T's pose in the state.
    """
    disc = [Dimension(f"disc_{axis}", "px", 0.0, 512.0) for axis in "xy"]
    kwargs: dict[str, object] = {"obs_type": "state"}
    if image_px:
        kwargs = {"obs_type": "pixels_agent_pos", "observation_width": image_px, "observation_height": image_px}
        state = _part("agent_pos", disc)
    else:
        table = [Dimension(f"t_{axis}", "px", 0.0, 512.0) for axis in "xy"]
        state = _part("", [*disc, *table, Dimension("t_angle", "rad", 0.0, 2 * math.pi)])
    return GymConfig(
        env_id="gym_pusht/PushT-v0",
        module="gym_pusht",
        kwargs=kwargs,
        tasks=(GymTask("push-t", "push the T onto its mark"),),
        state=(state,),
        action=_part("", disc),
        cameras=(GymCamera("top", image_px, image_px, camera_hz, "pixels"),) if image_px else (),
        control_hz=10.0,
        embodiment="pusht",
    )


def aloha(task: str = "transfer-cube", height: int = 120, width: int = 160) -> GymConfig:
    """ALOHA's two simulated arms (Zhao et al. 2023, "ACT", arXiv 2304.13705), joint positions at 50 Hz, camera `top`.

    gym-aloha draws 480x640 at every step, which a CPU does 5 to 10 times a second; here it is shrunk.
    """
    check_task("aloha", task, _ALOHA)
    env_id, instruction = _ALOHA[task]
    joints = [Dimension(f"{arm}_{joint}", *limits) for arm in ("left", "right") for joint, limits in _JOINTS.items()]
    return GymConfig(
        env_id=env_id,
        module="gym_aloha",
        kwargs={"obs_type": "pixels_agent_pos"},
        tasks=(GymTask(task, instruction),),
        state=(_part("agent_pos", joints),),
        action=_part("", joints),
        cameras=(GymCamera("top", height, width, 50.0, "pixels.top", 240, 320),),
        control_hz=50.0,
        embodiment="aloha",
    )


def fetch(task: str = "reach") -> GymConfig:
    """The Fetch arm of gymnasium-robotics (Plappert et al. 2018, arXiv 1802.09464), 25 Hz, no camera.

    Action: the hand's change in 5 cm per step, and the gripper. FetchReach keeps its gripper shut.
    """
    check_task("fetch", task, _FETCH)
    env_id, instruction = _FETCH[task]
    hand = _vector("hand", "m", 3.0)
    gripper = [Dimension(f"finger_{side}", "m", -0.1, 0.1) for side in ("right", "left")]
    # gymnasium-robotics gives velocities times the period
    speed = _vector("hand_v", "m/step", 1.0)
    gripper_speed = [Dimension(f"finger_{side}_v", "m/step", -1.0, 1.0) for side in ("right", "left")]
    if task == "reach":
        felt = [*hand, *gripper, *speed, *gripper_speed]
    else:
        felt = [*hand, *_vector("block", "m", 3.0), *_vector("block_from_hand", "m", 3.0), *gripper]
        felt += [Dimension(f"block_turn_{axis}", "rad", -math.pi, math.pi) for axis in "xyz"]
        felt += [*_vector("block_v", "m/step", 1.0), *_vector("block_turn_v", "rad/step", 10.0)]
        felt += [*speed, *gripper_speed]
    moves = [Dimension(f"move_{axis}", "5 cm/step", -1.0, 1.0, CommandType.delta) for axis in "xyz"]
    return GymConfig(
        env_id=env_id,
        module="gymnasium_robotics",
        tasks=(GymTask(task, instruction),),
        state=(_part("observation", felt), _part("desired_goal", _vector("goal", "m", 3.0))),
        action=_part("", [*moves, Dimension("gripper", "1", -1.0, 1.0)]),
        control_hz=25.0,
        embodiment=f"fetch-{task}",
    )


def metaworld(*tasks: str) -> GymConfig:
    """MetaWorld (Yu et al. 2020, arXiv 1910.10897) through its Gymnasium id: all 39 numbers, 80 Hz, no camera.

    Its spec is that of the recipe `state`. Its scene is fixed when the environment is made, so each reset makes one
    (50 ms), and an episode is over after 500 steps. The driver `metaworld` has neither bound, and cameras.
    """
    chosen = tasks or ("push",)
    spec = metaworld_spec(MetaWorldConfig(tasks=chosen, observation="state"))
    return GymConfig(
        env_id="Meta-World/goal_observable",
        module="metaworld",
        tasks=tuple(GymTask(task, instruction(task), kwargs={"env_name": f"{task}-v3"}) for task in chosen),
        state=(_part("", spec.state),),
        action=_part("", spec.action),
        control_hz=80.0,
        seed_argument="seed",
        embodiment=spec.embodiment,
    )


def _robot(preset: Callable[[], GymConfig]) -> Callable[..., GymRobot]:
    """For the registry."""

    def make(config: GymConfig | None = None, clock: Clock | None = None) -> GymRobot:
        return GymRobot(config or preset(), clock)

    return make


def _vector(name: str, unit: str, reach: float) -> list[Dimension]:
    return [Dimension(f"{name}_{axis}", unit, -reach, reach) for axis in "xyz"]


def _part(key: str, dimensions: Sequence[Dimension]) -> GymPart:
    return GymPart(
        key,
        tuple(d.name for d in dimensions),
        tuple(d.unit for d in dimensions),
        tuple(d.low for d in dimensions),
        tuple(d.high for d in dimensions),
        tuple(d.meaning for d in dimensions),
    )


pusht_robot = _robot(pusht)
aloha_robot = _robot(aloha)
fetch_robot = _robot(fetch)
metaworld_robot = _robot(metaworld)
