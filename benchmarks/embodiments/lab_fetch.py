"""The third robot: a Fetch arm of another laboratory, and the job that it joins.

It measures positions alone, no velocities, turns and fingers: 12 of the other's 28 dimensions, of the same names. It is
told in millimetres how far to move: its actions are other columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces

from fleet.config.recipe import Recipe, share_policy
from fleet.config.recipes import get_recipe
from hal.drivers.gym.fetch_expert import FetchExpert
from hal.drivers.gym.presets import fetch
from hal.drivers.gym.robot import GymRobot
from hal.drivers.gym.spec import GymConfig, GymPart, gym_spec
from hal.registry import register
from wire.clock import Clock
from wire.types import Dimension, Observation

ROBOT, ENV_ID = "lab-fetch", "vla_fleet_benchmark/LabFetchPush-v0"
MEMBERS = ("metaworld", "fetch", ROBOT)
_MEASURED = tuple(f"{what}_{axis}" for what in ("hand", "block", "block_from_hand") for axis in "xyz")
_LIMIT = np.array([50.0, 50.0, 50.0, 1.0], np.float32)
"""of its actions, where the other's is 1: millimetres a step, and the gripper's"""


class LabFetch(gymnasium.Wrapper[Any, Any, Any, Any]):
    """FetchPush as it is described above."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        names = [dimension.name for dimension in gym_spec(fetch("push"))[0].state]
        self._kept = [names.index(name) for name in _MEASURED]
        inner: Any = env.observation_space
        measured = spaces.Box(-np.inf, np.inf, (len(self._kept),), np.float64)
        self.observation_space = spaces.Dict({"observation": measured, "desired_goal": inner["desired_goal"]})
        self.action_space = spaces.Box(-_LIMIT, _LIMIT, dtype=np.float32)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        seen, info = self.env.reset(**options)
        return self._seen(seen), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        seen, reward, terminated, truncated, info = self.env.step(action / _LIMIT)
        return self._seen(seen), reward, terminated, truncated, info

    def _seen(self, seen: dict[str, Any]) -> dict[str, Any]:
        return {"observation": seen["observation"][self._kept], "desired_goal": seen["desired_goal"]}


class LabFetchExpert(FetchExpert):
    """The same operator, who tells it in its own units."""

    def propose(self, observation: Observation) -> np.ndarray | None:
        told = super().propose(observation)
        return None if told is None else told * _LIMIT


def _make_env(**options: Any) -> LabFetch:
    import gymnasium_robotics  # noqa: F401 - registers the other one

    return LabFetch(gymnasium.make("FetchPush-v4", **options))


gymnasium.register(ENV_ID, _make_env)


def lab_fetch() -> GymConfig:
    """Its configuration; names and limits are those of `hal.drivers.gym.presets.fetch`."""
    like = fetch("push")
    spec = gym_spec(like)[0]
    known = {dimension.name: dimension for dimension in spec.state}
    units = ("mm/step", "mm/step", "mm/step", "1")
    action = [
        msgspec.structs.replace(one, unit=unit, low=-float(limit), high=float(limit))
        for one, unit, limit in zip(spec.action, units, _LIMIT, strict=True)
    ]
    return replace(
        like,
        env_id=ENV_ID,
        module=__name__,
        state=(_part("observation", [known[name] for name in _MEASURED]), like.state[1]),
        action=_part("", action),
        embodiment=ROBOT,
    )


def _part(key: str, dimensions: list[Dimension]) -> GymPart:
    columns = zip(*((d.name, d.unit, d.low, d.high, d.meaning) for d in dimensions), strict=True)
    return GymPart(key, *columns)


def _make_robot(config: GymConfig | None = None, clock: Clock | None = None) -> GymRobot:
    return GymRobot(config or lab_fetch(), clock)


register(ROBOT, _make_robot, LabFetchExpert)


def shapes(seed: int = 0) -> Recipe:
    """MetaWorld's arm and the Fetch arm of recipe `shapes`, and the third one."""
    found, config = get_recipe("shapes", seed).members, lab_fetch()
    third = replace(
        found["fetch"],
        robot=ROBOT,
        robot_config=config,
        unpaced_config=config,
        spec=gym_spec(config)[0],
        # what the others know they keep by a part of the batches
        share=4.0,
    )
    return share_policy("shapes", {"metaworld": found["metaworld"], "fetch": found["fetch"], ROBOT: third})
