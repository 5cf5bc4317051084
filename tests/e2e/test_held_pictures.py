"""Pictures that a relay holds back: what is learned from is fetched, what nobody asks for stays on the site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cloud_learner.buffer.export_episode import export_episode
from cloud_learner.buffer.ledger.rows import HeldState
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.sampling.target import imitation
from tests import samples
from tests.e2e.relay_site import Site
from wire.errors import ConfigError, StorageError
from wire.messages.gateway import FetchPictures, Hello, PicturesGone, SealedSegment


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, hold=["front"])
    yield made
    made.close()


def learner(site: Site) -> ReplayDataset:
    tasks = {"reach": "reach the goal"}
    config = DatasetConfig(tasks=tasks, target=imitation(), batch=4, horizon=4, cache_bytes=4_000_000, prefetch=0)
    return ReplayDataset(site.ledger, site.store, samples.spec(), config)


def whole(site: Site, episode: str) -> bool:
    return all(site.pictures(episode))


def test_what_is_held_back_is_stored_without_pictures_and_comes_when_it_is_asked_for(site: Site) -> None:
    robot = site.robot("robot-0")
    taught, alone = robot.record(human=range(12, 16)), robot.record()
    site.pass_time(5)
    assert [len(site.stored(robot)[one]) for one in (taught, alone)] == [2, 2]
    assert site.pictures(taught) == site.pictures(alone) == [b""] * 5
    assert site.spool.held == 4 and site.spool.index.segments == 0 and len(robot.uplink.spool) == 0
    assert site.ledger.held_counts() == {HeldState.held: 4}
    before = site.ledger.totals()

    assert site.ledger.ask_episodes(None, human=True) == 1
    site.pass_time(12)
    assert [bool(one) for one in site.pictures(taught)] == [False, False, False, True, True]
    assert site.ledger.ask_episodes([taught], human=False) == 1
    site.pass_time(12)
    assert whole(site, taught) and not any(site.pictures(alone))
    assert site.ledger.held_counts() == {HeldState.held: 2} and site.spool.held == 2
    after = site.ledger.totals()
    assert (after.segments, after.steps) == (before.segments, before.steps)
    assert after.bytes == sum(row.bytes for row in site.ledger.places(range(1, 5)).values()) > before.bytes
    assert not site.gateway.refused and site.store.quarantine.entries() == []


def test_the_learner_asks_for_what_it_would_draw_and_draws_it_then(site: Site) -> None:
    robot = site.robot("robot-0")
    taught, alone = robot.record(human=range(4, 8)), robot.record()
    site.pass_time(5)
    trainer = site.gateway_port.connect("trainer", "trainer")
    trainer.send(Hello("trainer", "trainer", "c", 1, 5))
    with learner(site) as dataset:
        dataset.refresh()
        with pytest.raises(StorageError):
            dataset.next()
        wanted = dataset.pop_wanted_pictures()
        assert wanted == (f"{taught}/0",) and dataset.pop_wanted_pictures() == ()
        trainer.send(FetchPictures(wanted))
        site.pass_time(12)
        assert [bool(one) for one in site.pictures(taught)] == [True, True, True, False, False]
        assert not any(site.pictures(alone))
        dataset.refresh()
        batch = dataset.next()
        assert set(batch["tick"].tolist()) <= set(range(4, 8))


def test_what_is_whole_is_learned_from_meanwhile(site: Site) -> None:
    """And a picture that an earlier segment brought is asked for where that is held back."""
    robot = site.robot("robot-0")
    first, second = robot.record(human=range(4, 8)), robot.record(human=range(10, 15))
    site.pass_time(5)
    site.ledger.ask_episodes([first], human=False)
    site.pass_time(12)
    numbers = {name: episode.number for name in (first, second) if (episode := site.ledger.episode(name)) is not None}
    with learner(site) as dataset:
        dataset.refresh()
        assert {number for _ in range(5) for number in dataset.next()["episode"].tolist()} == {numbers[first]}
        assert set(dataset.pop_wanted_pictures()) == {f"{second}/0", f"{second}/1"}
        site.ledger.ask_episodes([second], human=False)
        site.pass_time(12)
        dataset.refresh()
        assert {number for _ in range(9) for number in dataset.next()["episode"].tolist()} == set(numbers.values())
        assert dataset.pop_wanted_pictures() == () and dataset.stats.unreadable_frames == 0


def test_pictures_that_the_relay_had_no_room_for_are_said_to_be_gone(tmp_path: Path) -> None:
    site = Site(tmp_path, hold=["all"], room_bytes=12_000)
    robot = site.robot("robot-0")
    ids = [robot.record() for _ in range(6)]
    site.pass_time(10)
    assert len(site.stored(robot)) == 6 and site.spool.size <= 12_000
    kept = site.spool.held
    assert 0 < kept < 12
    assert site.ledger.ask_episodes(None, human=False) == 12
    site.pass_time(20)
    assert site.ledger.held_counts() == {HeldState.gone: 12 - kept}
    assert not whole(site, ids[0]) and whole(site, ids[-1])
    site.close()


def test_pictures_are_asked_for_again_by_whoever_is_there_next(site: Site) -> None:
    """Relay and gateway are killed in between, the line is cut, and what came is sealed meanwhile."""
    robot = site.robot("robot-0")
    taught = robot.record()
    site.pass_time(5)
    assert seal(site.store, site.clock.now_ns(), force=True).segments == 2
    assert site.ledger.ask_episodes(None, human=False) == 2
    site.cut_uplink()
    site.pass_time(10)
    site.start_gateway()
    site.start_relay()
    site.mend_uplink()
    site.pass_time(12)
    assert whole(site, taught) and site.spool.size == 0
    assert seal(site.store, site.clock.now_ns(), force=True).segments == 2
    assert whole(site, taught) and site.ledger.held_counts() == {}


def test_what_came_without_pictures_and_comes_whole_from_its_robot_is_completed(site: Site) -> None:
    """The relay's word that it has a segment was lost, and the robot sends it to the gateway."""
    robot = site.robot("robot-0")
    taught = robot.record()
    site.pass_time(5)
    for segment_id in (f"{taught}/0", f"{taught}/1"):
        site.spool.ask([segment_id])
        found = site.spool.index.pop()
        assert found is not None
        sealed = site.spool.load(*found)
        assert sealed is not None
        robot.gateway.send(opened(site, sealed))
    site.gateway.poll()
    assert whole(site, taught) and site.ledger.totals().segments == 2
    # and once more, without pictures: nothing is lost by that
    site.line.send(msgspec.structs.replace(sealed, pictures={}))
    site.gateway.poll()
    assert whole(site, taught) and site.store.quarantine.entries() == []


