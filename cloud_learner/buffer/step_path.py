"""The way of one stored step, from what the robot saw to the version that learned from it and acts: when, and where.

Nothing is measured for it: all times stand in segments and in the ledger. They are of the clocks of those who noted
them; the measured offsets bring them to the gateway's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import AppliedRow, EpisodeRow, SegmentRow
from cloud_learner.buffer.store.store import SegmentStore
from wire.errors import ConfigError, suggest
from wire.messages.gateway import ACTORS, Segment
from wire.types import Actor, Role

_EPISODES = 200
"""newest episodes among which one that has come all the way is looked for"""
_AHEAD = 50
"""segments of the robot in which the new version's first step is looked for"""


class PathStage(msgspec.Struct, frozen=True):
    """A part of the way. Times are of the gateway's clock."""

    name: str
    place: str
    """the process that it is spent in, or waiting for"""
    began_ns: int
    ended_ns: int
    facts: Mapping[str, int | str] = {}


class StepPath(msgspec.Struct, frozen=True):
    """How far a step has come."""

    robot: str
    episode: str
    segment: str
    tick: int
    task: str
    actor: str
    stages: tuple[PathStage, ...]
    unix_offset_ns: int
    """nanoseconds since 1970 - gateway's clock"""
    ended: str
    """why it goes no further, '' when it came all the way"""


def follow_step(
    ledger: Ledger, store: SegmentStore, robot: str, episode: str = "", tick: int | None = None
) -> StepPath:
    """The way of the step of that `tick` of an `episode`: by default the first in which anybody acted, and of the
    newest episode of the robot from which a version learned that acts on it, or else of its newest.

    Raises `ConfigError` for what is not stored, `StorageError` when it cannot be read now.
    """
    found = _episode(ledger, robot, episode)
    row, segment, at = _step(ledger, store, found, tick)
    offset_ns = ledger.clock_offset_at(robot, row.received_ns)
    stages = [
        *_on_robot(segment, store.spec(segment.episode.spec_hash).period_ns, at, offset_ns),
        PathStage("send", "uplink", segment.closed_ns + offset_ns, row.received_ns, {"bytes": row.bytes}),
        PathStage("commit", "gateway", row.received_ns, row.committed_ns, {"row": row.row}),
    ]
    learned, ended = _learned(ledger, store, found, row)
    return StepPath(
        robot=robot,
        episode=found.id,
        segment=row.id,
        tick=segment.first_tick + at,
        task=found.task,
        actor=ACTORS[segment.actor[at]],
        stages=(*stages, *learned),
        unix_offset_ns=found.wall_ns - found.committed_ns,
        ended=ended,
    )


def _episode(ledger: Ledger, robot: str, wanted: str) -> EpisodeRow:
    newest = ledger.episodes(robot, _EPISODES)
    if wanted:
        row = ledger.episode(wanted)
        if row is None or row.robot != robot or row.pruned_ns:
            raise ConfigError(
                f"episode '{wanted}' of robot '{robot}' is not stored.{suggest(wanted, [one.id for one in newest])} "
                "`vla-fleet buffer tail` names the newest."
            )
        return row
    if not newest:
        names = {row.name for row in ledger.robots() if row.spec_hash is not None}
        raise ConfigError(f"nothing of robot '{robot}' is stored.{suggest(robot, names)}")
    applied = _applied(ledger, robot)
    whole = (one for one in newest if _acting(applied, ledger.versions_of_episode(one.id)) is not None)
    return next(whole, newest[0])


def _applied(ledger: Ledger, robot: str) -> list[AppliedRow]:
    return [row for row in ledger.applied() if row.robot == robot]


def _acting(applied: Iterable[AppliedRow], learned: Collection[int]) -> AppliedRow | None:
    """When the first of some versions acted on the robot."""
    return min((row for row in applied if row.version in learned), key=lambda row: row.version, default=None)


def _step(
    ledger: Ledger, store: SegmentStore, episode: EpisodeRow, tick: int | None
) -> tuple[SegmentRow, Segment, int]:
    """The segment, and which of its steps it is."""
    for row in ledger.segments_of(episode.id):
        if tick is not None and not row.first_tick <= tick < row.first_tick + row.steps:
            continue
        segment = _read(store, row)
        if tick is not None:
            return row, segment, tick - segment.first_tick
        if len(acted := np.flatnonzero(segment.actor != ACTORS.index(Actor.hold))):
            return row, segment, int(acted[0])
    which = f"has no step {tick}" if tick is not None else "has no step in which anybody acted"
    raise ConfigError(f"episode '{episode.id}' {which}; it has {episode.steps} steps. Choose another with --tick.")


