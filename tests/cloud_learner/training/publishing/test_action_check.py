"""A version acts on recorded observations before it goes out, and is compared with its parent."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from cloud_learner.buffer.loading.observations import ShownStep
from cloud_learner.training.config import ActionCheckConfig, PublisherConfig
from cloud_learner.training.publishing.action_check import ActionCheck, HeldSource
from cloud_learner.training.publishing.publisher import VersionPublisher
from cloud_learner.training.status import VersionFault, VersionRefusal
from policies.conformance.check import example_observation
from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from tests.cloud_learner.training.publishing.test_publisher import SPEC, Bench
from wire.errors import ConfigError, PolicyError, StorageError
from wire.types import ActionChunk, Latent


class Told:
    """A policy whose weights are the actions themselves: float32 by observation."""

    spec = SPEC

    def __init__(self):
        self.actions = np.zeros(0, np.float32)

    def load(self, weights, version):
        self.actions = np.frombuffer(weights, np.float32)

    def think(self, observation):
        return Latent(np.zeros(1, np.float32), 0, 1)

    def act(self, observation, latent, tick, prefix=None):
        value = self.actions[int(observation.state[0]) % len(self.actions)]
        if not np.isfinite(value):
            raise PolicyError("actions that are not finite")
        return ActionChunk(np.full((2, 1), value, np.float32), 0, 1, 1, 0, 0)


def observations(rows, shown=()):
    """`shown`: what somebody did at each, all the time; () nobody."""
    found = [example_observation(SPEC, row) for row in rows]
    for row, each in zip(rows, found, strict=True):
        each.state[0] = row
    taught = [np.full((5, 1), value, np.float32) for value in shown] or [np.zeros((0, 1), np.float32)] * len(rows)
    return [ShownStep(each, did) for each, did in zip(found, taught, strict=True)]


def told(config=ActionCheckConfig(), rows=4, shown=()):
    source = HeldSource(lambda count, draw: list(range(rows)), lambda rows: observations(rows, shown))
    check = ActionCheck(Told(), source, config)
    check.choose()
    assert check.ready
    return check


def actions(*values):
    return np.array(values, np.float32).tobytes()


def verdict(before, after, config=ActionCheckConfig(), shown=()):
    check = told(config, shown=shown)
    check.act(before, "parent")
    return check.compare(check.act(after, "child"), "parent")


def test_a_change_is_in_ranges_of_the_dimension():
    # the range is 2
    change, refusal = verdict(actions(0, 0.1, 0.2, 0.3), actions(0.1, 0.2, 0.3, 0.4))
    assert change == pytest.approx(0.05)
    assert refusal is None


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        (actions(0.6, 0.7, 0.8, 0.9), VersionFault.moved),
        (actions(-1, 1, 1, 1), VersionFault.saturated),
        (actions(0.15, 0.15, 0.15, 0.15), VersionFault.constant),
    ],
)
def test_actions_that_jump_saturate_or_stand_still_are_refused(after, fault):
    config = ActionCheckConfig() if fault == VersionFault.moved else ActionCheckConfig(max_change=9.0)
    change, refusal = verdict(actions(0, 0.1, 0.2, 0.3), after, config)
    assert refusal is not None
    assert refusal.fault == fault
    assert change > 0


def test_what_moved_towards_what_people_did_goes_however_far_it_is_from_its_parent():
    before, shown = actions(0, 0.1, 0.2, 0.3), (0.8, 0.9, 1, 1)
    change, refusal = verdict(before, actions(0.7, 0.8, 0.9, 1), shown=shown)
    assert change > 0.25
    assert refusal is None
    # as far, to the other side
    assert verdict(before, actions(-0.7, -0.6, -0.5, -0.4), shown=shown)[1].fault == VersionFault.moved
    # what people do at the limits is no fault either
    assert verdict(before, actions(-1, 1, 1, -1), shown=(-1, 1, 1, -1))[1] is None
    assert verdict(before, actions(1, 1, 1, -1), shown=(0, 0.1, 0.1, 0.3))[1].detail.count("what people did") == 1


def test_what_is_constant_is_refused_though_it_moved_towards_what_people_did():
    refusal = verdict(actions(-1, -0.9, -0.8, -0.7), actions(0, 0, 0, 0), shown=(0, 0.1, -0.1, 0))[1]
    assert refusal.fault == VersionFault.constant


def test_of_what_was_shown_so_much_counts_as_a_chunk_has():
    check = told(rows=2, shown=(0.5, 0.5))
    assert check.distance(np.zeros((2, 2, 1), np.float32)) == pytest.approx(0.25)
    assert check.distance(np.full((2, 9, 1), 0.5, np.float32)) == 0
    assert told(rows=2).distance(np.zeros((2, 2, 1), np.float32)) is None


def test_learning_goes_on_past_a_parent_that_stays_and_random_weights_never_do():
    """The parent is far from what people show; while nothing was published learning went far beyond `max_change`."""
    shown, rng = (0.8, 0.7, 0.9, 0.6, 0.8, 0.9, 0.7, 0.8), np.random.default_rng(0)
    check = told(rows=8, shown=shown)
    check.act(actions(*(-value for value in shown)), "parent")
    for share in (0.4, 0.6, 0.8, 1.0):
        learned = actions(*(-value + 2 * share * value for value in shown))
        change, refusal = check.compare(check.act(learned), "parent")
        assert change > 0.25
        assert refusal is None
    check.act(actions(*shown), "good")
    for _ in range(50):
        assert check.compare(check.act(actions(*rng.uniform(-1, 1, 8))), "good")[1] is not None


def test_after_a_refusal_other_observations_are_taken():
    draws = []

    def choose(count, draw):
        draws.append(draw)
        return [draw, draw + 1]

    check = ActionCheck(Told(), HeldSource(choose, observations), ActionCheckConfig(observations=2))
    for number, after in enumerate(((0.1, 0.2), (0.9, 0.8), (0.9, 0.8), (0.1, 0.2), (0.1, 0.2))):
        check.choose()
        assert check.ready
        check.act(actions(0, 0.1), "parent")
        check.compare(check.act(actions(*after), str(number)), "parent")
    assert draws == [0, 1, 2]


def test_what_the_parent_did_as_well_is_no_fault():
    assert verdict(actions(1, 1, 1, -1), actions(1, 1, 1, -1))[1] is None
    assert verdict(actions(0, 0, 0, 0), actions(0.01, 0.01, 0.01, 0.01))[1] is None


def test_what_cannot_act_is_refused():
    refusal = told().act(actions(0, float("nan")))
    assert isinstance(refusal, VersionRefusal)
    assert refusal.fault == VersionFault.cannot_act


class Unchecked(Told):
    """One that looks at nothing."""

    def act(self, observation, latent, tick, prefix=None):
        value = self.actions[int(observation.state[0]) % len(self.actions)]
        return ActionChunk(np.full((2, 1), value, np.float32), 0, 1, 1, 0, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_actions_that_are_not_finite_are_refused_whatever_they_are_compared_with(value):
    source = HeldSource(lambda count, draw: list(range(4)), observations)
    check = ActionCheck(Unchecked(), source, ActionCheckConfig(max_change=9.0))
    check.choose()
    assert check.ready
    refusal = check.act(actions(0, 0.1, value, 0.3), "child")
    assert isinstance(refusal, VersionRefusal)
    assert refusal.fault == VersionFault.cannot_act
    check.act(actions(0, 0.1, 0.2, 0.3), "parent")
    assert check.compare(np.full((4, 2, 1), value, np.float32), "parent")[1] is not None


def test_observations_are_chosen_again_until_there_are_enough():
    there, read = [], []

    def choose(count, draw):
        return there[:count]

    def fetch(rows):
        read.append(list(rows))
        return observations(rows)

    check = ActionCheck(Told(), HeldSource(choose, fetch), ActionCheckConfig(observations=3))
    check.choose()
    assert not check.ready
    for _ in range(5):
        there.append(len(there))
        check.choose()
        assert check.ready
        check.act(actions(0, 0, 0), str(len(there)))
    assert read == [[0], [0, 1], [0, 1, 2]]
    assert [check.knows(number) for number in "54321"] == [True] * 3 + [False] * 2, "the last three are remembered"


def test_others_that_draw_random_numbers_wait_while_it_acts():
    lock, held = threading.Lock(), []

    class Watching(Told):
        def think(self, observation):
            held.append(lock.locked())
            return super().think(observation)

    check = ActionCheck(Watching(), HeldSource(lambda count, draw: [0], observations), ActionCheckConfig(), lock)
    check.choose()
    assert check.ready
    check.act(actions(0))
    assert held == [True]
    assert not lock.locked()


@pytest.mark.parametrize(
    "wrong", [{"observations": -1}, {"quantization_every": 0}, {"max_change": 0.0}, {"max_quantization_change": 0.0}]
)
def test_a_config_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ActionCheckConfig(**wrong)


# --- with a policy, in the publisher ----------------------------------------------------------------------------------


def policy(seed=0):
    return FlowPolicy(SPEC, FlowConfig(state_dim=1, action_dim=1, horizon=2, width=32, layers=2), seed)


def checked(directory, config=ActionCheckConfig(), read=observations):
    bench = Bench(directory)
    source = HeldSource(lambda count, draw: list(range(8)), read)
    check = ActionCheck(policy(), source, config, bench.learner.random_lock)
    bench.publisher = VersionPublisher(bench.learner.policy.save, directory, PublisherConfig(), check)
    return bench


def ruin(bench, seed):
    """Random weights in place of the average's."""
    with torch.no_grad():
        for average, other in zip(bench.learner.average.parameters(), policy(seed).module.parameters(), strict=True):
            average.copy_(10 * other + torch.randn(other.shape, generator=torch.Generator().manual_seed(seed)))


