"""The label every table carries: what it was measured on, and how fast that was in the same run."""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import time
from pathlib import Path

from fleet.config.machine import describe_machine

_STEPS, _WARM_UP = 25, 5
_BATCH, _PIXELS, _WIDTH = 16, 64, 256


def label() -> str:
    """Processor, cores, vector instructions, system, and the calibration figure."""
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{describe_machine()}, {system}; calibration {calibration_ms():.1f} ms"


@functools.cache
def commit(directory: Path = Path(__file__).parent) -> str:
    """Short hash of what is checked out in `directory`, with a + when files were changed; ? outside of git.

    A benchmark asks before it measures: what is checked out later is asked for in vain.
    """
    words = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, cwd=directory, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "?"


@functools.cache
def calibration_ms() -> float:
    """What `MachineSpeed` says before anything else runs, in milliseconds; measured once a process.

    Figures of two machines are compared by their ratio to it.
    """
    return MachineSpeed().step_ms(_STEPS)


class MachineSpeed:
    """A small training step on one thread, by which machines, and moments of one machine, are compared.

    The step never changes: 16 pictures of 64 pixels through two convolutions and two layers, in float32.
    """

    def __init__(self) -> None:
        import torch
        from torch import nn

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._network = nn.Sequential(
                nn.Conv2d(3, 32, 4, 4),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, 2, 1),
                nn.Flatten(),
                nn.Linear(64 * (_PIXELS // 8) ** 2, _WIDTH),
                nn.SiLU(),
                nn.Linear(_WIDTH, 64),
            )
            self._images, self._wanted = torch.rand(_BATCH, 3, _PIXELS, _PIXELS), torch.rand(_BATCH, 64)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), fused=True)

    def step_ms(self, steps: int) -> float:
        """Median processor time of `steps` steps, after some to warm up, in milliseconds."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            took = []
            for _ in range(_WARM_UP + steps):
                begun = time.thread_time()
                self._optimizer.zero_grad()
                (self._network(self._images) - self._wanted).square().mean().backward()
                self._optimizer.step()
                took.append(time.thread_time() - begun)
        finally:
            torch.set_num_threads(before)
        return 1e3 * statistics.median(took[_WARM_UP:])
