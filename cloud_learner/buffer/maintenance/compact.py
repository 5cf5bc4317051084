"""Rewriting shards that are mostly forgotten, and giving the room of forgotten segments back.

A new shard is written and committed before the old one goes, so a segment always lies where the ledger says.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import SegmentRow, ShardRow
from cloud_learner.buffer.maintenance.shard_writer import DEFAULT_POLICY, SealPolicy, move, seal_held, take_shard
from cloud_learner.buffer.store.shard import SHARD_BYTES
from cloud_learner.buffer.store.store import SegmentStore

log = logging.getLogger(__name__)


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
                places = [place for shard in chosen for place in ledger.places_in_shard(spec_hash, shard.number)]
                written += rewrite(store, spec_hash, places, now_ns)
        dropped = _drop_dead(store, ledger)
        return Compacted(dropped, written, before - _stored_bytes(ledger))


def drop_dead(store: SegmentStore, ledger: Ledger, *, wait_s: float = 30) -> int:
    """Delete the shards in which no segment lies any more, and unused journal files. Returns how many shards."""
    with ledger.exclusive(wait_s=wait_s):
        return _drop_dead(store, ledger)


def rewrite(store: SegmentStore, spec_hash: str, places: Sequence[SegmentRow], now_ns: int) -> int:
    """Write segments into new shards, episode by episode; how many shards. For the holder of `ledger.exclusive`.

    A segment that is damaged stays where it is, and keeps its shard: `verify` with `repair` sets it aside.
    """
    episodes: dict[str, list[SegmentRow]] = {}
    for place in sorted(places, key=lambda place: place.row):
        episodes.setdefault(place.episode, []).append(place)
    rest = [sorted(some, key=lambda place: place.index) for some in episodes.values()]
    written = 0
    while rest:
        moved, damaged = move(store, spec_hash, take_shard(rest), now_ns)
        written += bool(moved)
        for row, reason in damaged.items():
            log.error("row %d of the ledger is damaged; `vla-fleet buffer verify`: %s", row, reason)
    return written


def _worth_rewriting(shards: Sequence[ShardRow]) -> list[ShardRow]:
    """The shards with something left that are mostly forgotten, and small ones when they become fewer together."""
    left = [shard for shard in shards if shard.live_segments]
    sparse = [shard for shard in left if 2 * shard.live_bytes < shard.record_bytes]
    small = [shard for shard in left if shard not in sparse and 2 * shard.live_bytes < SHARD_BYTES]
    together = sparse + small
    needed = max(-(-sum(shard.live_bytes for shard in together) // SHARD_BYTES), 1)
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
