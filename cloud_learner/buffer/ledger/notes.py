"""Robots, and what was measured, happened or was said. Functions of one transaction; `Ledger` has them as methods."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.ledger import clock_history, tables
from cloud_learner.buffer.ledger.rows import (
    AppliedRow,
    EvaluationRow,
    EventRow,
    OffsetRow,
    RobotRow,
    columns_of,
    insert_into,
    insert_new,
    row_of,
    rows_of,
)
from cloud_learner.buffer.ledger.segments import chunks
from wire.clock import clock_name
from wire.errors import InvalidDataError
from wire.messages.gateway import Evaluation
from wire.spec_checks import MAX_NAME
from wire.types import RobotSpec

_robots, _offsets, _labels, _e, _s = (
    tables.robots.c,
    tables.clock_offsets.c,
    tables.labels.c,
    tables.episodes.c,
    tables.segments.c,
)

_REVISION = "step_labels_revision"
"""key in `meta`: the newest revision of the steps' labels that was ever given"""


def read_meta(connection: sa.Connection, key: str) -> str:
    """What the table `meta` has under `key`, '' if nothing."""
    return connection.scalar(sa.select(tables.meta.c.value).where(tables.meta.c.key == key)) or ""


def write_meta(connection: sa.Connection, key: str, value: str) -> None:
    """Put `value` under `key`, in place of what is there."""
    row = insert_into(connection, tables.meta).values(key=key, value=value)
    connection.execute(row.on_conflict_do_update(index_elements=["key"], set_={"value": value}))


def count_up(connection: sa.Connection, key: str, least: int = 0) -> int:
    """Raise the number under `key` by one, from `least` if that is more; its new value, which never comes again."""
    number = max(int(read_meta(connection, key) or 0), least) + 1
    write_meta(connection, key, str(number))
    return number


_ROBOT_ROWS = columns_of(RobotRow, _robots)

# --- robots ---------------------------------------------------------------------------------------------------------


def see_robot(connection: sa.Connection, name: str, spec: RobotSpec | None, clock: str, seen_ns: int) -> None:
    """Note that `name` is here, with its spec if it brought one."""
    seen: dict[str, Any] = {"clock": clock, "last_seen_ns": seen_ns}
    if spec is not None:
        seen["spec_hash"] = spec.hash
        text = msgspec.json.encode(spec).decode()
        insert_new(connection, tables.specs, hash=spec.hash, data_hash=spec.data_hash, json=text)
    row = insert_into(connection, tables.robots).values(name=name, first_seen_ns=seen_ns, **seen)
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=seen))


def set_clock_offset(
    connection: sa.Connection, name: str, offset_ns: int, measured_ns: int, clock: str | None = None
) -> None:
    """Note the measured offset of a robot's clock, gateway time minus robot time, if it is another one than before.

    `clock`: which one it was; None: that with which the robot was seen last. Nothing happens for a robot that was never
    seen. Of each robot as much is kept as `clock_history` says.
    """
    query = sa.select(_offsets.offset_ns, _offsets.clock, _offsets.base_ns).where(_offsets.robot == name)
    newest = connection.execute(query.order_by(_offsets.id.desc()).limit(1)).one_or_none()
    seen = connection.scalar(sa.select(_robots.clock).where(_robots.name == name))
    if seen is None or (newest is not None and newest.offset_ns == offset_ns):
        return
    clock = seen if clock is None else clock
    base_ns = clock_base(connection, measured_ns)
    values = {"robot": name, "measured_ns": measured_ns, "offset_ns": offset_ns, "clock": clock, "base_ns": base_ns}
    connection.execute(sa.insert(tables.clock_offsets).values(**values))
    connection.execute(sa.update(tables.robots).where(_robots.name == name).values(clock_offset_ns=offset_ns))
    count = connection.scalar(sa.select(sa.func.count()).where(_offsets.robot == name)) or 0
    other_clock = newest is not None and (newest.clock, newest.base_ns) != (clock, base_ns)
    if other_clock or count > 2 * clock_history.MEASUREMENTS:
        rows = clock_offsets(connection, name)
        gone = {row.id for row in rows} - {row.id for row in clock_history.kept(rows)}
        for some in chunks(sorted(gone)):
            connection.execute(sa.delete(tables.clock_offsets).where(_offsets.id.in_(some)))


