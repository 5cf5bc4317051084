"""The spec of a robot that is a Gymnasium environment: what its configuration says, else what its spaces say.

A configuration that says everything (as the presets do) needs no environment for its spec; for any other one is made
once in the process, its spaces are read and it is closed again.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wire.errors import ConfigError, RobotError, suggest
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

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
    env_id: str = ""
    """default: the configuration's"""
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
    success_keys: tuple[str, ...] = ("is_success", "success")
    """the first of these that `info` has says whether the task is done"""
    success_when_terminated: bool = False
    """an episode that terminates without any of them was a success"""
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
        for camera in self.cameras:
            preview = camera.preview_height, camera.preview_width
            if any(preview) and not all(1 <= side <= 4096 for side in preview):
                raise ConfigError(f"{self.where}: camera '{camera.name}' preview {preview}: each side is 1 to 4096.")
            if not camera.rate_hz >= 0:
                raise ConfigError(f"{self.where}: camera '{camera.name}' has rate_hz {camera.rate_hz:g}.")

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"Gymnasium environment '{self.env_id}'"

    def known_tasks(self) -> tuple[GymTask, ...]:
        """The tasks, or the only one there is: `FetchReach` of `FetchReach-v4`, `PushT` of `gym_pusht/PushT-v0`."""
        return self.tasks or (GymTask(re.sub(r"(?<=.)-v\d+$", "", self.env_id.rpartition("/")[2])),)


class Spaces(NamedTuple):
    """What an environment says about itself: Gymnasium's own spaces."""

    observation: dict[str, Any]
    """by key, '' when the observation is one space"""
    action: Any
    """a Box of numbers"""
    render_fps: float


_known: dict[str, Spaces] = {}
"""by the configuration: an environment is asked once in a process"""


def gym_spec(config: GymConfig) -> tuple[RobotSpec, tuple[GymPart, ...]]:
    """The spec, and the parts its state is made of. Raises `ConfigError` naming the field that is missing or wrong."""
    if _says_all(config):
        return _spec(config, config.state, None), config.state
    key = repr(config)
    if key not in _known:
        env = make_env(config, config.known_tasks()[0])
        try:
            _known[key] = read_spaces(config, env)
        finally:
            env.close()
    spaces = _known[key]
    parts = config.state or tuple(GymPart(key) for key, space in spaces.observation.items() if _is_numbers(space))
    return _spec(config, parts, spaces), parts


def make_env(config: GymConfig, task: GymTask, seed: int = 0) -> Any:
    """The environment of `task`, not reset yet. Raises `ConfigError` for an id or arguments that it has not."""
    # mujoco reads these once, when it is imported. Mesa with more than one thread steals the control loop's core.
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("LP_NUM_THREADS", "1")
    # pygame greets everybody who imports it
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    gymnasium = _import("gymnasium", config)
    if config.module:
        module = _import(config.module, config)
        if config.env_id not in gymnasium.registry:
            gymnasium.register_envs(module)
    env_id = task.env_id or config.env_id
    kwargs = {**config.kwargs, **task.kwargs}
    if config.seed_argument:
        kwargs[config.seed_argument] = seed
    if any(camera.source == RENDER for camera in config.cameras):
        kwargs.setdefault("render_mode", "rgb_array")
    try:
        # the checker only warns, and asks for a picture of its own
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        hint = suggest(env_id, gymnasium.registry)
        module = "" if config.module else " Set `module` to the package that registers it."
        raise ConfigError(f"{config.where}: there is no environment '{env_id}'.{hint}{module}") from error
    except TypeError as error:
        raise ConfigError(f"{config.where}: it cannot be made with kwargs {sorted(kwargs)}: {error}.") from error
    except Exception as error:  # whatever a simulator does when it is started
        raise RobotError(
            f"{config.where}: '{env_id}' cannot be made ({type(error).__name__}: {error}). Check its packages and "
            f"`kwargs`; MUJOCO_GL is '{os.environ['MUJOCO_GL']}', use egl or osmesa without a display."
        ) from error


def _import(name: str, config: GymConfig) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # missing, or one of its own imports fails in its own way
        raise RobotError(
            f"{config.where}: the Python module '{name}' cannot be imported ({type(error).__name__}: {error}). "
            "Install the package that has it; `pip install 'vla-fleet[sim,gym]'` has those the driver is tested with."
        ) from error


def read_spaces(config: GymConfig, env: Any) -> Spaces:
    """Raises `ConfigError` when the actions are no vector of numbers."""
    if not _is_numbers(env.action_space):
        raise ConfigError(
            f"{config.where}: its actions are {env.action_space}; a robot takes a Box of numbers. "
            "Wrap the environment in one that does."
        )
    render_fps = float((env.metadata or {}).get("render_fps") or 0.0)
    return Spaces(dict(_leaves("", env.observation_space)), env.action_space, render_fps)


def check_spaces(config: GymConfig, parts: Sequence[GymPart], spec: RobotSpec, found: Spaces) -> None:
    """Raise `ConfigError` if an environment that was made is another one than the spec was made for."""
    made = _spec(config, parts, found)
    if (made.state_dim, made.action_dim) != (spec.state_dim, spec.action_dim):
        raise ConfigError(
            f"{config.where}: state and action have {spec.state_dim} and {spec.action_dim} numbers, but in this "
            f"environment {made.state_dim} and {made.action_dim}."
        )


