"""`vla-fleet` in the process of a test: one of its own would import again, for seconds, what is here already."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fleet.cli.__main__ import main


def vla_fleet(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What `vla-fleet words ...` says and its exit status; its standard input is empty.

    An exception that would be a traceback there is raised here. Not for commands that start threads which end the
    process, such as `doctor` on a driver that blocks.
    """
    out, err = io.StringIO(), io.StringIO()
    heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["vla-fleet", *words])
        patch.setattr(sys, "stdin", io.StringIO())
        patch.setattr(os, "_exit", sys.exit)
        patch.setenv("COLUMNS", "200")
        if cwd is not None:
            patch.chdir(cwd)
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            for number, handler in heard.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())
