"""What arrived too far behind is in no window, and a batch says how far behind its steps arrived."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.windows import Batch
from cloud_learner.buffer.sampling.target import StalenessBound, imitation, uniform
from tests.cloud_learner.buffer.loading.memory_buffer import POLICY, MemoryBuffer, record, robot
from tests.cloud_learner.buffer.loading.test_dataset import config, copied, same

SPEC = robot([(16, 16, 20.0)])
HORIZON = 6


def filled() -> MemoryBuffer:
    """Episodes whose later segments arrived when the fleet had newer versions."""
    buffer = MemoryBuffer(SPEC)
    for number in range(8):
        source = "demonstration" if number == 7 else "online"
        for segment in record(SPEC, f"e{number}", [12, 9, 15], number, source=source):
            buffer.version = 2 * segment.index + number // 2
            buffer.add(segment)
    buffer.version = 30
    return buffer


def lags(buffer: MemoryBuffer) -> dict[tuple[int, int], tuple[int, bool]]:
    """(lag on arrival, whether the policy did it by itself) of each step by episode and tick."""
    return {
        (buffer.numbers[segment.episode.id], segment.first_tick + step): (
            max(0, buffer.arrived[row] - int(segment.version[step])),
            segment.actor[step] == POLICY and segment.episode.source == "online",
        )
        for row, segment in buffer.segments.items()
        for step in range(segment.steps)
    }


def batches(buffer: MemoryBuffer, count: int = 30, **options: object) -> Iterator[Batch]:
    with ReplayDataset(buffer, buffer, SPEC, config(horizon=HORIZON, **options)) as data:  # type: ignore[arg-type]
        data.refresh()
        for _ in range(count):
            yield copied(data.next())


@pytest.mark.parametrize(
    "options", [{}, {"ticks_per_frame": 3}, {"max_offset": 4}, {"ticks_per_frame": 2, "max_offset": 3}]
)
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_no_window_holds_a_stale_step_unless_it_is_only_weighed_down(weight: float, options: dict[str, int]) -> None:
    buffer = filled()
    known, bound, stale_shown = lags(buffer), StalenessBound(2, weight), 0
    for batch in batches(buffer, target=uniform(staleness=bound), **options):
        ticks, mask, arrived = (np.asarray(batch[name]) for name in ("tick", "mask", "arrival_lag"))
        episodes = np.asarray(batch["episode"]).reshape(-1, *(1,) * (ticks.ndim - 1))
        for episode, tick, kept, lag in zip(
            np.broadcast_to(episodes, ticks.shape).ravel().tolist(),
            ticks.ravel().tolist(),
            mask.reshape(-1, HORIZON),
            arrived.ravel().tolist(),
            strict=True,
        ):
            assert lag == known[episode, tick][0]
            window = [known[episode, tick + step] for step in np.flatnonzero(kept).tolist()]
            stale_shown += sum(rollout and behind > bound.max_lag for behind, rollout in window)
    assert any(rollout and behind > bound.max_lag for behind, rollout in known.values())
    assert (stale_shown > 0) == (weight > 0)


def test_without_a_bound_batches_are_what_they_were_and_say_nothing_of_it() -> None:
    buffer = filled()
    later = filled()
    later.arrived = dict.fromkeys(later.arrived, 10**6)
    for a, b in zip(batches(buffer, target=uniform()), batches(later, target=uniform()), strict=True):
        assert "arrival_lag" not in a
        assert same(a, b)


def test_a_bound_takes_nothing_from_those_who_imitate_people() -> None:
    buffer = filled()
    bound = imitation(staleness=StalenessBound(0))
    grouped = {"ticks_per_frame": 2, "max_offset": 2}
    for a, b in zip(
        batches(buffer, target=bound, **grouped), batches(buffer, target=imitation(), **grouped), strict=True
    ):
        del a["arrival_lag"]
        assert same(a, b)


def test_frames_that_only_stale_steps_saw_are_not_decoded() -> None:
    buffer = filled()
    with ReplayDataset(buffer, buffer, SPEC, config(target=uniform(staleness=StalenessBound(0)))) as bounded:
        bounded.refresh()
        with ReplayDataset(buffer, buffer, SPEC, config(target=uniform())) as whole:
            whole.refresh()
            every = np.arange(len(whole.universe))
            assert bounded._planner.startable(every).sum() == bounded.eligible_steps
            assert bounded.eligible_steps == whole.eligible_steps - bounded.stats.stale_steps
            assert 0 < bounded.stats.stale_steps < bounded.stats.rollout_steps == whole.stats.rollout_steps
