"""A finished evaluation job as a measurement: the same seeds of every task, each once, on real robots of the fleet."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_learner.buffer.ledger.rows import JobEpisodeRow
from hal.scheduler import HELD_OUT_SEEDS
from wire.messages.fleet import JobRequest
from wire.messages.gateway import Evaluation

LABEL = "canary"


def measurement(
    request: JobRequest, episodes: Sequence[JobEpisodeRow], started_ns: int, duration_s: float
) -> Evaluation | None:
    """What the `episodes` of an evaluation job come to, None when there is none.

    `started_ns` tells two measurements of one version apart: the same job must give the same one each time.
    """
    first: dict[tuple[str, int], bool] = {}
    for episode in episodes:
        first.setdefault((episode.task, episode.seed), episode.outcome == "success")
    by_task: dict[str, list[bool]] = {task: [] for task in request.tasks}
    for (task, _), succeeded in first.items():
        by_task.setdefault(task, []).append(succeeded)
    success = {task: sum(found) / len(found) for task, found in by_task.items() if found}
    if not success:
        return None
    return Evaluation(
        number=request.version,
        success=success,
        episodes=request.episodes,
        first_seed=request.first_seed or HELD_OUT_SEEDS.start,
        label=LABEL,
        started_ns=started_ns,
        duration_s=duration_s,
    )
