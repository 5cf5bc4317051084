"""The robot of `benchmarks.soak`: it sways at 20 Hz in short episodes. Its uplink notes, in a file of its own, what it
made durable and what the gateway acknowledged: a truth that no fault of the fleet can touch. All else is as shipped.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.stop_latency.robot import Sway
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from hal.drivers.fake import FAKE_LIMITS, FakeConfig, FakeRobot
from robot_edge.control.config import LoopConfig
from robot_edge.uplink.spool import Spool

PLACE = "SOAK_PLACE"
"""environment variable: the directory of the notes"""
RECIPE = "benchmarks.soak.robot:recipe"
CONFIG = FakeConfig(control_hz=20.0)
TICKS = 40
"""of an episode, which is one segment"""


class SpoolNote(msgspec.Struct, frozen=True):
    """What became of a segment on its robot."""

    id: str
    time_ns: int
    steps: int = 0
    """of one that was made durable; 0: it was acknowledged"""
    closed_ns: int = 0
    """when its last step was recorded"""


def recipe(seed: int = 0) -> Recipe:
    """The fake job with this robot."""
    return replace(
        fake(seed),
        robot_config=CONFIG,
        unpaced_config=CONFIG,
        spec=FakeRobot(CONFIG).spec,
        make_policy=Sway,  # type: ignore[arg-type]
        motion=None,
        loop=LoopConfig(max_ticks=TICKS, safety=FAKE_LIMITS),
    )


def notes_of(place: Path, robot: str) -> Path:
    return place / f"{robot}.notes"


def read_notes(place: Path, robot: str) -> list[SpoolNote]:
    """In the order they were taken; none from a robot that never recorded anything."""
    try:
        lines = notes_of(place, robot).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=SpoolNote) for line in lines]


# --- what the uplink notes --------------------------------------------------------------------------------------------

_put, _forget = Spool.put, Spool.forget
_files: dict[str, int] = {}


def _note(spool: Spool, *notes: SpoolNote) -> None:
    """One write for all: a kill leaves whole lines."""
    robot = spool._path.parent.name
    if robot not in _files:
        path = notes_of(Path(os.environ[PLACE]), robot)
        _files[robot] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_files[robot], b"".join(msgspec.json.encode(note) + b"\n" for note in notes))


def _noting_put(self: Spool, segment: Any, *more: Any, **named: Any) -> Any:
    done = _put(self, segment, *more, **named)
    _note(self, SpoolNote(segment.id, time.monotonic_ns(), segment.steps, segment.closed_ns))
    return done


def _noting_forget(self: Spool, ids: tuple[str, ...], *more: Any, **named: Any) -> Any:
    # before they are gone: what was acknowledged counts from here on
    _note(self, *(SpoolNote(one, time.monotonic_ns()) for one in ids))
    return _forget(self, ids, *more, **named)


if PLACE in os.environ:
    Spool.put = _noting_put  # type: ignore[method-assign]
    Spool.forget = _noting_forget  # type: ignore[method-assign]
