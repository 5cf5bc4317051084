"""The report of a run: every figure is computed from the ledger, the stored segments and the edges' spools."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import AppliedRow, EpisodeRow, EvaluationRow, VersionRow
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.operator.view_models import is_telling
from fleet.config.data_directory import DataDirectory
from fleet.config.machine import describe_machine
from fleet.config.recipe import Recipe
from fleet.evaluation.statistics import wilson
from fleet.launch.process_specs import AFTER, BEFORE, minute_label
from robot_edge.runtime.rejection_log import read_refusal
from wire.errors import storage_errors
from wire.messages.gateway import ACTORS
from wire.types import Role

QUARTERS = 4
_SEGMENTS_AT_ONCE, _ALL = 64, 1_000_000_000
NOWHERE: Mapping[str, int] = {}


class RunCounters:
    """Ticks of the robots' control processes: each counts from zero, so the newest count of each is kept."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], dict[str, Any]] = {}

    def update(self, snapshot: dict[str, Any]) -> None:
        """Take in what the page shows."""
        for robot in snapshot["robots"]:
            if robot["pids"]:
                self._newest[robot["name"], robot["pids"][0]] = robot

    def totals(self) -> dict[str, int]:
        """`starved_ticks`: ticks a robot held because inference was late."""
        names = ("ticks", "missed_ticks", "starved_ticks")
        return {name: sum(robot[name] for robot in self._newest.values()) for name in names}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write it to `path`, whole. Raises `StorageError`."""
    temporary = path.with_suffix(".tmp")
    with storage_errors("writing the report", path):
        try:
            temporary.write_text(json.dumps(report, indent=2) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def make_report(
    data: DataDirectory,
    recipe: Recipe,
    counters: RunCounters,
    duration_s: float,
    elsewhere: Mapping[str, int] = NOWHERE,
    measured_at: Iterable[float] = (),
) -> dict[str, Any]:
    """Everything that was measured on the fleet in `data`, over all its runs but `ticks` and `duration_s`.

    `measured_at`: the minutes whose newest version was measured too.

    `elsewhere`: steps recorded by robots whose spools are on other machines. A robot that cannot be asked what it
    recorded is named in `spools_not_seen` and counts neither as lost nor as recorded.
    """
    with data.open_buffer() as (ledger, store):
        totals, by_robot = ledger.totals(), ledger.robot_totals()
        versions, evaluations = ledger.versions(), ledger.evaluations()
        asked = {name: elsewhere[name] if name in elsewhere else data.steps_recorded(name) for name in by_robot}
        recorded = {name: steps for name, steps in asked.items() if steps is not None}
        segments = _segments(ledger)
        online = [row for row in segments if row.source == "online"]
        offsets = {robot.name: robot.clock_offset_ns for robot in ledger.robots()}
        ingest_s = [(row.committed_ns - row.closed_ns - offsets.get(row.robot, 0)) / 1e9 for row in online]
        applied = ledger.applied()
        start_ns = versions[0].version.created_ns if versions else 0
        return {
            "recipe": recipe.name,
            "machine": describe_machine(),
            "duration_s": round(duration_s, 1),
            "success_before": _mean(_newest(evaluations, BEFORE)),
            "success_after": _mean(_newest(evaluations, AFTER)),
            "success_before_per_task": _tasks(_newest(evaluations, BEFORE)),
            "success_after_per_task": _tasks(_newest(evaluations, AFTER)),
            "success_during": [
                {"minute": minute, "version": row.number, "mean": _mean(row), "success": row.success}
                for minute in measured_at
                if (row := _newest(evaluations, minute_label(minute))) is not None
            ],
            "evaluation_episodes_per_task": recipe.evaluator.final_episodes,
            "success_curve": [
                {
                    "time_s": round((row.started_ns - start_ns) / 1e9, 1),
                    "version": row.number,
                    "mean": _mean(row),
                    "success": row.success,
                    "episodes_per_task": row.episodes,
                }
                for row in evaluations
                if row.label == "cadence"
            ],
            "retention": retention(row for row in evaluations if row.label == "cadence"),
            "episodes": len({row.episode for row in online}),
            "quarters": quarters(row for row in ledger.episodes(limit=_ALL) if row.source == "online"),
            "demonstrations": len({row.episode for row in segments if row.source == "demonstration"}),
            "members": _members(ledger, recipe, segments),
            "interventions": totals.interventions,
            "human_steps": sum(row.human_steps for row in online),
            **msgspec.structs.asdict(ledger.parts()),
            "versions_published": len(versions),
            "versions_refused": _refused(ledger),
            "gradient_steps": versions[-1].version.gradient_steps if versions else 0,
            "steps_recorded": sum(recorded.values()),
            "steps_stored": totals.steps - totals.duplicated_steps,
            "steps_lost": sum(max(0, steps - by_robot[name].steps) for name, steps in recorded.items()),
            "spools_not_seen": sorted(by_robot.keys() - recorded.keys()),
            "steps_duplicated": totals.duplicated_steps,
            "ingest_latency_s": _quantiles(ingest_s),
            "publish_to_applied_s": _quantiles([(row.applied_ns - row.announced_ns) / 1e9 for row in applied]),
            "trained_to_applied_s": _quantiles(_trained_to_applied_s(ledger, versions, applied)),
            "version_lag": _version_lag(ledger, store, online, offsets),
            **counters.totals(),
        }


def _segments(ledger: Ledger) -> list:
    rows: list = []
    while found := ledger.segments_after(rows[-1].row if rows else 0):
        rows += found
    return rows


def _members(ledger: Ledger, recipe: Recipe, segments: list) -> dict[str, dict[str, Any]]:
    """By member of a job for robots of several shapes what those recorded; empty in a job of one."""
    if not recipe.members:
        return {}
    kinds = {spec_hash: ledger.spec(spec_hash).data_hash for spec_hash in {row.spec_hash for row in segments}}
    found = {}
    for name, one in recipe.members.items():
        rows = [row for row in segments if kinds[row.spec_hash] == one.spec.data_hash]
        online = [row for row in rows if row.source == "online"]
        found[name] = {
            "robots": sorted({row.robot for row in online}),
            "episodes": len({row.episode for row in online}),
            "demonstrations": len({row.episode for row in rows if row.source == "demonstration"}),
            "steps": sum(row.steps for row in rows),
        }
    return found


def _trained_to_applied_s(ledger: Ledger, versions: tuple[VersionRow, ...], applied: Iterable[AppliedRow]) -> list:
    """From when the trainer began to make a delta of what it had trained, by the gateway's clock."""
    created_ns = {row.version.number: row.version.created_ns for row in versions}
    return [
        (row.applied_ns - created_ns[row.version] - ledger.clock_offset_at(Role.trainer, row.announced_ns)) / 1e9
        for row in applied
        if row.version in created_ns
    ]


