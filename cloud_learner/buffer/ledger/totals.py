"""Counters for a report, computed from the ledger's rows and from nothing else. Functions of one transaction."""

from __future__ import annotations

import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.rows import Totals

_e, _t = tables.episodes.c, tables.tallies.c


def totals(connection: sa.Connection) -> Totals:
    """What is stored of all robots."""
    found = robot_totals(connection).values()
    everything = dict.fromkeys(Totals.__struct_fields__, 0)
    for row in found:
        for name in Totals.__struct_fields__:
            value = getattr(row, name)
            everything[name] = max(everything[name], value) if name == "newest_row" else everything[name] + value
    return Totals(**everything)


def robot_totals(connection: sa.Connection) -> dict[str, Totals]:
    """What is stored, by robot."""
    names = ("segments", "episodes", "steps", "human_steps", "interventions", "bytes", "newest_row")
    query = sa.select(
        _t.robot,
        *(_t[name] for name in names),
        (_t.steps - _t.ticks).label("duplicated_steps"),
        (_t.end_tick - _t.ticks).label("missing_steps"),
    )
    rows = (dict(row) for row in connection.execute(query.where(_t.episodes > 0)).mappings())
    return {row.pop("robot"): Totals(**row) for row in rows}


def shares(connection: sa.Connection) -> tuple[tuple[str, str, str, int, int, int, int], ...]:
    """(task, source, outcome, episodes, steps, human steps, interventions) of what is stored; '': unfinished."""
    kinds = (_e.task, _e.source, _e.outcome)
    sums = (sa.func.sum(column) for column in (_e.steps, _e.human_steps, _e.interventions))
    query = sa.select(*kinds, sa.func.count(), *sums).where(_e.pruned_ns == 0).group_by(*kinds)
    rows = connection.execute(query)
    # PostgreSQL adds bigints up to a decimal
    return tuple(sorted((task, source, end, n, int(a), int(b), int(c)) for task, source, end, n, a, b, c in rows))
