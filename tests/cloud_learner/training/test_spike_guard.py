"""A loss that leaves for good takes the run back to its newest checkpoint; one that is noisy does not."""

import math

import numpy as np
import pytest
import torch

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from cloud_learner.training.spike_guard import LEAST_BEFORE, MOST_RETURNS, RECENT, SpikeGuard, SpikeReturns
from tests.cloud_learner.training.checkpoints.test_run_checkpoints import Ledger
from wire.errors import ConfigError, InvalidDataError, NotFiniteError


def noisy(level, count, seed=0):
    """Losses as of small batches: they differ by a factor of three, and now and then by ten."""
    rng = np.random.default_rng(seed)
    return level * np.exp(0.5 * rng.standard_normal(count)) * np.where(rng.random(count) < 0.1, 10.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_new_task_are_no_spike(seed):
    guard = SpikeGuard(10.0)
    for loss in [*noisy(1.0, 600, seed), *noisy(2.5, 600, seed + 9)]:
        guard.note(loss)
        assert not guard.sees_spike


def test_a_rise_for_good_is_one_and_is_suspected_before():
    guard = SpikeGuard(10.0)
    for loss in noisy(1.0, 300):
        guard.note(loss)
    suspected = []
    for loss in noisy(60.0, RECENT):
        guard.note(loss)
        suspected.append(guard.suspects)
    assert guard.sees_spike and suspected.index(True) < RECENT // 2 and all(suspected[RECENT // 2 :])
    guard.forget()
    assert not guard.sees_spike and not guard.suspects


@pytest.mark.parametrize("level", [0.0, -0.02, -3.0])
def test_a_loss_around_zero_or_below_it_is_measured_by_what_it_scatters(level):
    guard, rng = SpikeGuard(10.0), np.random.default_rng(3)
    for loss in level + 0.1 * rng.standard_normal(3000):
        guard.note(loss)
        assert not guard.sees_spike and not guard.suspects
    for loss in 100.0 + 0.1 * rng.standard_normal(RECENT):
        guard.note(loss)
    assert guard.sees_spike and guard.suspects


def test_a_loss_that_falls_ever_lower_is_no_spike():
    guard = SpikeGuard(10.0)
    for step in range(1000):
        guard.note(-(1.02**step))
        assert not guard.sees_spike and not guard.suspects


def test_none_is_seen_when_none_is_asked_for():
    guard = SpikeGuard(0.0)
    for loss in [*noisy(1.0, 300), *noisy(1e6, 100)]:
        guard.note(loss)
        assert not guard.sees_spike and not guard.suspects
    with pytest.raises(ConfigError, match=r"spike_factor is 0.5; it must be above 1, or 0"):
        TrainingConfig(spike_factor=0.5)


def test_of_refused_steps_so_many_in_a_row_are_one_and_each_is_suspected():
    guard, none = SpikeGuard(10.0), SpikeGuard(0.0)
    for count in range(1, RECENT + 1):
        guard.note(math.nan), none.note(math.nan)
        assert guard.suspects and none.suspects
        assert guard.sees_spike == (count == RECENT) and not none.sees_spike
    guard.note(1.0)
    assert not guard.suspects and not guard.sees_spike


class Plain:
    """A policy that fits a line; a batch says how far off it is."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = torch.nn.Linear(2, 1)

    def loss(self, batch):
        return (self.module(torch.ones(4, 2)) - batch["target"]).square().mean() + batch["more"]


class Source:
    def __init__(self):
        self.more = 0.0
        self.drawn = 0

    def next(self):
        self.drawn += 1
        return {"target": 1.0, "more": 0.1 + self.more, "state": np.zeros((4, 2), np.float32)}

    def state(self):
        return {"drawn": self.drawn}

    def restore(self, state):
        self.drawn = state["drawn"]
        return True


@pytest.fixture
def run(tmp_path):
    learner, source = Learner(Plain(), HGDagger(), TrainingConfig(batch=4), 0), Source()
    checkpoints = RunCheckpoints(tmp_path, learner, source, Ledger())
    returns = SpikeReturns(learner, checkpoints)

    def steps(count):
        for _ in range(count):
            try:
                loss = learner.step(source)["loss"]
            except NotFiniteError:
                loss = math.nan
            returns.note(loss)

    def save():
        checkpoints.begin({})
        checkpoints.wait()
        checkpoints.pop_result()
        returns.on_saved()

    yield learner, source, returns, steps, save
    checkpoints.close()


def test_it_goes_back_to_the_checkpoint_and_on_with_other_batches(run):
    learner, source, returns, steps, save = run
    steps(100)
    save()
    kept = learner.state().tensors
    steps(10)
    source.more = 50.0
    while not returns.count:
        steps(1)
    assert learner.gradient_steps == 100 and 110 < source.drawn < 110 + RECENT
    assert all(torch.equal(one, kept[name]) for name, one in learner.state().tensors.items())
    source.more = 0.0
    drawn = source.drawn
    steps(100)
    assert returns.count == 1 and learner.gradient_steps == 200 and source.drawn == drawn + 100


def test_what_does_not_help_is_said_with_the_last_good_state_on_disk(run, caplog):
    _, source, returns, steps, save = run
    steps(100)
    save()
    with pytest.raises(InvalidDataError, match="after going back 3 times to the same checkpoint"):
        for _ in range(10):
            source.more = 0.0
            steps(60)
            source.more = 50.0
            steps(RECENT)
    assert returns.count == MOST_RETURNS
    # a new checkpoint is another place to go back to
    save()
    source.more = 0.0
    steps(60)
    source.more = 5000.0
    steps(RECENT)
    assert returns.count == MOST_RETURNS + 1
    assert "back to gradient step 100" in caplog.text


def test_steps_that_are_refused_in_a_row_take_it_back(run, caplog):
    learner, _, returns, steps, save = run
    steps(100)
    save()
    kept = learner.state().tensors
    steps(10)
    with torch.no_grad():
        learner.policy.module.weight.mul_(1e30)
    steps(RECENT - 1)
    assert (returns.count, learner.gradient_steps) == (0, 110) and returns.suspects
    steps(1)
    assert (returns.count, learner.gradient_steps) == (1, 100)
    assert all(torch.equal(one, kept[name]) for name, one in learner.state().tensors.items())
    assert "gradient step 110: 20 steps in a row were not applied" in caplog.text
    # what follows is not known to be good before there is something to compare it with
    steps(LEAST_BEFORE - 1)
    assert returns.suspects
    steps(1)
    assert (returns.count, learner.gradient_steps) == (1, 100 + LEAST_BEFORE) and not returns.suspects


def test_a_batch_with_bad_values_once_in_a_while_is_only_refused(run):
    learner, source, returns, steps, save = run
    steps(100)
    save()
    for _ in range(3 * RECENT):
        source.more = math.nan
        steps(1)
        assert returns.suspects
        source.more = 0.0
        steps(1)
        assert not returns.suspects
    assert (returns.count, learner.gradient_steps) == (0, 100 + 3 * RECENT)


def test_bad_values_in_every_batch_do_not_take_it_back_for_ever(run):
    learner, source, returns, steps, save = run
    steps(100)
    save()
    source.more = math.nan
    steps(MOST_RETURNS * RECENT)
    assert (returns.count, learner.gradient_steps) == (MOST_RETURNS, 100)
    with pytest.raises(InvalidDataError, match=r"were not applied.* again after .*bad values.*move the newest"):
        steps(RECENT)


def test_without_a_checkpoint_refused_steps_are_said_now_and_then(run, caplog):
    _, source, returns, steps, _ = run
    source.more = math.nan
    steps(2 * RECENT + 1)
    assert not returns.count and returns.suspects and caplog.text.count("no checkpoint to go back to") == 2


def test_without_a_checkpoint_it_is_said(run, caplog):
    _, source, returns, steps, _ = run
    steps(60)
    source.more = 50.0
    steps(RECENT)
    assert not returns.count and "no checkpoint to go back to" in caplog.text


def test_a_task_that_is_new_and_hard_takes_it_back_once(run):
    _, source, returns, steps, save = run
    steps(100)
    save()
    source.more = 50.0
    steps(500)
    assert returns.count == 1
