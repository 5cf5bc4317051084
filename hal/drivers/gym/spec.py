"""The spec of a robot that is a Gymnasium environment: what its configuration says, else what its spaces say.

A configuration that says everything (as the presets do) needs no environment for its spec; for any other one is made
once in the process, its spaces are read and it is closed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hal.drivers.gym.config import RENDER, GymConfig, GymPart
from hal.drivers.gym.make import make_env
from wire.errors import ConfigError, suggest
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec


class Box(msgspec.Struct, frozen=True):
    """One Box of a space."""

    shape: tuple[int, ...]
    picture: bool
    low: tuple[float, ...] = ()
    """of every number in order; empty for a picture"""
    high: tuple[float, ...] = ()


class Spaces(msgspec.Struct, frozen=True):
    """What an environment says about itself."""

    observation: dict[str, Box]
    """by key, '' when the observation is one Box"""
    left_out: dict[str, str]
    """spaces that are no Box, by key: what they are"""
    action: Box
    render_fps: float


_known: dict[str, Spaces] = {}


def gym_spec(config: GymConfig) -> tuple[RobotSpec, tuple[GymPart, ...]]:
    """The spec, and the parts its state is made of. Raises `ConfigError` naming the field that is missing or wrong."""
    if _says_all(config):
        return _spec(config, config.state, None), config.state
    spaces = spaces_of(config)
    parts = config.state or tuple(GymPart(key) for key, box in spaces.observation.items() if not box.picture)
    return _spec(config, parts, spaces), parts


def spaces_of(config: GymConfig) -> Spaces:
    """The spaces of the configuration's first task; asked of an environment once in this process."""
    task = config.known_tasks()[0]
    asked = (config.env_id, config.module, config.kwargs, task, config.seed_argument, bool(_drawn(config)))
    key = msgspec.json.encode(asked, enc_hook=repr).decode()
    if key not in _known:
        env = make_env(config, task)
        try:
            _known[key] = read_spaces(config, env)
        finally:
            env.close()
    return _known[key]


def read_spaces(config: GymConfig, env: Any) -> Spaces:
    """Raises `ConfigError` when the actions are no vector of numbers."""
    boxes: dict[str, Box] = {}
    left_out: dict[str, str] = {}
    for key, space in _leaves("", env.observation_space):
        if (box := _box(space)) is None:
            left_out[key] = type(space).__name__
        else:
            boxes[key] = box
    action = _box(env.action_space)
    if action is None or action.picture:
        raise ConfigError(
            f"{config.where}: its actions are {env.action_space}; a robot takes a Box of numbers. "
            "Wrap the environment in one that does."
        )
    return Spaces(boxes, left_out, action, float((env.metadata or {}).get("render_fps") or 0.0))


def check_spaces(config: GymConfig, parts: Sequence[GymPart], spec: RobotSpec, found: Spaces) -> None:
    """Raise `ConfigError` if an environment that was made is another one than the spec was made for."""
    counts = [math.prod(_state_box(config, part, found).shape) for part in parts]
    if sum(counts) != spec.state_dim:
        given = ", ".join(f"'{part.key}' {count}" for part, count in zip(parts, counts, strict=True))
        raise ConfigError(f"{config.where}: state has {spec.state_dim} names, but the environment gives {given}.")
    if math.prod(found.action.shape) != spec.action_dim:
        raise ConfigError(
            f"{config.where}: action has {spec.action_dim} names, but the environment takes "
            f"{math.prod(found.action.shape)} numbers."
        )


def _spec(config: GymConfig, parts: Sequence[GymPart], spaces: Spaces | None) -> RobotSpec:
    state: list[Dimension] = []
    for number, part in enumerate(parts):
        box = _state_box(config, part, spaces) if spaces is not None else None
        state += _dimensions(config, f"state[{number}]", part, part.key.replace(".", "_") or "state", box)
    if not state:
        raise ConfigError(
            f"{config.where}: the observation has no Box of numbers for the state. Choose kwargs with which it has one."
        )
    action = _dimensions(config, "action", config.action, "action", spaces.action if spaces is not None else None)
    control_hz = config.control_hz or (spaces.render_fps if spaces is not None else 0.0)
    if not control_hz:
        raise ConfigError(f"{config.where}: it does not say its rate (metadata has no render_fps); give control_hz.")
    cameras = tuple(CameraSpec(c.name, c.height, c.width, c.rate_hz or control_hz) for c in config.cameras)
    for camera in cameras:
        ticks = control_hz / camera.rate_hz
        if ticks < 1 or abs(ticks - round(ticks)) > 1e-6:
            raise ConfigError(
                f"{config.where}: camera '{camera.name}': rate_hz {camera.rate_hz:g} must divide the control rate of "
                f"{control_hz:g} Hz: try {control_hz / max(1, round(ticks)):g}."
            )
    if spaces is not None:
        for asked in config.cameras:
            if asked.source != RENDER and asked.source not in spaces.observation:
                raise _no_key(config, f"cameras: source of '{asked.name}'", asked.source, spaces)
    return RobotSpec(config.embodiment or config.env_id, tuple(state), tuple(action), cameras, control_hz)


def _dimensions(config: GymConfig, what: str, part: GymPart, prefix: str, box: Box | None) -> list[Dimension]:
    count = len(box.low) if box is not None else len(part.names)
    names = part.names or ((prefix,) if count == 1 else tuple(f"{prefix}_{i}" for i in range(count)))
    fields: dict[str, tuple[Any, ...]] = {}
    defaults = {
        "names": names,
        "units": part.units or ("1",),
        "low": part.low or (box.low if box is not None else ()),
        "high": part.high or (box.high if box is not None else ()),
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


def _state_box(config: GymConfig, part: GymPart, spaces: Spaces) -> Box:
    box = spaces.observation.get(part.key)
    if box is None:
        raise _no_key(config, "state: key", part.key, spaces)
    if box.picture:
        raise ConfigError(f"{config.where}: state: '{part.key}' is a picture; name it as the `source` of a camera.")
    return box


def _no_key(config: GymConfig, what: str, key: str, spaces: Spaces) -> ConfigError:
    if key in spaces.left_out:
        return ConfigError(f"{config.where}: {what} '{key}' is a {spaces.left_out[key]}, no Box of numbers.")
    known = ", ".join(repr(name) for name in spaces.observation)
    return ConfigError(
        f"{config.where}: {what} '{key}' is not in the observation.{suggest(key, spaces.observation)} It has {known}."
    )


def _says_all(config: GymConfig) -> bool:
    return bool(
        config.state
        and config.control_hz
        and all(part.names and part.low and part.high for part in (*config.state, config.action))
    )


def _drawn(config: GymConfig) -> bool:
    return any(camera.source == RENDER for camera in config.cameras)


def _leaves(key: str, space: Any) -> Iterator[tuple[str, Any]]:
    """(key, space) of everything in nested Dict spaces."""
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        for name, part in inner.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), part)
    else:
        yield key, space


def _box(space: Any) -> Box | None:
    if not (hasattr(space, "low") and hasattr(space, "high")):
        return None
    shape = tuple(int(side) for side in space.shape)
    if np.dtype(space.dtype) == np.uint8 and len(shape) in (2, 3):
        return Box(shape, True)
    low, high = np.asarray(space.low, float).ravel(), np.asarray(space.high, float).ravel()
    return Box(shape, False, tuple(low.tolist()), tuple(high.tolist()))
