"""A process for tests of how processes are started: `python -m tests.robot_edge.runtime.part WHAT`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path

from robot_edge.runtime.lifecycle import ShutdownSignal


def main() -> None:
    match sys.argv[1:]:
        case ["exit", status]:
            sys.exit(int(status))
        case ["fail"]:
            raise RuntimeError("the driver is unwell")
        case ["tell"]:
            atexit.register(print, "and at its end")
            print(json.dumps(_seen()))
        case ["stay"]:
            shutdown = ShutdownSignal()
            print(f"here {os.getpid()}", flush=True)
            while not shutdown.requested:
                time.sleep(0.01)
            print("cut", flush=True)


def _seen() -> dict[str, object]:
    words = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    return {
        "arguments": sys.argv[1:],
        "shown": words[1:],
        "word": os.environ.get("WORD"),
        "other": os.environ.get("OTHER"),
        "leads": os.getsid(0) == os.getpid(),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)),
        "open": sum(os.path.exists(f"/proc/self/fd/{n}") for n in range(3, 64)),
        "terminates": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "interrupts": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }


if __name__ == "__main__":
    main()