def _refused(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """By robot: how many versions it did not take, and why not the last of them."""
    found: dict[str, dict[int, str]] = {}
    after = 0
    while events := ledger.events(after):
        after = events[-1].id
        for event in events:
            refusal = read_refusal(event.detail) if event.kind == "refused" else None
            if refusal is not None:
                found.setdefault(event.robot, {}).pop(refusal[0], None)
                found[event.robot][refusal[0]] = refusal[1]
    return {robot: {"versions": len(why), "reason": [*why.values()][-1]} for robot, why in sorted(found.items())}


def _version_lag(ledger: Ledger, store: SegmentStore, online: list, offsets: dict[str, int]) -> dict[str, int]:
    """How many versions behind the newest published one the policy's steps were: steps by lag."""
    created_ns = np.array([row.version.created_ns for row in ledger.versions()], np.int64)
    numbers = np.array([row.version.number for row in ledger.versions()], np.int64)
    if not len(numbers):
        return {}
    counts = Counter[int]()
    policy = ACTORS.index("policy")
    robots = {row.row: row.robot for row in online}
    rows = list(robots)
    for some in (rows[n : n + _SEGMENTS_AT_ONCE] for n in range(0, len(rows), _SEGMENTS_AT_ONCE)):
        for number, segment in store.read(some).segments.items():
            acted = segment.actor == policy
            times_ns = segment.times_ns[acted] + offsets.get(robots[number], 0)
            newest = np.searchsorted(created_ns, times_ns, side="right") - 1
            counts.update((numbers[np.maximum(newest, 0)] - segment.version[acted]).tolist())
    return {str(lag): counts[lag] for lag in sorted(counts)}


def _newest(evaluations: tuple[EvaluationRow, ...], label: str) -> EvaluationRow | None:
    return next((row for row in reversed(evaluations) if row.label == label), None)


def _mean(row: EvaluationRow | None) -> float | None:
    return None if row is None else round(float(np.mean(list(row.success.values()))), 4)


def _tasks(row: EvaluationRow | None) -> dict[str, float]:
    return {} if row is None else dict(row.success)


def _quantiles(values: list[float]) -> dict[str, float | int | None]:
    if not values:
        return {"p50": None, "p99": None, "count": 0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "count": len(values)}


def retention(measured: Iterable[EvaluationRow]) -> dict[str, dict[str, Any]]:
    """By task, of the points of the curve in their order: its `best` success and in which version that was first, its
    `newest`, and whether it is `lost`: their 95 % intervals (Wilson) do not overlap any more."""
    points: dict[str, list[tuple[float, int, int]]] = {}
    for row in measured:
        for task, rate in row.success.items():
            points.setdefault(task, []).append((rate, row.number, row.episodes))
    found = {}
    for task, every in sorted(points.items()):
        best, newest = max(every, key=lambda point: point[0]), every[-1]
        low, high = (wilson(round(rate * episodes), episodes) for rate, _, episodes in (best, newest))
        versions = {"best_version": best[1], "newest_version": newest[1]}
        found[task] = {"best": best[0], "newest": newest[0], **versions, "lost": high[1] < low[0]}
    return found


# --- how much help the robots needed ----------------------------------------------------------------------------------


def quarters(episodes: Iterable[EpisodeRow]) -> list[dict[str, Any]]:
    """One summary for each quarter of the time from the first to the last end of an episode in `episodes`.

    `episodes` and `steps`, `interventions_per_episode`, `human_share` of the steps, and `unaided_success`: the share
    of episodes that say how the policy did (`is_telling`) that succeeded with nobody's help. An episode belongs to the
    quarter it ended in; shares of nothing are None. Empty without an episode that ended.
    """
    ended = sorted((row for row in episodes if row.outcome), key=lambda row: row.wall_ns)
    if not ended:
        return []
    first_ns, took_ns = ended[0].wall_ns, max(1, ended[-1].wall_ns - ended[0].wall_ns)
    parts: list[list[EpisodeRow]] = [[] for _ in range(QUARTERS)]
    for row in ended:
        parts[min(QUARTERS - 1, QUARTERS * (row.wall_ns - first_ns) // took_ns)].append(row)
    return [_summary(part) for part in parts]


def _summary(rows: list[EpisodeRow]) -> dict[str, Any]:
    steps = sum(row.steps for row in rows)
    telling = [row for row in rows if is_telling(row.outcome, row.human_steps > 0)]
    alone = sum(row.outcome == "success" and not row.human_steps for row in telling)
    return {
        "episodes": len(rows),
        "steps": steps,
        "interventions_per_episode": _share(sum(row.interventions for row in rows), len(rows)),
        "human_share": _share(sum(row.human_steps for row in rows), steps),
        "unaided_success": _share(alone, len(telling)),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
