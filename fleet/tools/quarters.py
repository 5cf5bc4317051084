"""How much help the robots needed, quarter by quarter of the time they worked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cloud_learner.buffer.ledger.rows import EpisodeRow
from cloud_learner.operator.view_models import FINISHED

QUARTERS = 4


def quarters(episodes: Iterable[EpisodeRow]) -> list[dict[str, Any]]:
    """One summary for each quarter of the time from the first to the last end of an episode in `episodes`.

    `episodes` and `steps`, `interventions_per_episode`, `human_share` of the steps, and `unaided_success`: the share
    of finished episodes that succeeded with nobody's help. An episode belongs to the quarter it ended in; shares of
    nothing are None. Empty without an episode that ended.
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
    steps, finished = sum(row.steps for row in rows), [row for row in rows if row.outcome in FINISHED]
    alone = sum(row.outcome == "success" and not row.human_steps for row in finished)
    return {
        "episodes": len(rows),
        "steps": steps,
        "interventions_per_episode": _share(sum(row.interventions for row in rows), len(rows)),
        "human_share": _share(sum(row.human_steps for row in rows), steps),
        "unaided_success": _share(alone, len(finished)),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