def _spec(config: GymConfig, parts: Sequence[GymPart], spaces: Spaces | None) -> RobotSpec:
    state: list[Dimension] = []
    for number, part in enumerate(parts):
        space = _state_space(config, part, spaces) if spaces is not None else None
        state += _dimensions(config, f"state[{number}]", part, part.key.replace(".", "_") or "state", space)
    if not state:
        raise ConfigError(
            f"{config.where}: the observation has no Box of numbers for the state. Choose kwargs with which it has one."
        )
    action = _dimensions(config, "action", config.action, "action", spaces.action if spaces is not None else None)
    control_hz = config.control_hz or (spaces.render_fps if spaces is not None else 0.0)
    if not control_hz:
        raise ConfigError(f"{config.where}: it does not say its rate (metadata has no render_fps); give control_hz.")
    cameras = tuple(CameraSpec(c.name, c.height, c.width, c.rate_hz or control_hz) for c in config.cameras)
    for asked, camera in zip(config.cameras, cameras, strict=True):
        ticks = control_hz / camera.rate_hz
        if ticks < 1 or abs(ticks - round(ticks)) > 1e-6:
            raise ConfigError(
                f"{config.where}: camera '{camera.name}': rate_hz {camera.rate_hz:g} must divide the control rate of "
                f"{control_hz:g} Hz: try {control_hz / max(1, round(ticks)):g}."
            )
        if spaces is not None and asked.source != RENDER and not _is_box(spaces.observation.get(asked.source)):
            raise _no_key(config, f"cameras: source of '{asked.name}'", asked.source, spaces)
    return RobotSpec(config.embodiment or config.env_id, tuple(state), tuple(action), cameras, control_hz)


def _dimensions(config: GymConfig, what: str, part: GymPart, prefix: str, space: Any) -> list[Dimension]:
    """Of `part`; what it leaves out is in its `space`, None where it leaves out nothing."""
    count = math.prod(space.shape) if space is not None else len(part.names)
    names = part.names or ((prefix,) if count == 1 else tuple(f"{prefix}_{i}" for i in range(count)))
    fields: dict[str, tuple[Any, ...]] = {}
    defaults = {
        "names": names,
        "units": part.units or ("1",),
        "low": part.low or _numbers(space.low),
        "high": part.high or _numbers(space.high),
        "meaning": part.meaning or (CommandType.absolute,),
    }
    for name, values in defaults.items():
        fields[name] = values * count if len(values) == 1 and name != "names" else values
        if len(fields[name]) != count:
            where = f" of '{part.key}'" if part.key else ""
            wanted = "one each" if name == "names" else "one for all, or one each"
            raise ConfigError(
                f"{config.where}: {what}.{name} has {len(values)} values for {count} numbers{where}; give {wanted}."
            )
    dimensions = []
    for name, unit, low, high, meaning in zip(*fields.values(), strict=True):
        for side, value in (("low", low), ("high", high)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"{config.where}: {what}.{side} of '{name}' is {value}: the space sets no limit. Give its real "
                    f"range in {what}.low and {what}.high."
                )
        if not low < high:
            raise ConfigError(
                f"{config.where}: {what}.low of '{name}' is {low}, not below its high, {high}. Give its real range."
            )
        dimensions.append(Dimension(name, unit, float(low), float(high), meaning))
    return dimensions


def _state_space(config: GymConfig, part: GymPart, spaces: Spaces) -> Any:
    space = spaces.observation.get(part.key)
    if not _is_box(space):
        raise _no_key(config, "state: key", part.key, spaces)
    if not _is_numbers(space):
        raise ConfigError(f"{config.where}: state: '{part.key}' is a picture; name it as the `source` of a camera.")
    return space


def _no_key(config: GymConfig, what: str, key: str, spaces: Spaces) -> ConfigError:
    if key in spaces.observation:
        kind = type(spaces.observation[key]).__name__
        return ConfigError(f"{config.where}: {what} '{key}' is a {kind}, no Box of numbers.")
    boxes = [name for name, space in spaces.observation.items() if _is_box(space)]
    return ConfigError(
        f"{config.where}: {what} '{key}' is not in the observation.{suggest(key, boxes)} It has "
        f"{', '.join(map(repr, boxes))}."
    )


def _says_all(config: GymConfig) -> bool:
    return bool(
        config.state
        and config.control_hz
        and all(part.names and part.low and part.high for part in (*config.state, config.action))
    )


def _leaves(key: str, space: Any) -> Iterator[tuple[str, Any]]:
    """(key, space) of everything in nested Dict spaces."""
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        for name, part in inner.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), part)
    else:
        yield key, space


def _is_box(space: Any) -> bool:
    return hasattr(space, "low") and hasattr(space, "high")


def _is_numbers(space: Any) -> bool:
    return _is_box(space) and not (np.dtype(space.dtype) == np.uint8 and len(space.shape) in (2, 3))


def _numbers(limits: Any) -> tuple[float, ...]:
    return tuple(np.asarray(limits, float).ravel().tolist())