def test_normal_steps_pass_and_random_weights_do_not(tmp_path, caplog):
    bench = checked(tmp_path)
    assert bench.publish().measures.action_change is None
    for _ in range(5):
        bench.train()
        measures = bench.publish().measures
        assert 0 < measures.action_change < 0.25
    assert 0 < bench.publisher.counts.quantization_change < 0.25
    kept = [average.clone() for average in bench.learner.average.parameters()]
    for seed in (1, 2):
        ruin(bench, seed)
        assert bench.publish() is None
    counts = bench.publisher.counts
    assert sum(counts.refused.values()) == 2
    assert set(counts.refused) <= {VersionFault.moved, VersionFault.saturated}
    for average, before in zip(bench.learner.average.parameters(), kept, strict=True):
        average.copy_(before)
    bench.train()
    assert bench.publish().delta is not None


def test_what_quantisation_would_change_too_much_goes_whole_and_exact(tmp_path, caplog):
    bench = checked(tmp_path, ActionCheckConfig(max_quantization_change=1e-7))
    bench.publish()
    for number in range(1, 4):
        bench.train()
        made = bench.publish()
        assert made.delta is None
        assert bytes(made.file) == bench.learner.weights()
        assert made.measures.quantization_change > 1e-7
        assert made.measures.action_change > 0
        assert bench.publisher.counts.unquantized == number
    assert f"changes its actions by {made.measures.quantization_change:.3g} of their range" in caplog.text
    bench.publisher._check.config = ActionCheckConfig()
    bench.train()
    assert bench.publish().delta is not None
    assert bench.publisher.counts.unquantized == 3


