"""Algorithms by name, and one of one's own that learns in a whole fleet without another file being touched."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True)
class Reporting(AlgorithmConfig):
    """Its update gives `metrics`, and its policy's loss is `loss`."""

    name = "reporting"
    metrics: object = None
    loss: Callable[[torch.Tensor], object] | None = None

    def needs(self) -> DataNeeds:
        return DataNeeds(uniform())

    def make(self, policy: FlowPolicy) -> Algorithm:
        return Reports(policy, self)


class Reports(Algorithm):
    def __init__(self, policy: FlowPolicy, config: Reporting) -> None:
        super().__init__(policy)
        self._config = config

    def update(self, step):
        wrong = self._config.loss
        loss = self.policy.loss if wrong is None else lambda batch: wrong(self.policy.sample_losses(batch))
        step.minimize(POLICY, loss)
        return self._config.metrics


def reporting(metrics: object = None, loss: Callable[[torch.Tensor], object] | None = None) -> Learner:
    return Learner(FlowPolicy(SPEC, NET, 0), Reporting(metrics, loss), TrainingConfig(batch=4))


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (None, "update() gave None, and no numbers by name"),
        ({"bc": 0.5}, "update() gave bc, and no loss"),
        ({"loss": torch.tensor(0.5)}, "update() gave 'loss' as Tensor, which is no number"),
        ({"loss": 0.5, "many": torch.zeros(3)}, "update() gave 'many' as Tensor"),
        ({"loss": 0.5, "word": "0.5"}, "update() gave 'word' as str"),
        ({"loss": 0.5, "none": None}, "update() gave 'none' as NoneType"),
        ({"loss": 0.5, 3: 0.5}, "update() gave 3 as a name"),
        ({"loss": float("nan")}, "update() gave a loss of nan"),
        ({"loss": float("inf")}, "update() gave a loss of inf"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused_by_name(metrics: object, said: str) -> None:
    learner = reporting(metrics)
    with pytest.raises(ConfigError) as refused:
        run(learner, 0, 1)
    assert f"algorithm 'reporting': {said}" in str(refused.value)
    assert learner.gradient_steps == 0


def test_numbers_of_numpy_are_numbers_and_others_than_the_loss_may_be_none_yet() -> None:
    (found,) = run(reporting({"loss": np.float32(0.5), "count": np.int64(3), "share": float("nan")}), 0, 1)
    assert (found["loss"], found["count"]) == (0.5, 3.0) and np.isnan(found["share"])
    assert {type(one) for one in found.values()} == {float}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda losses: losses, "is a tensor of shape [4, 2]; it must be a scalar: take its mean"),
        (lambda losses: losses.mean().item(), "is a float; it must be a tensor that is a scalar"),
        (lambda losses: losses.mean().detach(), "depends on no weights"),
    ],
)
def test_a_loss_that_nothing_can_be_learned_from_is_refused_by_name(loss: Callable, said: str) -> None:
    learner = reporting({"loss": 0.5}, loss)
    before = learner.state().tensors
    with pytest.raises(ConfigError) as refused:
        run(learner, 0, 1)
    assert str(refused.value).startswith("algorithm 'reporting': its loss for 'policy' ") and said in str(refused.value)
    after = learner.state().tensors
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def write_module(place: Path, name: str, text: str) -> None:
    (place / f"{name}.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from cloud_learner.algorithms.interface import POLICY, Algorithm, AlgorithmConfig, DataNeeds, TrainedNetwork\n"
        "from cloud_learner.buffer.sampling.target import uniform\n" + text
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class It(AlgorithmConfig):\n    pass\n", "It lacks make, name, needs"),
        ("def broken(:\n", "cannot be imported: SyntaxError"),
        ("raise RuntimeError('no card')\n", "cannot be imported: RuntimeError: no card"),
        ("import nothing_at_all\n", "No module named 'nothing_at_all'$|No module named 'nothing_at_all'\\.$"),
    ],
)
def test_what_is_wrong_with_ones_own_is_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{abs(hash(text))}"
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, name, text)
    with pytest.raises(ConfigError, match=said):
        get_algorithm(f"{name}:It")


def test_a_module_that_is_not_found_may_lie_outside_of_the_path() -> None:
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        get_algorithm("not_there_at_all:It")


@dataclass(frozen=True)
class Guessing(AlgorithmConfig):
    """Trains a network of its own beside the policy."""

    name = "guessing"
    lazy: bool = False
    nothing: bool = False

    def needs(self) -> DataNeeds:
        return DataNeeds(uniform())

    def make(self, policy: FlowPolicy) -> Algorithm:
        return None if self.nothing else Guesses(policy, torch.nn.LazyLinear(1) if self.lazy else torch.nn.Linear(3, 1))