def clock_offset_at(connection: sa.Connection, name: str, time_ns: int) -> int:
    """Gateway time minus time of that robot or process, as it was known when the gateway's clock said `time_ns`.

    Before the first measurement that is kept: what that found; 0 when there was none.
    """
    found = sa.select(_offsets.offset_ns).where(_offsets.robot == name)
    then = found.where(_offsets.measured_ns <= time_ns).order_by(_offsets.id.desc()).limit(1)
    offset_ns = connection.scalar(then)
    return offset_ns if offset_ns is not None else connection.scalar(found.order_by(_offsets.id).limit(1)) or 0


def clock_offsets(connection: sa.Connection, name: str, after_id: int = 0) -> tuple[OffsetRow, ...]:
    """What is kept of what was measured of that robot's clock, in this order, after measurement `after_id`."""
    query = columns_of(OffsetRow, _offsets).where(_offsets.robot == name, _offsets.id > after_id)
    return rows_of(connection, OffsetRow, query.order_by(_offsets.id))


def clock_base(connection: sa.Connection, now_ns: int) -> int:
    """Nanoseconds since 1970 minus the time `now_ns` of this machine's clock: as it was asked for first, for as long as
    the clock counts. So intervals of one boot are exact, and those of two as good as the wall clock was."""
    if not (known := known_clock_base(connection)):
        known = time.time_ns() - now_ns
        write_meta(connection, f"clock {clock_name()}", str(known))
    return known


def known_clock_base(connection: sa.Connection) -> int:
    """As `clock_base`, 0 while nobody has asked for that."""
    return int(read_meta(connection, f"clock {clock_name()}") or 0)


def robot(connection: sa.Connection, name: str) -> RobotRow | None:
    """The robot of this name, if it was ever seen."""
    return row_of(connection, RobotRow, _ROBOT_ROWS.where(_robots.name == name))


def robots(connection: sa.Connection) -> tuple[RobotRow, ...]:
    """All robots, by name."""
    # sorted here: how a database sorts text depends on its locale
    return tuple(sorted(rows_of(connection, RobotRow, _ROBOT_ROWS), key=lambda row: row.name))


def spec(connection: sa.Connection, spec_hash: str) -> RobotSpec:
    """The spec with this hash. Raises `InvalidDataError` if no robot ever announced it."""
    text = connection.scalar(sa.select(tables.specs.c.json).where(tables.specs.c.hash == spec_hash))
    if text is None:
        raise unknown_spec(spec_hash)
    return msgspec.json.decode(text, type=RobotSpec)


def unknown_spec(spec_hash: str) -> InvalidDataError:
    """What is raised about a spec that no robot announced."""
    return InvalidDataError(f"robot spec {spec_hash} is unknown: the robot must say hello with it first.")


def spec_hashes(connection: sa.Connection) -> tuple[str, ...]:
    """Hashes of the specs that stored episodes have."""
    rows = sa.select(tables.episodes.c.spec_hash).distinct().order_by(tables.episodes.c.spec_hash)
    return tuple(connection.scalars(rows))


# --- measurements and events ----------------------------------------------------------------------------------------


_MEASURED = tuple(name for name in Evaluation.__struct_fields__ if name in tables.evaluations.c)
"""not the outcome of each episode: whoever decides by that remembers what came of it"""


