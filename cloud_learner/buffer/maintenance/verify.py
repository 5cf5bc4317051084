"""Whether everything the ledger knows is whole on disk or in the object store, and setting aside what is not."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Set

import msgspec

from cloud_learner.buffer.ledger.rows import ShardRow
from cloud_learner.buffer.maintenance.compact import rewrite
from cloud_learner.buffer.store.objects import WEIGHTS
from cloud_learner.buffer.store.quarantine import QuarantineReason
from cloud_learner.buffer.store.shard import metadata, shard_key
from cloud_learner.buffer.store.store import MARK, SegmentStore
from wire.errors import CorruptDataError

_READ_AT_ONCE = 64


class VerifyFinding(msgspec.Struct, frozen=True):
    """One thing that `verify` has to say."""

    damage: bool
    """whether something is lost that was not set aside before; otherwise it is only worth knowing"""
    text: str
    row: int = 0
    """the ledger row of the segment it is about, if it is about one"""


def verify(
    store: SegmentStore, repair: bool = False, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[VerifyFinding]:
    """Compare the object of every shard, and every record of the journal, with the SHA-256 in the ledger.

    Where an object differs, every segment in the shard is read and compared, so that only those are named that are hit.
    With `repair` those are marked, so that readers leave them out; a copy of what is damaged goes to
    `quarantine/`, and what is whole is written into another shard. Others seal and prune meanwhile: only what is found
    damaged is looked at again, and repaired, alone. `progress(shards, of)` is called after each shard. Raises
    `StorageError` when somebody else is at work for long then.
    """
    listed = set(store.objects.list())
    known = {MARK, *(f"{WEIGHTS}{version.path}" for version in store.ledger.versions())}
    shards = store.ledger.shards()
    for number, shard in enumerate(shards, 1):
        known.update(metadata(store.spec(shard.spec_hash)))
        known.add(shard_key(shard.spec_hash, shard.number))
        # in a shard that nothing lives in any more, nothing can be lost
        if shard.state == "sealed" and shard.live_segments:
            yield from _verify_shard(store, shard, repair)
        if progress is not None:
            progress(number, len(shards))
    yield from _verify_metadata(store, {shard.spec_hash for shard in store.ledger.shards()}, repair)
    yield from _verify_journal(store, repair)
    for key in sorted(listed - known):
        yield VerifyFinding(False, f"object {store.objects.place}/{key} belongs to nothing the ledger knows.")


def _alone(store: SegmentStore, repair: bool) -> contextlib.AbstractContextManager[None]:
    return store.ledger.exclusive(wait_s=30) if repair else contextlib.nullcontext()


def _verify_shard(store: SegmentStore, shard: ShardRow, repair: bool) -> list[VerifyFinding]:
    key, data = shard_key(shard.spec_hash, shard.number), b""
    try:
        data = store.objects.get(key)
        if hashlib.sha256(data).hexdigest() == shard.sha256:
            return []
        reason = (
            f"object {store.objects.place}/{key}: {len(data)} bytes that are not the {shard.bytes} that were written."
        )
    except CorruptDataError as error:
        reason = str(error)
    with _alone(store, repair):
        places = store.ledger.places_in_shard(shard.spec_hash, shard.number)
        if not places:
            return []  # everything was moved out of it, or forgotten, while it was being looked at
        damaged: dict[int, str] = {}
        for first in range(0, len(places), _READ_AT_ONCE):
            rows = [place.row for place in places[first : first + _READ_AT_ONCE]]
            damaged |= store.read_records(rows, cached=False).damaged
        found = [VerifyFinding(True, reason), *_set_aside(store, damaged, {key: data}, reason, repair)]
        whole = [place for place in places if place.row not in damaged]
        if repair and whole:
            written = rewrite(store, shard.spec_hash, whole, shard.created_ns)
            text = f"{len(whole)} whole segments of it were written again, into {written} shards."
            found.append(VerifyFinding(False, text))
    return found


def _verify_metadata(store: SegmentStore, spec_hashes: Set[str], repair: bool) -> Iterator[VerifyFinding]:
    """Whether an outside reader finds the arrays."""
    for spec_hash in sorted(spec_hashes):
        for key, expected in metadata(store.spec(spec_hash)).items():
            try:
                if store.objects.get(key) == expected:
                    continue
                error = f"object {store.objects.place}/{key} does not describe its array or group."
            except CorruptDataError as gone:
                error = str(gone)
            yield VerifyFinding(True, f"{error} {'It was written again.' if repair else '`--repair` writes it again.'}")
            if repair:
                with _alone(store, repair):
                    store.objects.put(key, expected)


def _verify_journal(store: SegmentStore, repair: bool) -> Iterator[VerifyFinding]:
    here = store.journal_is_here()
    for name, count in store.ledger.unsealed_elsewhere().items():
        yield VerifyFinding(False, f"{count} segments lie in the journal of gateway '{name}', on its machine.")
    unsealed = store.ledger.unsealed() if here else ()
    for first in range(0, len(unsealed), _READ_AT_ONCE):
        some = {segment.row: segment for segment in unsealed[first : first + _READ_AT_ONCE]}
        hit = list(store.read_records(list(some)).damaged)
        if not hit:
            continue
        with _alone(store, repair):
            found = []
            for row, reason in store.read_records(hit).damaged.items():
                raw = store.journal.raw(some[row].journaled)
                found += _set_aside(store, {row: reason}, {some[row].id: raw}, reason, repair)
        yield from found


def _set_aside(
    store: SegmentStore, damaged: dict[int, str], copies: dict[str, bytes], reason: str, repair: bool
) -> list[VerifyFinding]:
    """Name damaged segments; with `repair`, mark them and keep a copy of the damaged bytes."""
    if repair:
        for label, data in copies.items():
            if data:
                store.quarantine.put(label, data, reason, reasons=(QuarantineReason.damaged,))
        if damaged:
            store.ledger.mark_damaged(sorted(damaged))
    places = store.ledger.places(sorted(damaged))
    names = {row: places[row].id if row in places else "?" for row in damaged}
    aside = " and was set aside" if repair else ""
    return [
        VerifyFinding(True, f"segment {names[row]} (row {row}) is damaged{aside}: {reason}", row)
        for row, reason in sorted(damaged.items())
    ]
