"""Rewriting shards that are mostly forgotten, and giving the room of forgotten segments back.

A new shard is written and committed before the old one goes, so a segment always lies where the ledger says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import SegmentRow, ShardRow
from cloud_learner.buffer.maintenance.shard_writer import move, seal, take_shard
from cloud_learner.buffer.store.shard import SHARD_BYTES
from cloud_learner.buffer.store.store import SegmentStore

log = logging.getLogger(__name__)
Stuck = set[tuple[str, int]]
"""Shards in which something is damaged, by spec hash and number: trying again does not help."""


class Compacted(msgspec.Struct, frozen=True):
    """What became of the shards."""

    read_shards: int
    """shards that went: what was left in them was read and written again"""
    written_shards: int
    freed_bytes: int = 0
    """of the shards that went, less those that were written; `compact` says it"""


def compact(
    store: SegmentStore, now_ns: int, *, wait_s: float = 30, progress: Callable[[int, int], None] | None = None
) -> Compacted:
    """Seal what is ripe, write what is left of mostly forgotten shards and of small ones together, drop the old ones.

    One shard at a time, between which others may be at work. `progress(shards, of)`: so many went, of so many at most.
    Raises `StorageError` when somebody else is at work for longer than `wait_s`, and whatever writing may raise.
    """
    seal(store, now_ns, wait_s=wait_s)
    stuck: Stuck = set()
    read, written, before = 0, 0, _stored_bytes(store.ledger)
    most = len(_sparse(store.ledger))
    while (more := compact_one(store, now_ns, stuck, wait_s=wait_s)) is not None:
        read, written = read + more.read_shards, written + more.written_shards
        if progress is not None:
            progress(read, max(most, read))
    drop_dead(store, wait_s=wait_s)
    return Compacted(read, written, before - _stored_bytes(store.ledger))


def compact_one(
    store: SegmentStore, now_ns: int, stuck: Stuck, *, few: int = 2, wait_s: float = 30
) -> Compacted | None:
    """Drop what is dead, and write one shard of what is left of others; None when there is nothing to do.

    `few`: how many small shards are worth writing together when they do not fill half a shard. What could not be
    emptied joins `stuck`.
    """
    ledger = store.ledger
    with ledger.exclusive(wait_s=wait_s):
        sparse = _sparse(ledger)
        # first: a full disk has no room for anything else
        dropped, written = _drop_dead(store, sparse), 0
        if chosen := _worth_rewriting(sparse, stuck, few):
            spec_hash = chosen[0].spec_hash
            places = [place for shard in chosen for place in ledger.places_in_shard(spec_hash, shard.number)]
            written = rewrite(store, spec_hash, places, now_ns)
            dropped += _drop_dead(store, _sparse(ledger))
            left = {(shard.spec_hash, shard.number) for shard in ledger.shards(spec_hash)}
            stuck |= left & {(shard.spec_hash, shard.number) for shard in chosen}
        return Compacted(dropped, written) if dropped or written else None


def drop_dead(store: SegmentStore, *, wait_s: float = 30) -> int:
    """Delete the shards in which no segment lies any more, and unused journal files. Returns how many shards."""
    with store.ledger.exclusive(wait_s=wait_s):
        dropped = _drop_dead(store, _sparse(store.ledger))
        store.journal.remove_unused(store.ledger.journals)
        return dropped


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
            log.error(
                "row %d of the ledger is damaged and stays where it is; `vla-fleet buffer verify --repair` sets it "
                "aside: %s",
                row,
                reason,
            )
    return written


def _worth_rewriting(shards: Sequence[ShardRow], stuck: Set[tuple[str, int]], few: int) -> list[ShardRow]:
    """Shards of one spec, mostly forgotten or small, whose segments are to lie in one shard; the oldest ones."""
    by_spec: dict[str, list[ShardRow]] = {}
    for shard in shards:
        if shard.state == "sealed" and shard.live_segments and (shard.spec_hash, shard.number) not in stuck:
            by_spec.setdefault(shard.spec_hash, []).append(shard)
    for some in by_spec.values():
        chosen, size = [], 0
        for shard in some:
            if size + shard.live_bytes <= SHARD_BYTES:
                chosen.append(shard)
                size += shard.live_bytes
        # a small shard is joined by others or left alone: rewriting it by itself would change nothing
        sparse = any(2 * shard.live_bytes < shard.record_bytes for shard in chosen)
        if sparse or len(chosen) >= few or (len(chosen) > 1 and 2 * size >= SHARD_BYTES):
            return chosen
    return []


def _drop_dead(store: SegmentStore, shards: Sequence[ShardRow]) -> int:
    dead = [one for one in shards if one.state == "sealed" and not one.live_segments and not one.damaged_segments]
    for shard in dead:
        store.ledger.mark_dropping(shard.spec_hash, shard.number)
        store.remove_shard(shard.spec_hash, shard.number)
    return len(dead)


def _sparse(ledger: Ledger) -> tuple[ShardRow, ...]:
    """Those of which two fit into one: few of very many."""
    return ledger.shards(below_bytes=SHARD_BYTES // 2)


def _stored_bytes(ledger: Ledger) -> int:
    return sum(shard.bytes for shard in ledger.shards())
