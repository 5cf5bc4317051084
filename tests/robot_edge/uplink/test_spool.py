"""Durable until acknowledged, whatever kills the process; and within its quota, without touching what people did."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from robot_edge.uplink.spool import LEAST_BYTES, Spool, default_quota, quota_bytes
from tests import samples
from wire.codec import encode
from wire.errors import ConfigError, CorruptDataError, DiskFullError, NotWritableError, StorageError
from wire.messages.gateway import ACTORS, Segment
from wire.types import Actor


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


# --- the quota -------------------------------------------------------------------------------------------------------

SIZE = len(encode(samples.segment(0)))


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """Room for ten segments."""
    made = Spool(tmp_path / "spool.sqlite", 10 * SIZE + SIZE // 2)
    yield made
    made.close()


def episode(number: int, segments: int, actor: Actor = Actor.policy, source: str = "online") -> list[Segment]:
    """Its segments; at first the robot waits for the policy, which does the rest but the last step of the second one:
    that `actor` did."""
    of = samples.episode(number=number, source=source)
    made = [samples.segment(index, last=index == segments - 1, of=of) for index in range(segments)]
    waits = np.array([ACTORS.index(Actor.hold), 0, 0, 0], np.uint8)
    made[0] = msgspec.structs.replace(made[0], actor=waits[: made[0].steps])
    if segments > 1:
        acted = np.array([0, 0, 0, ACTORS.index(actor)], np.uint8)
        made[1] = msgspec.structs.replace(made[1], actor=acted)
    return made


def put(spool: Spool, *segments: Segment) -> None:
    for segment in segments:
        spool.put(segment)


def there(spool: Spool) -> list[int]:
    """Numbers of the episodes in it, as they were put in."""
    rows = spool._db.execute("SELECT episode FROM segments GROUP BY episode ORDER BY min(row)")
    return [int(name.rpartition("-")[2]) for (name,) in rows]


def test_over_the_quota_whole_episodes_of_the_policy_go_the_oldest_first(spool: Spool, tmp_path: Path) -> None:
    for number in range(6):
        put(spool, *episode(number, 3))
    assert there(spool) == [3, 4, 5]
    assert spool.dropped == (3, 36, 3 * sum(len(encode(one)) for one in episode(0, 3)))
    assert (len(spool), spool.steps_recorded, spool.is_full) == (9, 72, False)
    again = Spool(tmp_path / "spool.sqlite", 1)
    assert (again.dropped, again.reported, len(again)) == (spool.dropped, (0, 0, 0), 9), "to look drops nothing"
    again.note_reported(again.dropped)
    again.close()
    again = Spool(tmp_path / "spool.sqlite")
    assert again.reported == again.dropped == spool.dropped
    again.close()


@pytest.mark.parametrize("kept", [Actor.human, Actor.script, "demonstration"])
def test_an_episode_that_somebody_acted_in_stays_as_a_whole(spool: Spool, kept: Actor | str) -> None:
    put(spool, *(episode(0, 3, kept) if isinstance(kept, Actor) else episode(0, 3, source=kept)))
    for number in range(1, 5):
        put(spool, *episode(number, 3))
    assert there(spool) == [0, 3, 4]
    for number in range(5, 8):
        put(spool, *episode(number, 3, Actor.human))
    assert there(spool) == [0, 5, 6, 7]
    assert spool.is_full
    spool.forget(tuple(f"{samples.episode(number=0).id}/{index}" for index in range(2)))
    assert spool.size < spool.max_bytes and spool.is_full, "not each acknowledgement lets the robot move"
    spool.forget(tuple(f"{samples.episode(number=5).id}/{index}" for index in range(2)))
    assert not spool.is_full


def test_the_running_episode_and_one_that_the_gateway_has_a_part_of_stay(spool: Spool, tmp_path: Path) -> None:
    put(spool, *episode(0, 3))
    spool.begin(spool.index.next()[0])  # type: ignore[index]
    for number in range(1, 4):
        put(spool, *episode(number, 3))
    put(spool, *episode(4, 9)[:8])
    assert there(spool) == [0, 4] and spool.is_full
    again = Spool(tmp_path / "spool.sqlite", spool.max_bytes)
    put(again, *episode(5, 3), *episode(6, 2))
    assert there(again) == [0, 4]
    again.close()


def test_what_is_left_of_a_kept_episode_is_kept_by_a_later_process(tmp_path: Path) -> None:
    """Its correction is acknowledged, the uplink dies, and the end of the episode comes from what the spool kept."""
    path = tmp_path / "spool.sqlite"
    first = Spool(path, 4 * SIZE)
    segments = episode(0, 4, Actor.human)
    put(first, *segments[:2])
    first.put(segments[2], segments[3])
    first.forget(tuple(segment.id for segment in segments[:3]))
    second = Spool(path, 4 * SIZE)
    ending = second.ending()
    assert ending is not None and len(second) == 0
    second.put(ending)
    for number in range(1, 9):
        put(second, *episode(number, 2))
    assert there(second)[0] == 0
    first.close()
    second.close()


@pytest.mark.parametrize("seed", range(5))
def test_it_never_holds_more_than_its_quota_and_what_may_not_go(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    spool = Spool(tmp_path / "spool.sqlite", draw.randrange(5, 30) * SIZE)
    spool._db.execute("PRAGMA synchronous=OFF")
    human: set[str] = set()
    forgotten: set[str] = set()
    for number in range(60):
        actor = draw.choice((Actor.policy, Actor.policy, Actor.human, Actor.script))
        segments = episode(number, draw.randrange(2, 6), actor)
        human |= {segment.id for segment in segments if actor != Actor.policy}
        put(spool, *segments)
        assert spool.size <= spool.max_bytes or spool.is_full
        for _ in range(draw.randrange(6)):
            if (found := spool.index.next()) is not None:
                spool.begin(found[0])
                spool.index.pop()
                forgotten.add(f"{found[0].id}/{found[1].number}")
                spool.forget((f"{found[0].id}/{found[1].number}",))
        if draw.random() < 0.1:
            spool.close()
            spool = Spool(tmp_path / "spool.sqlite", spool.max_bytes)
            spool._db.execute("PRAGMA synchronous=OFF")
        rows = spool._db.execute("SELECT episode || '/' || number, size, steps FROM segments").fetchall()
        assert (len(rows), sum(row[1] for row in rows)) == (len(spool), spool.size)
        assert human - forgotten <= {row[0] for row in rows}
        there_steps = sum(row[2] for row in rows)
        assert spool.steps_recorded == there_steps + 4 * len(forgotten) + spool.dropped.steps
    spool.close()


@pytest.mark.parametrize("actor", [Actor.policy, Actor.human])
def test_on_a_full_disk_what_fits_is_the_quota_until_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actor: Actor
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1))
    spool = Spool(tmp_path / "spool.sqlite", 10**9)
    spool._db.execute("PRAGMA max_page_count = 25")
    number = 0
    with pytest.raises(DiskFullError):
        for number in range(100):
            put(spool, *episode(number, 2, actor))
    full = spool.size
    assert spool.on_disk_full() == (actor == Actor.policy)
    assert spool.max_bytes < 0.9 * full
    if actor == Actor.policy:
        assert spool.size <= spool.max_bytes
    else:
        assert spool.is_full
        with pytest.raises(DiskFullError):
            spool.put(episode(number + 1, 1)[0])
        first = [f"{samples.episode(number=one).id}/{index}" for one in range(number) for index in (0, 1)]
        spool.forget(tuple(first[: len(first) // 2]))
    for number in range(200, 230):
        put(spool, *episode(number, 2))
    assert spool.dropped.episodes > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))
    found = spool.index.next()
    assert found is not None
    spool.forget((f"{found[0].id}/{found[1].number}",))
    assert spool.max_bytes == 10**9
    spool.close()


def test_to_forget_there_is_room_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_edge.uplink.spool._RESERVE_BYTES", 2 * SIZE)
    spool = Spool(tmp_path / "spool.sqlite")
    reserve, forget = tmp_path / "spool.reserve", spool._forget
    put(spool, *episode(0, 2))
    assert not reserve.exists(), "so little can wait for room"
    put(spool, *episode(1, 3))
    assert reserve.stat().st_size == 2 * SIZE

    def needs_room(ids: tuple[str, ...]) -> list[tuple[str, int, int, int]]:
        if reserve.exists():
            raise DiskFullError("full")
        return forget(ids)

    monkeypatch.setattr(spool, "_forget", needs_room)
    spool.forget(tuple(segment.id for segment in episode(0, 2)))
    assert len(spool) == 3 and reserve.exists(), "and set aside again"
    spool.close()


def test_an_empty_spool_gives_the_disk_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_edge.uplink.spool._SHRINK_BYTES", 500_000)
    spool = Spool(tmp_path / "spool.sqlite")
    put(spool, *(samples.segment(index, steps=400) for index in range(40)))
    spool._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / "spool.sqlite").stat().st_size > 1_000_000
    spool.forget(tuple(samples.segment(index).id for index in range(40)))
    assert sum(path.stat().st_size for path in tmp_path.glob("spool.sqlite*")) < 300_000
    spool.close()


def test_by_default_it_takes_half_of_what_is_free_and_no_more_than_20_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, quota in ((0, LEAST_BYTES), (10**9, 5 * 10**8), (10**12, 20 * 10**9)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert default_quota(tmp_path / "spool.sqlite") == quota
    assert (quota_bytes("--spool-max", 0.0), quota_bytes("--spool-max", 2.5)) == (0, 2_500_000_000)
    for wrong in (-1.0, 0.01, float("nan")):
        with pytest.raises(ConfigError, match="--spool-max"):
            quota_bytes("--spool-max", wrong)
