"""The spool keeps what it took, through kills and full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from robot_edge.uplink.segments import SegmentBuilder
from robot_edge.uplink.spool import Spool
from tests import samples
from wire.errors import CorruptDataError, DiskFullError, NotWritableError, StorageError
from wire.messages.gateway import RecordedChunk, Segment


def waiting(spool: Spool) -> list[tuple[int, str]]:
    """(row, id) of all that is there, in the order in which it would be sent."""
    found = []
    while (there := spool.index.next()) is not None:
        found.append((there[1].row, f"{there[0].id}/{there[1].number}"))
        spool.index.pop()
    return found


def test_first_in_first_out_until_forgotten(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    for index in range(3):
        spool.put(samples.segment(index))
    rows = waiting(spool)
    assert [name for _, name in rows] == [f"{samples.episode().id}/{index}" for index in range(3)]
    assert spool.steps_recorded == 12
    first = spool.get(rows[0][0])
    assert first is not None
    assert first.index == 0
    spool.forget((rows[0][1], "never heard of"))
    assert len(spool) == 2
    assert spool.get(rows[0][0]) is None
    spool.close()
    again = Spool(tmp_path / "spool.sqlite")
    assert len(again) == 2
    assert again.steps_recorded == 12
    again.close()


def test_the_same_segment_twice_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put(samples.segment())
    with pytest.raises(StorageError):
        spool.put(samples.segment())
    assert (len(spool), spool.steps_recorded) == (1, 4)
    spool.close()


def test_a_full_disk_takes_back_what_was_being_written(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put(samples.segment(0))
    spool._db.execute("PRAGMA max_page_count = 12")
    with pytest.raises(DiskFullError, match="Free some room"):
        for index in range(1, 100):
            spool.put(samples.segment(index, steps=400))
    kept = len(spool)
    spool._db.execute("PRAGMA max_page_count = 1000000")
    spool.put(samples.segment(500, steps=400))
    assert len(spool) == kept + 1
    assert spool.steps_recorded == 4 + 400 * kept
    spool.close()


def test_a_file_that_is_no_spool_says_so(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    path.write_bytes(b"this is not a database, but it is long enough to be looked at" * 100)
    with pytest.raises(CorruptDataError, match="Move it away"):
        Spool(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(NotWritableError):
        Spool(tmp_path / "below" / "spool.sqlite")


def test_a_path_below_a_file_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="opening the spool"):
        Spool(tmp_path / "file" / "below" / "spool.sqlite")


WRITER = """
import sys
from pathlib import Path
from robot_edge.uplink.segments import SegmentBuilder
from robot_edge.uplink.spool import Spool
from tests import samples
spool = Spool(Path(sys.argv[1]))
start = int(sys.argv[2])
for index in range(start, start + 100000):
    spool.put(samples.segment(index))
    sys.stdout.write(f"{index}\\n"); sys.stdout.flush()
"""


@pytest.mark.slow
def test_killed_at_any_point_nothing_that_was_put_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    put: list[int] = []
    for attempt in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(1000 * attempt)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        put.append(int(writer.stdout.readline()))
        time.sleep(0.003 * attempt)
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        put += [int(line) for line in rest.split("\n")[:-1]]
    spool = Spool(path)
    found = [int(name.rsplit("/", 1)[1]) for _, name in waiting(spool)]
    assert set(put) <= set(found)
    assert len(found) == len(set(found))
    assert spool.steps_recorded == 4 * len(found)
    spool.close()


def test_what_it_counts_is_what_lies_in_it(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    spool = Spool(path)
    for index in range(3):
        spool.put(samples.segment(index))
    spool.forget(())
    spool.forget((samples.segment(1).id, "unknown"))
    with pytest.raises(StorageError):
        spool.put(samples.segment(0))
    counts = len(spool), spool.steps_recorded, spool.size
    assert counts[:2] == (2, 12)
    spool.close()
    again = Spool(path)
    assert (len(again), again.steps_recorded, again.size) == counts
    again.close()


def test_the_ticks_of_a_segment_follow_each_other() -> None:
    """Of a skipped period, or a tick without a valid observation, there is no step."""
    builder = SegmentBuilder(samples.episode(), 4)
    found: list[Segment | None] = []
    ticks = [0, 1, 2, 5, 6, 7, 8, 9, 20]
    for tick in ticks:
        if tick in (0, 6):
            builder.frame("front", 10 * tick + 1, samples.image(tick))
        chunk = RecordedChunk(tick, 1, np.zeros((4, 4), np.float32), 0, 0, 0.0) if tick in (2, 5) else None
        found.append(builder.step(samples.step(tick, frame_ns=1 if tick < 6 else 61), chunk))
    found.append(builder.end("success", 1_000))
    segments = [segment for segment in found if segment is not None]
    assert [(s.first_tick, s.steps, s.last) for s in segments] == [
        (0, 3, False),
        (5, 4, False),
        (9, 1, False),
        (20, 1, True),
    ]
    stored = [(s.first_tick + i, float(s.state[i, 0])) for s in segments for i in range(s.steps)]
    assert stored == [(tick, float(np.float32(tick / 1000))) for tick in ticks]
    assert [s.index for s in segments] == [0, 1, 2, 3]
    # each frame once, with the first segment that saw it; each chunk with the step that began it
    assert [s.frames["front"].times_ns.tolist() for s in segments] == [[1], [61], [], []]
    assert [[chunk.first_tick for chunk in s.chunks] for s in segments] == [[2], [5], [], []]
