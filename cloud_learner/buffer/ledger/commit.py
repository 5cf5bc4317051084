"""How a segment is entered in the ledger. A function of one transaction, which `Ledger` has as a method.

The gateway does it for every segment of every robot, so the statements are built once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.dialects import postgresql, sqlite

from cloud_learner.buffer.check import MAX_STEPS
from cloud_learner.buffer.control import (
    NOBODY,
    Control,
    find_runs,
    is_takeover,
    largest_lag,
    marked_actor,
    summarise_control,
)
from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import unknown_spec
from cloud_learner.buffer.ledger.rows import HeldBy, HeldState, Journaled
from wire.errors import InvalidDataError
from wire.identity.sealing import held_cameras
from wire.messages.gateway import Segment
from wire.types import Episode

log = logging.getLogger(__name__)
_s, _e = tables.segments.c, tables.episodes.c
_NOTHING_HELD: Mapping[str, HeldBy] = {}
_MAX_INDEX = 2**31 - 1
_FACTS = Episode.__struct_fields__

_KNOWN = sa.select(_s.row).where(_s.id == bindparam("id"))
_EPISODE = sa.select(tables.episodes).where(_e.id == bindparam("id"))
_NEWEST_VERSION = sa.select(sa.func.coalesce(sa.func.max(tables.versions.c.number), 0))
_SPEC_KNOWN = sa.select(tables.specs.c.hash).where(tables.specs.c.hash == bindparam("hash"))
_INSERT_EPISODE = sa.insert(tables.episodes)
_NEW_EPISODE = {
    column.name: column.default.arg
    for column in tables.episodes.columns
    if isinstance(column.default, sa.ColumnDefault)
}
_INSERT_SEGMENT = sa.insert(tables.segments)
_UPDATE_EPISODE = sa.update(tables.episodes).where(_e.number == bindparam("_number"))
# no segment is longer than MAX_STEPS, so that the index finds all that can reach into ticks [first, end)
_OVERLAPPING = (
    sa.select(_s.first_tick, _s.steps)
    .where(_s.episode == bindparam("episode"), _s.first_tick < bindparam("end"))
    .where(_s.first_tick > bindparam("first") - MAX_STEPS)
    .order_by(_s.first_tick)
)
_SUMS = ("segments", "steps", "human_steps", "interventions", "bytes", "ticks", "end_tick")


def _tally(dialect: Any) -> Any:
    """An upsert that adds to a robot's tally."""
    insert, tally = dialect.insert(tables.tallies), tables.tallies.c
    added = {name: tally[name] + insert.excluded[name] for name in ("episodes", *_SUMS)}
    newest = {"newest_row": insert.excluded.newest_row}
    return insert.on_conflict_do_update(index_elements=["robot"], set_={**added, **newest})


_TALLY = {"sqlite": _tally(sqlite), "postgresql": _tally(postgresql)}
_ACTIVE = sa.select(_s.index, _s.entry_actor, _s.exit_actor).where(
    _s.episode == bindparam("episode"), _s.exit_actor != NOBODY
)
_BEFORE = _ACTIVE.where(_s.index < bindparam("index")).order_by(_s.index.desc()).limit(1)
_AFTER = _ACTIVE.where(_s.index > bindparam("index")).order_by(_s.index).limit(1)
_AROUND = sa.union_all(*(sa.select(each.subquery()) for each in (_BEFORE, _AFTER)))


def commit_segments(
    connection: sa.Connection,
    gateway: int,
    segments: Sequence[tuple[Segment, Journaled, int]],
    committed_ns: int,
    held: Mapping[str, HeldBy] = _NOTHING_HELD,
) -> list[int | None]:
    """Enter segments whose records are on disk of a `gateway`, each with where it lies and when it was received, and
    what they add to their episodes; their rows, None for one whose id was there. `held`: by id, who holds back the
    pictures of some.

    The work does not grow with the number of episodes, nor with their length. Raises `InvalidDataError`, with none
    entered, for a segment of an episode that was pruned: it was forgotten, and is not taken again; if the episode is
    known with another robot, task, spec or source, has another segment of that index, or if its spec is unknown.
    """
    added: dict[str, Counter[str]] = {}
    # one for all of them: what lag they arrived with is settled here, for good
    newest = connection.scalar(_NEWEST_VERSION) or 0
    rows = [
        _commit_segment(connection, gateway, segment, at, ns, committed_ns, newest, added)
        for segment, at, ns in segments
    ]
    for robot, tally in added.items():
        connection.execute(_TALLY[connection.dialect.name], {"robot": robot, **tally})
    kept_back = [
        {"row": row, "state": HeldState.held, **held.get(segment.id, HeldBy())._asdict()}
        for row, (segment, _, _) in zip(rows, segments, strict=True)
        if row is not None and held_cameras(segment)
    ]
    if kept_back:
        connection.execute(sa.insert(tables.held_pictures), kept_back)
    return rows


