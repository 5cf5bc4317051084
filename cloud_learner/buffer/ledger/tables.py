"""The ledger's tables, the same in SQLite and PostgreSQL.

Times ending in `_ns` are nanoseconds of the gateway's clock unless the column says robot clock.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

FORMAT = 8
"""Grows when a table changes its meaning; a ledger of another format is refused."""

metadata = sa.MetaData()
# SQLite only counts a plain INTEGER primary key; its integers have 64 bits all the same
_Key = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _key(name: str) -> sa.Column[int]:
    """A number that grows with each row and is never given twice."""
    return sa.Column(name, _Key, primary_key=True, autoincrement=True)


def _count(name: str, *args: Any, **options: Any) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, *args, nullable=False, **{"default": 0, **options})


def _text(name: str, *args: Any, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text, *args, nullable=False, **options)


meta = sa.Table(
    "meta",
    metadata,
    # format, generation, which episodes are being deleted, how many shard numbers of each robot spec and of leases were
    # given, what makes each clock of a gateway nanoseconds since 1970
    _text("key", primary_key=True),
    _text("value"),
)

gateways = sa.Table(
    "gateways",
    metadata,
    # those that write here; each has a journal, on a disk of its own
    _key("number"),
    _text("name", unique=True),
    # what tells its journal from others, see `Journal.claim`
    _text("journal", unique=True),
    sqlite_autoincrement=True,
)

robot_holds = sa.Table(
    "robot_holds",
    metadata,
    # which gateway a robot was let in by last, and when that heard of it, by the database's clock
    _text("robot", primary_key=True),
    _count("gateway", sa.ForeignKey("gateways.number")),
    _count("heard_ns"),
)

specs = sa.Table(
    "specs",
    metadata,
    _text("hash", primary_key=True),
    # the same for those whose recordings can be learned from together
    _text("data_hash", index=True),
    _text("json"),
)

robots = sa.Table(
    "robots",
    metadata,
    _text("name", primary_key=True),
    sa.Column("spec_hash", sa.Text, sa.ForeignKey("specs.hash")),
    _text("clock"),
    # gateway time = robot time + offset
    _count("clock_offset_ns"),
    _count("first_seen_ns"),
    _count("last_seen_ns"),
)

clock_offsets = sa.Table(
    "clock_offsets",
    metadata,
    _key("id"),
    _text("robot", sa.ForeignKey("robots.name"), index=True),
    _count("measured_ns"),
    _count("offset_ns"),
    # which clock of the robot it was, and what makes the gateway's time then nanoseconds since 1970
    _text("clock", default=""),
    _count("base_ns"),
    sqlite_autoincrement=True,
)

episodes = sa.Table(
    "episodes",
    metadata,
    _key("number"),
    _text("id", unique=True),
    _text("robot"),
    _text("spec_hash", sa.ForeignKey("specs.hash")),
    _text("task"),
    _count("seed"),
    _text("source"),
    # robot clock
    _count("started_ns"),
    _text("outcome", default=""),
    # sums over the segments that came; they stay when the episode is pruned
    _count("steps"),
    _count("human_steps"),
    _count("interventions"),
    _count("segments"),
    _count("bytes"),
    # ticks that at least one segment brought, and the first one above all of them
    _count("ticks"),
    _count("end_tick"),
    # index of the segment it ended with, -1 until that came
    _count("last_index", default=-1),
    # of the newest segment; wall: nanoseconds since 1970, which alone tell an age after the computer was restarted
    _count("newest_row"),
    _count("committed_ns"),
    _count("wall_ns"),
    # when its segments were deleted, nanoseconds since 1970; 0 while they are there
    _count("pruned_ns"),
    # the ledger's generation that began with it, for those who keep an index; 0 while they are there
    _count("pruned_at"),
    sa.Index("episodes_robot", "robot", "number"),
    sqlite_autoincrement=True,
)

tallies = sa.Table(
    "tallies",
    metadata,
    # sums over a robot's episodes that are not pruned, so that nobody has to add them up
    _text("robot", primary_key=True),
    _count("episodes"),
    _count("segments"),
    _count("steps"),
    _count("human_steps"),
    _count("interventions"),
    _count("bytes"),
    _count("ticks"),
    _count("end_tick"),
    # the largest ledger row that the robot ever got
    _count("newest_row"),
)

segments = sa.Table(
    "segments",
    metadata,
    # the order of rows is the order of commits
    _key("row"),
    _text("id", unique=True),
    _count("episode", sa.ForeignKey("episodes.number")),
    _count("index"),
    _count("first_tick"),
    _count("steps"),
    _count("human_steps"),
    # first and last actor that was not `hold`, -1 when the robot held all the time
    _count("entry_actor"),
    _count("exit_actor"),
    # times that somebody took the robot from the policy within the segment
    _count("takeovers"),
    sa.Column("last", sa.Boolean, nullable=False),
    # '' unless last
    _text("outcome"),
    # of float32 rewards, added as float64
    sa.Column("reward_sum", sa.Double, nullable=False),
    # over all cameras
    _count("frames"),
    # little-endian int32[k, 4]: first offset, count, marked actor, version; `control.find_runs`
    sa.Column("runs", sa.LargeBinary, nullable=False),
    # the fleet's newest policy version when its row was entered, and by how many versions what the policy did in it was
    # behind that, at most (`control.largest_lag`)
    _count("newest_version"),
    _count("lag"),
    # of its record
    _count("bytes"),
    _text("sha256"),
    # the gateway that took it, whose clock all its times but the robot's are of
    _count("gateway"),
    # where it lies: in a file of that gateway's journal, or among the records of a shard of its robot spec
    sa.Column("journal", sa.BigInteger),
    sa.Column("shard", sa.BigInteger),
    _count("offset"),
    sa.Column("damaged", sa.Boolean, nullable=False, default=False),
    # robot clock
    _count("closed_ns"),
    _count("received_ns"),
    # when its bytes were on disk and this row's transaction began
    _count("committed_ns"),
    sa.UniqueConstraint("episode", "index"),
    sa.Index("segments_ticks", "episode", "first_tick"),
    sqlite_autoincrement=True,
)


def _index_where(name: str, column: sa.Column[Any], condition: sa.ColumnElement[bool]) -> None:
    sa.Index(name, column, sqlite_where=condition, postgresql_where=condition)


_index_where("episodes_pruned", episodes.c.pruned_at, episodes.c.pruned_at != 0)
_index_where("segments_journal", segments.c.journal, segments.c.journal.is_not(None))
_index_where("segments_shard", segments.c.shard, segments.c.shard.is_not(None))
_index_where("segments_damaged", segments.c.damaged, segments.c.damaged)

shards = sa.Table(
    "shards",
    metadata,
    _text("spec_hash", sa.ForeignKey("specs.hash"), primary_key=True),
    _count("number", primary_key=True, autoincrement=False),
    # writing: reserved, its object may be there; sealed: readable; dropping: its object is being deleted
    _text("state"),
    # of the records before they were compressed, and of the object
    _count("record_bytes"),
    _count("bytes"),
    _text("sha256", default=""),
    _count("created_ns"),
    # over the segments that lie in it now, kept with every change of theirs so that nobody has to add them up
    _count("live_bytes", index=True),
    _count("live_steps"),
    _count("live_segments"),
    _count("damaged_segments"),
)

versions = sa.Table(
    "versions",
    metadata,
    _count("number", primary_key=True, autoincrement=False),
    _text("sha256"),
    _count("size_bytes"),
    _count("parent", index=True),
    _count("gradient_steps"),
    _count("human_steps"),
    _count("newest_segment"),
    _count("created_ns"),
    _text("path"),
)

trained = sa.Table(
    "trained",
    metadata,
    # the episodes drawn from on the way to a version that none of its ancestors had seen
    _count("version", sa.ForeignKey("versions.number"), primary_key=True, autoincrement=False),
    _count("episode", sa.ForeignKey("episodes.number"), primary_key=True, autoincrement=False, index=True),
)

evaluations = sa.Table(
    "evaluations",
    metadata,
    _key("id"),
    _count("number"),
    _text("label"),
    _count("first_seed"),
    _count("episodes"),
    _text("success"),
    # evaluator's clock
    _count("started_ns"),
    sa.Column("duration_s", sa.Double, nullable=False),
    # nanoseconds since 1970, for people
    _count("wall_ns"),
    sa.UniqueConstraint("number", "label", "first_seed", "started_ns"),
    sqlite_autoincrement=True,
)

applied = sa.Table(
    "applied",
    metadata,
    _text("robot", primary_key=True),
    _count("version", primary_key=True, autoincrement=False),
    _count("announced_ns"),
    # gateway's clock: the gateway corrects the robot's stamp by the measured offset
    _count("applied_ns"),
)

events = sa.Table(
    "events",
    metadata,
    _key("id"),
    _count("time_ns"),
    _text("robot"),
    _text("kind"),
    _text("detail"),
    sqlite_autoincrement=True,
)

labels = sa.Table(
    "labels",
    metadata,
    _key("id"),
    # of one name the newest counts
    _count("episode", sa.ForeignKey("episodes.number"), index=True),
    _text("name"),
    sa.Column("value", sa.Double, nullable=False),
    _text("author"),
    # nanoseconds since 1970
    _count("wall_ns"),
    sqlite_autoincrement=True,
)

step_labels = sa.Table(
    "step_labels",
    metadata,
    # what a job says of each step of a segment; it goes with the segment
    _count("row", sa.ForeignKey("segments.row", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    _text("name", primary_key=True),
    # grows with every call that writes some, so that who keeps them finds what is new
    _count("revision", index=True),
    # little-endian float32[T]
    sa.Column("data", sa.LargeBinary, nullable=False),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    _text("name", primary_key=True),
    # the newest ledger row when it was taken, and what was there and not damaged up to it
    _count("row"),
    _count("segments"),
    _count("steps"),
    # nanoseconds since 1970
    _count("wall_ns"),
)

jobs = sa.Table(
    "jobs",
    metadata,
    _key("number"),
    _text("id", unique=True),
    # where it was handed in, whose robots work on it
    _count("gateway"),
    # JSON of the `JobRequest`
    _text("request"),
    # waiting while it is open, then done or cancelled
    _text("phase"),
    # nanoseconds since 1970
    _count("submitted_wall_ns"),
    _count("ended_wall_ns"),
    sqlite_autoincrement=True,
)

job_episodes = sa.Table(
    "job_episodes",
    metadata,
    # an episode counts for one job, however often its segments come
    _count("episode", sa.ForeignKey("episodes.number"), primary_key=True, autoincrement=False),
    _text("job", sa.ForeignKey("jobs.id"), index=True),
    _count("wall_ns"),
)

leases = sa.Table(
    "leases",
    metadata,
    # who holds which robot now; what has ended is not kept
    _text("robot", primary_key=True),
    _count("gateway"),
    _count("number"),
    # JSON of the `Lease`; its end is of the gateway's clock, which may have started over since
    _text("lease"),
    _count("wall_ns"),
)

lease_history = sa.Table(
    "lease_history",
    metadata,
    # when a person had a robot, or a policy was measured on it: what a robot says of its steps is judged by it
    _key("id"),
    # the gateway that gave it, whose clock its times are of
    _count("gateway"),
    _text("robot"),
    _count("number"),
    _text("holder"),
    # a `LeaseKind`
    _text("kind"),
    _count("from_ns"),
    # -1 while it stands
    _count("to_ns", default=-1),
    # with it these times are nanoseconds since 1970: one number for each boot of the gateway's computer
    _count("base_ns"),
    sa.Index("lease_history_robot", "robot", "kind"),
    sqlite_autoincrement=True,
)
_index_where("lease_history_open", lease_history.c.number, lease_history.c.to_ns == -1)

held_pictures = sa.Table(
    "held_pictures",
    metadata,
    # segments whose pictures a relay holds back, until they come; they go with the segment
    _count("row", sa.ForeignKey("segments.row", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    # a `HeldBy`
    _text("relay", index=True),
    _text("body"),
    # a `HeldState`
    _text("state"),
)
