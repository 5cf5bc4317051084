"""Segments whose pictures a relay holds back, as the ledger knows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.rows import HeldBy, HeldState
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.store import SegmentStore
from tests.cloud_learner.buffer.loading.memory_buffer import robot
from tests.cloud_learner.buffer.synthetic import fake_episode, same_segment
from wire.errors import InvalidDataError
from wire.identity.sealing import without_pictures
from wire.messages.gateway import Segment

SPEC = robot([(16, 16, 20.0)])


@pytest.fixture
def store(tmp_path: Path, ledger_place: str) -> Iterator[SegmentStore]:
    ledger, made = BufferLocation(tmp_path, ledger_place if "://" in ledger_place else "").open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    yield made
    made.close()
    ledger.close()


def held(store: SegmentStore, name: str, relay: str = "relay", actor: int = 0) -> tuple[Segment, ...]:
    """An episode of two segments, whole; the store has it without pictures."""
    whole = fake_episode(SPEC, name, steps=100, segment_steps=50, actor=[actor] * 100, seed=len(name))
    by = dict.fromkeys((segment.id for segment in whole), HeldBy(relay))
    rows = store.append_all([(without_pictures(segment), 1) for segment in whole], 2, held=by)
    assert None not in rows
    return whole


def rows_of(store: SegmentStore, name: str) -> list[int]:
    return [segment.row for segment in store.ledger.segments_of(name)]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_completed_segment_is_read_whole_wherever_it_lay(store: SegmentStore, sealed: bool) -> None:
    whole, ledger = held(store, "e1"), store.ledger
    if sealed:
        seal(store, 3, force=True)
        before = ledger.shards()[0].live_bytes
    first, second = rows_of(store, "e1")
    store.complete(first, whole[0], 4)
    found = store.read([first, second]).segments
    assert same_segment(found[first], whole[0])
    assert all(frames.sha256 for frames in found[second].frames.values() if len(frames.times_ns))
    assert ledger.held_rows([first, second]) == {second: HeldState.held}
    place = ledger.places([first])[first]
    assert place.shard is None and place.journal is not None
    totals, episode = ledger.totals(), ledger.episode("e1")
    assert episode is not None
    assert totals.bytes == episode.bytes == sum(one.bytes for one in ledger.places([first, second]).values())
    if sealed:
        assert 0 < ledger.shards()[0].live_bytes < before
    assert seal(store, 5, force=True).segments == (1 if sealed else 2)
    assert same_segment(store.read([first]).segments[first], whole[0])


def test_what_is_moved_as_it_was_while_it_is_completed_stays_whole(store: SegmentStore) -> None:
    """Whoever seals has read a record, and its pictures come before it is moved."""
    whole, rows = held(store, "e1"), rows_of(store, "e1")
    before = store.read_records(rows).payloads
    store.complete(rows[0], whole[0], 4)
    assert store.write_shard(SPEC.hash, before, 5) == 1
    assert same_segment(store.read(rows).segments[rows[0]], whole[0])
    assert seal(store, 6, force=True).segments == 1
    assert same_segment(store.read(rows).segments[rows[0]], whole[0]) and not store.read(rows).damaged


def test_what_was_forgotten_is_not_completed(store: SegmentStore) -> None:
    whole, (row, _) = held(store, "e1"), rows_of(store, "e1")
    with store.ledger.exclusive():
        store.ledger.prune(["e1"], 5)
    with pytest.raises(InvalidDataError, match="pruned"):
        store.complete(row, whole[0], 6)
    assert store.ledger.held_counts() == {}, "it went with its segment"


def test_who_wants_what_of_whom(store: SegmentStore) -> None:
    ledger = store.ledger
    held(store, "e1")
    held(store, "e2", actor=1)
    held(store, "e3", relay="relay-2")
    held(store, "e4", relay="")
    assert ledger.wanted_pictures("relay", 10) == ()
    assert ledger.ask_pictures(["e1/1", "e3/0", "nothing/0"]) == 2
    assert ledger.ask_pictures(["e1/1"]) == 0
    assert ledger.wanted_pictures("relay", 10) == ("e1/1",)
    assert ledger.ask_episodes(None, human=True) == 2
    assert ledger.wanted_pictures("relay", 10) == ("e1/1", "e2/0", "e2/1")
    assert ledger.wanted_pictures("relay", 2) == ("e1/1", "e2/0")
    assert ledger.note_pictures_gone("relay-2", ["e1/1", "e3/0", "e3/1"]) == 1, "of its own, and asked for"
    assert ledger.wanted_pictures("relay-2", 10) == ()
    assert ledger.ask_episodes(["e3", "e4"], human=False) == 3
    assert ledger.wanted_pictures("relay", 10)[3:] == ("e4/0", "e4/1"), "nobody knows who has them"
    assert ledger.held_counts() == {HeldState.held: 1, HeldState.wanted: 6, HeldState.gone: 1}
