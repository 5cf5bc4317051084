"""What the ledger is told and answers: one frozen struct per kind of row. Columns are explained in `tables.py`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from wire.messages.fleet import JobRequest
from wire.messages.gateway import Evaluation
from wire.types import PolicyVersion

K = TypeVar("K", bound=msgspec.Struct)


def columns_of(kind: type[msgspec.Struct], columns: Any) -> sa.Select[Any]:
    """A query of all fields of `kind`, which are names of `columns`."""
    return sa.select(*(columns[name] for name in kind.__struct_fields__))


def rows_of(connection: sa.Connection, kind: type[K], query: sa.Select[Any]) -> tuple[K, ...]:
    """What a query of `columns_of` finds."""
    return tuple(kind(*row) for row in connection.execute(query))


def row_of(connection: sa.Connection, kind: type[K], query: sa.Select[Any]) -> K | None:
    """The first one that a query of `columns_of` finds, if it finds any."""
    return next(iter(rows_of(connection, kind, query)), None)


def insert_into(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT of the connection's dialect, which knows ON CONFLICT."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def insert_new(connection: sa.Connection, table: sa.Table, **values: Any) -> bool:
    """Enter a row; False if there was one of its keys, which stays as it is."""
    row = insert_into(connection, table).values(**values).on_conflict_do_nothing()
    return connection.execute(row.returning(*table.primary_key)).first() is not None


class HeldBy(NamedTuple):
    """Who holds back pictures of a segment."""

    relay: str = ""
    """'': nobody knows"""
    body: str = ""
    """sha256 of what the robot sealed: the same whenever it is brought, '' when nobody knows"""


class HeldState(StrEnum):
    """How far pictures that a relay holds back are asked for."""

    held = "held"
    wanted = "wanted"
    """somebody asked for them"""
    gone = "gone"
    """the relay has them no more"""


class RobotRow(msgspec.Struct, frozen=True):
    """A robot as the gateway knows it."""

    name: str
    spec_hash: str | None
    """None for a process that drives no robot, such as the trainer"""
    clock: str
    clock_offset_ns: int
    """gateway time minus robot time, as measured last"""
    first_seen_ns: int
    last_seen_ns: int


class EpisodeRow(msgspec.Struct, frozen=True):
    """An episode with what has been committed of it so far."""

    number: int
    """grows in the order in which episodes first came; never given twice"""
    id: str
    robot: str
    spec_hash: str
    task: str
    seed: int
    source: str
    started_ns: int
    outcome: str
    """'' until its last segment is committed"""
    steps: int
    human_steps: int
    interventions: int
    segments: int
    bytes: int
    """of its segments as they came, in the journal's encoding"""
    newest_row: int
    """ledger row of the segment that was committed last"""
    committed_ns: int
    """when that was"""
    wall_ns: int
    """the same in nanoseconds since 1970"""
    pruned_ns: int
    """when its segments were deleted, nanoseconds since 1970; 0 while they are there"""


class KeptEpisode(msgspec.Struct, frozen=True):
    """What decides whether an episode is forgotten; as in `EpisodeRow`."""

    id: str
    task: str
    source: str
    outcome: str
    human_steps: int
    segments: int
    bytes: int
    wall_ns: int


class Journaled(msgspec.Struct, frozen=True):
    """Where the record of a segment lies in the journal, and what its payload must be."""

    journal: int
    """number of the file"""
    offset: int
    bytes: int
    """of the payload"""
    sha256: str
    """of the payload"""


class SegmentRow(msgspec.Struct, frozen=True):
    """A committed segment: what a reader must know of it and its episode, and where its record lies."""

    row: int
    id: str
    episode: str
    index: int
    first_tick: int
    steps: int
    human_steps: int
    bytes: int
    sha256: str
    """of the record"""
    gateway: int
    """number of the gateway that took it"""
    journal: int | None
    """file of that gateway's journal it lies in, None when it lies in a shard"""
    shard: int | None
    offset: int
    """in the journal file, or among the records of the shard"""
    damaged: bool
    newest_version: int
    """the fleet's newest policy version when it arrived"""
    lag: int
    """versions by which what the policy did in it was behind that, at most; 0 if it did nothing"""
    closed_ns: int
    received_ns: int
    committed_ns: int
    robot: str
    spec_hash: str
    task: str
    source: str
    finished: bool
    """whether the episode's last segment and all before it are committed"""

    @property
    def journaled(self) -> Journaled | None:
        """Where its record lies in the journal; None when it lies in a shard."""
        return None if self.journal is None else Journaled(self.journal, self.offset, self.bytes, self.sha256)


class Waiting(msgspec.Struct, frozen=True):
    """How much lies in the journal."""

    segments: int
    steps: int
    bytes: int


class TakenRobots(msgspec.Struct, frozen=True):
    """What came of `Ledger.take_robots`."""

    elsewhere: dict[str, str] = {}
    """by robot: the name of the gateway that has it"""
    moved: tuple[str, ...] = ()
    """robots that come from another gateway"""
    reserved: int = 0
    """number after which leases are to be numbered now, 0: as before"""