def add_evaluation(connection: sa.Connection, evaluation: Evaluation, wall_ns: int) -> bool:
    """Enter a measurement; False if it was there. `wall_ns`: nanoseconds since 1970, now."""
    facts = {name: getattr(evaluation, name) for name in _MEASURED}
    facts["success"] = msgspec.json.encode(evaluation.success, order="sorted").decode()
    return insert_new(connection, tables.evaluations, wall_ns=wall_ns, **facts)


def evaluations(connection: sa.Connection) -> tuple[EvaluationRow, ...]:
    """All measurements in the order they came."""
    columns = tables.evaluations.c
    query = sa.select(columns.wall_ns, *(columns[name] for name in _MEASURED)).order_by(columns.id)
    rows = connection.execute(query).mappings()
    return tuple(EvaluationRow(**{**row, "success": msgspec.json.decode(row["success"])}) for row in rows)


def note_applied(connection: sa.Connection, robot: str, version: int, announced_ns: int, applied_ns: int) -> bool:
    """Note when `robot` first acted on `version`; False if that was noted before."""
    values = {"robot": robot, "version": version, "announced_ns": announced_ns, "applied_ns": applied_ns}
    return insert_new(connection, tables.applied, **values)


def applied(connection: sa.Connection) -> tuple[AppliedRow, ...]:
    """All first uses of versions, by version and robot."""
    rows = rows_of(connection, AppliedRow, columns_of(AppliedRow, tables.applied.c))
    return tuple(sorted(rows, key=lambda row: (row.version, row.robot)))


def add_event(connection: sa.Connection, time_ns: int, robot: str, kind: str, detail: str = "") -> None:
    """Note something that happened; `time_ns` in the gateway's clock."""
    # what a peer said may stand in it, and PostgreSQL takes no NUL
    values = {"time_ns": time_ns, "robot": robot, "kind": kind, "detail": detail.replace("\0", "\N{SYMBOL FOR NULL}")}
    connection.execute(sa.insert(tables.events).values(**values))


def events(connection: sa.Connection, after_id: int = 0, limit: int = 1000) -> tuple[EventRow, ...]:
    """Up to `limit` events after event `after_id`, oldest first."""
    c = tables.events.c
    return rows_of(connection, EventRow, columns_of(EventRow, c).where(c.id > after_id).order_by(c.id).limit(limit))


# --- labels ---------------------------------------------------------------------------------------------------------


def label_episode(connection: sa.Connection, episode_id: str, name: str, value: float, author: str) -> None:
    """Note what `author` says of an episode; what was said last under a name counts.

    `success` is 0 or 1, `quality` from 0 to 1, other names are free. Raises `InvalidDataError` for another value or no
    name, and for an episode that is not there.
    """
    _require_label_name(name)
    allowed = {"success": value in (0, 1), "quality": 0 <= value <= 1}.get(name, math.isfinite(value))
    if not allowed:
        raise InvalidDataError(
            f"label {name}={value:g} of episode {episode_id!r}: success is 0 or 1, quality from 0 to 1, anything else "
            "a finite number."
        )
    found = connection.execute(sa.select(_e.number, _e.pruned_ns).where(_e.id == episode_id)).one_or_none()
    if found is None or found.pruned_ns:
        gone = "is not in the ledger" if found is None else "was pruned"
        raise InvalidDataError(
            f"episode {episode_id!r} {gone}: it cannot be labelled with '{name}'. `vla-fleet buffer tail` names "
            "segments of episodes that are there."
        )
    values = {"episode": found.number, "name": name, "value": value, "author": author, "wall_ns": time.time_ns()}
    connection.execute(sa.insert(tables.labels).values(**values))


def labels(connection: sa.Connection, episode_id: str) -> dict[str, float]:
    """What was said last of an episode, by name."""
    query = sa.select(_labels.name, _labels.value).join(tables.episodes, _labels.episode == _e.number)
    return dict(map(tuple, connection.execute(query.where(_e.id == episode_id).order_by(_labels.id))))


