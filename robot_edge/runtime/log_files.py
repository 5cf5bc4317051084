"""Logs that processes write through a file descriptor they were given, kept from growing without bound.

    NAME.log ──copied──► NAME.log.1, then cut to nothing; whoever appends to it (O_APPEND) goes on from there

Nobody can have such a process open another file, so the file stays the same one. What is written between the last look
at it and the cut, some microseconds, is lost; nothing else is.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from robot_edge.runtime.log_format import message_of

log = logging.getLogger(__name__)

LOG_BYTES = 16 * 2**20
"""of a log, and as much of what was before it"""
_TAIL_BYTES = 1 << 16


def old_log(path: Path) -> Path:
    """Where what was in the log at `path` before lies."""
    return path.with_name(path.name + ".1")


def rotate_log(path: Path, most_bytes: int = LOG_BYTES) -> None:
    """Begin the log at `path` anew if it is larger than that. A disk that does not let it is logged; nothing is cut
    then."""
    try:
        if not path.exists() or path.stat().st_size <= most_bytes:
            return
        with path.open("r+b") as file, old_log(path).open("wb") as old:
            shutil.copyfileobj(file, old, 1 << 20)
            old.flush()
            # What was written meanwhile; the last look, which finds nothing, is just before the cut.
            while rest := os.read(file.fileno(), 1 << 20):
                old.write(rest)
                old.flush()
            os.ftruncate(file.fileno(), 0)
    except OSError as error:
        log.error("the log %s stays as it is, it could not be begun anew: %s", path, error)


def last_line(path: Path) -> str:
    """What the last line of the log at `path` says, '' for none. Raises `OSError` when it cannot be read."""
    for each in (path, old_log(path)):
        if each == path or each.exists():
            with each.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                return message_of(lines[-1])
    return ""