def _commit_segment(
    connection: sa.Connection,
    gateway: int,
    segment: Segment,
    at: Journaled,
    received_ns: int,
    committed_ns: int,
    newest_version: int,
    tallies: dict[str, Counter[str]],
) -> int | None:
    """`tallies`: by robot, what is to be added to the table of that name."""
    if connection.scalar(_KNOWN, {"id": segment.id}) is not None:
        return None
    if segment.steps > MAX_STEPS:
        raise InvalidDataError(f"segment {segment.id} has {segment.steps} steps; at most {MAX_STEPS} are taken.")
    if not 0 <= segment.index <= _MAX_INDEX:
        raise InvalidDataError(f"segment {segment.id} has index {segment.index}; 0 to {_MAX_INDEX} are taken.")
    episode = _episode_of(connection, segment)
    if episode["pruned_ns"]:
        # not a silent None: what came after the forgetting may be what should have been kept
        raise InvalidDataError(f"segment {segment.id} is not taken: its episode was pruned.")
    number = episode["number"]
    control = summarise_control(segment.actor)
    new_ticks = _count_new_ticks(connection, episode, segment)
    interventions, demonstration = 0, segment.episode.source == "demonstration"
    if not demonstration:
        interventions = _new_interventions(connection, number, segment.index, control)
    values = {
        "id": segment.id,
        "episode": number,
        "index": segment.index,
        "first_tick": segment.first_tick,
        "steps": segment.steps,
        "human_steps": control.human_steps,
        "entry_actor": control.entry,
        "exit_actor": control.exit,
        "takeovers": control.takeovers,
        "last": segment.last,
        "outcome": segment.outcome if segment.last else "",
        "reward_sum": float(segment.reward.sum(dtype=np.float64)),
        "frames": sum(len(frames.encoded) for frames in segment.frames.values()),
        "runs": find_runs(marked_actor(segment), segment.version).astype("<i4").tobytes(),
        "newest_version": newest_version,
        "lag": largest_lag(segment.actor, segment.version, demonstration, newest_version),
        "bytes": at.bytes,
        "sha256": at.sha256,
        "gateway": gateway,
        "journal": at.journal,
        "offset": at.offset,
        "closed_ns": segment.closed_ns,
        "received_ns": received_ns,
        "committed_ns": committed_ns,
    }
    try:
        row = inserted_key(connection.execute(_INSERT_SEGMENT, values))
    except sa.exc.IntegrityError as error:
        raise InvalidDataError(
            f"segment {segment.id}: its episode has another segment of index {segment.index}."
        ) from error
    # whoever writes is alone, so these are still what was read above
    added = {
        "segments": 1,
        "steps": segment.steps,
        "human_steps": control.human_steps,
        "interventions": interventions,
        "bytes": at.bytes,
        "ticks": new_ticks,
        "end_tick": max(0, segment.first_tick + segment.steps - episode["end_tick"]),
    }
    changes = {
        **{name: episode[name] + added[name] for name in _SUMS},
        "outcome": segment.outcome if segment.last else episode["outcome"],
        "last_index": segment.index if segment.last else episode["last_index"],
        "newest_row": row,
        "committed_ns": committed_ns,
        "wall_ns": time.time_ns(),
    }
    connection.execute(_UPDATE_EPISODE, {"_number": number, **changes})
    tally = tallies.setdefault(episode["robot"], Counter())
    tally.update(added, episodes=int(episode["segments"] == 0))
    tally["newest_row"] = row
    return row


def _episode_of(connection: sa.Connection, segment: Segment) -> sa.RowMapping | dict[str, Any]:
    """The row of the segment's episode, entered if it is new."""
    facts = {name: getattr(segment.episode, name) for name in _FACTS}
    known = connection.execute(_EPISODE, {"id": facts["id"]}).mappings().one_or_none()
    if known is None:
        if connection.scalar(_SPEC_KNOWN, {"hash": segment.episode.spec_hash}) is None:
            raise unknown_spec(segment.episode.spec_hash)
        values = {**_NEW_EPISODE, **facts}
        return {**values, "number": inserted_key(connection.execute(_INSERT_EPISODE, values))}
    for name, value in facts.items():
        if known[name] != value:
            raise InvalidDataError(
                f"segment {segment.id}: its episode is known with {name} {known[name]!r}, not {value!r}."
            )
    return known


def _count_new_ticks(connection: sa.Connection, episode: sa.RowMapping | dict[str, Any], segment: Segment) -> int:
    """How many ticks of `segment` no other segment of the episode has brought yet."""
    first, end = segment.first_tick, segment.first_tick + segment.steps
    if first >= episode["end_tick"]:
        return segment.steps
    new, at = segment.steps, first
    for begin, count in connection.execute(_OVERLAPPING, {"episode": episode["number"], "first": first, "end": end}):
        until = min(begin + count, end)
        new -= max(0, until - max(begin, at))
        at = max(at, until)
    return new


def _new_interventions(connection: sa.Connection, episode: int, index: int, control: Control) -> int:
    """How many more interventions the episode has with this segment. Segments may come in any order."""
    if control.entry == NOBODY:
        return 0
    here = {"episode": episode, "index": index}
    leave = entry = NOBODY
    for other, entered, left in connection.execute(_AROUND, here):
        leave, entry = (left, entry) if other < index else (leave, entered)
    seams = is_takeover(leave, control.entry) + is_takeover(control.exit, entry) - is_takeover(leave, entry)
    return control.takeovers + seams


def inserted_key(result: sa.CursorResult[Any]) -> int:
    """The number that the database gave to the row of an INSERT."""
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])
