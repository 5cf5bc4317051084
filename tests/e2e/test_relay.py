"""What robots record goes by their site's relay: it outlasts the line, and nobody who brings it is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.e2e.relay_site import RELAY, Site
from wire.codec import decode, encode
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import Ack, Heartbeat, Hello, HelloAck, SealedSegment, Segment

WHOLE = {f"robot-0-boot-{number:06d}": [0, 1] for number in (1, 2)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_segments_come_by_the_relay_and_count_as_their_robots_own(site: Site, tmp_path: Path) -> None:
    robot, direct = site.robot("robot-0"), site.robot("robot-1", by_relay=False)
    for one in site.robots:
        one.record(human=range(5, 9))
        one.record()
    site.pass_time(5)
    assert site.stored(robot) == WHOLE
    assert len(site.stored(direct)) == 2
    assert site.relay.uploads is not None and site.relay.uploads.taken == site.relay.uploads.sent == 4
    assert len(robot.uplink.spool) == len(site.spool.index._episodes) == site.spool.size == 0
    mine, other = (site.ledger.robot_totals()[name] for name in ("robot-0", "robot-1"))
    assert (mine.steps, mine.human_steps, mine.interventions) == (other.steps, other.human_steps, 1) == (40, 4, 1)
    assert mine.bytes == other.bytes, "the same records"
    assert not site.gateway.refused and not site.relay.refused


def test_a_line_that_is_away_costs_a_robot_no_room(site: Site) -> None:
    robot = site.robot("robot-0")
    site.pass_time(2)
    site.cut_uplink()
    site.pass_time(3)
    robot.record()
    robot.record()
    site.pass_time(5)
    assert site.stored(robot) == {} and len(robot.uplink.spool) == 0
    assert site.spool.index.segments == 4
    site.start_gateway()
    site.mend_uplink()
    site.pass_time(5)
    assert site.stored(robot) == WHOLE and site.spool.size == 0


def test_a_robot_that_never_reached_the_gateway_is_heard_by_the_relay(site: Site) -> None:
    """Its key is known there: that is enough, whether it has spoken or not."""
    site.robot("robot-1", by_relay=False)
    site.pass_time(1)
    robot = site.robot("robot-0")
    site.gateway_port.cut = {"robot-0"}
    robot.record()
    site.pass_time(5)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]}


def test_without_the_relay_robots_send_to_the_gateway_and_come_back_to_it(site: Site) -> None:
    robot = site.robot("robot-0")
    site.pass_time(2)
    site.cut_relay()
    robot.record()
    site.pass_time(8)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]}
    assert site.relay.uploads is not None and site.relay.uploads.taken == 0
    site.relay_port.cut = set()
    robot.record()
    site.pass_time(5)
    assert site.stored(robot) == WHOLE and site.relay.uploads.taken == 0, "for a minute it is left out"
    site.pass_time(60)
    robot.record()
    site.pass_time(5)
    assert site.relay.uploads.taken == 2 and len(site.stored(robot)) == 3


def test_a_segment_that_comes_both_ways_is_stored_once(site: Site) -> None:
    robot = site.robot("robot-0")
    site.pass_time(2)
    site.gateway_port.cut = {RELAY}
    robot.record()
    site.pass_time(3)
    # The relay has it, and its word of that is lost: the robot sends it to the gateway as well.
    again = [site.spool.load(*found) for found in iter(site.spool.index.pop, None)]
    assert len(again) == 2
    for sealed in again:
        assert sealed is not None
        robot.gateway.send(with_pictures_of(sealed))
    site.pass_time(1)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]}
    site.start_relay()
    site.gateway_port.cut = set()
    site.pass_time(5)
    assert site.spool.size == 0 and site.ledger.totals().segments == 2
    assert not site.gateway.refused and site.view.observe().steps_stored == 20


def with_pictures_of(sealed: SealedSegment) -> Segment:
    segment = decode(sealed.body)
    assert isinstance(segment, Segment)
    frames = {
        name: msgspec.structs.replace(one, encoded=sealed.pictures.get(name, ()), sha256=b"")
        for name, one in segment.frames.items()
    }
    return msgspec.structs.replace(segment, frames=frames)


def changed_steps(sealed: SealedSegment, site: Site) -> SealedSegment:
    segment = decode(sealed.body)
    assert isinstance(segment, Segment)
    return msgspec.structs.replace(sealed, body=encode(msgspec.structs.replace(segment, reward=segment.reward + 1)))


def other_picture(sealed: SealedSegment, site: Site) -> SealedSegment:
    return msgspec.structs.replace(sealed, pictures={"front": (b"no picture",) * len(sealed.pictures["front"])})


LIES: dict[str, Callable[[SealedSegment, Site], SealedSegment]] = {
    "its own steps": changed_steps,
    "its own pictures": other_picture,
    "one picture less": lambda one, site: msgspec.structs.replace(one, pictures={"front": one.pictures["front"][1:]}),
    "pictures of a camera that is none": lambda one, site: msgspec.structs.replace(one, pictures={"x": (b"x",)}),
    "in another robot's name": lambda one, site: msgspec.structs.replace(one, robot="robot-1"),
    "in nobody's name": lambda one, site: msgspec.structs.replace(one, robot="robot-7"),
    "in its own name": lambda one, site: msgspec.structs.replace(one, robot=RELAY),
    "under another id": lambda one, site: msgspec.structs.replace(one, id=one.id[:-1] + "7"),
    "without a seal": lambda one, site: msgspec.structs.replace(one, seal=b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_relay_harms_nobody(site: Site, lie: str) -> None:
    robot, other = site.robot("robot-0"), site.robot("robot-1", by_relay=False)
    site.pass_time(2)
    site.gateway_port.cut = {RELAY}
    robot.record()
    site.pass_time(3)
    found = site.spool.index.pop()
    assert found is not None
    honest = site.spool.load(*found)
    assert honest is not None
    site.gateway_port.cut = set()
    site.line.send(LIES[lie](honest, site))
    other.record()
    site.gateway.poll()
    assert site.gateway.refused == {RefusalReason.wrong_seal: 1}
    assert site.stored(robot) == {} and site.store.quarantine.entries() == []
    assert [event["robot"] for event in site.view.snapshot()["events"] if event["kind"] == "refused"] == [RELAY]
    # An honest one follows.
    site.line.discard()
    site.start_relay()
    site.pass_time(5)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]} and len(site.stored(other)) == 1


def test_what_a_revoked_key_sealed_is_kept_aside_by_the_relay_and_offered_again(site: Site) -> None:
    robot, other = site.robot("robot-0"), site.robot("robot-1")
    site.pass_time(2)
    revoked = site.gateway_port.records.pop("robot-0")
    for one in site.robots:
        one.record()
    site.pass_time(5)
    assert site.stored(robot) == {} and len(site.stored(other)) == 1
    assert site.spool.refused == 2 and site.relay.refused == {"refused_by_gateway": 2}
    site.gateway_port.records["robot-0"] = revoked
    site.start_relay()
    site.pass_time(5)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]} and site.spool.size == 0


def test_a_robot_cannot_give_the_relay_another_ones_segments(site: Site) -> None:
    robot, thief = site.robot("robot-0"), site.robot("robot-1")
    site.pass_time(2)
    site.cut_uplink()
    robot.record()
    site.pass_time(3)
    found = site.spool.index.pop()
    assert found is not None
    sealed = site.spool.load(*found)
    assert sealed is not None
    before = site.spool.size
    link = thief.uplink._relay
    assert link is not None
    mine = msgspec.structs.replace(changed_steps(sealed, site), robot="robot-1")
    for lie in (sealed, mine):
        link.channel.send(lie)
    site.pass_time(0.2)
    assert site.relay.refused == {"invalid_segment": 2} and site.spool.size == before


def test_a_full_relay_takes_nothing_and_robots_send_to_the_gateway(tmp_path: Path) -> None:
    site = Site(tmp_path, room_bytes=20_000)
    robot = site.robot("robot-0")
    site.pass_time(2)
    site.gateway_port.cut = {RELAY}
    ids = [robot.record() for _ in range(10)]
    site.pass_time(30)
    assert site.relay.uploads is not None and 0 < site.relay.uploads.taken < 20
    assert site.spool.size <= 20_000
    assert len(robot.uplink.spool) == 0 and 0 < len(site.stored(robot)) < 10
    site.gateway_port.cut = set()
    site.pass_time(70)
    assert sorted(site.stored(robot)) == ids and all(found == [0, 1] for found in site.stored(robot).values())
    assert site.spool.size == 0
    site.close()


def test_a_full_disk_takes_nothing_and_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = site.robot("robot-0")
    site.pass_time(2)
    site.gateway_port.cut = {RELAY}
    robot.record()
    site.pass_time(2)
    pages = site.spool._db.execute("PRAGMA page_count").fetchone()[0]
    site.spool._db.execute(f"PRAGMA max_page_count = {pages}")
    monkeypatch.setattr(site.spool, "has_room_again", lambda: False)
    ids = [robot.record() for _ in range(10)]
    site.pass_time(12)
    assert site.relay.uploads is not None and "the disk is full" in site.relay.uploads.fault
    assert "nothing can be stored now" in site.relay.progress()
    assert len(robot.uplink.spool) == 0, "what it did not take went to the gateway"
    site.gateway_port.cut = set()
    site.spool._db.execute("PRAGMA max_page_count = 1000000")
    monkeypatch.undo()
    site.pass_time(10)
    assert site.relay.uploads.fault == "" and site.spool.size == 0
    stored = site.stored(robot)
    assert sorted(stored) == ["robot-0-boot-000001", *ids] and set(map(tuple, stored.values())) == {(0, 1)}


class OtherRelay:
    """Keeps what `Site` asks of a relay; says whatever it likes."""

    def __init__(self, site: Site, credit_bytes: int, says: Message | None = None) -> None:
        self._site, self._credit_bytes, self._says = site, credit_bytes, says
        self.came: list[str] = []

    def poll(self) -> None:
        while (received := self._site.relay_port.recv()) is not None:
            robot, message = received
            if isinstance(message, SealedSegment):
                self.came.append(message.id)
            elif isinstance(message, Hello | Heartbeat):
                now_ns = self._site.clock.now_ns()
                answer = HelloAck("r", now_ns, message.sent_ns, credit_bytes=self._credit_bytes)
                for word in filter(None, (answer, self._says)):
                    self._site.relay_port.send(robot, word)

    def close(self) -> None:
        """It has nothing."""


def test_a_relay_that_swallows_what_it_is_sent_is_left_out(site: Site) -> None:
    site.relay.close()
    site.relay = swallows = OtherRelay(site, 1_000_000)  # type: ignore[assignment]
    robot = site.robot("robot-0")
    site.pass_time(3)
    robot.record()
    site.pass_time(10)
    assert swallows.came and site.stored(robot) == {} and len(robot.uplink.spool) == 2
    site.pass_time(20)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]} and len(robot.uplink.spool) == 0


def test_a_relay_cannot_have_a_robot_forget_what_it_was_not_sent(site: Site) -> None:
    site.relay.close()
    lie = Ack(("robot-0-boot-000001/0", "robot-0-boot-000001/1"), credit_bytes=0)
    site.relay = OtherRelay(site, 0, lie)  # type: ignore[assignment]
    robot = site.robot("robot-0")
    site.pass_time(2)
    site.cut_uplink()
    robot.record()
    site.pass_time(3)
    assert len(robot.uplink.spool) == 2
    site.mend_uplink()
    site.pass_time(5)
    assert site.stored(robot) == {"robot-0-boot-000001": [0, 1]}
