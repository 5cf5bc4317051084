"""The benchmark of old prefixes, very small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.table import render
from benchmarks.prefix_age import __main__ as prefix_age
from benchmarks.prefix_age.scene import INSTRUCTIONS, MOVING, NEAR_M, SPEC, STILL, Demonstrations, Square, demonstrate
from tests.extras import needs

pytestmark = [pytest.mark.slow, needs("lerobot")]

SIZE = replace(prefix_age.QUICK, ages=(0, 4), gradient_steps=2)


class Perfect:
    """Stands for a `Model`: knows the square from the picture's own robot, and is told nothing else."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    def chunks(self, images, states, words, seed):
        green = images[..., 1] > 180
        grid = (np.arange(64) / 63 * 2 - 1) * 0.3
        found = np.zeros((len(images), 4), np.float32)
        for row, mask in enumerate(green):
            found[row, :2] = grid[np.nonzero(mask.any(0))[0]].mean(), -grid[np.nonzero(mask.any(1))[0]].mean()
        way = np.clip((found - states) / 0.01 * 0.5, -1, 1) * (1, 1, 0, 0)
        left = 0.5 ** np.arange(self.horizon)
        return (way[:, None] * left[None, :, None]).astype(np.float32)


def test_an_operator_reaches_the_square_and_follows_it() -> None:
    robot = Square()
    for task in (STILL, MOVING):
        robot.reset(task, 3)
        begin = robot.goal.copy()
        assert robot.read().task == INSTRUCTIONS[task]
        for _ in range(90):
            robot.write(robot.wanted())
        assert robot.distance_m() < NEAR_M / 2
        assert (np.linalg.norm(robot.goal - begin) > 0.1) == (task == MOVING)


def test_windows_bring_the_state_and_actions_of_later() -> None:
    shown = demonstrate(1, 20, 0)
    assert shown.images.shape == (2, 20, 64, 64, 3) and shown.instructions == tuple(INSTRUCTIONS.values())
    marked = Demonstrations(
        np.broadcast_to(np.arange(20, dtype=np.uint8)[None, :, None, None, None], shown.images.shape),
        np.broadcast_to(np.arange(20, dtype=np.float32)[None, :, None], (2, 20, SPEC.state_dim)),
        np.broadcast_to(np.arange(20, dtype=np.float32)[None, :, None], (2, 20, SPEC.action_dim)),
        shown.instructions,
    )
    ages = np.array([0, 3, 5])
    images, then, later, chunks, words = marked.windows(np.random.default_rng(0), 3, 8, ages)
    assert np.array_equal(images[:, 0, 0, 0], then[:, 0])
    assert np.array_equal(later[:, 0] - then[:, 0], ages)
    assert np.array_equal(chunks[:, :, 0] - later[:, :1], np.tile(np.arange(8), (3, 1)))
    assert set(words) <= set(INSTRUCTIONS.values())


def test_age_costs_what_has_moved_since() -> None:
    size = replace(prefix_age.FULL, episodes=4, ages=(0, 24))
    model = Perfect(size.horizon)
    found = {
        (way, age, task): prefix_age.on_target(model, way, age, size, task)
        for way, age in ((prefix_age.FRESH, 0), (prefix_age.FRESH, 24), (prefix_age.OLD, 24))
        for task in (STILL, MOVING)
    }
    assert found[prefix_age.FRESH, 0, STILL] > 0.95 and found[prefix_age.FRESH, 24, STILL] > 0.95
    assert found[prefix_age.FRESH, 0, MOVING] > 0.7 > found[prefix_age.FRESH, 24, MOVING]
    assert found[prefix_age.OLD, 24, STILL] <= found[prefix_age.FRESH, 24, STILL]


@pytest.mark.slow
def test_a_small_run_gives_every_cell(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        found = prefix_age.seed_results(SIZE, 0, tmp_path)
    finally:
        torch.set_num_threads(threads)
    for way in prefix_age.LEARNED:
        for age in SIZE.ages:
            for task in prefix_age.SCENES:
                error, share = found[prefix_age._cell(way, age, task)]
                assert 0 < error < 1 and 0 <= share <= 1
    assert set(found["ms"]) == {"think", "act", "predict"} and min(found["ms"].values()) > 0
    same = [found[prefix_age._cell(way, 0, STILL)] for way in (prefix_age.OLD, prefix_age.FRESH)]
    assert same[0] == same[1]
    other = [found[prefix_age._cell(way, 4, STILL)][0] for way in (prefix_age.OLD, prefix_age.FRESH)]
    assert other[0] != other[1]
    result = prefix_age.report(SIZE, [found])
    text = render(result, "x")
    assert text.count("| 4 | 200 |") == 4 and "undivided" in text
    assert [goal.name for goal in result.goals][-1].startswith("time of act")
