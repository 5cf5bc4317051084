"""Makes a policy once in a process of its own, before parts are started with it that would all fail for one reason.

Files show much of what is wrong (`policies.interface.registry.defaults`); a pattern that freezes nothing or a device
that is not there shows only when the policy is made. Whoever starts parts stays without torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from fleet.config.overrides import Overrides
from fleet.config.process_options import TryPolicyOptions
from wire.errors import PolicyError

_OURS = "vla-fleet: "


def try_policy(recipe: str, overrides: Overrides, seed: int, asked: Callable[[], bool]) -> bool:
    """Make the policy of `overrides` for the robot of `recipe`; False when `asked` to stop before that was done.

    Raises `PolicyError` with the one line that the process said.
    """
    sys.stderr.write(f"trying the policy {overrides.policy} …\n")
    sys.stderr.flush()
    words = ["policy", "try", *TryPolicyOptions(recipe=recipe, seed=seed, overrides=overrides).arguments()]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C goes to the parent alone.
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if asked():
                    return False
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode == 0:
            return True
        said.seek(0)
        raise PolicyError(_last_word(said.read().decode(errors="replace"), process.returncode, overrides.policy))


def _last_word(text: str, status: int, policy: str) -> str:
    _, ours, word = text.rpartition(f"\n{_OURS}") if not text.startswith(_OURS) else ("", _OURS, text[len(_OURS) :])
    if ours:
        return " ".join(word.split())
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    lines = text.strip().splitlines()
    return f"policy '{policy}' cannot be made: its process ended with {ended}{f': {lines[-1]}' if lines else ''}."