def _read(store: SegmentStore, row: SegmentRow) -> Segment:
    found = store.read([row.row])
    if row.row not in found.segments:
        why = found.damaged.get(row.row, "it lies in the journal of another machine: run this there.")
        raise ConfigError(f"segment '{row.id}' cannot be read: {why}")
    return found.segments[row.row]


def _on_robot(segment: Segment, period_ns: int, at: int, offset_ns: int) -> Iterator[PathStage]:
    """What was seen and decided for a step, until its segment was whole."""
    stepped_ns = int(segment.times_ns[at])
    seen = {camera: int(times[at]) for camera, times in segment.frame_times_ns.items()}
    if seen:
        ages = {f"{camera}_age_ns": stepped_ns - time_ns for camera, time_ns in seen.items()}
        yield PathStage("capture", "driver", min(seen.values()) + offset_ns, stepped_ns + offset_ns, ages)
    chunk_tick, delay = int(segment.chunk_tick[at]), int(segment.delay_ticks[at])
    chunk = next((one for one in segment.chunks if one.first_tick == chunk_tick), None)
    if chunk is not None and delay >= 0:
        began_ns = chunk.observed_ns + offset_ns
        facts = {"chunk_tick": chunk_tick, "delay_ticks": delay, "version": chunk.version}
        yield PathStage("infer", "inference", began_ns, began_ns + delay * period_ns, facts)
    acted_ns = stepped_ns + period_ns
    facts = {"tick": segment.first_tick + at, "version": int(segment.version[at])}
    yield PathStage("act", "control", stepped_ns + offset_ns, acted_ns + offset_ns, facts)
    # the last step of a segment closes it
    closed_ns = max(segment.closed_ns, stepped_ns)
    yield PathStage("record", "uplink", stepped_ns + offset_ns, closed_ns + offset_ns, {"steps": segment.steps})


def _learned(
    ledger: Ledger, store: SegmentStore, episode: EpisodeRow, segment: SegmentRow
) -> tuple[list[PathStage], str]:
    """From the commit to the robot that acts by what was learned, and why it ends before that."""
    rows = (ledger.version(number) for number in ledger.versions_of_episode(episode.id))
    # an earlier one learned from what had come of the episode before this segment
    learned = [row.version for row in rows if row is not None and row.version.newest_segment >= segment.row]
    if not learned:
        return [], "no version has learned from its episode yet"
    version = learned[0]
    # a version does not say who made it: a trainer of another name is taken to have the gateway's clock
    created_ns = version.created_ns + ledger.clock_offset_at(Role.trainer, segment.committed_ns)
    if created_ns < segment.committed_ns:
        return [], "a clock has started over since it was stored"
    facts = {"version": version.number, "parent": version.parent, "gradient_steps": version.gradient_steps}
    stages = [PathStage("train", "trainer", segment.committed_ns, created_ns, facts)]
    acting = _acting(_applied(ledger, episode.robot), [one.number for one in learned])
    if acting is None:
        return stages, f"no version that learned from its episode has acted on '{episode.robot}' yet"
    stages += [
        PathStage("publish", "gateway", created_ns, acting.announced_ns, {"version": acting.version}),
        PathStage("fetch", "inference", acting.announced_ns, acting.applied_ns, {"version": acting.version}),
    ]
    acted = _first_step(ledger, store, episode.robot, acting, segment.row)
    if acted is None:
        return stages, f"no stored step of '{episode.robot}' was made by version {acting.version} yet"
    return [*stages, PathStage("act again", "control", acting.applied_ns, acted[0], acted[1])], ""


def _first_step(
    ledger: Ledger, store: SegmentStore, robot: str, acting: AppliedRow, after: int
) -> tuple[int, dict[str, int | str]] | None:
    """When the robot first acted by a version, and in which step."""
    looked = 0
    while looked < _AHEAD and (rows := ledger.segments_after(after)):
        after = rows[-1].row
        for row in rows:
            offset_ns = ledger.clock_offset_at(robot, row.received_ns) if row.robot == robot else 0
            if row.robot != robot or row.damaged or row.closed_ns + offset_ns < acting.applied_ns:
                continue
            looked += 1
            segment = _read(store, row)
            policy = segment.actor == ACTORS.index(Actor.policy)
            made = np.flatnonzero(policy & (segment.version >= acting.version))
            if len(made):
                at = int(made[0])
                facts: dict[str, int | str] = {"episode": row.episode, "tick": segment.first_tick + at}
                facts["version"] = int(segment.version[at])
                return int(segment.times_ns[at]) + offset_ns, facts
    return None
