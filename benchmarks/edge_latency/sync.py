"""The synchronous loop for `benchmarks.edge_latency`: observe → predict a chunk → execute 25 actions → observe.

    python -m benchmarks.edge_latency.sync MODEL RECORD

Ends and writes RECORD on SIGTERM or SIGINT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.edge_latency.arm import PERIOD_NS, TASK, Arm
from benchmarks.edge_latency.vla import HEAD, load
from robot_edge.runtime.lifecycle import ShutdownSignal
from wire.clock import MonotonicClock

EXECUTE = 25


def main(model: Path, record: Path) -> None:
    """Each action lasts one control period from when it is sent; while the policy thinks, the arm gets none."""
    shutdown, clock = ShutdownSignal(), MonotonicClock()
    policy, before, after = load(model)
    arm = Arm(record)
    while not shutdown.requested:
        _, state, _, frames = arm.read()
        images = {HEAD + name: torch.from_numpy(image).permute(2, 0, 1) / 255 for name, image in frames.items()}
        batch = before({**images, "observation.state": torch.from_numpy(state), "task": TASK})
        chunk = after(policy.predict_action_chunk(batch))[0, :EXECUTE].numpy()
        deadline_ns = clock.now_ns()
        for action in chunk:
            arm.write(action)
            deadline_ns += PERIOD_NS
            clock.sleep_until(deadline_ns)
    arm.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