def test_what_is_measured_of_a_version_acts_once(tmp_path, monkeypatch):
    bench, acted = checked(tmp_path), []
    load = bench.publisher._check._policy.load
    monkeypatch.setattr(bench.publisher._check._policy, "load", lambda *args: (acted.append(1), load(*args)))
    bench.publish()
    for _ in range(3):
        bench.train()
        acted.clear()
        assert bench.publish().measures.quantization_change is not None
        assert len(acted) == 2, "as it was trained, and as robots rebuild it"


def test_quantisation_alone_is_measured_of_every_so_many_deltas(tmp_path):
    bench = checked(tmp_path, ActionCheckConfig(quantization_every=3))
    bench.publish()
    measured = []
    for _ in range(7):
        bench.train()
        measured.append(bench.publish().measures.quantization_change is not None)
    assert measured == [True, False, False, True, False, False, True]


def test_after_a_restart_the_parent_acts_from_its_file(tmp_path):
    bench = checked(tmp_path)
    bench.publish()
    bench.checkpoint()
    again = checked(tmp_path)
    again.robot = bench.robot
    again.train()
    assert again.publish().measures.action_change > 0


def test_observations_that_cannot_be_read_keep_nothing_from_going_out(tmp_path, caplog):
    def away(rows):
        raise StorageError("the store is away.")

    bench = checked(tmp_path, read=away)
    assert bench.publish().measures.action_change is None
    assert "the store is away" in caplog.text
