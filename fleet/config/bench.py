"""What a recipe for a real arm has to be told of one bench: a TOML file, read with its mistakes named.

    [robot]                 # what `lerobot-calibrate` was told
    port = "/dev/ttyACM0"
    id = "bench"

`docs/examples/bench.toml` has every key. Only read: nothing is opened here, so that a trainer on another machine takes
the same file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from wire.errors import ConfigError, suggest
from wire.untrusted import MAX_CONFIG_BYTES, read_file

Positive = Annotated[float, msgspec.Meta(gt=0)]
Joints = dict[str, Positive]
"""by joint, without lerobot's `.pos`"""
Table = TypeVar("Table", bound=msgspec.Struct)


class ArmTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[robot]`, and what a leader has as well."""

    port: str
    """serial port, better by its path below /dev/serial/by-id"""
    id: str
    """as `lerobot-calibrate` was told"""
    calibration_dir: str = ""
    """where its calibration lies; '': lerobot's own place"""
    fields: dict[str, Any] = {}
    """further fields of lerobot's own configuration"""


class LeaderTable(ArmTable, frozen=True, kw_only=True):
    """`[leader]`: the arm that a person moves."""

    engage: Literal["near", "always"] = "near"
    """when it drives: once it is where the robot is, or at once"""
    speed: Positive = 0.3
    """share of the range per second, until the robot has come to the leader"""


class CameraTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[cameras.NAME]`."""

    device: int | str = ""
    """number, path or URL; for the kind opencv"""
    kind: str = "opencv"
    """any camera of the registry"""
    height: Annotated[int, msgspec.Meta(gt=0)] = 480
    width: Annotated[int, msgspec.Meta(gt=0)] = 640
    """what the device is asked for, and what people see"""
    fps: Positive = 30.0
    picture: tuple[int, int] = (96, 96)
    """(height, width) of what the policy gets"""
    config: dict[str, Any] = {}
    """further fields of that kind of camera, such as rotation and fourcc"""


class LimitsTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[limits]`: in place of the recipe's, for the joints that are named."""

    velocity: Joints = {}
    acceleration: Joints = {}
    stop_deceleration: Joints = {}


class EpisodesTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[episodes]`."""

    seconds: Positive = 30.0
    """an episode is over after so long in the policy's hands"""
    demonstrations: Annotated[int, msgspec.Meta(ge=1)] = 10
    """a person drives so many of each task before the first version is learned"""
    reset_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """the next episode begins so long after one has ended, without a word; 0: somebody says that the scene is ready"""


class BesideTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[beside]`: what the person beside the arm has; as the options of `vla-fleet edge`."""

    stop_keys: tuple[str, ...] = ()
    stop_lines: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    speed_limit: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """share of the velocity limits"""


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    robot: ArmTable
    tasks: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    """the sentence a person would say, by task name"""
    cameras: Annotated[dict[str, CameraTable], msgspec.Meta(min_length=1)]
    leader: LeaderTable | None = None
    rest_pose: dict[str, float] | None = None
    """by joint, where episodes begin, in place of the recipe's; empty: the arm begins where it is"""
    limits: LimitsTable = LimitsTable()
    episodes: EpisodesTable = EpisodesTable()
    beside: BesideTable = BesideTable()


def read_table(path: Path, kind: type[Table]) -> Table:
    """The TOML file at `path` as a `kind`. Raises `ConfigError` that names the file and the key, and the nearest."""
    try:
        given = tomllib.loads(read_file(path, MAX_CONFIG_BYTES).decode())
    except ConfigError as error:
        raise ConfigError(f"--config {error} Give a TOML file.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is no TOML: {error}.") from error
    for name, known in _unknown_keys(given, kind, ""):
        raise ConfigError(
            f"--config {path}: there is no '{name}'.{suggest(name.rpartition('.')[2], known)} Known here: "
            f"{', '.join(known)}."
        )
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--config {path}: {error}, where $ is the file.") from error


def _unknown_keys(given: Any, kind: Any, where: str) -> Iterator[tuple[str, list[str]]]:
    """Keys that nothing reads, each with those that are known in its place."""
    if not isinstance(given, Mapping):
        return
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        for name, value in given.items():
            if name in hints:
                yield from _unknown_keys(value, hints[name], f"{where}{name}.")
            else:
                yield where + name, sorted(hints)
        return
    inside = get_args(kind)
    if get_origin(kind) is dict:
        for name, value in given.items():
            yield from _unknown_keys(value, inside[1], f"{where}{name}.")
    elif inside:
        for one in inside:
            yield from _unknown_keys(given, one, where)