def opened(site: Site, sealed: SealedSegment):
    return site.gateway._storage._seals.open(sealed)


def test_other_pictures_than_were_sealed_complete_nothing(site: Site) -> None:
    robot = site.robot("robot-0")
    taught = robot.record()
    site.pass_time(5)
    site.spool.ask([f"{taught}/0"])
    found = site.spool.index.pop()
    assert found is not None
    sealed = site.spool.load(*found)
    assert sealed is not None
    others = (sealed.pictures["front"][1], sealed.pictures["front"][0], *sealed.pictures["front"][2:])
    site.line.send(msgspec.structs.replace(sealed, pictures={"front": others}))
    site.gateway.poll()
    assert not any(site.pictures(taught)) and site.gateway.refused == {"wrong_seal": 1}


def test_a_relay_speaks_of_its_own_pictures_alone(site: Site) -> None:
    robot = site.robot("robot-0")
    taught = robot.record()
    site.pass_time(5)
    site.ledger.ask_episodes(None, human=False)
    other = site.gateway_port.connect("relay-2", "relay")
    other.send(Hello("relay-2", "relay", "c", 1, 5))
    other.send(PicturesGone((f"{taught}/0", "nothing/0")))
    site.gateway.poll()
    assert site.ledger.held_counts() == {HeldState.wanted: 2}


def test_a_robot_cannot_leave_its_pictures_out(site: Site) -> None:
    robot = site.robot("robot-0")
    site.pass_time(2)
    robot.record()
    site.gateway_port.cut = {"relay"}
    site.pass_time(3)
    found = site.spool.index.pop()
    assert found is not None
    sealed = site.spool.load(*found)
    assert sealed is not None
    robot.gateway.send(opened(site, sealed))
    site.gateway.poll()
    assert site.stored(robot) == {} and site.gateway.refused == {"malformed": 1}


def test_an_episode_is_not_exported_without_its_pictures(site: Site, tmp_path: Path) -> None:
    robot = site.robot("robot-0")
    taught = robot.record()
    site.pass_time(5)
    with pytest.raises(ConfigError, match="buffer ask"):
        export_episode(site.ledger, site.store, taught, tmp_path / "one.episode")
