"""`vla-fleet policy` in a process of its own: whoever starts parts stays without torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.config.process_options import TryPolicyOptions
from robot_edge.runtime.forking import start_program
from wire.errors import PolicyError, storage_errors

_OURS = "vla-fleet: "


def try_policy(
    recipe: str, overrides: Overrides, seed: int, stopped: Callable[[], object], config: Path | None = None
) -> bool:
    """Make the policy of `overrides` once for the robot of `recipe`, and the algorithm for it if one is given; False
    when it was `stopped` before that was done.

    Files show much of what is wrong with a policy (`policies.interface.registry.defaults`); a pattern that freezes
    nothing or a device that is not there shows only when it is made, and then all parts would fail for one reason.
    Raises `PolicyError` with the one line that the process said.
    """
    policy = overrides.policy or f"of recipe '{recipe}'"
    sys.stderr.write(f"trying the policy {policy}{f' with {overrides.algorithm}' if overrides.algorithm else ''} …\n")
    sys.stderr.flush()
    argv = ["try", *TryPolicyOptions(recipe=recipe, config=config, seed=seed, overrides=overrides).arguments()]
    return _run(argv, policy, stopped)


def build_policy(kind: str, data: DataDirectory, recipe: str, seed: int, stopped: Callable[[], object]) -> None:
    """Build a tiny policy of `kind` in `data.policy`, which is not there yet, with the statistics of what `data` has
    recorded. Raises `PolicyError` or `StorageError`."""
    # Only a whole one gets the name by which it is found again.
    half = data.policy.with_name(f"{data.policy.name}.building")
    shutil.rmtree(half, ignore_errors=True)
    argv = ["tiny", kind, str(half), "--recipe", recipe, "--seed", str(seed), "--data", str(data.root)]
    if not _run(argv, f"tiny {kind}", stopped, data.logs / "policy.log"):
        return
    with storage_errors("building the policy", data.policy):
        half.rename(data.policy)


def _run(argv: list[str], policy: str, stopped: Callable[[], object], log_file: Path | None = None) -> bool:
    """Run `vla-fleet policy ARGV` to its end; False when it was `stopped`, which is asked meanwhile, before that."""
    with contextlib.ExitStack() as held:
        with storage_errors(f"making policy {policy}", log_file):
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                said = held.enter_context(log_file.open("w+b"))
            else:
                said = held.enter_context(tempfile.TemporaryFile())
        command = [sys.executable, "-m", "fleet.cli", "policy", *argv]
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        process = start_program(command, {**os.environ, "OMP_NUM_THREADS": "1"}, said.fileno(), niceness)
        try:
            while (status := process.poll()) is None:
                if stopped():
                    return False
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        if status == 0:
            return True
        said.seek(0)
        where = "" if log_file is None else f" (see {log_file})"
        raise PolicyError(_last_word(said.read().decode(errors="replace"), status, policy) + where)


def _last_word(text: str, status: int, policy: str) -> str:
    _, ours, word = f"\n{text}".rpartition(f"\n{_OURS}")
    if ours:
        return " ".join(word.split())
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    lines = text.strip().splitlines()
    return f"policy '{policy}' cannot be made: its process ended with {ended}{f': {lines[-1]}' if lines else ''}."