class Guesses(Algorithm):
    """Its own network learns to guess 1 from chance."""

    def __init__(self, policy: FlowPolicy, guess: object) -> None:
        super().__init__(policy)
        self.guess = guess
        self._networks = {POLICY: TrainedNetwork(policy.module), "guess": TrainedNetwork(guess)}

    @property
    def networks(self) -> dict[str, TrainedNetwork]:
        return self._networks

    def update(self, step: object) -> dict[str, float]:
        guessed = step.descend("guess", lambda: (self.guess(torch.randn(4, 3)) - 1).square().mean())
        return {"loss": step.minimize(POLICY, self.policy.loss), "guessed": guessed}


def test_its_own_network_is_the_same_under_the_same_seed() -> None:
    def run(seed: int) -> list[dict[str, float]]:
        torch.manual_seed(seed + 100)
        learner = Learner(FlowPolicy(SPEC, NET, seed=0), Guessing(), TrainingConfig(batch=4, warmup_steps=5), seed)
        return [learner.step(Batches(example_batch(SPEC, 4, n))) for n in range(3)]

    assert run(0) == run(0)
    assert [one["guessed"] for one in run(0)] != [one["guessed"] for one in run(1)]


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (lambda guesses, step: step.minimize("polcy", None), "network 'polcy', only 'policy', 'guess'. Did you mean"),
        (lambda guesses, step: step.average("gues"), "trains no network 'gues'"),
        (lambda guesses, step: step.descend("guess", lambda: drawn_inside(step)), "do not go inside a loss"),
        (lambda guesses, step: drawn_inside(step, guesses.guess), "do not go inside a loss, nor inside step.random()"),
    ],
)
def test_a_slip_in_an_update_is_said_by_name(update: Callable, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(FlowPolicy(SPEC, NET, seed=0), Guessing(), TrainingConfig(batch=4))
    own = Guesses.update
    monkeypatch.setattr(Guesses, "update", update)
    with pytest.raises(ConfigError, match="algorithm 'guessing'") as refused:
        learner.step(Batches(example_batch(SPEC, 4, 0)))
    assert said in str(refused.value)
    monkeypatch.setattr(Guesses, "update", own)
    learner.step(Batches(example_batch(SPEC, 4, 0)))
    assert learner.gradient_steps == 1


def drawn_inside(step: object, guess: object = None) -> torch.Tensor:
    with step.random():
        step.descend("guess", lambda: guess(torch.randn(4, 3)).mean())
        return torch.randn(1)


def test_a_network_that_is_not_said_how_to_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guesses, "networks", property(lambda guesses: {POLICY: guesses.policy.module}))
    with pytest.raises(ConfigError, match="its network 'policy' is FlowNetwork, and no TrainedNetwork"):
        Learner(FlowPolicy(SPEC, NET, seed=0), Guessing(), TrainingConfig(batch=4))


def test_its_own_network_goes_where_the_policy_is() -> None:
    policy = FlowPolicy(SPEC, NET, seed=0)
    policy.module.to("meta")
    learner = Learner(policy, Guessing(), TrainingConfig(batch=4))
    assert {one.device.type for one in learner.algorithm.guess.parameters()} == {"meta"}


def test_a_network_without_shapes_and_no_algorithm_at_all_are_named() -> None:
    with pytest.raises(PolicyError, match=r"network 'guess' has parameters whose shapes .*feature_width"):
        Learner(FlowPolicy(SPEC, NET, seed=0), Guessing(lazy=True), TrainingConfig(batch=4))
    with pytest.raises(ConfigError, match=r"'guessing': make\(\) gave None"):
        Learner(FlowPolicy(SPEC, NET, seed=0), Guessing(nothing=True), TrainingConfig(batch=4))


def test_the_algorithm_in_the_docs_learns() -> None:
    text = (EXAMPLES.parent / "algorithms.md").read_text()
    (code,) = [part.split("```")[0] for part in text.split("```python\n")[1:] if "class Weighted(" in part]
    known: dict[str, object] = {
        "torch": torch,
        "Algorithm": Algorithm,
        "TrainedNetwork": TrainedNetwork,
        "POLICY": POLICY,
    }
    exec(code, known)

    class Example(Guessing):
        def make(self, policy: FlowPolicy) -> Algorithm:
            return known["Weighted"](policy, self)

    learner = Learner(
        FlowPolicy(SPEC, NET, seed=0), Example(), TrainingConfig(batch=4, learning_rate=1e-2, warmup_steps=1)
    )
    batch = example_batch(SPEC, 4) | {"return_to_go": np.full((4, 2), 2.0, np.float32)}
    errors = [learner.step(Batches(batch))["error"] for _ in range(60)]
    assert errors[-1] < errors[0]
