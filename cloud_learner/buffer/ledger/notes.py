"""Robots, and what was measured, happened or was said. Functions of one transaction; `Ledger` has them as methods."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.commit import inserted_key
from cloud_learner.buffer.ledger.rows import (
    AppliedRow,
    EvaluationRow,
    EventRow,
    LabelRow,
    RobotRow,
)
from wire.errors import InvalidDataError
from wire.messages.gateway import Evaluation
from wire.types import RobotSpec

_robots, _offsets, _labels, _e = tables.robots.c, tables.clock_offsets.c, tables.labels.c, tables.episodes.c


def insert_into(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT of the connection's dialect, which knows ON CONFLICT."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def read_meta(connection: sa.Connection, key: str) -> str:
    """What the table `meta` has under `key`, '' if nothing."""
    return connection.scalar(sa.select(tables.meta.c.value).where(tables.meta.c.key == key)) or ""


def write_meta(connection: sa.Connection, key: str, value: str) -> None:
    """Put `value` under `key`, in place of what is there."""
    row = insert_into(connection, tables.meta).values(key=key, value=value)
    connection.execute(row.on_conflict_do_update(index_elements=["key"], set_={"value": value}))


# --- robots ---------------------------------------------------------------------------------------------------------


def see_robot(connection: sa.Connection, name: str, spec: RobotSpec | None, clock: str, seen_ns: int) -> None:
    """Note that `name` is here, with its spec if it brought one."""
    seen: dict[str, Any] = {"clock": clock, "last_seen_ns": seen_ns}
    if spec is not None:
        seen["spec_hash"] = spec.hash
        text = msgspec.json.encode(spec).decode()
        row = insert_into(connection, tables.specs).values(hash=spec.hash, json=text)
        connection.execute(row.on_conflict_do_nothing())
    row = insert_into(connection, tables.robots).values(name=name, first_seen_ns=seen_ns, **seen)
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=seen))


def set_clock_offset(connection: sa.Connection, name: str, offset_ns: int, measured_ns: int) -> None:
    """Note the measured offset of a robot's clock, gateway time minus robot time, if it is another one than before.

    Nothing happens for a robot that was never seen.
    """
    newest = sa.select(_offsets.offset_ns).where(_offsets.robot == name).order_by(_offsets.id.desc()).limit(1)
    known = connection.scalar(sa.select(_robots.name).where(_robots.name == name))
    if known is None or connection.scalar(newest) == offset_ns:
        return
    values = {"robot": name, "measured_ns": measured_ns, "offset_ns": offset_ns}
    connection.execute(sa.insert(tables.clock_offsets).values(**values))
    connection.execute(sa.update(tables.robots).where(_robots.name == name).values(clock_offset_ns=offset_ns))


def clock_offsets(connection: sa.Connection, robot: str) -> tuple[tuple[int, int], ...]:
    """(when it was measured, offset) in ns, whenever a robot's clock was found to have another one; oldest first."""
    query = sa.select(_offsets.measured_ns, _offsets.offset_ns).where(_offsets.robot == robot).order_by(_offsets.id)
    return tuple((measured_ns, offset_ns) for measured_ns, offset_ns in connection.execute(query))


def robot(connection: sa.Connection, name: str) -> RobotRow | None:
    """The robot of this name, if it was ever seen."""
    row = connection.execute(_ROBOT_ROWS.where(_robots.name == name)).one_or_none()
    return RobotRow(*row) if row else None


def robots(connection: sa.Connection) -> tuple[RobotRow, ...]:
    """All robots, by name."""
    # sorted here: how a database sorts text depends on its locale
    return tuple(sorted((RobotRow(*row) for row in connection.execute(_ROBOT_ROWS)), key=lambda row: row.name))


def spec(connection: sa.Connection, spec_hash: str) -> RobotSpec | None:
    """The spec with this hash, if any robot ever announced it."""
    text = connection.scalar(sa.select(tables.specs.c.json).where(tables.specs.c.hash == spec_hash))
    return msgspec.json.decode(text, type=RobotSpec) if text is not None else None


