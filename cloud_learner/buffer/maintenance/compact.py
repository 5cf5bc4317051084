"""Rewriting shards that are mostly forgotten, and giving the room of forgotten segments back.

A new shard is written and committed before the old one goes, so a segment always lies where the ledger says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Place, ShardRow
from cloud_learner.buffer.maintenance.shard_writer import DEFAULT_POLICY, SealPolicy, seal_held
from cloud_learner.buffer.store.arrays import SHARD_JPEG_BYTES, SHARD_ROWS
from cloud_learner.buffer.store.shard import Room, ShardItem, encode_shard
from cloud_learner.buffer.store.store import SegmentStore
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_READ_AT_ONCE = 64


class Compacted(msgspec.Struct, frozen=True):
    """What became of the shards."""

    read_shards: int
    """shards that went: what was left in them was read and written again"""
    written_shards: int
    freed_bytes: int
    """of the shards that went, less those that were written"""


def compact(
    store: SegmentStore, ledger: Ledger, now_ns: int, policy: SealPolicy = DEFAULT_POLICY, *, wait_s: float = 30
) -> Compacted:
    """Seal what is ripe, write what is left of mostly forgotten shards and of small ones together, drop the old ones.

    Raises `StorageError` when somebody else is at work for longer than `wait_s`, and whatever writing may raise.
    """
    with ledger.exclusive(wait_s=wait_s):
        seal_held(store, ledger, now_ns, policy)
        written = 0
        before = _stored_bytes(ledger)
        by_spec: dict[str, list[ShardRow]] = {}
        for shard in ledger.shards():
            if shard.state == "sealed":
                by_spec.setdefault(shard.spec_hash, []).append(shard)
        for spec_hash, shards in by_spec.items():
            if chosen := _worth_rewriting(shards):
                rows = live_rows(ledger, spec_hash, {shard.number for shard in chosen})
                written += rewrite(store, ledger, store.spec(spec_hash), rows, now_ns)
        dropped = _drop_dead(store, ledger)
        return Compacted(dropped, written, before - _stored_bytes(ledger))


def drop_dead(store: SegmentStore, ledger: Ledger, *, wait_s: float = 30) -> int:
    """Delete the shards in which no segment lies any more, and unused journal files. Returns how many shards."""
    with ledger.exclusive(wait_s=wait_s):
        return _drop_dead(store, ledger)


def live_rows(ledger: Ledger, spec_hash: str, shards: Set[int]) -> list[int]:
    """Ledger rows of the segments that lie in these shards and are not damaged, growing."""
    rows = ledger.index(0, spec_hash).row.tolist()
    return [row for row, place in ledger.places(rows).items() if place.shard in shards]


def rewrite(store: SegmentStore, ledger: Ledger, spec: RobotSpec, rows: Sequence[int], now_ns: int) -> int:
    """Write segments into new shards, episode by episode; how many shards. For the holder of `ledger.exclusive`.

    A segment that is damaged stays where it is, and keeps its shard: `verify` with `repair` sets it aside.
    """
    written = 0
    room, items = Room(spec), list[ShardItem]()
    for item in _items(store, ledger, rows):
        if not room.take(item.segment):
            _write(store, ledger, spec, items, now_ns)
            written += 1
            room, items = Room(spec), []
            room.take(item.segment)
        items.append(item)
    if items:
        _write(store, ledger, spec, items, now_ns)
        written += 1
    return written


def _write(store: SegmentStore, ledger: Ledger, spec: RobotSpec, items: Sequence[ShardItem], now_ns: int) -> None:
    number = ledger.reserve_shard(spec.hash, now_ns)
    store.write_shard(spec, number, encode_shard(spec, number, items))


def _items(store: SegmentStore, ledger: Ledger, rows: Sequence[int]) -> Iterator[ShardItem]:
    """The whole segments of these rows, episodes one after another in the order of their first rows."""
    places = ledger.places(rows)
    firsts: dict[str, int] = {}
    for row in sorted(places):
        firsts.setdefault(places[row].episode, row)
    order: list[Place] = sorted(
        (place for place in places.values() if not place.damaged),
        key=lambda place: (firsts[place.episode], place.index),
    )
    for at in range(0, len(order), _READ_AT_ONCE):
        some = order[at : at + _READ_AT_ONCE]
        found = store.read([place.row for place in some], verify=True)
        for row, reason in found.damaged.items():
            log.error("segment %s (row %d) is damaged; `vla-fleet buffer verify`: %s", places[row].id, row, reason)
        for place in some:
            if place.row in found.segments:
                yield ShardItem(place.row, place.sha256, found.segments[place.row])


def _worth_rewriting(shards: Sequence[ShardRow]) -> list[ShardRow]:
    """The shards with something left that are mostly forgotten, and small ones when they become fewer together."""
    left = [shard for shard in shards if shard.live_segments]
    sparse = [shard for shard in left if 2 * shard.live_rows < shard.rows]
    small = [
        shard
        for shard in left
        if shard not in sparse and 2 * shard.live_rows < SHARD_ROWS and 2 * shard.bytes < SHARD_JPEG_BYTES
    ]
    together = sparse + small
    rows = sum(shard.live_rows for shard in together)
    size = sum(shard.bytes * shard.live_rows // max(1, shard.rows) for shard in together)
    needed = max(-(-rows // SHARD_ROWS), -(-size // SHARD_JPEG_BYTES), 1)
    # a small shard is joined by others or left alone: rewriting it by itself would change nothing
    return sorted(together, key=lambda shard: shard.number) if sparse or needed < len(small) else []


def _drop_dead(store: SegmentStore, ledger: Ledger) -> int:
    dropped = 0
    for shard in ledger.shards():
        if shard.state == "sealed" and not shard.live_segments and not shard.damaged_segments:
            ledger.mark_dropping(shard.spec_hash, shard.number)
            store.remove_shard(shard.spec_hash, shard.number)
            dropped += 1
    store.journal.remove_unused(ledger.journals)
    return dropped


def _stored_bytes(ledger: Ledger) -> int:
    return sum(shard.bytes for shard in ledger.shards())
