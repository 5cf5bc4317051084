"""Moves finished episodes from the journal into shards.

Whole episodes fill a shard, in the order of their beginning, so that an episode lies together. What is finished waits
until it is worth a shard, or has waited long; an episode that nothing was added to for as long is taken as it is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import msgspec

from cloud_learner.buffer.ledger.rows import SegmentRow
from cloud_learner.buffer.store.quarantine import QuarantineReason
from cloud_learner.buffer.store.shard import SHARD_BYTES
from cloud_learner.buffer.store.store import SegmentStore

log = logging.getLogger(__name__)
MIN_ROWS = 2048
"""finished steps of one robot spec that are worth a shard"""
MIN_BYTES = SHARD_BYTES // 2
"""or their size in the journal"""
MAX_AGE_S = 600.0
"""what has waited so long goes into a shard, however small; so does an episode that got nothing for so long"""


class Sealed(msgspec.Struct, frozen=True):
    """What sealing did."""

    shards: int = 0
    segments: int = 0
    rows: int = 0


PROMPT_S = 5.0
"""the same for finished episodes where several gateways share a ledger: readers elsewhere cannot read the journal"""


def seal(store: SegmentStore, now_ns: int, *, force: bool = False, wait_s: float = 0) -> Sealed:
    """Move all that is ripe into shards: `seal_one` again and again, between which others may be at work."""
    done = Sealed()
    while (more := seal_one(store, now_ns, force=force, wait_s=wait_s)) is not None:
        done = Sealed(done.shards + more.shards, done.segments + more.segments, done.rows + more.rows)
    return done


def seal_one(store: SegmentStore, now_ns: int, *, force: bool = False, wait_s: float = 0) -> Sealed | None:
    """Move what is ripe into one shard, and remove journal files that nobody needs any more; None if nothing is ripe.

    Whoever commits segments waits for none of what is read, packed and stored, only for short transactions. `now_ns`:
    the clock of `committed_ns`. `force`: everything is ripe. `wait_s`: how long to wait for somebody else who seals,
    compacts or prunes. Raises `StorageError` when they are not done by then, and whatever writing may raise; a shard
    that was begun is removed by `SegmentStore.clean`.
    """
    with store.ledger.exclusive(wait_s=wait_s):
        if not store.journal_is_here():
            return None
        prompt = len(store.ledger.gateway_names()) > 1
        by_spec: dict[str, list[SegmentRow]] = {}
        for segment in store.ledger.unsealed():
            # a file that is gone is no reason to forget its segments: `verify` says so, and a person decides
            if segment.journal is not None and store.journal.has(segment.journal):
                by_spec.setdefault(segment.spec_hash, []).append(segment)
            else:
                log.error("segment %s lies in journal file %s, which is gone.", segment.id, segment.journal)
        for spec_hash, segments in by_spec.items():
            if not (ripe := _ripe(segments, now_ns, force, PROMPT_S if prompt else MAX_AGE_S)):
                continue
            chosen = take_shard(ripe)
            moved, damaged = move(store, spec_hash, chosen, now_ns)
            for segment in chosen:
                if segment.row in damaged:
                    _set_aside(store, segment, damaged[segment.row])
            store.journal.remove_unused(store.ledger.journals)
            return Sealed(bool(moved), moved, sum(segment.steps for segment in chosen if segment.row not in damaged))
    return None


def _ripe(segments: Sequence[SegmentRow], now_ns: int, force: bool, longest_s: float) -> list[list[SegmentRow]]:
    """The episodes that may be sealed, in order; none while they are few and none waited for `longest_s`."""

    def waited(segment: SegmentRow, seconds: float = MAX_AGE_S) -> bool:
        # a stamp in the future is one of before the machine started
        return not 0 <= now_ns - segment.committed_ns <= seconds * 1e9

    ripe = []
    for _, group in itertools.groupby(segments, key=lambda segment: segment.episode):
        episode = list(group)
        if force or episode[-1].finished or all(map(waited, episode)):
            ripe.append(episode)
    every = list(itertools.chain(*ripe))
    worth = sum(one.steps for one in every) >= MIN_ROWS or sum(one.bytes for one in every) >= MIN_BYTES
    return ripe if force or worth or any(waited(one, longest_s) for one in every) else []


def take_shard(episodes: list[list[SegmentRow]]) -> list[SegmentRow]:
    """As many of the first segments as fit into one shard; they are taken out of `episodes`, which holds some."""
    chosen: list[SegmentRow] = []
    room = SHARD_BYTES
    while episodes:
        episode = episodes[0]
        if room <= SHARD_BYTES // 4 and room < sum(segment.bytes for segment in episode) <= SHARD_BYTES:
            break  # it will lie together in the next one
        while episode and episode[0].bytes <= room:
            room -= episode[0].bytes
            chosen.append(episode.pop(0))
        if episode:
            break
        episodes.pop(0)
    return chosen


def move(
    store: SegmentStore, spec_hash: str, segments: Sequence[SegmentRow], now_ns: int
) -> tuple[int, dict[int, str]]:
    """Write segments into a shard of their own; how many, and by row why others could not be read: they stay."""
    found = store.read_records([segment.row for segment in segments])
    # in the order of `segments`; one that was completed meanwhile is longer than there is room for, and comes later
    records = {
        segment.row: record
        for segment in segments
        if (record := found.payloads.get(segment.row)) is not None and len(record) == segment.bytes
    }
    return store.write_shard(spec_hash, records, now_ns) if records else 0, found.damaged


def _set_aside(store: SegmentStore, segment: SegmentRow, why: str) -> None:
    log.error("segment %s (row %d) is damaged and set aside: %s", segment.id, segment.row, why)
    store.quarantine.put(segment.id, store.journal.raw(segment.journaled), why, reasons=(QuarantineReason.damaged,))
    store.ledger.mark_damaged([segment.row])
