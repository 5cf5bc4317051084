"""Which serial ports there are, and why one cannot be opened."""

from __future__ import annotations

import grp
import os
from pathlib import Path

_PATTERNS = ("serial/by-id/*", "ttyACM*", "ttyUSB*")


def serial_ports() -> list[str]:
    """Paths of the ports that an arm may hang on, those that stay the same when cables are moved first."""
    return [str(path) for pattern in _PATTERNS for path in sorted(Path("/dev").glob(pattern))]


def port_fault(port: str) -> str:
    """Why `port` cannot be opened, and what to do; '' when nothing is seen."""
    if not Path(port).exists():
        there = ", ".join(serial_ports()) or "none: check cable and power"
        return f"there is no serial port {port}. There are: {there}. `lerobot-find-port` tells which is which."
    if not os.access(port, os.R_OK | os.W_OK):
        return (
            f"serial port {port} may not be opened by this user: `sudo adduser $USER {_group_of(port)}`, then log in "
            "again."
        )
    return ""


def _group_of(port: str) -> str:
    try:
        return grp.getgrgid(os.stat(port).st_gid).gr_name
    except (KeyError, OSError):
        return "dialout"
