"""A trainer that keeps one core busy, for `benchmarks.edge_latency`: the tiny SmolVLA, batch 8, until SIGTERM.

python -m benchmarks.edge_latency.load MODEL
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from benchmarks.edge_latency.arm import ACTION, CAMERAS, PX, STATE, TASK
from benchmarks.edge_latency.children import die_with_parent
from benchmarks.edge_latency.vla import HEAD, load
from robot_edge.runtime.lifecycle import ShutdownSignal

_BATCH = 8


def main(model: Path) -> None:
    """Prints `ready` after the first step."""
    shutdown = ShutdownSignal()
    # as `vla-fleet up` starts its trainer
    os.nice(5)
    die_with_parent()
    policy, before, _ = load(model)
    policy.train()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-4)
    steps = 0
    while not shutdown.requested:
        images = {HEAD + name: torch.rand(_BATCH, 3, PX, PX) for name in CAMERAS}
        state = torch.rand(_BATCH, len(STATE))
        action = torch.rand(_BATCH, policy.config.chunk_size, len(ACTION))
        raw = {**images, "observation.state": state, "action": action, "task": [TASK] * _BATCH}
        loss, _ = policy.forward(before(raw))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 1:
            sys.stdout.write("ready\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
