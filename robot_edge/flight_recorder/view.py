"""A stretch of a flight as a Rerun recording (.rrd): curves, decisions and pictures on one time axis.

Open it with `rerun FILE.rrd`. Time axes: `tick`, and `time` in seconds of the robot's clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from robot_edge.flight_recorder.events import FlightHeader, Gap, PreviewFrame
from robot_edge.flight_recorder.rows import Row, read_rows
from wire.errors import ConfigError, storage_errors


def write_rerun(
    path: Path, rrd: Path, first_tick: int | None = None, last_tick: int | None = None, session_id: str = ""
) -> int:
    """Write `rrd`; how many ticks it has.

    Raises `ConfigError` without Rerun, `StorageError` when `rrd` cannot be written, and as `read_rows` does.
    """
    rr = _rerun()
    header, stretch = read_rows(path, first_tick, last_tick, session_id)
    with storage_errors("writing a Rerun recording", rrd):
        rrd.parent.mkdir(parents=True, exist_ok=True)
        rrd.touch()
    recording = rr.RecordingStream("vla-fleet flight", recording_id=f"{header.name}-{header.session_id}")
    recording.save(str(rrd))
    view = _View(rr, recording, header)
    for item in stretch:
        view.add(item)
    recording.flush()
    recording.disconnect()
    return view.ticks


class _View:
    """Logs rows into one recording."""

    def __init__(self, rr: Any, recording: Any, header: FlightHeader) -> None:
        self.ticks = 0
        self._rr = rr
        self._recording = recording
        self._decided = ""
        self._chunk = -1
        spec = header.spec
        for entity, dimensions in (("state", spec.state), ("proposed", spec.action), ("executed", spec.action)):
            names = [f"{d.name} [{d.unit}]" for d in dimensions]
            recording.log(entity, rr.SeriesLines(names=names), static=True)
        recording.log("about", rr.TextDocument(_about(header)), static=True)

    def add(self, item: Row | PreviewFrame | Gap) -> None:
        if isinstance(item, PreviewFrame):
            self._at(item.tick, item.time_ns)
            self._recording.log(
                f"camera/{item.camera}", self._rr.EncodedImage(contents=item.jpeg, media_type="image/jpeg")
            )
        elif isinstance(item, Gap):
            self._recording.set_time("tick", sequence=item.first)
            self._say("WARN", f"ticks {item.first} to {item.last} were not recorded: {item.reason}")
        else:
            self._row(item)

    def _row(self, row: Row) -> None:
        self.ticks += 1
        self._at(row.tick, row.time_ns)
        self._curve("late_ms", [row.late_s * 1e3])
        self._curve("state", row.state)
        self._curve("executed", row.executed)
        decided = f"{row.mode}{f': {row.reason}' if row.reason else ''}"
        if decided != self._decided:
            self._decided = decided
            self._say("WARN" if row.reason else "INFO", decided)
        if row.notes:
            self._say("INFO", row.notes)
        if row.latency_s >= 0:
            self._curve("inference/latency_ms", [row.latency_s * 1e3])
        step = row.step
        if step is None:
            return
        self._curve("proposed", step.proposed)
        if step.chunk_tick >= 0:
            self._curve("inference/delay_ticks", [step.delay_ticks])
            if step.chunk_tick != self._chunk:
                self._say("DEBUG", f"chunk of tick {step.chunk_tick}, version {step.version}")
                self._curve("inference/chunk", [step.chunk_tick])
        self._chunk = step.chunk_tick

    def _at(self, tick: int, time_ns: int) -> None:
        self._recording.set_time("tick", sequence=tick)
        self._recording.set_time("time", duration=time_ns / 1e9)

    def _curve(self, entity: str, values: Any) -> None:
        if values is not None:
            self._recording.log(entity, self._rr.Scalars(np.asarray(values, np.float64)))

    def _say(self, level: str, text: str) -> None:
        self._recording.log("decisions", self._rr.TextLog(text, level=level))


def _about(header: FlightHeader) -> str:
    return (
        f"Robot {header.name}, start {header.session_id}, {header.spec.embodiment} at {header.spec.control_hz:g} Hz, "
        f"strategy {header.chunking.strategy}, vla-fleet {header.program}."
    )


def _rerun() -> Any:
    try:
        import rerun
    except ImportError as error:
        raise ConfigError(
            f"viewing a flight needs Rerun ({error}). Install it with: pip install 'rerun-sdk>=0.24'. "
            "Without it, the table shows the same ticks."
        ) from error
    return rerun
