"""The relay's disk: what was put in is there after any kill, what the gateway lacks is never dropped."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from robot_edge.relay.upload_spool import ALL_CAMERAS, UploadSpool
from tests import samples
from wire.codec import decode, encode
from wire.errors import CorruptDataError, DiskFullError
from wire.identity.sealing import Sealer
from wire.messages.gateway import CameraFrames, SealedSegment, Segment
from wire.types import Actor

SEALER = Sealer(zmq.curve_keypair()[1], zmq.curve_keypair()[0])
PICTURE = 9000


def sealed(index: int, robot: str = "robot-0", episode: int = 0, human: bool = False) -> SealedSegment:
    """With one picture of 9 kB."""
    segment = samples.segment(index, last=False, of=samples.episode(robot, episode))
    if human:
        segment.actor.setflags(write=True)
        segment.actor[:] = list(Actor).index(Actor.human)
    picture = bytes([index % 256]) * PICTURE
    frames = {"front": CameraFrames(segment.frames["front"].times_ns, (picture,))}
    return SEALER.seal(msgspec.structs.replace(segment, frames=frames))


def ids(messages: Sequence[SealedSegment]) -> tuple[str, ...]:
    return tuple(message.id for message in messages)


def pop(spool: UploadSpool) -> list[SealedSegment]:
    """What would be sent, in that order."""
    found = [spool.load(*place) for place in iter(spool.index.pop, None)]
    assert None not in found
    return [message for message in found if message is not None]


def same(one: SealedSegment, other: SealedSegment) -> bool:
    return encode(one) == encode(other)


def test_what_was_put_in_is_sent_as_it_came_until_it_is_forgotten(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite")
    messages = [sealed(index) for index in range(3)]
    assert spool.put_all(messages) == (ids(messages), {})
    assert spool.put_all(messages[:1]) == (ids(messages[:1]), {}), "twice is once"
    assert all(map(same, pop(spool), messages))
    spool.forget((messages[0].id, "nothing/0"))
    spool.close()
    again = UploadSpool(tmp_path / "uploads.sqlite")
    assert ids(pop(again)) == ids(messages[1:])
    again.forget(ids(messages))
    assert again.size == again.index.size == 0
    again.close()


def test_what_people_did_goes_first(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite")
    spool.put_all([sealed(0, "robot-0"), sealed(0, "robot-1", human=True), sealed(0, "robot-2")])
    assert [message.robot for message in pop(spool)] == ["robot-1", "robot-2", "robot-0"]
    spool.close()


def test_an_id_has_one_content_and_one_robot(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite")
    first = sealed(0)
    spool.put_all([first])
    segment = decode(first.body)
    assert isinstance(segment, Segment)
    other = SEALER.seal(msgspec.structs.replace(segment, reward=segment.reward + 1))
    thief = msgspec.structs.replace(segment, episode=msgspec.structs.replace(segment.episode, robot="robot-1"))
    wrong = {
        "came before with other content": other,
        "from 'robot-0'": SEALER.seal(thief),
        "is no segment of robot": msgspec.structs.replace(sealed(1), robot="robot-1"),
        "is not '<episode id>/<index>'": msgspec.structs.replace(sealed(2), id="another/2"),
        "not a message": msgspec.structs.replace(sealed(3), body=first.body[:1] + b"x"),
    }
    for reason, message in wrong.items():
        stored, invalid = spool.put_all([message])
        assert stored == () and reason in invalid[message.id]
    assert [same(one, first) for one in pop(spool)] == [True]
    spool.close()


def test_held_pictures_stay_until_they_are_asked_for(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite", hold=["front"])
    messages = [sealed(index) for index in range(3)]
    spool.put_all(messages)
    assert spool.index.size < PICTURE < spool.size
    assert all(message.pictures == {} for message in pop(spool))
    assert spool.ask(ids(messages)) == (), "they are on their way without pictures"
    spool.forget(ids(messages))
    assert spool.held == 3 and spool.index.segments == 0 and spool.spare_bytes == spool.size
    assert spool.ask((messages[1].id, "nothing/0")) == ("nothing/0",)
    assert spool.ask((messages[1].id,)) == () and spool.held == 2
    spool.close()
    # Another start, which holds nothing back: what was held stays.
    again = UploadSpool(tmp_path / "uploads.sqlite")
    assert again.held == 2
    (found,) = pop(again)
    assert same(found, messages[1])
    again.forget((found.id,))
    assert again.held == 2 and again.ask((found.id,)) == (found.id,)
    again.close()


def test_cameras_by_name_or_all(tmp_path: Path) -> None:
    for number, (hold, held) in enumerate(((("side",), False), (("side", "front"), True), ((ALL_CAMERAS,), True))):
        spool = UploadSpool(tmp_path / f"{number}.sqlite", hold=hold)
        spool.put_all([sealed(0)])
        assert [message.pictures == {} for message in pop(spool)] == [held]
        spool.close()


def test_over_the_quota_only_what_the_gateway_has_goes_the_oldest_first(tmp_path: Path) -> None:
    size = len(encode(sealed(0)))
    spool = UploadSpool(tmp_path / "uploads.sqlite", 6 * size + 100, hold=["front"])
    messages = [sealed(index) for index in range(10)]
    spool.put_all(messages[:4])
    spool.forget(ids(messages[:3]))
    spool.put_all(messages[4:7])
    assert spool.held == 2 and spool.ask(ids(messages[:1])) == ids(messages[:1])
    spool.put_all(messages[7:9])
    assert spool.held == 0 and spool.is_full
    with pytest.raises(DiskFullError, match="--spool-max"):
        spool.put_all(messages[9:])
    assert ids(pop(spool)) == ids(messages[3:9]), "and nothing is lost by that"
    spool.forget(ids(messages[3:5]))
    assert not spool.is_full and spool.put_all(messages[9:]).stored == ids(messages[9:])
    spool.close()


def test_what_is_refused_is_kept_and_offered_by_the_next_start(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite")
    messages = [sealed(index) for index in range(2)]
    spool.put_all(messages)
    pop(spool)
    spool.set_aside(ids(messages[:1]))
    assert spool.refused == 1 and spool.index.segments == 1
    assert spool.ask(ids(messages[:1])) == ids(messages[:1])
    spool.close()
    again = UploadSpool(tmp_path / "uploads.sqlite")
    assert ids(pop(again)) == ids(messages) and again.refused == 0
    again.close()


def test_a_full_disk_takes_back_what_was_being_written(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite")
    spool.put_all([sealed(0)])
    spool._db.execute("PRAGMA max_page_count = 12")
    with pytest.raises(DiskFullError, match="Free some room"):
        spool.put_all([sealed(index) for index in range(1, 100)])
    assert spool.index.segments == 1 and spool.size == len(encode(sealed(0)))
    spool._db.execute("PRAGMA max_page_count = 1000000")
    spool.put_all([sealed(1)])
    assert ids(pop(spool)) == ids([sealed(0), sealed(1)])
    spool.close()


def test_on_a_full_disk_what_is_held_back_makes_room(tmp_path: Path) -> None:
    spool = UploadSpool(tmp_path / "uploads.sqlite", hold=["front"])
    messages = [sealed(index) for index in range(12)]
    spool.put_all(messages[:8])
    spool.forget(ids(messages[:7]))
    pages = spool._db.execute("PRAGMA page_count").fetchone()[0]
    spool._db.execute(f"PRAGMA max_page_count = {pages}")
    assert spool.put_all(messages[8:10]).stored == ids(messages[8:10])
    assert spool.held == 3, "twice as much as is needed, the oldest"
    assert ids(pop(spool)) == ids(messages[7:10])
    spool.close()


def test_to_forget_there_is_room_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_edge.relay.upload_spool._RESERVE_BYTES", 10_000)
    spool = UploadSpool(tmp_path / "uploads.sqlite")
    reserve, settle = tmp_path / "upload.reserve", spool._settle
    assert reserve.stat().st_size == 10_000
    spool.put_all([sealed(0)])

    def needs_room(ids: Sequence[str], refused: bool) -> None:
        if reserve.exists():
            raise DiskFullError("full")
        settle(ids, refused)

    monkeypatch.setattr(spool, "_settle", needs_room)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    spool.forget((sealed(0).id,))
    assert spool.size == 0 and not spool.has_room_again()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert spool.has_room_again() and reserve.exists()
    spool.close()


def test_a_file_that_is_no_spool_says_so(tmp_path: Path) -> None:
    path = tmp_path / "uploads.sqlite"
    path.write_bytes(b"this is not a database, but it is long enough to be looked at" * 100)
    with pytest.raises(CorruptDataError, match="Move it away"):
        UploadSpool(path)


WRITER = """
import sys
from pathlib import Path
from robot_edge.relay.upload_spool import UploadSpool
from tests.robot_edge.relay.test_upload_spool import sealed
spool = UploadSpool(Path(sys.argv[1]), hold=["front"])
start = int(sys.argv[2])
for index in range(start, start + 100000, 3):
    for one in spool.put_all([sealed(number) for number in range(index, index + 3)]).stored:
        sys.stdout.write(f"{one}\\n"); sys.stdout.flush()
    spool.forget((f"robot-0-boot-000000/{index}",))
    spool.ask((f"robot-0-boot-000000/{index}",))
"""


@pytest.mark.slow
def test_killed_at_any_point_nothing_that_was_put_in_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "uploads.sqlite"
    put: list[str] = []
    for attempt in range(6):
        command = [sys.executable, "-c", WRITER, str(path), str(1000 * attempt)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        put.append(writer.stdout.readline().strip())
        time.sleep(0.005 * attempt)
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        put += rest.split("\n")[:-1]
    spool = UploadSpool(path)
    held = spool.held
    found = ids(pop(spool))
    assert len(found) == len(set(found)) and len(found) + held >= len(put)
    assert set(put) <= set(found) | {one for one in put if spool.ask((one,)) == ()}
    spool.close()
