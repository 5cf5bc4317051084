"""Whether everything the ledger knows is whole on disk or in the object store, and setting aside what is not."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled, ShardRow
from cloud_learner.buffer.maintenance.compact import live_rows, rewrite
from cloud_learner.buffer.store import arrays
from cloud_learner.buffer.store.store import MARK, SegmentStore, decode_record
from wire.errors import CorruptDataError
from wire.types import RobotSpec


class VerifyFinding(msgspec.Struct, frozen=True):
    """One thing that `verify` has to say."""

    damage: bool
    """whether something is lost that was not set aside before; otherwise it is only worth knowing"""
    text: str
    row: int = 0
    """the ledger row of the segment it is about, if it is about one"""


def verify(store: SegmentStore, ledger: Ledger, repair: bool = False) -> Iterator[VerifyFinding]:
    """Compare every object, and every record of the journal, with the size and SHA-256 in the ledger.

    Where an object of a shard differs, every segment in the shard is read and compared, so that only those are named
    that are hit. With `repair` those are marked, so that readers leave them out; a copy of what is damaged goes to
    `quarantine/`, and what is whole is written into another shard. Raises `StorageError` when somebody else is at work.
    """
    with ledger.exclusive(wait_s=30) if repair else contextlib.nullcontext():
        listed = set(store.objects.list())
        known = {MARK}
        for shard in ledger.shards():
            spec = store.spec(shard.spec_hash)
            known.update(arrays.metadata(spec, 0, {}))
            known.update(arrays.shard_keys(spec, shard.number))
            # in a shard that nothing lives in any more, nothing can be lost
            if shard.state == "sealed" and shard.live_segments:
                yield from _verify_shard(store, ledger, spec, shard, repair)
        yield from _verify_metadata(store, ledger, repair)
        yield from _verify_journal(store, ledger, repair)
        for key in sorted(listed - known):
            yield VerifyFinding(False, f"object {store.objects.place}/{key} belongs to nothing the ledger knows.")


def _verify_shard(
    store: SegmentStore, ledger: Ledger, spec: RobotSpec, shard: ShardRow, repair: bool
) -> Iterator[VerifyFinding]:
    bad: dict[str, tuple[str, bytes]] = {}
    for row in ledger.objects_of(shard.spec_hash, shard.number):
        try:
            data = store.objects.get(row.key)
        except CorruptDataError as error:
            bad[row.key] = str(error), b""
            continue
        if len(data) != row.bytes or hashlib.sha256(data).hexdigest() != row.sha256:
            what = f"{len(data)} bytes that are not the {row.bytes} that were written"
            bad[row.key] = f"object {store.objects.place}/{row.key}: {what}.", data
    if not bad:
        return
    rows = live_rows(ledger, shard.spec_hash, {shard.number})
    if not rows:
        return  # everything was moved out of it, or forgotten, while it was being looked at
    found = store.read(rows, verify=True)
    for reason, _ in bad.values():
        yield VerifyFinding(True, reason)
    yield from _set_aside(store, ledger, found.damaged, {key: data for key, (_, data) in bad.items()}, repair)
    if repair and found.segments:
        written = rewrite(store, ledger, spec, sorted(found.segments), shard.created_ns)
        yield VerifyFinding(
            False, f"{len(found.segments)} whole segments of it were written again, into {written} shards."
        )


def _verify_metadata(store: SegmentStore, ledger: Ledger, repair: bool) -> Iterator[VerifyFinding]:
    """Whether an outside reader sees every array as long as it is."""
    newest: dict[str, ShardRow] = {}
    for shard in ledger.shards():
        if shard.state == "sealed" and shard.number >= newest.get(shard.spec_hash, shard).number:
            newest[shard.spec_hash] = shard
    for spec_hash, shard in newest.items():
        spec = store.spec(spec_hash)
        # how many frames are in use is not in the ledger: they end with the shard at the latest
        whole = arrays.metadata(spec, shard.number, {array.path: array.shard for array in arrays.arrays_of(spec)})
        least = arrays.metadata(spec, shard.number, {array.path: shard.rows for array in arrays.steps_of(spec)})
        for key, expected in least.items():
            try:
                if not _agrees(store.objects.get(key), expected):
                    raise CorruptDataError(f"object {store.objects.place}/{key} does not describe its array or group.")
            except CorruptDataError as error:
                ending = "It was written again." if repair else "`--repair` writes it again."
                yield VerifyFinding(True, f"{error} {ending}")
                if repair:
                    store.objects.put(key, whole[key])


def _agrees(data: bytes, expected: bytes) -> bool:
    """Whether a metadata object is as it was written, for an array at least as long as expected.

    It may be longer, by a shard that was never committed or is gone.
    """
    try:
        found, least = msgspec.json.decode(data), msgspec.json.decode(expected)
        if least["node_type"] == "array":
            length = found["shape"][0]
            if length < least["shape"][0]:
                return False
            least["shape"][0] = length
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        return False
    return bool(found == least)


def _verify_journal(store: SegmentStore, ledger: Ledger, repair: bool) -> Iterator[VerifyFinding]:
    unsealed = ledger.unsealed()
    if unsealed and not store.journal_is_here():
        yield VerifyFinding(
            False, f"{len(unsealed)} segments lie in the journal of another machine, {store.journal.directory}."
        )
        return
    for segment in unsealed:
        at = Journaled(segment.journal, segment.offset, segment.bytes, segment.sha256)
        try:
            decode_record(store.journal.read(at), segment.id)
        except CorruptDataError as error:
            place = ledger.places([segment.row]).get(segment.row)
            if place is not None and place.journal == segment.journal and not place.damaged:
                copy = {f"{segment.id}.record": store.journal.raw(at)}
                yield from _set_aside(store, ledger, {segment.row: str(error)}, copy, repair)


def _set_aside(
    store: SegmentStore, ledger: Ledger, damaged: dict[int, str], copies: dict[str, bytes], repair: bool
) -> Iterator[VerifyFinding]:
    """Name damaged segments; with `repair`, mark them and keep a copy of the damaged bytes."""
    if repair:
        for key, data in copies.items():
            if data:
                store.set_aside(key, data)
        if damaged:
            ledger.mark_damaged(sorted(damaged))
    places = ledger.places(sorted(damaged))
    for row, reason in sorted(damaged.items()):
        name = places[row].id if row in places else "?"
        yield VerifyFinding(
            True, f"segment {name} (row {row}) is damaged{' and was set aside' if repair else ''}: {reason}", row
        )
