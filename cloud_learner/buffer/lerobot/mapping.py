"""How the columns of a LeRobot dataset become the state, the action and the cameras of a robot."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from cloud_learner.buffer.files import checked_name
from cloud_learner.buffer.lerobot.resampling import same_rate
from cloud_learner.buffer.lerobot.source import DatasetSource, names_of, picture_size
from wire.errors import ConfigError, SpecMismatchError, suggest
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

T = TypeVar("T")
STATE_KEY, ACTION_KEY = "observation.state", "action"
_FAR = 4.0
_MOST_TIMES = 1000
"""as many rows, or as few, resampling makes of a dataset's"""


class DatasetMapping(msgspec.Struct, frozen=True, kw_only=True):
    """What a person says about a dataset; everything has a default that suits a dataset of our own export.

    `names` and `scale` go by the robot's name of a dimension; where state and action share a name that is not to be
    treated alike, `state.NAME` and `action.NAME` say which is meant.
    """

    spec: RobotSpec | None = None
    """whose data it is to be; None makes a robot spec from the dataset's names, statistics and rate"""
    robot: str = "lerobot"
    """name under which the episodes are stored"""
    names: dict[str, str] = {}
    """what the dataset calls a state or action dimension"""
    by_position: bool = False
    """take state and action dimensions in their order, whatever they are called"""
    scale: dict[str, float] = {}
    """what to multiply a dimension with: 0.0174533 makes radians of degrees"""
    cameras: dict[str, str] = {}
    """the dataset's image key, by the robot's camera"""
    resample: bool = False
    """take rows at another rate than the robot's, by the rules of `resampling`"""
    tasks: dict[str, str] = {}
    """task name by instruction; an instruction that is not in it is the name itself"""


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Which numbers of a vector are a robot's, and what they are multiplied with."""

    order: list[int]
    scale: np.ndarray
    """float32[n]"""

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """float32[T, n] of [T, m] as in the dataset."""
        return np.ascontiguousarray(values[:, self.order], np.float32) * self.scale


class Mapped(msgspec.Struct, frozen=True, eq=False):
    """A mapping that fits a dataset."""

    spec: RobotSpec
    cameras: dict[str, str]
    """the dataset's key by the robot's camera, in the order of the spec"""
    state: Columns
    action: Columns


def map_dataset(source: DatasetSource, mapping: DatasetMapping) -> Mapped:
    """Match a dataset with a robot.

    Raises `ConfigError` for a dataset without state or action, another rate unless it is to be resampled, an unknown
    name, or numbers that cannot be in the robot's units; `SpecMismatchError` when dimensions or cameras of the robot
    are not in the dataset.
    """
    checked_name(mapping.robot, "robot")
    for what, key in (("state", STATE_KEY), ("action", ACTION_KEY)):
        feature = source.features.get(key)
        if feature is None or feature["dtype"] in ("video", "image", "string"):
            there = ", ".join(sorted(source.features))
            raise ConfigError(f"the dataset at {source.root} has no {what} '{key}' of numbers; it has: {there}.")
    spec = mapping.spec or (source.about.spec if source.about is not None else _spec_of(source, mapping))
    if not (mapping.resample or same_rate(source.fps, spec.control_hz)):
        raise ConfigError(
            f"the dataset at {source.root} has {source.fps:g} rows a second, robot spec '{spec.embodiment}' runs at "
            f"{spec.control_hz:g} Hz: steps would mean something else. Resample it (--resample), or give a spec with "
            f"control_hz={source.fps:g}, or none to make one from the dataset."
        )
    if not 1 / _MOST_TIMES <= spec.control_hz / source.fps <= _MOST_TIMES:
        raise ConfigError(
            f"the dataset at {source.root} has {source.fps:g} rows a second, robot spec '{spec.embodiment}' runs at "
            f"{spec.control_hz:g} Hz: no row is made {_MOST_TIMES} times as many, or as few. Give the robot's own rate."
        )
    known = {f"state.{d.name}" for d in spec.state} | {f"action.{d.name}" for d in spec.action}
    known |= {name.split(".", 1)[1] for name in known}
    for option, given in (("names", mapping.names), ("scale", mapping.scale)):
        for name in given:
            if name not in known:
                raise ConfigError(f"{option}: the robot has no state or action '{name}'.{suggest(name, known)}")
    return Mapped(
        spec,
        _cameras(source, spec, mapping),
        _columns(source, mapping, "state", STATE_KEY, spec.state),
        _columns(source, mapping, "action", ACTION_KEY, spec.action),
    )


def _said(given: dict[str, T], what: str, name: str, otherwise: T) -> T:
    """What a person said about the robot's `name` of the state or action (`what`)."""
    return given.get(f"{what}.{name}", given.get(name, otherwise))


