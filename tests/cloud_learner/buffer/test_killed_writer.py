"""A gateway that is killed with -9 again and again loses nothing it acknowledged and stores nothing twice."""

import subprocess
import sys

from cloud_learner.buffer.fake import fake_episode, fake_spec, same_segment
from cloud_learner.buffer.files import TEMPORARY
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.store import SegmentStore

KILLS = 15
STEPS, SEGMENT_STEPS = 24, 8

# One process imports everything and forks the writers that it then kills. A writer says what it acknowledged; what was
# committed last comes again in the next life, as after an acknowledgement that was lost.
LIVES = """
import os, pathlib, random, signal, sys, time
from cloud_learner.buffer.fake import fake_episode, fake_spec
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.store import SegmentStore
from cloud_learner.ingest import Ingest

def write(root, out):
    spec = fake_spec(1, size=16)
    ledger = Ledger.open(root / "ledger.sqlite")
    ledger.see_robot("r1", spec, "clock", 1)
    ingest = Ingest(root, ledger, SegmentStore.open(root / "segments"))
    ingest.open()
    number = max(0, ledger.totals().newest_row // 3 - 2)
    while True:
        for segment in fake_episode(spec, f"e{number}", steps=24, segment_steps=8, seed=number):
            result = ingest.accept("r1", segment, 1)
            os.write(out, f"{result.outcome} {segment.id}\\n".encode())
        number += 1

chance = random.Random(0)
for _ in range(int(sys.argv[2])):
    heard, out = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            write(pathlib.Path(sys.argv[1]), out)
        finally:
            os._exit(1)
    os.close(out)
    # anywhere in the work on the segment after so many: the chance is in the time, not in the progress
    with open(heard, "rb") as lines:
        for _ in range(chance.randrange(1, 13)):
            os.write(1, lines.readline())
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(writer, signal.SIGKILL)
        os.write(1, lines.read())
    _, status = os.waitpid(writer, 0)
    assert os.WIFSIGNALED(status), status
"""


def test_everything_acknowledged_survives_kill_9(tmp_path):
    lives = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path), str(KILLS)], stdout=subprocess.PIPE, text=True, check=True
    )
    said = [line.split() for line in lives.stdout.splitlines()]
    assert {outcome for outcome, _ in said} == {"stored", "duplicate"}
    acknowledged = [segment for _, segment in said]
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
