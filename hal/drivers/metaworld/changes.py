"""What of a simulated world is other than MetaWorld ships it: what a fleet meets when a camera is knocked, a lamp fails
or an arm ages. Everything is an edit of MuJoCo's model; what a robot says of itself, its spec, stays the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.drivers.metaworld.tasks import KNOWN_TASKS
from hal.interfaces.robot import check_task
from wire.errors import ConfigError

_HANDLES = {"door-open": ("door_link", 0.05), "window-open": ("windowb_a", 0.05), "window-close": ("windowb_a", 0.05)}
"""body with the handle, and how far in front of it (m) all that belongs to the handle is"""
_LEAST_LAG = 0.5
"""below, MuJoCo's step is too long for the spring that draws the hand"""


@dataclass(frozen=True, slots=True)
class WorldChanges:
    """Raises `ConfigError` for values that cannot be."""

    tasks: tuple[str, ...] = ()
    """in whose scenes; (): in those of all"""
    camera_m: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """the cameras that stand beside the arm, moved in x, y, z"""
    camera_deg: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """and turned about their own axes: to the right, up, and towards whoever looks through them"""
    light: float = 1.0
    """brightness of all lamps, in theirs"""
    friction: float = 1.0
    """of everything that slides on something, in its own"""
    lag: float = 1.0
    """how slowly the hand is drawn after its set-point, in what it takes otherwise; at least 0.5"""
    gain: float = 1.0
    """how far an action moves the set-point, in what it says"""
    handle_m: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """the handle of the tasks `door-open`, `window-open` and `window-close`, moved in x, y, z on what it opens"""

    def __post_init__(self) -> None:
        for name in ("camera_m", "camera_deg", "handle_m", "light", "friction", "lag", "gain"):
            value = getattr(self, name)
            if not all(math.isfinite(one) for one in (value if isinstance(value, tuple) else (value,))):
                raise ConfigError(f"WorldChanges: {name} is {value}; it must be finite.")
        for name in ("friction", "gain"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"WorldChanges: {name} is {getattr(self, name)}; it must be positive.")
        if self.light < 0:
            raise ConfigError(f"WorldChanges: light is {self.light}; it is a factor, from 0 (dark), 1 is as it was.")
        if self.lag < _LEAST_LAG:
            raise ConfigError(f"WorldChanges: lag is {self.lag}; it must be at least {_LEAST_LAG}, 1 is as it was.")
        for task in self.tasks:
            check_task("WorldChanges", task, KNOWN_TASKS)
        if any(self.handle_m) and self.tasks and not set(self.tasks) & _HANDLES.keys():
            raise ConfigError(
                f"WorldChanges: handle_m is set, and none of {', '.join(self.tasks)} has a handle that can be moved; "
                f"{', '.join(_HANDLES)} have."
            )

    def apply(self, mujoco: Any, env: Any, task: str) -> None:
        """Change MetaWorld's environment `env` of `task`, once, before it is reset or drawn."""
        if self.tasks and task not in self.tasks:
            return
        model = env.model
        self._move_cameras(mujoco, model)
        for lamp in (model.light_ambient, model.light_diffuse, model.light_specular):
            lamp *= self.light
        head = model.vis.headlight
        for lamp in (head.ambient, head.diffuse, head.specular):
            lamp *= self.light
        model.geom_friction[:, 0] *= self.friction
        # The hand is welded to its set-point by a spring: its time constant.
        model.eq_solref[:, 0] *= self.lag
        env.action_scale *= self.gain
        if any(self.handle_m) and task in _HANDLES:
            self._move_handle(model, *_HANDLES[task])

    def _move_cameras(self, mujoco: Any, model: Any) -> None:
        turn = np.zeros(4)
        mujoco.mju_euler2Quat(turn, np.radians(self.camera_deg), "xyz")
        for camera in np.flatnonzero(model.cam_bodyid == 0):
            model.cam_pos[camera] += self.camera_m
            mujoco.mju_mulQuat(model.cam_quat[camera], model.cam_quat[camera].copy(), turn)

    def _move_handle(self, model: Any, name: str, in_front_m: float) -> None:
        body = model.body(name).id
        shift = np.array(self.handle_m)
        geoms = (model.geom_bodyid == body) & (model.geom_pos[:, 1] < -in_front_m)
        model.geom_pos[geoms] += shift
        model.site_pos[(model.site_bodyid == body)] += shift
        # What may touch is looked for in boxes that were made with the model: they have to reach as far.
        first = model.body_bvhadr[body]
        model.bvh_aabb[first : first + model.body_bvhnum[body], 3:] += np.linalg.norm(shift)


UNCHANGED = WorldChanges()
