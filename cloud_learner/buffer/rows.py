"""What the ledger answers with: one frozen struct per kind of row. Columns are explained in `tables.py`."""

from __future__ import annotations

import msgspec

from wire.types import PolicyVersion


class RobotRow(msgspec.Struct, frozen=True):
    """A robot as the gateway knows it."""

    name: str
    spec_hash: str | None
    """None for a process that drives no robot, such as the trainer"""
    clock: str
    clock_offset_ns: int
    """gateway time minus robot time"""
    first_seen_ns: int
    last_seen_ns: int


class EpisodeRow(msgspec.Struct, frozen=True):
    """An episode with what has been committed of it so far."""

    id: str
    robot: str
    spec_hash: str
    task: str
    seed: int
    source: str
    started_ns: int
    outcome: str
    """'' until its last segment is committed"""
    steps: int
    human_steps: int
    interventions: int


class Stored(msgspec.Struct, frozen=True):
    """Where the file of a segment lies."""

    path: str
    """relative to the segments directory"""
    bytes: int
    sha256: str


class SegmentRow(msgspec.Struct, frozen=True):
    """A committed segment, with what a reader must know of its episode to decide whether to load it."""

    row: int
    id: str
    episode: str
    index: int
    first_tick: int
    steps: int
    human_steps: int
    path: str
    """relative to the segments directory"""
    bytes: int
    sha256: str
    closed_ns: int
    received_ns: int
    committed_ns: int
    robot: str
    spec_hash: str
    task: str
    source: str


class VersionRow(msgspec.Struct, frozen=True):
    """A policy version whose weights are on disk."""

    version: PolicyVersion
    path: str
    """file name in the weights directory"""


class EvaluationRow(msgspec.Struct, frozen=True):
    """Measured success of a version on held-out seeds."""

    number: int
    label: str
    first_seed: int
    episodes: int
    """per task"""
    success: dict[str, float]
    """by task name, 0 to 1"""
    started_ns: int
    duration_s: float
    wall_ns: int
    """nanoseconds since 1970 when the gateway received it"""


class AppliedRow(msgspec.Struct, frozen=True):
    """When a robot first acted on a version, both times in the gateway's clock."""

    robot: str
    version: int
    announced_ns: int
    applied_ns: int


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened to a robot and that a person may ask about later."""

    id: int
    time_ns: int
    robot: str
    kind: str
    detail: str


class Totals(msgspec.Struct, frozen=True):
    """What is stored, of all robots or of one."""

    segments: int = 0
    episodes: int = 0
    steps: int = 0
    """sum over segments, duplicated ticks included"""
    human_steps: int = 0
    interventions: int = 0
    bytes: int = 0
    newest_row: int = 0
    duplicated_steps: int = 0
    """ticks of an episode that more than one segment brought: 0 unless something is broken"""
    missing_steps: int = 0
    """ticks below the newest one of their episode that no segment brought yet"""
