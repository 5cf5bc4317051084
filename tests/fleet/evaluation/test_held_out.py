"""Measuring on held-out scenes: the same outcome in whatever order and process, and figures of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.config.overrides import Overrides
from fleet.config.recipes import fake
from fleet.config.weights_source import parse_source
from fleet.evaluation.held_out import HeldOutRunner, MeasuredEpisode, PolicyUnderTest, measure, pin, plan_episodes, rate
from hal.scheduler.episodes import HELD_OUT_SEEDS
from wire.errors import ConfigError, CorruptDataError

SHORT = ["evaluator.max_ticks=12"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Of an untrained policy."""
    recipe = fake()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(recipe.make_policy(recipe.spec, 3).save())
    return path


def under_test(path: Path, settings: list[str] | None = None) -> PolicyUnderTest:
    return pin(PolicyUnderTest(parse_source(str(path)), "fake", overrides=Overrides(set_=settings or SHORT)))


def test_scenes_are_held_out_and_every_beginning_is_balanced() -> None:
    recipe = fake()
    planned = plan_episodes(recipe, 3)
    assert len(set(planned)) == 12 and all(seed in HELD_OUT_SEEDS for _, seed in planned)
    assert [task for task, _ in planned[:4]] == list(recipe.tasks)
    assert planned[:8] == plan_episodes(recipe, 2)
    late = replace(recipe, evaluator=replace(recipe.evaluator, final_first_seed=HELD_OUT_SEEDS.stop - 2))
    with pytest.raises(ConfigError, match="there are 2"):
        plan_episodes(late, 3)


def test_earlier_tasks_are_measured_beside_those_that_are_practised() -> None:
    recipe = fake()
    practised = replace(recipe, tasks=recipe.tasks[:1])
    assert {task for task, _ in plan_episodes(practised, 2)} == {recipe.tasks[0]}
    earlier = replace(recipe.evaluator, earlier_tasks=recipe.tasks[:2])
    both = replace(practised, evaluator=earlier)
    assert both.measured_tasks == recipe.tasks[:2], "each once"
    assert [task for task, _ in plan_episodes(both, 1)] == list(recipe.tasks[:2])


def test_an_episode_does_not_depend_on_those_before_it(weights: Path) -> None:
    # short chunks, so that many are made, and latency that is drawn
    one = under_test(weights, ["evaluator.max_ticks=30", "delay=random:0-4", "chunking.execute_ticks=2"])
    planned = plan_episodes(one.make_recipe(), 2)
    forth = {(found.task, found.seed): found for found in measure(one, planned)}
    back = {(found.task, found.seed): found for found in measure(one, planned[::-1])}
    assert forth == back and len(forth) == 8


def test_what_a_policy_draws_follows_from_the_episode(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = HeldOutRunner(under_test(weights))
    drawn: list[int] = []
    act = runner._policy._policy.act
    monkeypatch.setattr(
        runner._policy._policy, "act", lambda *a, seed: (drawn.append(seed), act(*a, seed=seed))[1], raising=False
    )
    seeds = []
    for seed in (2_000_000, 2_000_001, 2_000_000):
        drawn.clear()
        runner.run("go-up", seed)
        seeds.append(tuple(drawn))
    runner.close()
    assert seeds[0] == seeds[2] != seeds[1] and len(set(seeds[0])) == len(seeds[0]) > 0


@pytest.mark.slow
def test_several_processes_find_the_same(weights: Path) -> None:
    one = under_test(weights)
    planned = plan_episodes(one.make_recipe(), 1)
    alone, shared = (sorted(measure(one, planned, n), key=lambda found: found.task) for n in (1, 2))
    assert alone == shared and len(alone) == 4


@pytest.mark.slow
def test_what_a_process_cannot_do_is_said_as_it_is(weights: Path) -> None:
    one = under_test(weights)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(CorruptDataError, match="changed meanwhile"):
        list(measure(one, [("go-up", 2_000_000)] * 2, 2))


def test_weights_that_change_meanwhile_are_not_measured(weights: Path) -> None:
    one = under_test(weights)
    weights.write_bytes(fake().make_policy(fake().spec, 4).save())
    with pytest.raises(CorruptDataError, match="changed meanwhile"):
        next(measure(one, [("go-up", 2_000_000)]))


def test_a_rate_counts_steps_of_successes_alone() -> None:
    found = rate([MeasuredEpisode("t", n, n < 3, 10 + n) for n in range(4)])
    assert (found.episodes, found.successes, found.share, found.steps) == (4, 3, 0.75, 11.0)
    assert found.low == pytest.approx(0.3006, abs=1e-3) and found.high == pytest.approx(0.9544, abs=1e-3)
    assert rate([MeasuredEpisode("t", 0, False, 10)]).steps is None
