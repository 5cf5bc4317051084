"""The gateways that write to one ledger: whose journal a segment lies in, and which of them has a robot.

Functions of one transaction; `Ledger` has them as methods. A gateway is known by the number that its journal was given.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import read_meta, write_meta
from cloud_learner.buffer.ledger.tables import insert_into
from wire.errors import StorageError

_g, _s, _holds = tables.gateways.c, tables.segments.c, tables.robot_holds.c
_LEASE = "lease"
LEASES_AT_ONCE = 1_000_000
"""numbers of leases that a gateway may give before it asks for more"""


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


def reserve_leases(connection: sa.Connection) -> int:
    """The number after which the caller may number `LEASES_AT_ONCE` leases: above all that were ever given."""
    number = int(read_meta(connection, _LEASE) or 0)
    write_meta(connection, _LEASE, str(number + LEASES_AT_ONCE))
    return number


def take_robot(connection: sa.Connection, gateway: int, robot: str, silent_s: float) -> tuple[str, bool]:
    """Have `robot` at this gateway: ('', whether it was at another one before).

    (name of the other gateway, False), with nothing changed, while that has heard of it within `silent_s`.
    """
    now_ns = _now_ns(connection)
    query = sa.select(_holds.gateway, _holds.heard_ns, _g.name).join(tables.gateways, _g.number == _holds.gateway)
    found = connection.execute(query.where(_holds.robot == robot)).one_or_none()
    moved = found is not None and found.gateway != gateway
    if found is not None and moved and now_ns - found.heard_ns < silent_s * 1e9:
        return found.name, False
    row = insert_into(connection, tables.robot_holds).values(robot=robot, gateway=gateway, heard_ns=now_ns)
    change = {"gateway": gateway, "heard_ns": now_ns}
    connection.execute(row.on_conflict_do_update(index_elements=["robot"], set_=change))
    return "", moved


def keep_robots(connection: sa.Connection, gateway: int, robots: Iterable[str]) -> None:
    """This gateway has heard of these robots, of which it keeps those it has."""
    mine = sa.update(tables.robot_holds).where(_holds.gateway == gateway, _holds.robot.in_(list(robots)))
    connection.execute(mine.values(heard_ns=_now_ns(connection)))


def _now_ns(connection: sa.Connection) -> int:
    """By the database's clock: those of several gateways differ."""
    if connection.dialect.name != "postgresql":
        return time.time_ns()
    return int(connection.scalar(sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1e9)::bigint")) or 0)
