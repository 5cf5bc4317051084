"""Moves finished episodes from the journal into shards.

Whole episodes fill a shard, in the order of their beginning, so that an episode lies together. What is finished waits
until it fills most of a shard, or has waited long; an episode that nothing was added to for as long is taken as it is.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled, Unsealed
from cloud_learner.buffer.store.arrays import SHARD_JPEG_BYTES, SHARD_ROWS
from cloud_learner.buffer.store.shard import Room, ShardItem, encode_shard
from cloud_learner.buffer.store.store import SegmentStore, decode_record
from wire.clock import Clock, MonotonicClock
from wire.errors import CorruptDataError, FleetError
from wire.types import RobotSpec

log = logging.getLogger(__name__)


class SealPolicy(msgspec.Struct, frozen=True):
    """When segments move from the journal into a shard."""

    min_rows: int = 2048
    """finished steps of one robot spec that are worth a shard"""
    min_bytes: int = SHARD_JPEG_BYTES // 2
    """or their size in the journal"""
    max_age_s: float = 600.0
    """what has waited so long goes into a shard, however small; so does an episode that got nothing for so long"""


DEFAULT_POLICY = SealPolicy()


class Sealed(msgspec.Struct, frozen=True):
    """What a round of sealing did."""

    shards: int = 0
    segments: int = 0
    rows: int = 0


def seal(
    store: SegmentStore,
    ledger: Ledger,
    now_ns: int,
    policy: SealPolicy = DEFAULT_POLICY,
    *,
    force: bool = False,
    wait_s: float = 0,
) -> Sealed:
    """Move what is ripe into shards, and remove journal files that nobody needs any more.

    `now_ns`: the clock of `committed_ns`. `force`: everything is ripe. `wait_s`: how long to wait for somebody else who
    seals, compacts or prunes. Raises `StorageError` when they are not done by then, and whatever writing may raise; a
    shard that was begun is removed by `SegmentStore.clean`.
    """
    with ledger.exclusive(wait_s=wait_s):
        return seal_held(store, ledger, now_ns, policy, force=force)


def seal_held(
    store: SegmentStore, ledger: Ledger, now_ns: int, policy: SealPolicy = DEFAULT_POLICY, *, force: bool = False
) -> Sealed:
    """As `seal`, for the holder of `ledger.exclusive`."""
    if not store.journal_is_here():
        return Sealed()
    done = Sealed()
    by_spec: dict[str, list[Unsealed]] = {}
    for segment in ledger.unsealed():
        # a file that is gone is no reason to forget its segments: `verify` says so, and a person decides
        if store.journal.has(segment.journal):
            by_spec.setdefault(segment.spec_hash, []).append(segment)
        else:
            log.error("segment %s lies in journal file %d, which is gone.", segment.id, segment.journal)
    for spec_hash, segments in by_spec.items():
        ripe, due = _ripe(segments, now_ns, policy, force)
        spec = store.spec(spec_hash)
        while ripe and (due or _worth(ripe, policy)):
            moved = _fill_shard(store, ledger, spec, ripe, now_ns)
            done = Sealed(done.shards + bool(moved[1]), done.segments + moved[0], done.rows + moved[1])
    if done.segments:
        store.journal.remove_unused(ledger.journals)
    return done


def _ripe(
    segments: Sequence[Unsealed], now_ns: int, policy: SealPolicy, force: bool
) -> tuple[list[list[Unsealed]], bool]:
    """The episodes that may be sealed, in order, and whether that is due however few they are."""

    def waited(segment: Unsealed) -> bool:
        # a stamp in the future is one of before the machine started
        return not 0 <= now_ns - segment.committed_ns <= policy.max_age_s * 1e9

    ripe = []
    for _, group in itertools.groupby(segments, key=lambda segment: segment.episode_number):
        episode = list(group)
        if force or episode[-1].finished or all(map(waited, episode)):
            ripe.append(episode)
    return ripe, force or any(map(waited, itertools.chain(*ripe)))


def _worth(ripe: Sequence[Sequence[Unsealed]], policy: SealPolicy) -> bool:
    return (
        sum(segment.steps for episode in ripe for segment in episode) >= policy.min_rows
        or sum(segment.bytes for episode in ripe for segment in episode) >= policy.min_bytes
    )


def _fill_shard(
    store: SegmentStore, ledger: Ledger, spec: RobotSpec, ripe: list[list[Unsealed]], now_ns: int
) -> tuple[int, int]:
    """Seal as many of the first of `ripe` as fit into one shard, and take them out of it; (segments, rows) sealed."""
    room, items = Room(spec), list[ShardItem]()
    full = False
    while ripe and not full:
        episode = ripe[0]
        steps = sum(segment.steps for segment in episode)
        if steps > room.rows and steps <= SHARD_ROWS and room.rows <= SHARD_ROWS // 4:
            break  # it will lie together in the next one
        while episode and not full:
            segment = _read(store, ledger, episode[0])
            full = segment is not None and not room.take(segment.segment)
            if not full:
                episode.pop(0)
                if segment is not None:
                    items.append(segment)
        if not episode:
            ripe.pop(0)
    assert items or not full, "SegmentStore.append takes no segment that is larger than a shard"
    if not items:
        return 0, 0
    number = ledger.reserve_shard(spec.hash, now_ns)
    encoded = encode_shard(spec, number, items)
    return store.write_shard(spec, number, encoded), encoded.rows


def _read(store: SegmentStore, ledger: Ledger, at: Unsealed) -> ShardItem | None:
    """A segment of the journal; None, and marked in the ledger, when its record is damaged."""
    record = Journaled(at.journal, at.offset, at.bytes, at.sha256)
    try:
        return ShardItem(at.row, at.sha256, decode_record(store.journal.read(record), at.id))
    except CorruptDataError as error:
        log.error("segment %s (row %d) is damaged and set aside: %s", at.id, at.row, error)
        store.set_aside(f"{at.id}.record", store.journal.raw(record))
        ledger.mark_damaged([at.row])
        return None


class ShardWriter:
    """A thread that seals every few seconds. What fails is logged and tried again after a pause."""

    def __init__(
        self,
        store: SegmentStore,
        ledger: Ledger,
        policy: SealPolicy = DEFAULT_POLICY,
        clock: Clock | None = None,
        every_s: float = 5.0,
        pause_s: float = 30.0,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._policy = policy
        self._clock = clock or MonotonicClock()
        self._every_s = every_s
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="sealer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the shard that is being written, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        failed = False
        while not self._stopping.wait(self._pause_s if failed else self._every_s):
            try:
                with self._ledger.exclusive(wait_s=0):
                    if failed:
                        self._store.clean()
                    done = seal_held(self._store, self._ledger, self._clock.now_ns(), self._policy)
                failed = False
                if done.shards:
                    log.info("%d segments with %d steps sealed in %d shards.", done.segments, done.rows, done.shards)
            except FleetError as error:
                failed = True
                log.warning("sealing waits %.0f s: %s", self._pause_s, error)
            except Exception:
                failed = True
                log.exception("sealing failed; the next try is in %.0f s.", self._pause_s)
