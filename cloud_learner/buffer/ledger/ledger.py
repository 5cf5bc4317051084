"""The ledger: which robots, episodes, segments, versions and measurements exist, and where each segment lies.

One SQL database: an SQLite file by default, PostgreSQL by URL. The gateway writes; trainers and the command line read
meanwhile, and may be on other machines with PostgreSQL. A segment exists when its row is committed, and a row is on the
device when the method that wrote it returns.

The methods are functions of the modules named after their concern, each in one transaction of its own; what maintenance
changes takes several short ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from cloud_learner.buffer.ledger import commit as ledger_commit
from cloud_learner.buffer.ledger import jobs as ledger_work
from cloud_learner.buffer.ledger import lineage, tables
from cloud_learner.buffer.ledger import notes as ledger_notes
from cloud_learner.buffer.ledger import segments as ledger_segments
from cloud_learner.buffer.ledger import shards as ledger_shards
from cloud_learner.buffer.ledger import snapshots as ledger_snapshots
from cloud_learner.buffer.ledger.engine import Database, no_ledger
from cloud_learner.buffer.ledger.segments import chunks
from wire.errors import FormatError

_FORMAT = "format"
SEGMENTS_AT_ONCE = 100
EPISODES_AT_ONCE = 100
"""What one transaction of maintenance changes at most: whoever commits segments waits behind it."""
_PAUSE_S = 0.05
P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")


def _reads(function: Callable[Concatenate[sa.Connection, P], R]) -> Callable[Concatenate[Ledger, P], R]:
    """A method that calls `function` in a transaction that only reads."""

    @functools.wraps(function)
    def method(self: Ledger, /, *args: P.args, **options: P.kwargs) -> R:
        with self.reading() as connection:
            return function(connection, *args, **options)

    return method


def _writes(function: Callable[Concatenate[sa.Connection, P], R]) -> Callable[Concatenate[Ledger, P], R]:
    """A method that calls `function` in a transaction that writes."""

    @functools.wraps(function)
    def method(self: Ledger, /, *args: P.args, **options: P.kwargs) -> R:
        with self.writing() as connection:
            return function(connection, *args, **options)

    return method


def _reads_own(function: Callable[Concatenate[sa.Connection, int, P], R]) -> Callable[Concatenate[Ledger, P], R]:
    """As `_reads`, of what belongs to the gateway that this ledger was opened for."""

    @functools.wraps(function)
    def method(self: Ledger, /, *args: P.args, **options: P.kwargs) -> R:
        with self.reading() as connection:
            return function(connection, self.gateway, *args, **options)

    return method


def _writes_own(function: Callable[Concatenate[sa.Connection, int, P], R]) -> Callable[Concatenate[Ledger, P], R]:
    """As `_writes`, in the name of the gateway that this ledger was opened for."""

    @functools.wraps(function)
    def method(self: Ledger, /, *args: P.args, **options: P.kwargs) -> R:
        with self.writing() as connection:
            return function(connection, self.gateway, *args, **options)

    return method


class Ledger(Database):
    """An opened ledger. Get one from `Ledger.open`; it may be used from several threads.

    Every method may raise `StorageError`, and those that write `DiskFullError` or `NotWritableError`; then nothing of
    what they were to do was done, unless only the answer of the database was lost.
    """

    gateway = 0
    """number of the gateway that writes here, 0 before `claim_journal` gave one"""

    @classmethod
    def open(cls, location: str | Path, *, read_only: bool = False) -> Ledger:
        """Open the ledger at a path (SQLite) or an SQLAlchemy URL (`postgresql://user@host/database`).

        It is created if it is not there, unless `read_only`. Raises `StorageError` when there is none to read or it has
        another format, `CorruptDataError` when the file is no ledger, `ConfigError` for a URL of another kind.
        """
        ledger = cls.at(location, read_only)
        try:
            ledger._check_format()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _check_format(self) -> None:
        with self.reading() if self.read_only else self.writing() as connection:
            names = set(sa.inspect(connection).get_table_names())
            if not names and self.read_only:
                raise no_ledger(self.location)
            found = ledger_notes.read_meta(connection, _FORMAT) if "meta" in names else ""
            if not self.read_only and (not names or found == str(tables.FORMAT)):
                # what came later stands in tables of its own, which an older ledger gets now
                tables.metadata.create_all(connection)
            if not names:
                found = str(tables.FORMAT)
                ledger_notes.write_meta(connection, _FORMAT, found)
        if found != str(tables.FORMAT):
            newer = "newer " if found and found.isdecimal() and int(found) > tables.FORMAT else ""
            raise FormatError(
                f"ledger {self.location} has format {found or 'unknown'}, this vla-fleet reads format {tables.FORMAT}: "
                f"install the {newer}vla-fleet that wrote it, or choose a fresh --data directory or database."
            )

    # robots
    see_robot = _writes(ledger_notes.see_robot)
    set_clock_offset = _writes(ledger_notes.set_clock_offset)
    clock_offset_at = _reads(ledger_notes.clock_offset_at)
    clock_offsets = _reads(ledger_notes.clock_offsets)
    known_clock_base = _reads(ledger_notes.known_clock_base)
    robot = _reads(ledger_notes.robot)
    robots = _reads(ledger_notes.robots)
    spec = _reads(ledger_notes.spec)
    spec_hashes = _reads(ledger_notes.spec_hashes)

    # episodes and segments
    commit_segments = _writes_own(ledger_commit.commit_segments)
    segment = _reads(ledger_segments.segment)
    segments_after = _reads(ledger_segments.segments_after)
    segments_of = _reads(ledger_segments.segments_of)
    row_before = _reads(ledger_segments.row_before)
    episode = _reads(ledger_segments.episode)
    episodes = _reads(ledger_segments.episodes)
    episodes_of_robot = _reads(ledger_segments.episodes_of_robot)
    demonstrated_tasks = _reads(ledger_segments.demonstrated_tasks)
    index = _reads(ledger_segments.index)
    generation = _reads(ledger_shards.generation)
    gone_since = _reads(ledger_segments.gone_since)

    # where segments lie
    places = _reads(ledger_segments.places)
    places_in_shard = _reads(ledger_segments.places_in_shard)
    unsealed = _reads_own(ledger_segments.unsealed)
    in_journal = _reads(ledger_shards.in_journal)
    journals = _reads_own(ledger_shards.journals)
    reserve_shard = _writes(ledger_shards.reserve_shard)
    shards = _reads(ledger_shards.shards)
    mark_dropping = _writes(ledger_shards.mark_dropping)
    forget_shard = _writes(ledger_shards.forget_shard)

    def commit_shard(
        self, spec_hash: str, number: int, offsets: Mapping[int, int], record_bytes: int, bytes: int, sha256: str
    ) -> int:
        """Seal a reserved shard whose object is stored and move segments there, to these growing offsets by row; how
        many.

        What was not moved when this is interrupted lies where it lay. Those that were pruned, completed or marked as
        damaged meanwhile are left out. Raises `StorageError` if the shard is not in state 'writing'. For the holder of
        `exclusive`.
        """
        with self.writing() as connection:
            ledger_shards.commit_shard(connection, spec_hash, number, record_bytes, bytes, sha256)
        begins = [*offsets.values(), record_bytes]
        places = {row: (at, end - at) for row, at, end in zip(offsets, begins, begins[1:], strict=False)}
        pieces = chunks(places.items(), SEGMENTS_AT_ONCE)
        return sum(self._apart(lambda c, some: ledger_shards.move_segments(c, number, dict(some)), pieces))

    def _apart(self, function: Callable[[sa.Connection, Sequence[Q]], R], pieces: Iterable[Sequence[Q]]) -> Iterator[R]:
        """`function` of each piece in a transaction of its own, and a pause as long, for those who write meanwhile."""
        for piece in pieces:
            began = time.monotonic()
            with self.writing() as connection:
                found = function(connection, piece)
            # whoever waits for SQLite's lock looks again and again, after 1 to 25 ms
            time.sleep(min(time.monotonic() - began, _PAUSE_S))
            yield found

    # pictures that relays hold back
    complete_segment = _writes_own(ledger_shards.complete_segment)
    ask_pictures = _writes(ledger_shards.ask_pictures)
    ask_episodes = _writes(ledger_shards.ask_episodes)
    note_pictures_gone = _writes(ledger_shards.note_pictures_gone)
    wanted_pictures = _reads(ledger_shards.wanted_pictures)
    held_segment = _reads(ledger_shards.held_segment)
    held_rows = _reads(ledger_shards.held_rows)
    held_counts = _reads(ledger_shards.held_counts)

    # forgetting and damage
    damaged_segments = _reads(ledger_segments.damaged_segments)
    kept_episodes = _reads(ledger_segments.kept_episodes)
    pruned_episodes = _reads(ledger_shards.pruned_episodes)

    def mark_damaged(self, rows: Sequence[int]) -> int:
        """Note that the segments of these ledger rows cannot be read; how many were not marked yet."""
        return sum(self._apart(ledger_shards.mark_damaged, chunks(rows, SEGMENTS_AT_ONCE)))

    def prune(self, episode_ids: Sequence[str], now_ns: int, newest_row: int | None = None) -> tuple[int, int, int]:
        """Delete the segments of at most `EPISODES_AT_ONCE` episodes: how many episodes, segments and bytes that were.

        The episodes stay, so that lineage can name them. Those that are unknown or pruned already, or got a segment
        after ledger row `newest_row`, are skipped. `now_ns`: nanoseconds since 1970. What is interrupted is finished by
        `finish_pruning`. For the holder of `exclusive`.
        """
        self.finish_pruning()
        with self.writing() as connection:
            found = ledger_shards.prune(connection, episode_ids, now_ns, newest_row)
        self.finish_pruning()
        return found

    def finish_pruning(self) -> None:
        """Delete what is left of episodes that were pruned. For the holder of `exclusive`."""
        while any(self._apart(lambda c, _: ledger_shards.delete_pruned(c, SEGMENTS_AT_ONCE), ((),))):
            pass

    # versions and lineage
    commit_version = _writes(lineage.commit_version)
    version = _reads(lineage.version)
    versions = _reads(lineage.versions)
    newest_version = _reads(lineage.newest_version)
    episodes_of_version = _reads(lineage.episodes_of_version)
    versions_of_episode = _reads(lineage.versions_of_episode)
    known_to = _reads(lineage.known_to)
    kept_rollout = _reads_own(lineage.kept_rollout)
    keep_rollout = _writes_own(lineage.keep_rollout)

    # measurements, events, labels
    add_evaluation = _writes(ledger_notes.add_evaluation)
    evaluations = _reads(ledger_notes.evaluations)
    note_applied = _writes(ledger_notes.note_applied)
    applied = _reads(ledger_notes.applied)
    add_event = _writes(ledger_notes.add_event)
    events = _reads(ledger_notes.events)
    label_episode = _writes(ledger_notes.label_episode)
    labels = _reads(ledger_notes.labels)
    episode_labels = _reads(ledger_notes.episode_labels)
    put_step_labels = _writes(ledger_notes.put_step_labels)
    step_labels = _reads(ledger_notes.step_labels)
    labelled_since = _reads(ledger_notes.labelled_since)

    # snapshots
    take_snapshot = _writes(ledger_snapshots.take_snapshot)
    snapshots = _reads(ledger_snapshots.snapshots)
    snapshot_row = _reads(ledger_snapshots.snapshot_row)
    newest_row = _reads(ledger_snapshots.newest_row)
    snapshots_of = _reads(ledger_snapshots.snapshots_of)
    first_rows = _reads(ledger_snapshots.first_rows)

    # jobs and leases
    add_job = _writes_own(ledger_work.add_job)
    end_job = _writes(ledger_work.end_job)
    jobs = _reads_own(ledger_work.jobs)
    count_for_job = _writes(ledger_work.count_for_job)
    episodes_of_job = _reads(ledger_work.episodes_of_job)
    task_counts = _reads(ledger_work.task_counts)
    keep_leases = _writes_own(ledger_work.keep_leases)
    kept_leases = _reads_own(ledger_work.kept_leases)
    note_leases = _writes_own(ledger_work.note_leases)
    end_leases = _writes_own(ledger_work.end_leases)
    lease_intervals = _reads(ledger_work.lease_intervals)
    ever_leased = _reads(ledger_work.ever_leased)
    reserve_leases = _writes(ledger_work.reserve_leases)

    # gateways that share this ledger
    claim_journal = _writes(ledger_shards.claim_journal)
    gateway_of = _reads(ledger_shards.gateway_of)
    gateway_names = _reads(ledger_shards.gateway_names)
    unsealed_elsewhere = _reads_own(ledger_shards.unsealed_elsewhere)
    take_robots = _writes_own(ledger_work.take_robots)

    # counters
    totals = _reads(ledger_segments.totals)
    robot_totals = _reads(ledger_segments.robot_totals)
    shares = _reads(ledger_segments.shares)
    lags = _reads(ledger_segments.lags)
    parts = _reads(ledger_segments.parts)
