"""One MetaWorld task as a deterministic simulator: seed and actions fix the trajectory, bit for bit.

Making one takes 0.02 s (0.12 s the first time), a reset 5-8 ms, a step 0.15-0.4 ms.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from hal.drivers.metaworld.changes import UNCHANGED, WorldChanges
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


_REPLACED = (
    "step",
    "set_xyz_action",
    "do_simulation",
    "_step_mujoco_simulation",
    "_get_obs",
    "_get_pos_goal",
    "_get_curr_obs_combined_no_goal",
    "get_endeff_pos",
)
"""methods of MetaWorld's environment that `Simulation.step` stands for; a task with another one has its own"""
_DOWN = (1.0, 0.0, 1.0, 0.0)
"""quaternion (w, x, y, z, not normalised): the hand points down"""


class Pose(NamedTuple):
    """All that the picture of a scene depends on besides its model."""

    qpos: np.ndarray
    mocap_pos: np.ndarray
    mocap_quat: np.ndarray


class Simulation:
    """One task's environment."""

    def __init__(self, task: str, changes: WorldChanges = UNCHANGED) -> None:
        mujoco, metaworld = import_simulator()
        env = metaworld.env_dict.ALL_V3_ENVIRONMENTS[f"{task}-v3"]()
        # What `set_task` does, without building the benchmark's 50 scenes: an episode's scene comes from its seed.
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        env._partially_observable = False
        env.__dict__.pop("sawyer_observation_space", None)  # cached while the goal was still hidden
        # The control loop decides when an episode ends; MetaWorld would raise at 500 steps.
        env.max_path_length = sys.maxsize
        changes.apply(mujoco, env, task)
        self.task = task
        self._env = env
        self._forward, self._step = mujoco.mj_forward, mujoco.mj_step
        self._hand, self._right, self._left = (env.data.body(name).xpos for name in ("hand", "rightclaw", "leftclaw"))
        base = metaworld.sawyer_xyz_env.SawyerXYZEnv
        self._plain = all(getattr(type(env), name) is getattr(base, name) for name in _REPLACED)
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
        """(reward, success) of one control period of 12.5 ms.

        What the environment's own `step` gives, bit for bit, without what it does for others: half of its time is spent
        on checks, on forces that nobody reads, and on putting together 39 numbers.
        """
        env = self._env
        if not self._plain:
            self.observation, reward, _, _, info = env.step(action)
            return float(reward), float(info["success"]) > 0.5
        self.advance(action)
        now = self._now()
        whole = np.empty(39)
        whole[:18], whole[18:36], whole[36:] = now, env._prev_obs, env._get_pos_goal()
        env._prev_obs = now
        bounds = env.sawyer_observation_space
        env._last_stable_obs = whole.clip(bounds.low, bounds.high)
        reward, info = env.evaluate_state(env._last_stable_obs, action)
        self.observation = env._last_stable_obs
        return float(reward), float(info["success"]) > 0.5

    def advance(self, action: np.ndarray) -> None:
        """What moves in a control period, and nothing of what is reported of it."""
        env, data = self._env, self._env.data
        move = action[:3].clip(-1, 1) * env.action_scale
        data.mocap_pos[0] = (data.mocap_pos[0] + move).clip(env.mocap_low, env.mocap_high)
        data.mocap_quat[:] = _DOWN
        data.ctrl[:] = action[3], -action[3]
        self._step(env.model, data, nstep=env.frame_skip)
        env.curr_path_length += 1
        self._forward(env.model, data)

    @property
    def opening(self) -> float:
        """Of the gripper, from 0 to 1."""
        apart = self._right - self._left
        return min(max(math.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)

    def pose(self) -> Pose:
        """A copy of where everything is."""
        data = self._env.data
        return Pose(data.qpos.copy(), data.mocap_pos.copy(), data.mocap_quat.copy())

    def close(self) -> None:
        self._env.close()

    def _now(self) -> np.ndarray:
        """float64[18]: hand (m), gripper opening, and of up to two objects the position (m) and the quaternion."""
        env, now = self._env, np.zeros(18)
        now[:3] = self._hand
        now[3] = self.opening
        positions = env._get_pos_objects().reshape(-1, 3)
        objects = now[4 : 4 + 7 * len(positions)].reshape(-1, 7)
        objects[:, :3] = positions
        objects[:, 3:] = env._get_quat_objects().reshape(-1, 4)
        return now
