"""What the buffer holds, for people and for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cloud_learner.buffer.files import room_warning
from cloud_learner.buffer.ledger.rows import LagRow, PartTotals, SegmentRow
from cloud_learner.buffer.store.store import SegmentStore


class Share(msgspec.Struct, frozen=True):
    """Episodes of one task, source and outcome."""

    task: str
    source: str
    outcome: str
    """'' while the episode is unfinished"""
    episodes: int
    steps: int
    human_steps: int
    interventions: int


class Stats(msgspec.Struct, frozen=True):
    """The whole buffer."""

    shares: tuple[Share, ...]
    robots: int
    episodes: int
    segments: int
    steps: int
    human_steps: int
    parts: PartTotals
    """of the human steps of those that practise"""
    pruned_episodes: int
    damaged_segments: int
    journal_segments: int
    """not in a shard yet"""
    journal_bytes: int
    shards: int
    shard_bytes: int
    live_share: float
    """part of the shards' records that is not forgotten"""
    bytes_per_step: float
    cache_bytes: int
    """what is kept of an object store on this machine's disk"""
    cache_cap_bytes: int
    """as much may be; 0: nothing is kept"""
    versions: int
    newest_version: int
    warning: str
    """of a disk that is nearly full"""


def collect(store: SegmentStore) -> Stats:
    """Count everything; a few aggregates over the ledger."""
    ledger = store.ledger
    shares = tuple(Share(*row) for row in ledger.shares())
    totals, shards, newest = ledger.totals(), ledger.shards(), ledger.newest_version()
    waiting = ledger.in_journal()
    sealed = [shard for shard in shards if shard.state == "sealed"]
    written = sum(shard.record_bytes for shard in sealed)
    stored = sum(shard.bytes for shard in sealed)
    live_bytes = sum(shard.bytes * shard.live_bytes / max(1, shard.record_bytes) for shard in sealed)
    cache = store.objects.cache
    steps_stored = sum(shard.live_steps for shard in sealed) + waiting.steps
    return Stats(
        shares=shares,
        robots=len(ledger.robot_totals()),
        episodes=sum(share.episodes for share in shares),
        segments=totals.segments,
        steps=sum(share.steps for share in shares),
        human_steps=sum(share.human_steps for share in shares),
        parts=ledger.parts(),
        pruned_episodes=ledger.pruned_episodes(),
        damaged_segments=ledger.damaged_segments(),
        journal_segments=waiting.segments,
        journal_bytes=waiting.bytes,
        shards=len(sealed),
        shard_bytes=stored,
        live_share=sum(shard.live_bytes for shard in sealed) / written if written else 1.0,
        bytes_per_step=(live_bytes + waiting.bytes) / steps_stored if steps_stored else 0.0,
        cache_bytes=cache.used_bytes if cache else 0,
        cache_cap_bytes=cache.cap_bytes if cache else 0,
        versions=len(ledger.versions()),
        newest_version=newest.version.number if newest else 0,
        warning=room_warning(store.journal.directory.parent),
    )


def render(stats: Stats) -> str:
    """A table of a few lines."""
    lines = [f"{'task':24} {'source':14} {'outcome':10} {'episodes':>9} {'steps':>11} {'human':>8} {'take-overs':>10}"]
    lines += [
        f"{share.task[:24]:24} {share.source:14} {share.outcome or 'open':10} {share.episodes:9,} {share.steps:11,} "
        f"{share.human_steps / max(1, share.steps):8.1%} {share.interventions:10,}"
        for share in stats.shares
    ]
    lines += [
        "",
        f"{stats.episodes:,} episodes, {stats.steps:,} steps of {stats.robots} robots; {stats.pruned_episodes:,} "
        f"episodes were forgotten, {stats.damaged_segments:,} segments are damaged.",
        f"In place of the policy: {stats.parts.recoveries:,} recoveries of {stats.parts.recovery_steps:,} steps, and "
        f"{stats.parts.correction_steps:,} steps of corrections.",
        f"{stats.shards:,} shards of {stats.shard_bytes / 1e6:,.1f} MB ({stats.live_share:.0%} live), journal "
        f"{stats.journal_bytes / 1e6:,.1f} MB in {stats.journal_segments:,} segments; "
        f"{stats.bytes_per_step:,.0f} bytes a step.",
        f"{stats.versions:,} policy versions, the newest is {stats.newest_version}.",
    ]
    if stats.cache_cap_bytes:
        used, cap = stats.cache_bytes / 1e6, stats.cache_cap_bytes / 1e6
        lines.append(f"{used:,.1f} MB of the object store are kept on this disk, of {cap:,.0f} MB that may be.")
    if stats.warning:
        lines.append(f"warning: {stats.warning}")
    return "\n".join(lines)


class LagStats(msgspec.Struct, frozen=True):
    """With what lag the rollouts of one robot arrived, or those of all."""

    robot: str
    """'' for all"""
    rollout_steps: int
    """what the policy did by itself; shares and percentiles are of these"""
    p50: int
    """versions"""
    p99: int
    largest: int
    stale_steps: int | None
    """of a larger lag than was asked about; None: nothing was"""


def lag_stats(rows: Sequence[LagRow], max_lag: int | None = None) -> tuple[LagStats, ...]:
    """By robot, the fleet as a whole last; empty without a rollout."""
    total: Counter[int] = Counter()
    for row in rows:
        total.update(row.steps_by_lag)
    parts = [(row.robot, row.steps_by_lag) for row in rows if row.rollout_steps]
    return tuple(_lag_stats(robot, counts, max_lag) for robot, counts in (*parts, ("", total)) if counts)


def _lag_stats(robot: str, counts: Mapping[int, int], max_lag: int | None) -> LagStats:
    lags = np.array(sorted(counts), np.int64)
    steps = np.cumsum([counts[lag] for lag in lags.tolist()])
    p50, p99 = (int(lags[np.searchsorted(steps, share * steps[-1])]) for share in (0.5, 0.99))
    stale = None if max_lag is None else sum(count for lag, count in counts.items() if lag > max_lag)
    return LagStats(robot, int(steps[-1]), p50, p99, int(lags[-1]), stale)


def render_lags(stats: Sequence[LagStats], max_lag: int | None = None) -> str:
    """A table of a line a robot."""
    if not stats:
        return "no rollout is stored: nobody's policy has acted by itself."
    asked = f" {f'above {max_lag}':>16}" if max_lag is not None else ""
    lines = [f"{'robot':24} {'rollout steps':>13} {'lag p50':>8} {'p99':>5} {'largest':>8}{asked}"]
    for one in stats:
        stale = (
            f" {one.stale_steps:9,} {one.stale_steps / one.rollout_steps:6.1%}" if one.stale_steps is not None else ""
        )
        lines.append(
            f"{one.robot[:24] or 'all':24} {one.rollout_steps:13,} {one.p50:8,} {one.p99:5,} {one.largest:8,}{stale}"
        )
    return "\n".join(lines)


def tail_line(row: SegmentRow) -> str:
    """One line for one segment."""
    ticks = f"{row.first_tick}..{row.first_tick + row.steps}"
    latency_ms = (row.committed_ns - row.received_ns) / 1e6
    return (
        f"{row.row:8} {row.robot:14} {row.task:20} {row.source:14} {row.id:40} ticks {ticks:>11} "
        f"human {row.human_steps:4} lag {row.lag:3} {row.bytes / 1e3:8.1f} kB {latency_ms:6.1f} ms"
    )
