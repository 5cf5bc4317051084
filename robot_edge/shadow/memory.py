"""Whether there is memory for one more policy, so that the one that acts never lacks any."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from robot_edge.runtime.memory import available_memory
from wire.errors import PolicyError

_STAYS_FREE = 256 * 2**20


def require_memory(weights: Path, inference_pid: int) -> None:
    """Raise `PolicyError` unless as much memory is available as the process `inference_pid`, which holds two policies,
    has, and `_STAYS_FREE` more. 0, or one that is gone: three times the file of the `weights`."""
    needed = _resident_bytes(inference_pid) or 3 * weights.stat().st_size
    available, where = available_memory()
    if available < needed + _STAYS_FREE:
        raise PolicyError(
            f"it may take {needed / 1e6:.0f} MB of memory and {_STAYS_FREE / 1e6:.0f} MB are to stay free, but "
            f"{available / 1e6:.0f} MB are available ({where}). Choose another robot, or make room on this one."
        )


def end_first() -> None:
    """Where memory runs out all the same, the system ends this process before any other one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _resident_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        if process:
            return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
