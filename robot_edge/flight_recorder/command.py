"""`vla-fleet replay`: the same decisions again, a table, a Rerun recording."""

from __future__ import annotations

import datetime
import logging
import sys
from pathlib import Path

from robot_edge.flight_recorder.file import find_starts
from robot_edge.flight_recorder.replay import MakeLoop, replay
from robot_edge.flight_recorder.rows import print_table
from robot_edge.flight_recorder.view import write_rerun


def replay_command(
    path: Path,
    make_loop: MakeLoop,
    first: int | None = None,
    last: int | None = None,
    rrd: Path | None = None,
    table: bool = False,
    session_id: str = "",
) -> int:
    """Replay ticks [first, last] of a flight and say what came out: 0 when all decisions are the same, 1 otherwise.

    `path`: a flight file or a robot's directory of them; `session_id`: which start of the process, the newest
    by default. Raises `ConfigError`, `CorruptDataError` or `StorageError` with what to do.
    """
    found = find_starts(path)
    if len(found) > 1 and not session_id:
        print(
            f"{path} holds {len(found)} starts of the control process; this is the newest. The others: --session NAME"
        )
        for header in (files[0].header for files in found[:-1]):
            began = datetime.datetime.fromtimestamp(header.started_unix_ns / 1e9)
            print(f"  {header.session_id}, begun {began:%Y-%m-%d %H:%M:%S}")
    if table:
        print_table(path, sys.stdout, first, last, session_id)
    if rrd is not None:
        ticks = write_rerun(path, rrd, first, last, session_id)
        print(f"{ticks} ticks written for Rerun; look at them with: rerun {rrd}")
    # A loop that is played to warns of what went wrong in the flight, as if it went wrong now.
    logging.disable(logging.CRITICAL)
    try:
        result = replay(path, make_loop, first, last, session_id=session_id)
    finally:
        logging.disable(logging.NOTSET)
    for note in result.notes:
        print(f"note: {note}")
    robot = f"robot '{result.header.name}', start {result.header.session_id}"
    if not result.differences:
        print(f"{robot}: ticks {result.first_tick} to {result.last_tick}: {result.ticks} decided again, all the same.")
        return 0
    print(
        f"{robot}: tick {result.differences[0].tick} is decided otherwise now, after {result.ticks - 1} that are not:"
    )
    for difference in result.differences:
        print(f"  {difference.what}: recorded {difference.recorded}, replayed {difference.replayed}")
    return 1
