"""A gateway that is killed with -9 again and again loses nothing it acknowledged and stores nothing twice."""

import os
import random
import signal
import subprocess
import sys
import time

from cloud_learner.buffer.fake import fake_episode, fake_spec, same_segment
from cloud_learner.buffer.files import TEMPORARY
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.store import SegmentStore

KILLS = 15
EPISODES = 4000
STEPS, SEGMENT_STEPS = 24, 8

# The writer says what it acknowledged; at its start it gets everything again that was not.
WRITER = """
import pathlib, sys
from cloud_learner.buffer.fake import fake_episode, fake_spec
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.store import SegmentStore
from cloud_learner.ingest import Ingest

root, start = pathlib.Path(sys.argv[1]), int(sys.argv[2])
spec = fake_spec(1, size=16)
ledger = Ledger.open(root / "ledger.sqlite")
ledger.see_robot("r1", spec, "clock", 1)
ingest = Ingest(root, ledger, SegmentStore.open(root / "segments"))
ingest.open()
print("ready", flush=True)
for number in range(start // 3, 4000):
    for segment in fake_episode(spec, f"e{number}", steps=24, segment_steps=8, seed=number):
        result = ingest.accept("r1", segment, 1)
        assert result.outcome in ("stored", "duplicate"), result
        print(segment.id, flush=True)
"""


def test_everything_acknowledged_survives_kill_9(tmp_path):
    chance = random.Random(0)
    acknowledged: list[str] = []
    for _ in range(KILLS):
        # the first segments come again, as after an acknowledgement that was lost
        start = max(0, len(set(acknowledged)) - 4)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(writer.pid, signal.SIGKILL)
        said, _ = writer.communicate()
        # a line torn by the kill is no acknowledgement
        acknowledged += [line[:-1] for line in said.splitlines(keepends=True) if line.endswith("\n")]
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    store = SegmentStore.open(tmp_path / "segments")
    rows = ledger.segments_after(0, limit=10**6)
    ids = [row.id for row in rows]
    assert len(set(acknowledged)) > KILLS
    assert set(acknowledged) <= set(ids)
    assert len(ids) == len(set(ids))
    spec = fake_spec(1, size=16)
    for row in rows:
        number, index = row.id[1:].split("/")
        segments = fake_episode(spec, row.episode, steps=STEPS, segment_steps=SEGMENT_STEPS, seed=int(number))
        assert same_segment(store.read(row.path, row.sha256), segments[int(index)])
    totals = ledger.totals()
    assert totals.duplicated_steps == 0
    assert totals.steps == len(ids) * SEGMENT_STEPS
    # at most the last segment of each life was written but not committed, and no temporary is left
    files = [path for path in (tmp_path / "segments").rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.endswith(TEMPORARY)]
    assert len(files) - len(ids) <= 1
