"""The edge's costs: what is counted in the processes of a robot, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.edge_cost.__main__ import PARTS, CostSample, copy_rows, cost, counting, mean

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
from tests import samples
from hal.driver_host.protocol import FrameWriter
from wire.transport.frame_ring import FrameRing
from wire.messages.gateway import Stop
from wire.messages.local import FrameRecorded
from wire.transport.shared_channel import SharedChannel
from wire.types import Frame
place = Path(sys.argv[1])
frames = [Frame(n, np.full((8, 8, 3), n, np.uint8)) for n in range(4)]
ring = FrameRing(place / "frames", samples.spec(), write=True)
ring.put("front", frames[0])
ring.put("front", frames[0])
uplink, control = (SharedChannel(place / "line", bind=side, polls=True) for side in (True, False))
control.send(Stop())
control.send(FrameRecorded("e", "front", Frame(1, frames[1].image, np.zeros((10, 10, 3), np.uint8))))
while uplink.recv() is not None:
    pass
larger = Frame(3, frames[3].image, np.zeros((10, 10, 3), np.uint8))
child = os.fork()
if child == 0:
    ring.put("front", frames[2])
    FrameWriter(place / "robot", samples.spec()).write({"front": larger})
    os._exit(0)
os.waitpid(child, 0)
print(os.getpid(), child)
"""
PICTURE = 8 * 8 * 3


def test_copies_are_counted_in_a_process_and_in_its_fork(tmp_path: Path) -> None:
    counters = tmp_path / "counters"
    counting.install(counters)
    environment = os.environ | {"PYTHONPATH": f"{counters}:{ROOT}", counting.PLACE: str(counters)}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ran = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    parent, child = (counting.read(counters, int(pid)) for pid in ran.stdout.split())
    assert (parent["ring calls"], parent["ring bytes"]) == (1, PICTURE), "the same frame is copied once"
    assert (child["ring calls"], child["ring bytes"]) == (3, 2 * PICTURE + 300)
    assert (parent["pictures"], child["pictures"]) == (0, 1), "a larger picture is the same one"
    for name in ("send", "recv"):
        assert (parent[f"{name} calls"], parent[f"{name} bytes"]) == (1, PICTURE + 300)
    assert set(counting.read(counters, 1).values()) == {0.0}


def sample(seconds: float, ticks: int, **copies: dict[str, float]) -> CostSample:
    spent = dict.fromkeys((*PARTS, "physics", "operator", "drawing"), seconds)
    names = [f"{name} {unit}" for name in counting.COPIES for unit in ("calls", "bytes")]
    counted = {part: dict.fromkeys([*names, counting.PICTURES], 0.0) | copies.get(part, {}) for part in PARTS}
    return CostSample(dict.fromkeys(PARTS, 1), spent, counted, ticks)


def test_costs_are_of_a_tick_and_copies_of_a_new_picture() -> None:
    before = sample(1.0, 100, robot={"pictures": 10, "ring calls": 10, "ring bytes": 1000})
    now = sample(
        1.5,
        600,
        robot={"pictures": 30, "ring calls": 30, "ring bytes": 3000},
        control={"send calls": 15, "send bytes": 1500, "ring calls": 20, "ring bytes": 2000},
    )
    found = cost(before, now)
    assert found.parts["control"] == 1000
    assert found.copies["driver: into shared memory"] == (1.0, 100.0)
    assert found.copies["control: into the durable line to the uplink"] == (0.75, 75.0)
    assert found.copies["control: into the ring of frames"] == (1.0, 100.0)
    assert found.copies["uplink: out of that line"] == (0.0, 0.0)
    still = cost(before, sample(1.5, 600, robot={"pictures": 10, "ring calls": 10, "ring bytes": 1000}))
    assert still.copies["driver: into shared memory"] == (0.0, 0.0)
    both = mean([found, still])
    assert both.copies["control: into the durable line to the uplink"] == (0.375, 37.5)
    rows = copy_rows({"before": found, "now": both})
    assert rows[-1] == {
        "per new picture": "all",
        "before (copies)": 2.75,
        "before (bytes)": 275,
        "now (copies)": 1.375,
        "now (bytes)": 138,
    }
