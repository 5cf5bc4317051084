"""Policy versions as people see them: what the rollout knows of each, and what its robots do."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import ShadowTally
from wire.messages.fleet import ShadowStatus, VersionStatus
from wire.types import PolicyVersion

_SHOWN = 50


def version_statuses(
    controller: RolloutController, versions: Mapping[int, PolicyVersion], acting: Mapping[str, int]
) -> tuple[VersionStatus, ...]:
    """The newest versions, and all that are needed, oldest first; `acting`: by robot, what it runs."""
    records = {record.number: record for record in controller.versions()}
    runs: dict[int, list[str]] = {}
    for robot, number in sorted(acting.items()):
        runs.setdefault(number, []).append(robot)
    pins: dict[int, list[str]] = {}
    for robot, number in sorted(controller.pins.items()):
        pins.setdefault(number, []).append(robot or "all")
    shown = sorted({*sorted(records)[-_SHOWN:], *controller.needed} & versions.keys())
    return tuple(
        VersionStatus(
            version=versions[number],
            state=(record := records[number]).state,
            current=number == controller.current,
            reference=number == controller.reference,
            robots=tuple(runs.get(number, ())),
            pinned=tuple(pins.get(number, ())),
            episodes=record.tally.judged,
            successes=record.tally.succeeded,
            unjudged=record.tally.episodes - record.tally.judged,
            note=record.reason,
            frozen=controller.frozen,
            shadow=_shadow(record.shadow, controller.shadow_robots() if number == controller.shadow else ()),
        )
        for number in shown
    )


def _shadow(tally: ShadowTally | None, robots: Collection[str]) -> ShadowStatus | None:
    if tally is None:
        return None
    found = tally.difference
    return ShadowStatus(
        robots=tuple(sorted(robots)),
        chunks=found.chunks,
        mean=found.mean,
        p95=found.p95,
        most=max(found.largest, default=0.0),
        largest=dict(tally.largest),
        faults=tally.faults,
        problems=dict(tally.problems),
    )