def spec_hashes(connection: sa.Connection) -> tuple[str, ...]:
    """Hashes of the specs that stored episodes have."""
    rows = sa.select(tables.episodes.c.spec_hash).distinct().order_by(tables.episodes.c.spec_hash)
    return tuple(connection.scalars(rows))


_ROBOT_ROWS = sa.select(*(_robots[name] for name in RobotRow.__struct_fields__))


# --- measurements and events ----------------------------------------------------------------------------------------


def add_evaluation(connection: sa.Connection, evaluation: Evaluation, wall_ns: int) -> bool:
    """Enter a measurement; False if it was there. `wall_ns`: nanoseconds since 1970, now."""
    facts = {name: getattr(evaluation, name) for name in evaluation.__struct_fields__}
    facts["success"] = msgspec.json.encode(evaluation.success, order="sorted").decode()
    row = insert_into(connection, tables.evaluations).values(wall_ns=wall_ns, **facts).on_conflict_do_nothing()
    return connection.execute(row.returning(tables.evaluations.c.id)).first() is not None


def evaluations(connection: sa.Connection) -> tuple[EvaluationRow, ...]:
    """All measurements in the order they came."""
    columns = (tables.evaluations.c[name] for name in EvaluationRow.__struct_fields__)
    rows = connection.execute(sa.select(*columns).order_by(tables.evaluations.c.id)).mappings()
    return tuple(EvaluationRow(**{**row, "success": msgspec.json.decode(row["success"])}) for row in rows)


def note_applied(connection: sa.Connection, robot: str, version: int, announced_ns: int, applied_ns: int) -> bool:
    """Note when `robot` first acted on `version`; False if that was noted before."""
    values = {"robot": robot, "version": version, "announced_ns": announced_ns, "applied_ns": applied_ns}
    row = insert_into(connection, tables.applied).values(**values).on_conflict_do_nothing()
    return connection.execute(row.returning(tables.applied.c.version)).first() is not None


def applied(connection: sa.Connection) -> tuple[AppliedRow, ...]:
    """All first uses of versions, by version and robot."""
    columns = (tables.applied.c[name] for name in AppliedRow.__struct_fields__)
    rows = (AppliedRow(*row) for row in connection.execute(sa.select(*columns)))
    return tuple(sorted(rows, key=lambda row: (row.version, row.robot)))


def add_event(connection: sa.Connection, time_ns: int, robot: str, kind: str, detail: str = "") -> None:
    """Note something that happened; `time_ns` in the gateway's clock."""
    # what a peer said may stand in it, and PostgreSQL takes no NUL
    values = {"time_ns": time_ns, "robot": robot, "kind": kind, "detail": detail.replace("\0", "\N{SYMBOL FOR NULL}")}
    connection.execute(sa.insert(tables.events).values(**values))


def events(connection: sa.Connection, after_id: int = 0, limit: int = 1000) -> tuple[EventRow, ...]:
    """Up to `limit` events after event `after_id`, oldest first."""
    c = tables.events.c
    query = sa.select(*(c[name] for name in EventRow.__struct_fields__)).where(c.id > after_id).order_by(c.id)
    return tuple(EventRow(*row) for row in connection.execute(query.limit(limit)))


# --- labels ---------------------------------------------------------------------------------------------------------


def add_label(connection: sa.Connection, episode: str, key: str, value: str, author: str, time_ns: int) -> int:
    """Note what `author` says of an episode; the label's id. Raises `InvalidDataError` for an unknown episode."""
    number = connection.scalar(sa.select(_e.number).where(_e.id == episode))
    if number is None:
        raise InvalidDataError(f"episode {episode!r} is not in the ledger: it cannot be labelled.")
    values = {"episode": number, "key": key, "value": value, "author": author, "time_ns": time_ns}
    return inserted_key(connection.execute(sa.insert(tables.labels).values(**values)))


def labels(connection: sa.Connection, episode: str) -> tuple[LabelRow, ...]:
    """All labels of an episode, oldest first; one key may stand there several times."""
    columns = (_e.id if name == "episode" else _labels[name] for name in LabelRow.__struct_fields__)
    query = sa.select(*columns).select_from(tables.labels.join(tables.episodes, _labels.episode == _e.number))
    return tuple(LabelRow(*row) for row in connection.execute(query.where(_e.id == episode).order_by(_labels.id)))