class ShardRow(msgspec.Struct, frozen=True):
    """A shard of the store."""

    spec_hash: str
    number: int
    state: str
    """writing, sealed or dropping"""
    record_bytes: int
    """of the records that were written, before they were compressed"""
    bytes: int
    """of its object"""
    sha256: str
    """of its object"""
    created_ns: int
    live_bytes: int
    """of the records that lie in it and are not damaged"""
    live_steps: int
    live_segments: int
    damaged_segments: int
    """that lie in it: what is left of them stays"""


class VersionRow(msgspec.Struct, frozen=True):
    """A policy version whose weights are on disk."""

    version: PolicyVersion
    path: str
    """file name in the weights directory"""


class EvaluationRow(Evaluation, frozen=True, eq=False, kw_only=True):
    """A measurement as the gateway received it."""

    wall_ns: int
    """nanoseconds since 1970 when that was"""


class AppliedRow(msgspec.Struct, frozen=True):
    """When a robot first acted on a version, both times in the gateway's clock."""

    robot: str
    version: int
    announced_ns: int
    applied_ns: int


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened to a robot and that a person may ask about later."""

    id: int
    time_ns: int
    robot: str
    kind: str
    detail: str


class SnapshotRow(msgspec.Struct, frozen=True):
    """A named moment of the ledger."""

    name: str
    row: int
    """the newest ledger row then: `DatasetConfig.until_row` draws from what the snapshot holds"""
    segments: int
    steps: int
    wall_ns: int
    """when it was taken, nanoseconds since 1970"""
    there: int
    """of its segments, so many can still be read: the others were pruned or damaged"""


class Totals(msgspec.Struct, frozen=True):
    """What is stored, of all robots or of one. Pruned episodes are not in it."""

    segments: int = 0
    episodes: int = 0
    steps: int = 0
    """sum over segments, duplicated ticks included"""
    human_steps: int = 0
    interventions: int = 0
    bytes: int = 0
    newest_row: int = 0
    """the largest ledger row that was ever given, also to a segment that was pruned"""
    duplicated_steps: int = 0
    """ticks of an episode that more than one segment brought: 0 unless something is broken"""
    missing_steps: int = 0
    """ticks below the newest one of their episode that no segment brought yet"""


class EpisodeFacts(msgspec.Struct, frozen=True):
    """What is known of an episode from its beginning."""

    id: str
    robot: str
    task: str
    source: str
    seed: int


class JobRow(msgspec.Struct, frozen=True):
    """A job that was submitted."""

    number: int
    """grows in the order of submission"""
    id: str
    request: JobRequest
    phase: str
    """waiting (that is: open), done or cancelled"""
    submitted_wall_ns: int
    """nanoseconds since 1970"""
    ended_wall_ns: int
    """0 while it is open"""


class LeaseKind(StrEnum):
    """Why a lease is remembered after its end."""

    person = "person"
    """a person had the robot"""
    evaluation = "evaluation"
    """a policy was measured on it"""


class LeaseNote(msgspec.Struct, frozen=True):
    """That a lease began, or ended."""

    robot: str
    number: int
    holder: str
    kind: LeaseKind
    at_ns: int
    """gateway's clock"""
    ended: bool = False


class OffsetRow(msgspec.Struct, frozen=True):
    """What was measured of a robot's clock once."""

    id: int
    measured_ns: int
    """gateway's clock"""
    offset_ns: int
    """gateway time minus robot time"""
    clock: str
    """of the robot: another one after each boot of its computer"""
    base_ns: int
    """nanoseconds since 1970 minus gateway time"""


class LagRow(msgspec.Struct, frozen=True):
    """How far behind one robot's rollouts arrived."""

    robot: str
    rollout_steps: int
    """what the policy did by itself, but for demonstrations and evaluations"""
    steps_by_lag: dict[int, int]
    """those steps by `control.arrival_lag`"""


class PartTotals(msgspec.Struct, frozen=True):
    """What people and scripts did in place of the policy, in practice."""

    recoveries: int = 0
    """times that one of them brought the robot back"""
    recovery_steps: int = 0
    correction_steps: int = 0
    """all others of theirs"""


class SegmentColumns(msgspec.Struct, frozen=True, eq=False):
    """Columns of n segments and their R runs, in the order of ledger rows."""

    row: np.ndarray
    """int64[n], growing"""
    episode: np.ndarray
    """int64[n], `EpisodeRow.number`"""
    index: np.ndarray
    """int32[n]"""
    first_tick: np.ndarray
    """int64[n]"""
    steps: np.ndarray
    """int32[n]"""
    frames: np.ndarray
    """int32[n], over all cameras"""
    reward_sum: np.ndarray
    """float64[n]"""
    last: np.ndarray
    """bool[n]"""
    newest_version: np.ndarray
    """int32[n], the fleet's newest policy version when each arrived"""
    outcome: np.ndarray
    """int8[n], index into `check.OUTCOMES`, -1 for a segment that is not the last"""
    run_offsets: np.ndarray
    """int64[n + 1]: runs of segment i are [run_offsets[i], run_offsets[i + 1])"""
    runs: np.ndarray
    """int32[R, 4]: first offset in the segment, count, marked actor, version"""
    episodes: dict[int, EpisodeFacts]
    """by number, all that occur"""