def _columns(
    source: DatasetSource, mapping: DatasetMapping, what: str, key: str, wanted: tuple[Dimension, ...]
) -> Columns:
    names = names_of(source.features[key], what)
    asked = [_said(mapping.names, what, dimension.name, dimension.name) for dimension in wanted]
    if mapping.by_position:
        if len(names) != len(wanted):
            raise SpecMismatchError(
                f"'{key}' of {source.root} has {len(names)} numbers, the robot's {what} has {len(wanted)}."
            )
        asked = list(names)
    elif missing := [name for name in asked if name not in names]:
        raise SpecMismatchError(
            f"'{key}' of {source.root} has no '{missing[0]}', which the robot's {what} needs; it has: "
            f"{', '.join(names)}. Say which is which (names), or take them in their order (by position)."
        )
    scale = [_said(mapping.scale, what, dimension.name, 1.0) for dimension in wanted]
    found = Columns([names.index(name) for name in asked], np.array(scale, np.float32))
    if mapping.spec is not None:
        # a row's delta is that of several ticks, or a part of one's
        ticks = source.fps / mapping.spec.control_hz if key == ACTION_KEY else 1.0
        _check_range(source, key, wanted, found, ticks)
    return found


def _check_range(
    source: DatasetSource, key: str, wanted: tuple[Dimension, ...], columns: Columns, ticks: float
) -> None:
    """That no number lies several times further out than the robot's limits are apart: that would be another unit."""
    if (limits := source.limits(key)) is None:
        return
    for dimension, (low, high) in zip(wanted, np.sort(columns(np.stack(limits)).T).tolist(), strict=True):
        if dimension.meaning == CommandType.delta:
            low, high = low * ticks, high * ticks
        span = _FAR * (dimension.high - dimension.low)
        if low < dimension.low - span or high > dimension.high + span:
            raise ConfigError(
                f"'{key}' of {source.root}: '{dimension.name}' runs from {low:.4g} to {high:.4g}, but the robot's "
                f"limits are {dimension.low:g} to {dimension.high:g} {dimension.unit}: give its scale."
            )


def _cameras(source: DatasetSource, spec: RobotSpec, mapping: DatasetMapping) -> dict[str, str]:
    """The dataset's key for each camera of `spec`."""
    keys = _image_keys(source)
    known = [camera.name for camera in spec.cameras]
    if unknown := set(mapping.cameras) - set(known):
        raise ConfigError(f"the robot has no camera '{min(unknown)}': {known}.{suggest(min(unknown), known)}")
    ours = source.about.cameras if source.about is not None else {}
    found = {}
    for camera in known:
        asked = mapping.cameras.get(camera) or ours.get(camera) or camera
        matching = [key for key in keys if asked in (key, _short(key))]
        if not matching:
            raise SpecMismatchError(
                f"the dataset at {source.root} has no images '{asked}' for the robot's camera '{camera}'; it has: "
                f"{', '.join(keys) or 'none'}. Say which is which (cameras)."
            )
        found[camera] = matching[0]
    return found


def _image_keys(source: DatasetSource) -> list[str]:
    """Keys of colour images and videos."""
    return [
        key
        for key, feature in source.features.items()
        if feature["dtype"] in ("image", "video")
        and not (feature.get("info") or {}).get("video.is_depth_map")
        and picture_size(feature)[2] == 3
    ]


def _short(key: str) -> str:
    return key.removeprefix("observation.").removeprefix("images.")


def _spec_of(source: DatasetSource, mapping: DatasetMapping) -> RobotSpec:
    """A robot as the dataset shows it: its names, the least and greatest value of each number as limits."""

    def dimensions(what: str, key: str) -> tuple[Dimension, ...]:
        limits = source.limits(key)
        if limits is None:
            raise ConfigError(
                f"the dataset at {source.root} has no statistics of '{key}' to take limits from: give a robot spec."
            )
        found = []
        for name, low, high in zip(names_of(source.features[key], what), *limits, strict=True):
            factor = _said(mapping.scale, what, name, 1.0)
            low, high = sorted((float(low) * factor, float(high) * factor))
            if low == high:
                low, high = low - 0.5, high + 0.5
            found.append(Dimension(name, "unknown", low, high))
        return tuple(found)

    sizes = {key: picture_size(source.features[key]) for key in _image_keys(source)}
    return RobotSpec(
        embodiment=str(source.info.get("robot_type") or "lerobot"),
        state=dimensions("state", STATE_KEY),
        action=dimensions("action", ACTION_KEY),
        cameras=tuple(CameraSpec(_short(key), h, w, source.fps) for key, (h, w, _) in sizes.items()),
        control_hz=source.fps,
    )
