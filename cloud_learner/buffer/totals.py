"""Counters for a report, computed from the ledger's rows and from nothing else."""

from __future__ import annotations

import sqlalchemy as sa

from cloud_learner.buffer import tables
from cloud_learner.buffer.rows import Totals

_s, _e = tables.segments.c, tables.episodes.c


def read_totals(connection: sa.Connection) -> dict[str | None, Totals]:
    """Totals by robot name, and of all robots under None; empty when nothing is stored."""
    end = _s.first_tick + _s.steps
    # the newest tick that earlier segments of the episode brought
    reached = sa.func.max(end).over(partition_by=_s.episode, order_by=(_s.first_tick, _s.row), rows=(None, -1))
    rows = sa.select(
        _s.row,
        _s.episode,
        _s.steps,
        _s.human_steps,
        _s.bytes,
        end.label("end"),
        sa.func.max(0, sa.func.min(sa.func.coalesce(reached, 0), end) - _s.first_tick).label("twice"),
    ).subquery()
    per_episode = (
        sa.select(
            _e.robot,
            _e.interventions,
            sa.func.count().label("segments"),
            sa.func.sum(rows.c.steps).label("steps"),
            sa.func.sum(rows.c.human_steps).label("human_steps"),
            sa.func.sum(rows.c.bytes).label("bytes"),
            sa.func.max(rows.c.row).label("newest_row"),
            sa.func.sum(rows.c.twice).label("twice"),
            sa.func.max(rows.c.end).label("end"),
        )
        .join(_e.id.table, rows.c.episode == _e.id)
        .group_by(rows.c.episode)
        .subquery()
    )
    c = per_episode.c
    query = sa.select(
        c.robot,
        sa.func.sum(c.segments).label("segments"),
        sa.func.count().label("episodes"),
        sa.func.sum(c.steps).label("steps"),
        sa.func.sum(c.human_steps).label("human_steps"),
        sa.func.sum(c.interventions).label("interventions"),
        sa.func.sum(c.bytes).label("bytes"),
        sa.func.max(c.newest_row).label("newest_row"),
        sa.func.sum(c.twice).label("duplicated_steps"),
        sa.func.sum(c.end - (c.steps - c.twice)).label("missing_steps"),
    ).group_by(c.robot)
    by_robot = {row["robot"]: dict(row) for row in connection.execute(query).mappings()}
    found: dict[str | None, Totals] = {}
    everything = dict.fromkeys(Totals.__struct_fields__, 0)
    for robot, row in by_robot.items():
        del row["robot"]
        found[robot] = Totals(**row)
        for name, value in row.items():
            everything[name] = max(everything[name], value) if name == "newest_row" else everything[name] + value
    if found:
        found[None] = Totals(**everything)
    return found
