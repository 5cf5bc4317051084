"""Makes Gymnasium environments, and turns what goes wrong into errors that say what to do."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from hal.drivers.gym.config import RENDER, GymConfig, GymTask
from wire.errors import ConfigError, RobotError, suggest


def import_gymnasium(config: GymConfig) -> Any:
    """The package `gymnasium`, with the configuration's module registered. Raises `RobotError` naming the package."""
    # mujoco reads these once, when it is imported. Mesa with more than one thread steals the control loop's core.
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("LP_NUM_THREADS", "1")
    # pygame greets everybody who imports it
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    gymnasium = _import("gymnasium", config)
    if config.module:
        module = _import(config.module, config)
        if config.env_id not in gymnasium.registry and hasattr(gymnasium, "register_envs"):
            gymnasium.register_envs(module)
    return gymnasium


def make_env(config: GymConfig, task: GymTask, seed: int = 0) -> Any:
    """The environment of `task`, not reset yet. Raises `ConfigError` for an id or arguments that it has not."""
    gymnasium = import_gymnasium(config)
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


def value_at(observation: Any, key: str) -> Any:
    """What lies at `a.b` in nested mappings; all of it for ''. Raises `KeyError`."""
    for name in key.split(".") if key else ():
        if not isinstance(observation, Mapping):
            raise KeyError(key)
        observation = observation[name]
    return observation


def _import(name: str, config: GymConfig) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # missing, or one of its own imports fails in its own way
        raise RobotError(
            f"{config.where}: the Python module '{name}' cannot be imported ({type(error).__name__}: {error}). "
            "Install the package that has it; `pip install 'vla-fleet[sim,gym]'` has those the driver is tested with."
        ) from error