def episode_labels(connection: sa.Connection, name: str, after_id: int = 0) -> tuple[dict[int, float], int]:
    """What was said of episodes under `name` after label `after_id`, by their numbers, and the newest label's id."""
    query = sa.select(_labels.episode, _labels.value, _labels.id).where(_labels.name == name, _labels.id > after_id)
    rows = connection.execute(query.order_by(_labels.id)).all()
    return {row.episode: row.value for row in rows}, rows[-1].id if rows else after_id


def put_step_labels(
    connection: sa.Connection, name: str, labels: Mapping[int, np.ndarray], skip_gone: bool = False
) -> tuple[int, ...]:
    """Note one number for each step of the segments of these ledger rows, float32[T] each, in place of earlier ones.

    A thousand rows at a time hold nobody up. With `skip_gone` the others are noted when some rows are gone, pruned
    while they were computed; the ledger rows, growing, that were left out so. Raises `InvalidDataError`, with nothing
    noted, for rows that are gone otherwise and for another number of steps.
    """
    _require_label_name(name)
    steps: dict[int, int] = {}
    for some in chunks(map(int, labels)):
        steps |= dict(map(tuple, connection.execute(sa.select(_s.row, _s.steps).where(_s.row.in_(some)))))
    gone = tuple(sorted(int(row) for row in labels if row not in steps))
    if gone and not skip_gone:
        raise InvalidDataError(
            f"label '{name}' of ledger row {', '.join(map(str, gone))}: no such segment, it was pruned or never came. "
            "Leave out what is gone, or have it skipped (skip_gone)."
        )
    found = []
    for row, values in labels.items():
        if row not in steps:
            continue
        data = np.asarray(values, "<f4")
        if data.shape != (steps[row],):
            raise InvalidDataError(
                f"label '{name}' of ledger row {row} has shape {list(data.shape)}; the segment has {steps[row]} steps, "
                "give one number for each."
            )
        found.append({"row": int(row), "name": name, "data": data.tobytes()})
    if found:
        # not the newest of the rows alone: pruning deletes them, and a number that came twice would tell nobody
        newest = connection.scalar(sa.select(sa.func.max(tables.step_labels.c.revision))) or 0
        revision = count_up(connection, _REVISION, least=newest)
        row_of = insert_into(connection, tables.step_labels).values(revision=revision)
        changes = {"data": row_of.excluded.data, "revision": revision}
        connection.execute(row_of.on_conflict_do_update(index_elements=["row", "name"], set_=changes), found)
    return gone


def step_labels(
    connection: sa.Connection, rows: Sequence[int], names: Sequence[str]
) -> dict[int, dict[str, np.ndarray]]:
    """By ledger row and name, float32[T]; what was not said is absent."""
    c = tables.step_labels.c
    found: dict[int, dict[str, np.ndarray]] = {}
    for some in chunks(map(int, rows)):
        query = sa.select(c.row, c.name, c.data).where(c.row.in_(some), c.name.in_(names))
        for row, name, data in connection.execute(query):
            found.setdefault(row, {})[name] = np.frombuffer(data, "<f4")
    return found


def labelled_since(connection: sa.Connection, revision: int, names: Sequence[str]) -> tuple[tuple[int, ...], int]:
    """(ledger rows, growing, that got a label of these names after `revision`, the newest revision)."""
    c = tables.step_labels.c
    newest = connection.scalar(sa.select(sa.func.max(c.revision))) or 0
    if newest <= revision:
        return (), revision
    query = sa.select(c.row).distinct().where(c.revision > revision, c.name.in_(names)).order_by(c.row)
    return tuple(connection.scalars(query)), newest


def _require_label_name(name: str) -> None:
    if not (name.isascii() and name.isidentifier() and len(name) <= MAX_NAME):
        raise InvalidDataError(
            f"label {name[:MAX_NAME]!r}: a name is made of letters, digits and underscores, such as 'success'."
        )
