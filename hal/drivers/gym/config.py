"""What a Gymnasium environment does not say about itself, and a robot must: names, units, limits, meanings, tasks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from wire.errors import ConfigError
from wire.types import CommandType

RENDER = "render"
"""The `source` of a camera that is what `render()` draws."""


@dataclass(frozen=True, slots=True)
class GymPart:
    """One Box of numbers. A field of one value stands for all of the Box's numbers, an empty one for what it says."""

    key: str = ""
    """where the Box lies in a Dict of observations, as `desired_goal` or `arm.position`; empty: the Box is all of it"""
    names: tuple[str, ...] = ()
    """one each; default: the key (`state`, `action`) with the number's index"""
    units: tuple[str, ...] = ()
    """default: "1", a number without a unit"""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """default: the Box's; must be given where those are not finite"""
    meaning: tuple[CommandType, ...] = ()
    """default: absolute"""


@dataclass(frozen=True, slots=True)
class GymCamera:
    """One camera of the simulation."""

    name: str
    height: int
    width: int
    rate_hz: float = 0.0
    """must divide the control rate; 0: the control rate"""
    source: str = RENDER
    """`render`, or where its pictures lie in the observation, as `pixels` or `pixels.top`"""
    preview_height: int = 0
    preview_width: int = 0
    """of the larger picture for people; 0: they see the policy's"""


@dataclass(frozen=True, slots=True)
class GymTask:
    """One thing that can be done in the environment."""

    name: str
    instruction: str = ""
    """what a person would say; default: the name with spaces"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """added to the configuration's when the environment of this task is made"""
    options: dict[str, Any] = field(default_factory=dict)
    """given to `reset(options=...)`"""


@dataclass(frozen=True, slots=True)
class GymConfig:
    """A Gymnasium environment as a robot. Raises `ConfigError` for values that cannot work."""

    env_id: str
    """as `gymnasium.make` takes it: FetchReach-v4, gym_pusht/PushT-v0"""
    module: str = ""
    """imported first, because it registers the environment: gym_pusht, gymnasium_robotics, metaworld"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """for `gymnasium.make`"""
    tasks: tuple[GymTask, ...] = ()
    """default: one, named after the environment"""
    state: tuple[GymPart, ...] = ()
    """what the robot feels, in this order; default: every Box of numbers in the observation"""
    action: GymPart = field(default_factory=GymPart)
    cameras: tuple[GymCamera, ...] = ()
    control_hz: float = 0.0
    """0: `render_fps` of the environment's metadata"""
    seed_argument: str = ""
    """for an environment whose scene is fixed when it is made: it is made at every reset, with the seed as this"""
    embodiment: str = ""
    """default: the environment's id"""

    def __post_init__(self) -> None:
        if not self.env_id:
            raise ConfigError("GymConfig: env_id is empty; name an environment, as FetchReach-v4.")
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names) or not all(names):
            raise ConfigError(f"{self.where}: tasks need names, each once; these are {names}.")

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"Gymnasium environment '{self.env_id}'"

    def known_tasks(self) -> tuple[GymTask, ...]:
        """The tasks, or the only one there is: `FetchReach` of `FetchReach-v4`, `PushT` of `gym_pusht/PushT-v0`."""
        return self.tasks or (GymTask(re.sub(r"(?<=.)-v\d+$", "", self.env_id.rpartition("/")[2])),)
