"""What was started in a data directory, and with which settings: DATA/runs/TIME-COMMAND.json, one file for each start.

A file is written whole before anything is learned, and never changed. It says all that a recipe came to, also what no
option names, so that a run can be told from another, and be repeated, once the defaults have moved on.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from fleet.config.data_directory import DataDirectory, read_note, write_note
from fleet.config.recipe import Recipe
from fleet.config.settings import settings_of, value_text
from policies.interface.registry import PolicyChoice
from wire.errors import ConfigError

log = logging.getLogger(__name__)

_PACKAGES = ("vla-fleet", "torch", "lerobot", "numpy", "msgspec", "metaworld", "mujoco")
_FIXED = {"seed": "--seed", "start": "--from", "data": "--data", "dataset": "--dataset", "snapshot": "--snapshot"}
"""what a training is of, from its first step to its last, as commands call it"""
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]*@")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One start."""

    command: str
    """of vla-fleet: up, trainer or train"""
    began: str
    """day and time of day, UTC"""
    command_line: list[str]
    """without passwords"""
    recipe: str
    config: str = ""
    """the file that the recipe was made from"""
    seed: int
    policy: PolicyChoice | None = None
    """another one than the recipe's"""
    algorithm: str
    start: str = ""
    """weights that it began with, '' for the policy's first ones"""
    data: str = ""
    """the buffer's data directory, where it is another one"""
    snapshot: str = ""
    dataset: str = ""
    """a LeRobot dataset that was taken into the buffer first"""
    steps: int = 0
    """gradient steps that were asked for, 0: no number"""
    given: list[str]
    """what --set said"""
    settings: dict[str, Any]
    """every setting by its path, those of the defaults included"""
    versions: dict[str, str]
    """of Python and of what computes"""
    machine: str


def make_record(
    command: str, recipe: Recipe, seed: int, policy: PolicyChoice | None, given: list[str], **rest: Any
) -> RunRecord:
    """Of a start that is about to be; `rest`: further fields of `RunRecord`."""
    return RunRecord(
        command=command,
        began=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command_line=[_PASSWORD.sub(r"\1:***@", word) for word in sys.argv],
        recipe=recipe.name,
        config=str(recipe.config or ""),
        seed=seed,
        policy=policy,
        algorithm=recipe.algorithm.name,
        start=str(recipe.start or ""),
        given=given,
        settings={one.path: msgspec.json.decode(msgspec.json.encode(one.value)) for one in settings_of(recipe)},
        versions={"python": platform.python_version(), **_versions()},
        machine=platform.node(),
        **rest,
    )


def keep_record(data: DataDirectory, record: RunRecord) -> Path:
    """Write it beside those of earlier starts; its path. Raises `StorageError`."""
    stamp = re.sub(r"[-:.]|\+.*", "", record.began)
    path = data.runs / f"{stamp}-{record.command}-{os.getpid()}.json"
    write_note(path, record, "noting with what settings a run begins")
    return path


def newest_record(data: DataDirectory, command: str = "*") -> RunRecord | None:
    """Of the newest start that learned there, or of the newest by that command, None when there was none.

    Raises `StorageError`."""
    paths = sorted(data.runs.glob(f"*-{command}-*.json"), key=lambda path: path.name)
    remedy = "Move it away: it only says what was asked for."
    return read_note(paths[-1], RunRecord, "reading with what settings a run began", remedy) if paths else None


def differing_settings(one: RunRecord, other: RunRecord) -> list[tuple[str, Any, Any]]:
    """(name, one's, the other's) of what they were started with that differs."""
    first, second = _compared(one), _compared(other)
    return [
        (name, first.get(name), second.get(name))
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    ]


def require_same_training(data: DataDirectory, before: RunRecord, now: RunRecord) -> None:
    """Raise `ConfigError` where `now` cannot go on with what `before` began in `data`: it is on other data, from other
    weights or by another seed. Other settings may differ, and that is logged."""
    differing = differing_settings(before, now)
    if fixed := [one for one in differing if one[0] in _FIXED]:
        named = ", ".join(f"{_FIXED[name]} {_said(was)} (now {_said(said)})" for name, was, said in fixed)
        raise ConfigError(f"{data.root} was begun with {named}: say the same to go on, or choose another --out.")
    if differing:
        named = ", ".join(f"{name} {_said(said)} (was {_said(was)})" for name, was, said in differing)
        log.info("%s goes on with other settings: %s.", data.root, named)


def _said(value: Any) -> str:
    return value_text(value) or "none"


def _compared(record: RunRecord) -> dict[str, Any]:
    about = {name: getattr(record, name) for name in ("recipe", "algorithm", "seed", "start", "data", "dataset")}
    about |= {"policy": str(record.policy or ""), "snapshot": record.snapshot, "steps": record.steps}
    return {**about, **record.settings}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
