"""How the columns of a LeRobot dataset become the state, the action and the cameras of a robot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from cloud_learner.buffer.files import checked_name
from cloud_learner.buffer.lerobot.source import DatasetSource, names_of, picture_size
from wire.errors import ConfigError, SpecMismatchError, suggest
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

T = TypeVar("T")
STATE_KEY, ACTION_KEY = "observation.state", "action"
_FAR = 4.0
_PREFIXES = ("observation.images.", "observation.")


class DatasetMapping(msgspec.Struct, frozen=True, kw_only=True):
    """What a person says about a dataset; everything has a default that suits a dataset of our own export.

    `names`, `scale` and `units` go by the robot's name of a dimension; where state and action share a name that is not
    to be treated alike, `state.NAME` and `action.NAME` say which is meant.
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


class Mapped(msgspec.Struct, frozen=True, eq=False):
    """A mapping that fits a dataset."""

    spec: RobotSpec
    at_its_rate: bool
    """whether a row is a control tick"""
    robot: str
    cameras: dict[str, str]
    """the dataset's key by the robot's camera"""
    frame_columns: list[int]
    """for each camera of the spec its column of `frame_time_s`, in datasets of our own export"""
    state: Callable[[np.ndarray], np.ndarray]
    """[T, n] as in the dataset to float32[T, ds]"""
    action: Callable[[np.ndarray], np.ndarray]
    """[T, n] as in the dataset to float32[T, da]"""
    tasks: dict[str, str]

    def task(self, instruction: str, noted: str, episode: int) -> str:
        """The name of an instruction's task; `noted`: what our own export calls it, or ''."""
        name = self.tasks.get(instruction) or noted or instruction
        if not 1 <= len(name) <= 200:
            raise ConfigError(
                f"episode {episode}: a task name has 1 to 200 characters, the instruction {instruction[:60]!r} has "
                f"{len(instruction)}: say what the task is called (Mapping.tasks)."
            )
        return name


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
    at_its_rate = abs(spec.control_hz - source.fps) <= 1e-6 * spec.control_hz
    if not (at_its_rate or mapping.resample):
        raise ConfigError(
            f"the dataset at {source.root} has {source.fps:g} rows a second, robot spec '{spec.embodiment}' runs at "
            f"{spec.control_hz:g} Hz: steps would mean something else. Resample it (--resample), or give a spec with "
            f"control_hz={source.fps:g}, or none to make one from the dataset."
        )
    _check_names(mapping, spec)
    cameras = _cameras(source, spec, mapping)
    by_key = {key: number for number, key in enumerate(source.about.cameras.values())} if source.about else {}
    return Mapped(
        spec=spec,
        at_its_rate=at_its_rate,
        robot=mapping.robot,
        cameras=cameras,
        frame_columns=[by_key.get(key, 0) for key in cameras.values()],
        state=_dimensions(source, mapping, "state", STATE_KEY, spec.state),
        action=_dimensions(source, mapping, "action", ACTION_KEY, spec.action),
        tasks=mapping.tasks,
    )


def _check_names(mapping: DatasetMapping, spec: RobotSpec) -> None:
    known = {f"state.{d.name}" for d in spec.state} | {f"action.{d.name}" for d in spec.action}
    known |= {name.split(".", 1)[1] for name in known}
    for option in ("names", "scale"):
        for name in getattr(mapping, option):
            if name not in known:
                raise ConfigError(f"{option}: the robot has no state or action '{name}'.{suggest(name, known)}")


def _said(given: dict[str, T], what: str, name: str, otherwise: T) -> T:
    """What a person said about the robot's `name` of the state or action (`what`)."""
    return given.get(f"{what}.{name}", given.get(name, otherwise))


def _dimensions(
    source: DatasetSource, mapping: DatasetMapping, what: str, key: str, wanted: tuple[Dimension, ...]
) -> Callable[[np.ndarray], np.ndarray]:
    names = names_of(source.features[key], what)
    asked = [_said(mapping.names, what, dimension.name, dimension.name) for dimension in wanted]
    if mapping.by_position:
        if len(names) != len(wanted):
            raise SpecMismatchError(
                f"'{key}' of {source.root} has {len(names)} numbers, the robot's {what} has {len(wanted)}."
            )
        order = list(range(len(wanted)))
    else:
        missing = [name for name in asked if name not in names]
        if missing:
            raise SpecMismatchError(
                f"'{key}' of {source.root} has no '{missing[0]}', which the robot's {what} needs; it has: "
                f"{', '.join(names)}. Say which is which (names), or take them in their order (by position)."
            )
        order = [names.index(name) for name in asked]
    scale = np.array([_said(mapping.scale, what, dimension.name, 1.0) for dimension in wanted], np.float32)
    if mapping.spec is not None:
        # a row's delta is that of several ticks, or a part of one's
        ticks = source.fps / mapping.spec.control_hz if key == ACTION_KEY else 1.0
        of_tick = [ticks if dimension.meaning == CommandType.delta else 1.0 for dimension in wanted]
        _check_range(source, key, wanted, order, scale * of_tick)

    def convert(values: np.ndarray) -> np.ndarray:
        found = np.ascontiguousarray(values[:, order], np.float32)
        return found if (scale == 1).all() else found * scale

    return convert


def _check_range(
    source: DatasetSource, key: str, wanted: tuple[Dimension, ...], order: list[int], scale: np.ndarray
) -> None:
    """That no number lies several times further out than the robot's limits are apart: that would be another unit."""
    if (limits := source.limits(key)) is None:
        return
    least, most = limits
    for dimension, column, factor in zip(wanted, order, scale.tolist(), strict=True):
        low, high = sorted((float(least[column]) * factor, float(most[column]) * factor))
        span = _FAR * (dimension.high - dimension.low)
        if low < dimension.low - span or high > dimension.high + span:
            raise ConfigError(
                f"'{key}' of {source.root}: '{dimension.name}' runs from {low:.4g} to {high:.4g}, but the robot's "
                f"limits are {dimension.low:g} to {dimension.high:g} {dimension.unit}: give its scale."
            )


def _cameras(source: DatasetSource, spec: RobotSpec, mapping: DatasetMapping) -> dict[str, str]:
    """The dataset's key for each camera of `spec`."""
    keys = _image_keys(source)
    unknown = set(mapping.cameras) - {camera.name for camera in spec.cameras}
    if unknown:
        known = [camera.name for camera in spec.cameras]
        raise ConfigError(f"the robot has no camera '{min(unknown)}': {known}.{suggest(min(unknown), known)}")
    ours = source.about.cameras if source.about is not None else {}
    found = {}
    for camera in spec.cameras:
        asked = mapping.cameras.get(camera.name) or ours.get(camera.name) or camera.name
        matching = [key for key in keys if asked in (key, _short(key))]
        if not matching:
            raise SpecMismatchError(
                f"the dataset at {source.root} has no images '{asked}' for the robot's camera '{camera.name}'; it has: "
                f"{', '.join(keys) or 'none'}. Say which is which (cameras)."
            )
        found[camera.name] = matching[0]
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
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


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

    cameras = []
    for key in _image_keys(source):
        height, width, _ = picture_size(source.features[key])
        cameras.append(CameraSpec(_short(key), height, width, source.fps))
    return RobotSpec(
        embodiment=str(source.info.get("robot_type") or "lerobot"),
        state=dimensions("state", STATE_KEY),
        action=dimensions("action", ACTION_KEY),
        cameras=tuple(cameras),
        control_hz=source.fps,
    )
