"""Forgetting whole episodes, so that the buffer stays in bounds."""

from __future__ import annotations

import contextlib

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import EpisodeRow

_STILL_RUNS_NS = 3600 * 10**9
"""An unfinished episode that got a segment within this time is never forgotten."""


class Retention(msgspec.Struct, frozen=True):
    """Which episodes are forgotten. What nothing below speaks of stays."""

    max_bytes: float | None = None
    """of all segments as they came; the oldest episodes go until the rest is no more"""
    max_age_s: float | None = None
    """since an episode's newest segment was committed"""
    drop_outcomes: tuple[str, ...] = ()
    """episodes that ended so go at once"""
    keep_outcomes: tuple[str, ...] = ()
    """episodes that ended so stay, whatever their age and the size of all"""
    keep_human: bool = True
    """episodes in which a person or a script acted stay"""
    keep_demonstrations: bool = True


class Pruned(msgspec.Struct, frozen=True):
    """What was forgotten, or would be."""

    episodes: int
    segments: int
    bytes: int


def prune(ledger: Ledger, retention: Retention, now_ns: int, *, dry_run: bool = False, wait_s: float = 30) -> Pruned:
    """Forget whole episodes, the oldest first; with `dry_run` only say how many. Room comes back with `compact`.

    `now_ns`: nanoseconds since 1970. Raises `StorageError` when somebody else is at work for longer than `wait_s`.
    """
    with contextlib.nullcontext() if dry_run else ledger.exclusive(wait_s=wait_s):
        chosen, segments, size = _choose(ledger, retention, now_ns)
        if chosen and not dry_run:
            segments, size = ledger.prune(chosen, now_ns)
    return Pruned(len(chosen), segments, size)


def _choose(ledger: Ledger, retention: Retention, now_ns: int) -> tuple[list[str], int, int]:
    """Ids of the episodes to forget, the oldest first, and their segments and bytes."""
    there = [row for row in reversed(ledger.episodes(limit=2**31 - 1)) if not row.pruned_ns and row.segments]
    total = sum(row.bytes for row in there)
    chosen, segments, size = [], 0, 0
    for goes_anyway in (True, False):
        for row in there:
            if _protected(row, retention, now_ns) or goes_anyway != _goes(row, retention, now_ns):
                continue
            if goes_anyway or (retention.max_bytes is not None and total - size > retention.max_bytes):
                chosen.append(row.id)
                segments += row.segments
                size += row.bytes
    return chosen, segments, size


def _goes(row: EpisodeRow, retention: Retention, now_ns: int) -> bool:
    """Whether it is forgotten whatever the size of all."""
    old = retention.max_age_s is not None and now_ns - row.wall_ns > retention.max_age_s * 1e9
    return old or bool(row.outcome and row.outcome in retention.drop_outcomes)


def _protected(row: EpisodeRow, retention: Retention, now_ns: int) -> bool:
    return (
        (retention.keep_human and row.human_steps > 0)
        or (retention.keep_demonstrations and row.source == "demonstration")
        or (row.outcome != "" and row.outcome in retention.keep_outcomes)
        or (row.outcome == "" and 0 <= now_ns - row.wall_ns <= _STILL_RUNS_NS)
    )
