"""Algorithms by name, and one of one's own that learns in a whole fleet without another file being touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.interface import POLICY, Algorithm, AlgorithmConfig, DataNeeds, TrainedNetwork
from cloud_learner.algorithms.registry import get_algorithm, known
from cloud_learner.buffer.sampling.target import uniform
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from fleet.config.overrides import Overrides
from fleet.config.recipes import fake
from policies.conformance.data import example_batch
from policies.flow.policy import FlowPolicy
from policies.tokens.policy import TokenPolicy
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.test_learner import NET, SPEC
from tests.policies.tokens.test_policy import REACHER, REACHING
from wire.errors import ConfigError, InvalidDataError, PolicyError

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_the_built_in_ones_are_found_and_a_name_that_is_not_there_is_said() -> None:
    assert all(isinstance(get_algorithm(name), AlgorithmConfig) for name in known())
    with pytest.raises(ConfigError, match="hg-dagger"):
        get_algorithm("hg-dager")
    for wrong, said in (("nowhere:It", "cannot be imported"), ("math:pi", "no subclass of AlgorithmConfig")):
        with pytest.raises(ConfigError, match=said):
            get_algorithm(wrong)


def test_the_recipes_own_settings_stay_when_its_algorithm_is_named() -> None:
    recipe = replace(fake(), algorithm=HGDagger(draws=3))
    assert Overrides(algorithm="hg-dagger").applied(recipe).algorithm == HGDagger(draws=3)


@pytest.mark.slow
def test_ones_own_algorithm_learns_in_a_fleet_from_what_succeeded(examples: None, tmp_path: Path) -> None:
    recipe = Overrides(algorithm="own_algorithm:FilteredImitation").applied(fake())
    recipe = replace(recipe, training=replace(recipe.training, batch=8, publish_every_s=0.5))
    fleet = InProcessFleet(tmp_path, recipe)
    try:
        fleet.turn(400)
        assert fleet.ledger.newest_version().version.number >= 2
        drawn = set()
        for _ in range(20):
            drawn |= set(np.asarray(fleet.trainer._source.next()["actor"]).tolist())
        assert len(drawn) > 1 or 0 not in drawn
    finally:
        fleet.close()


def test_a_policy_that_lacks_what_it_takes_is_refused_before_anything_is_learned(examples: None) -> None:
    with pytest.raises(ConfigError, match=r"filtered-imitation.*says its imitation loss sample by sample"):
        get_algorithm("own_algorithm:FilteredImitation").make(TokenPolicy(REACHER, REACHING))


# --- networks of its own ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Critical(AlgorithmConfig):
    """A critic of the policy's features, with a target network, two draws an update."""

    name = "critical"
    broken: bool = False

    def needs(self) -> DataNeeds:
        return DataNeeds(uniform(), n_step=2)

    def make(self, policy):
        return CriticalUpdates(policy, self.broken)


class CriticalUpdates(Algorithm):
    def __init__(self, policy, broken):
        super().__init__(policy)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            critic = torch.nn.Linear(policy.module.latent_width + 2, 1)
        self._networks = {
            POLICY: TrainedNetwork(policy.module),
            "critic": TrainedNetwork(critic, rate_scale=0.5, average=0.9),
        }
        self._broken = broken

    @property
    def networks(self):
        return self._networks

    def update(self, step):
        batch = step.draw()
        with step.random(), torch.no_grad():
            features = self.policy.features(batch)
            wanted = step.average("critic")(features) * 0.9 + torch.rand(1)
        if self._broken:
            wanted = wanted * torch.nan
        value = step.descend("critic", lambda: (self._networks["critic"].module(features) - wanted).square().mean())
        return {"loss": step.minimize(POLICY, self.policy.loss), "value": value}


def critical(seed=0, broken=False):
    training = TrainingConfig(batch=4, learning_rate=1e-3, accumulate=2)
    return Learner(FlowPolicy(SPEC, NET, 0), Critical(broken), training, seed)


def run(learner, first, count):
    found = []
    for number in range(first, first + count):
        found.append(learner.step(Batches(*(example_batch(SPEC, 4, 10 * number + k) for k in range(3)))))
    return found


def test_its_networks_are_trained_averaged_and_restored_bit_for_bit() -> None:
    first = critical()
    before = first.state().tensors["critic/module/weight"]
    run(first, 0, 3)
    state = first.state()
    assert {"critic/average/weight", "critic/optimizer/exp_avg/weight"} <= state.tensors.keys()
    moved, average = state.tensors["critic/module/weight"], state.tensors["critic/average/weight"]
    assert not torch.equal(before, moved) and 0 < (average - before).norm() < (moved - before).norm()
    expected = run(first, 3, 2)
    second = critical(seed=7)
    run(second, 50, 1)
    second.restore(state)
    assert run(second, 3, 2) == expected
    assert second.weights() == first.weights()
    plain = Learner(FlowPolicy(SPEC, NET, 0), HGDagger(), TrainingConfig(batch=4))
    with pytest.raises(PolicyError, match="also has 'critic/"):
        plain.restore(state)


def test_gradients_of_several_batches_make_one_step() -> None:
    first = Learner(FlowPolicy(SPEC, NET, 0), HGDagger(), TrainingConfig(batch=4, accumulate=3))
    source = Batches(*(example_batch(SPEC, 4, k) for k in range(3)))
    first.step(source)
    assert (source.drawn, first.gradient_steps) == (3, 1)


def test_a_loss_that_is_not_finite_names_its_network_and_leaves_it() -> None:
    learner = critical(broken=True)
    before = learner.state().tensors
    with pytest.raises(InvalidDataError, match="gradient step 0 of 'critic' was not applied"):
        run(learner, 0, 1)
    after = learner.state().tensors
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
