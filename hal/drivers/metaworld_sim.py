"""One MetaWorld task as a deterministic simulator: seed and actions fix the trajectory, bit for bit.

Making one takes 0.02 s (0.12 s the first time), a reset 5-8 ms, a step 0.15-0.5 ms.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.drivers.metaworld_tasks import simulator_name
from wire.errors import RobotError

CONTROL_HZ = 80.0
"""The simulator's own step is 12.5 ms."""


def import_simulator() -> tuple[Any, Any]:
    """(mujoco, metaworld), imported so that they draw without a display.

    Raises `RobotError` naming the packages when they cannot be imported.
    """
    # mujoco reads these once, when it is imported. Mesa with more than one thread steals the control loop's core.
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("LP_NUM_THREADS", "1")
    try:
        import metaworld
        import mujoco
    except Exception as error:  # RuntimeError and OSError too: a bad MUJOCO_GL, a missing shared library
        raise RobotError(
            f"MetaWorld cannot be imported ({type(error).__name__}: {error}). Install it with "
            f"`pip install 'vla-fleet[sim]'`; MUJOCO_GL is '{os.environ['MUJOCO_GL']}', use egl or osmesa."
        ) from error
    return mujoco, metaworld


@dataclass(frozen=True, slots=True)
class Pose:
    """All that the picture of a scene depends on besides its model."""

    qpos: np.ndarray
    mocap_pos: np.ndarray
    mocap_quat: np.ndarray


class Simulation:
    """One task's environment."""

    def __init__(self, task: str) -> None:
        mujoco, metaworld = import_simulator()
        name = simulator_name(task)
        env = metaworld.env_dict.ALL_V3_ENVIRONMENTS[name]()
        # What `set_task` does, without building the benchmark's 50 scenes: an episode's scene comes from its seed.
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        env._partially_observable = False
        env.__dict__.pop("sawyer_observation_space", None)  # cached while the goal was still hidden
        # The control loop decides when an episode ends; MetaWorld would raise at 500 steps.
        env.max_path_length = sys.maxsize
        self.task = task
        self._env = env
        self._forward = mujoco.mj_forward
        self.observation: np.ndarray = np.zeros(39)
        """float64[39]: hand, gripper and objects now, the same one step ago, goal (m)"""

    @property
    def model(self) -> Any:
        """The mujoco.MjModel; its body positions change at a reset only."""
        return self._env.model

    @property
    def data(self) -> Any:
        """The mujoco.MjData."""
        return self._env.data

    def reset(self, seed: int) -> None:
        """Build the scene of `seed`."""
        env = self._env
        env.seed(int(seed))
        env.reset()
        # MetaWorld moves bodies after its last forward pass and then reports where they were before.
        self._forward(env.model, env.data)
        env._prev_obs = env._get_curr_obs_combined_no_goal()
        self.observation = np.array(env._get_obs(), np.float64)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """(reward, success) of one control period of 12.5 ms."""
        self.observation, reward, _, _, info = self._env.step(action)
        return float(reward), float(info["success"]) > 0.5

    def pose(self) -> Pose:
        """A copy of where everything is."""
        data = self._env.data
        return Pose(data.qpos.copy(), data.mocap_pos.copy(), data.mocap_quat.copy())

    def close(self) -> None:
        self._env.close()
