"""The gateways that write to one ledger: whose journal a segment lies in, and which of them has a robot.

Functions of one transaction; `Ledger` has them as methods. A gateway is known by the number that its journal was given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.jobs import reserve_leases
from cloud_learner.buffer.ledger.tables import insert_into
from wire.errors import StorageError

_g, _s, _holds = tables.gateways.c, tables.segments.c, tables.robot_holds.c


class TakenRobots(msgspec.Struct, frozen=True):
    """What came of `take_robots`."""

    elsewhere: dict[str, str] = {}
    """by robot: the name of the gateway that has it"""
    reserved: int = 0
    """number after which leases are to be numbered now, 0: as before"""


def claim_journal(connection: sa.Connection, journal: str, name: str, renamed: bool) -> int:
    """The number of the gateway that has this `journal`, called `name`; a new one is entered, and `renamed` if it was
    called otherwise.

    Raises `StorageError` when another journal of that name holds segments that are not sealed: they are nowhere else.
    """
    known = connection.execute(sa.select(_g.number, _g.name).where(_g.journal == journal)).one_or_none()
    if known is not None and (known.name == name or not renamed):
        return int(known.number)
    other = connection.scalar(sa.select(_g.number).where(_g.name == name))
    if other is not None:
        if known is not None or connection.scalar(sa.select(_unsealed_of(other))):
            raise StorageError(
                f"another data directory writes to this ledger as gateway '{name}': its journal is not this one's. "
                "Give each gateway a name of its own (--gateway-name), or restore the journal that belongs here."
            )
        connection.execute(sa.update(tables.gateways).where(_g.number == other).values(journal=journal))
        return int(other)
    if known is not None:
        connection.execute(sa.update(tables.gateways).where(_g.number == known.number).values(name=name))
        return int(known.number)
    row = sa.insert(tables.gateways).values(name=name, journal=journal).returning(_g.number)
    return int(connection.execute(row).scalar_one())


def gateway_of(connection: sa.Connection, journal: str) -> int:
    """The number of the gateway that has this journal, 0 when none is known."""
    return connection.scalar(sa.select(_g.number).where(_g.journal == journal)) or 0


def gateway_names(connection: sa.Connection) -> dict[int, str]:
    """All gateways that ever wrote here, by number."""
    return dict(map(tuple, connection.execute(sa.select(_g.number, _g.name).order_by(_g.number))))


def unsealed_elsewhere(connection: sa.Connection, gateway: int) -> dict[str, int]:
    """How many segments lie in the journals of other gateways, by their names."""
    query = sa.select(_g.name, sa.func.count()).join(tables.gateways, _g.number == _s.gateway)
    query = query.where(_s.journal.is_not(None), _s.gateway != gateway, ~_s.damaged).group_by(_g.name)
    return dict(map(tuple, connection.execute(query)))


def _unsealed_of(gateway: int) -> sa.Exists:
    return sa.exists().where(_s.journal.is_not(None), _s.gateway == gateway)


def take_robots(
    connection: sa.Connection, gateway: int, robots: Sequence[str], silent_s: float, leases: int
) -> TakenRobots:
    """Have these robots, which this gateway hears, but for those that another one has heard of within `silent_s`.

    `leases`: so many numbers are reserved when one comes from another gateway.
    """
    now_ns, elsewhere, moved = _now_ns(connection), dict[str, str](), False
    query = sa.select(_holds.robot, _holds.gateway, _holds.heard_ns, _g.name)
    query = query.join(tables.gateways, _g.number == _holds.gateway).where(_holds.robot.in_(list(robots)))
    for robot, other, heard_ns, name in connection.execute(query):
        if other != gateway and now_ns - heard_ns < silent_s * 1e9:
            elsewhere[robot] = name
        moved |= other != gateway and robot not in elsewhere
    change = {"gateway": gateway, "heard_ns": now_ns}
    if mine := [{"robot": robot, **change} for robot in robots if robot not in elsewhere]:
        row = insert_into(connection, tables.robot_holds)
        row = row.on_conflict_do_update(index_elements=["robot"], set_=change)
        connection.execute(row, mine)
    return TakenRobots(elsewhere, reserve_leases(connection, leases) if moved else 0)


def _now_ns(connection: sa.Connection) -> int:
    """By the database's clock: those of several gateways differ."""
    if connection.dialect.name != "postgresql":
        return time.time_ns()
    return int(connection.scalar(sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1e9)::bigint")) or 0)
