"""Counts in the running processes of a robot what `benchmarks.edge_cost` reports beside processor time.

`install` puts this file where Python runs it as `sitecustomize` in each process of either checkout: methods are wrapped
by whichever of their names a checkout has. Counts lie in a mapped file for each process, so that writing one costs
next to nothing, and so that they can be read while it runs.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

PLACE = "VLA_FLEET_EDGE_COST"
"""environment variable: the directory of the counts"""
TIMED = ("physics", "operator")
"""seconds of processor time of what a real robot would not pay"""
COPIES = ("board", "reader", "ring", "send", "recv")
"""what copies a picture; each has a count and a number of bytes"""
PICTURES = "pictures"
"""new pictures that a driver's process has got"""
_FIELDS = [*TIMED, PICTURES, *(f"{name} {unit}" for name in COPIES for unit in ("calls", "bytes"))]

_mine: tuple[int, Any] = 0, None


def install(directory: Path) -> None:
    """Count in each process that is started with `directory` in PYTHONPATH and as `PLACE`."""
    directory.mkdir()
    shutil.copy(__file__, directory / "sitecustomize.py")


def read(directory: Path, pid: int) -> dict[str, float]:
    """What process `pid` has counted so far, by field: `TIMED`, `PICTURES`, and `COPIES` with " calls" or " bytes"."""
    path = directory / str(pid)
    values = np.fromfile(path, np.float64) if path.exists() else np.zeros(len(_FIELDS))
    return dict(zip(_FIELDS, values.tolist(), strict=True))


def _add(field: str, amount: float) -> None:
    global _mine
    if _mine[0] != os.getpid():
        # A fork has its own.
        path = Path(os.environ[PLACE]) / str(os.getpid())
        _mine = os.getpid(), np.memmap(path, np.float64, "w+", shape=(len(_FIELDS),)).view(np.ndarray)
    _mine[1][_FIELDS.index(field)] += amount


def _wrap(place: str, what: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `module:Class.method` with `what` if this checkout has it."""
    module, _, path = place.partition(":")
    kind, _, method = path.partition(".")
    with suppress(ImportError, AttributeError):
        owner = getattr(importlib.import_module(module), kind)
        # Where it is only used it is not wrapped once more.
        if owner.__module__ == module:
            setattr(owner, method, what(getattr(owner, method)))


def _timed(field: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapping(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *values: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return inner(self, *values, **named)
            finally:
                _add(field, time.thread_time() - begin)

        return method

    return wrapping


def _copying(name: str, copied: Callable[[tuple[Any, ...], Any], int]) -> Callable[[Callable[..., Any]], Any]:
    """`copied(arguments, result)`: bytes of pictures that a call copied."""

    def wrapping(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *values: Any, **named: Any) -> Any:
            result = inner(self, *values, **named)
            if amount := copied(values, result):
                _add(f"{name} calls", 1)
                _add(f"{name} bytes", amount)
            return result

        return method

    return wrapping


def _seeing(new: Callable[[tuple[Any, ...]], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`new(arguments)`: whether the call is about a new picture, not about the larger one of it."""

    def wrapping(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *values: Any) -> Any:
            if new(values):
                _add(PICTURES, 1)
            return inner(self, *values)

        return method

    return wrapping


def _putting(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A frame that is in the ring already is not copied again."""

    def put(self: Any, camera: str, frame: Any) -> int:
        before = self._last[camera][0]
        number = inner(self, camera, frame)
        if number != before:
            _add("ring calls", 1)
            _add("ring bytes", frame.image.nbytes)
        return int(number)

    return put


def _of_frame(message: Any) -> int:
    if type(message).__name__ not in ("FrameRecorded", "FrameTaken"):
        return 0
    frame = message.frame
    return int(frame.image.nbytes + (0 if frame.preview is None else frame.preview.nbytes))


def _count() -> None:
    # Each stands twice: in the modules of today, and in those of checkouts to compare with.
    for simulation in ("hal.drivers.metaworld.simulation", "hal.drivers.metaworld_sim"):
        for method in ("step", "reset"):
            _wrap(f"{simulation}:Simulation.{method}", _timed("physics"))
    for expert in ("hal.drivers.metaworld.expert", "hal.drivers.metaworld_expert"):
        for method in ("propose", "progress"):
            _wrap(f"{expert}:MetaWorldExpert.{method}", _timed("operator"))
    _wrap("hal.host_line:PictureBoard._write", _seeing(lambda given: given[0][1] == "image"))
    _wrap("hal.host_line:PictureBoard._write", _copying("board", lambda given, _: given[1].nbytes))
    _wrap("hal.host_line:PictureReader._copy", _copying("reader", lambda _, picture: picture.nbytes))
    for frames in ("hal.driver_host.protocol", "hal.driver_host.frames", "hal.host_frames"):
        _wrap(f"{frames}:FrameWriter._put", _seeing(lambda given: True))
    for ring in ("wire.transport.frame_ring", "wire.frame_ring", "robot_edge.frames"):
        _wrap(f"{ring}:FrameRing.put", _putting)
    for line in ("shared_channel:SharedChannel", "zmq_channel:ZmqPair"):
        for place in ("wire.transport", "wire"):
            _wrap(f"{place}.{line}.send", _copying("send", lambda given, sent: _of_frame(given[0]) if sent else 0))
            _wrap(f"{place}.{line}.recv", _copying("recv", lambda _, message: _of_frame(message)))


if __name__ == "sitecustomize" and PLACE in os.environ:
    _count()
