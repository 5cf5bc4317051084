"""Policy versions, and which episodes each has seen. Functions of one transaction; `Ledger` has them as methods.

A version's rows in `trained` name the episodes that were first drawn on the way from its parent to it. What it has seen
is the union of those of itself and its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import read_meta, write_meta
from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.buffer.ledger.segments import chunks
from wire.errors import InvalidDataError
from wire.types import PolicyVersion

_v, _t, _e = tables.versions.c, tables.trained.c, tables.episodes.c
_VERSION_ROWS = sa.select(_v.path, *(_v[name] for name in PolicyVersion.__struct_fields__))


def commit_version(connection: sa.Connection, version: PolicyVersion, path: str, trained: Iterable[int] = ()) -> None:
    """Enter a version whose weights are on disk as `path`, with the numbers of the episodes it first drew from.

    Those that an ancestor has seen may be among them. Raises `InvalidDataError` if the number is taken, an episode
    unknown.
    """
    if connection.scalar(sa.select(_v.number).where(_v.number == version.number)) is not None:
        raise InvalidDataError(f"policy version {version.number} is in the ledger already.")
    facts = {name: getattr(version, name) for name in PolicyVersion.__struct_fields__}
    connection.execute(sa.insert(tables.versions).values(path=path, **facts))
    wanted = set(trained)
    known: set[int] = set()
    seen: set[int] = set()
    ancestors = set(connection.scalars(sa.select(_ancestors(version.parent).c.number)))
    for some in chunks(wanted):
        known.update(connection.scalars(sa.select(_e.number).where(_e.number.in_(some))))
        # not all that the ancestors have seen: whoever commits segments waits
        before = connection.execute(sa.select(_t.episode, _t.version).where(_t.episode.in_(some)))
        seen.update(episode for episode, number in before if number in ancestors)
    if wanted - known:
        raise InvalidDataError(
            f"policy version {version.number}: this ledger has no episode of number {min(wanted - known)}. "
            "Does the trainer read another one?"
        )
    if new := wanted - seen:
        connection.execute(
            sa.insert(tables.trained), [{"version": version.number, "episode": number} for number in sorted(new)]
        )


def version(connection: sa.Connection, number: int) -> VersionRow | None:
    """The version of this number, if it is there."""
    return _one(connection, _VERSION_ROWS.where(_v.number == number))


def versions(connection: sa.Connection) -> tuple[VersionRow, ...]:
    """All versions, oldest first."""
    return tuple(_version_row(row) for row in connection.execute(_VERSION_ROWS.order_by(_v.number)))


def newest_version(connection: sa.Connection) -> VersionRow | None:
    """The version of the largest number, if there is one."""
    return _one(connection, _VERSION_ROWS.order_by(_v.number.desc()).limit(1))


def episodes_of_version(connection: sa.Connection, number: int) -> tuple[str, ...]:
    """Ids of all episodes that this version or an ancestor of it was trained on, in the order they came."""
    seen = sa.select(_t.episode).where(_t.version.in_(sa.select(_ancestors(number).c.number)))
    query = sa.select(_e.id).where(_e.number.in_(seen)).order_by(_e.number)
    return tuple(connection.scalars(query))


def known_to(connection: sa.Connection, number: int) -> set[int]:
    """Numbers of all episodes that this version or an ancestor of it was trained on."""
    return set(connection.scalars(sa.select(_t.episode).where(_t.version.in_(sa.select(_ancestors(number).c.number)))))


def versions_of_episode(connection: sa.Connection, episode_id: str) -> tuple[int, ...]:
    """Numbers of all versions that were trained on this episode: those that first drew it and their descendants."""
    first = sa.select(_t.version).join(tables.episodes, _t.episode == _e.number).where(_e.id == episode_id)
    found = first.cte("found", recursive=True)
    found = found.union(sa.select(_v.number).join(found, _v.parent == found.c.version))
    return tuple(connection.scalars(sa.select(found.c.version).order_by(found.c.version)))


_ROLLOUT = "rollout"
"""key in `meta`, with the gateway's number: each decides for its own robots"""


def kept_rollout(connection: sa.Connection, gateway: int) -> str:
    """What the gateway keeps of how far versions are, '' when nothing yet."""
    return read_meta(connection, f"{_ROLLOUT} {gateway}")


def keep_rollout(connection: sa.Connection, gateway: int, text: str) -> None:
    """Keep that, in place of what was."""
    write_meta(connection, f"{_ROLLOUT} {gateway}", text)


def _ancestors(number: int) -> sa.CTE:
    """The version and all its ancestors, as one column of numbers."""
    found = sa.select(_v.number, _v.parent).where(_v.number == number).cte("ancestors", recursive=True)
    # UNION, not UNION ALL: a version that is its own ancestor ends the walk instead of going round
    return found.union(sa.select(_v.number, _v.parent).join(found, _v.number == found.c.parent))


def _one(connection: sa.Connection, query: sa.Select) -> VersionRow | None:
    row = connection.execute(query).one_or_none()
    return _version_row(row) if row else None


def _version_row(row: sa.Row) -> VersionRow:
    path, *facts = row
    return VersionRow(version=PolicyVersion(*facts), path=path)
