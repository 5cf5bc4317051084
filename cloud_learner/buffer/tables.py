"""The ledger's tables, and how its SQLite file is opened.

Times ending in `_ns` are nanoseconds of the gateway's clock unless the column says robot clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

FORMAT = 1
"""Grows when a table changes its meaning; a ledger of another format is refused."""

metadata = sa.MetaData()


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, default=0)


def _text(name: str, *args: Any, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text, *args, nullable=False, **options)


meta = sa.Table("meta", metadata, _text("key", primary_key=True), _text("value"))

specs = sa.Table("specs", metadata, _text("hash", primary_key=True), _text("json"))

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

episodes = sa.Table(
    "episodes",
    metadata,
    _text("id", primary_key=True),
    _text("robot", index=True),
    _text("spec_hash", sa.ForeignKey("specs.hash")),
    _text("task"),
    _count("seed"),
    _text("source"),
    # robot clock
    _count("started_ns"),
    _text("outcome", default=""),
    _count("steps"),
    _count("human_steps"),
    _count("interventions"),
)

segments = sa.Table(
    "segments",
    metadata,
    # SQLite only counts a plain INTEGER primary key; the order of rows is the order of commits
    sa.Column("row", sa.Integer, primary_key=True, autoincrement=True),
    _text("id", unique=True),
    _text("episode", sa.ForeignKey("episodes.id")),
    _count("index"),
    _count("first_tick"),
    _count("steps"),
    _count("human_steps"),
    # first and last actor that was not `hold`, -1 when the robot held all the time
    _count("entry_actor"),
    _count("exit_actor"),
    # times that somebody took the robot from the policy within the segment
    _count("takeovers"),
    _text("path"),
    _count("bytes"),
    _text("sha256"),
    # robot clock
    _count("closed_ns"),
    _count("received_ns"),
    # when the file was on disk and this row's transaction began
    _count("committed_ns"),
    sa.UniqueConstraint("episode", "index"),
    sqlite_autoincrement=True,
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    _text("sha256"),
    _count("size_bytes"),
    _count("parent"),
    _count("gradient_steps"),
    _count("human_steps"),
    _count("newest_segment"),
    _count("created_ns"),
    _text("path"),
)

evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    _count("number"),
    _text("label"),
    _count("first_seed"),
    _count("episodes"),
    _text("success"),
    # evaluator's clock
    _count("started_ns"),
    sa.Column("duration_s", sa.Float, nullable=False),
    # nanoseconds since 1970, for people
    _count("wall_ns"),
    sa.UniqueConstraint("number", "label", "first_seed", "started_ns"),
)

applied = sa.Table(
    "applied",
    metadata,
    _text("robot", primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    _count("announced_ns"),
    # gateway's clock: the gateway corrects the robot's stamp by the measured offset
    _count("applied_ns"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    _count("time_ns"),
    _text("robot"),
    _text("kind"),
    _text("detail"),
    sqlite_autoincrement=True,
)


def open_engine(path: Path, read_only: bool) -> sa.Engine:
    """An engine on the SQLite file at `path`; nothing is opened before its first use.

    Writers take the lock when a transaction begins, so that two of them wait for each other instead of failing.
    """
    mode = "rw" if read_only else "rwc"
    # Every thread gets its own connection; WAL lets them, and other processes, read while one writes.
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=f"file:{_escaped(path)}", query={"mode": mode, "uri": "true"})
    )

    @sa.event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        # pysqlite's own transaction handling is switched off: `_begin` below does it
        connection.isolation_level = None
        pragmas = ["busy_timeout=30000", "synchronous=FULL", "foreign_keys=ON"]
        # a reader could not change the journal mode, and must not change data
        pragmas += ["query_only=ON"] if read_only else ["journal_mode=WAL"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _escaped(path: Path) -> str:
    text = str(path.absolute())
    for character, escape in (("%", "%25"), ("?", "%3f"), ("#", "%23")):
        text = text.replace(character, escape)
    return text
