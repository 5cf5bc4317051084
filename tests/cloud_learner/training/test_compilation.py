"""`training.compile`: the same losses by compiled code, the same names on disk, and errors that name the setting."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training import compilation
from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.config import LossPrecision, TrainingConfig
from cloud_learner.training.learner import Learner
from policies.flow.policy import FlowPolicy
from tests.cloud_learner.training.batches import Batches
from tests.cloud_learner.training.ranks.test_sharded_network import Dealt, Line, alone, start
from tests.cloud_learner.training.test_learner import NET, SPEC, TRAINING, learner, run
from wire.errors import ConfigError, InvalidDataError

COMPILED = dataclasses.replace(TRAINING, compile=True)
RANK_STEPS = 12


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    """Traced as always, but run as it is: that takes no minute."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "_compile_graph", lookup_backend("eager"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """Each one that was compiled, by its number of inputs."""
    found = []

    def count(graph, inputs):
        found.append(len(inputs))
        return graph

    monkeypatch.setattr(compilation, "_compile_graph", count)
    return found


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"precision": LossPrecision.bfloat16}])
def test_losses_weights_and_averages_are_those_of_the_same_run_without_it(changes, monkeypatch):
    graphs, lower = [], lookup_backend("aot_eager")
    # gradients are traced, too
    monkeypatch.setattr(compilation, "_compile_graph", lambda *given: graphs.append(given) or lower(*given))
    subject = learner(training=dataclasses.replace(COMPILED, **changes))
    plain = learner(training=dataclasses.replace(TRAINING, **changes))
    assert run(subject, 0, 4) == pytest.approx(run(plain, 0, 4), rel=1e-4)
    assert len(graphs) >= 2, "images and actions have a part each"
    assert_close(subject.state().tensors, plain.state().tensors)


def test_a_compiled_run_goes_on_without_it_and_the_other_way_round(tmp_path):
    plain = learner()
    expected = run(plain, 0, 6)
    for number, (first, second) in enumerate([(COMPILED, TRAINING), (TRAINING, COMPILED)]):
        begun, goes_on = learner(training=first), learner(seed=9, training=second)
        run(begun, 0, 3)
        path = checkpoint.save(tmp_path / str(number), begun.state(), {})
        assert not [name for name in begun.state().tensors if "_orig_mod" in name], path
        goes_on.restore(checkpoint.load_newest(tmp_path / str(number)).state)
        assert run(goes_on, 3, 3) == pytest.approx(expected[3:], rel=1e-4)
        robot = FlowPolicy(SPEC, NET, seed=5)
        robot.load(goes_on.weights(), 1)


class Plain:
    """A policy around `module`, whose `loss` is its own."""

    ticks_ahead, max_offset, history = (), 0, 0

    def __init__(self, loss):
        self.module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        self._loss = loss

    def loss(self, batch):
        return self._loss(self.module, torch.from_numpy(batch["state"])).square().mean()


def trained(loss, compile=True):
    return Learner(Plain(loss), HGDagger(), TrainingConfig(compile=compile))


def states(count=3):
    return Batches({"state": np.ones((count, 2), np.float32)})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_real_compiler_gives_the_same_losses(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    subject, plain = (trained(lambda module, x: module(x), compile=one) for one in (True, False))
    plain.restore(subject.state())
    losses = [[one.step(states())["loss"] for _ in range(4)] for one in (subject, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert any(tmp_path.rglob("*.cpp")), "it was compiled"


def test_code_on_arrays_between_is_no_hindrance(graphs):
    def loss(module, x):
        found = module(x)
        return found * float(np.median(found.detach().numpy()))

    subject = trained(loss)
    assert np.isfinite([subject.step(states())["loss"] for _ in range(3)]).all()
    assert len(graphs) == 1


def test_batches_of_any_size_are_compiled_once_more_and_no_more(graphs):
    subject, many = trained(lambda module, x: module(x)), []
    for count in range(2, 14):
        subject.step(states(count))
        many.append(len(graphs))
    assert many == [0, 1, *[2] * 10]


def test_many_learners_of_a_process_do_not_use_up_each_others_bound(graphs):
    for count in range(1, 10):
        subject = trained(lambda module, x: module(x))
        subject.step(states())
        subject.step(states())
        assert len(graphs) == count


@pytest.mark.parametrize("backward", [False, True])
def test_what_cannot_be_compiled_names_the_setting(backward, monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("no kernel for this")

    def fail_later(graph, inputs):
        class Later(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise torch._dynamo.exc.TorchRuntimeError("no kernel for this")

        return lambda *given: tuple(Later.apply(one) for one in graph(*given))

    monkeypatch.setattr(compilation, "_compile_graph", fail_later if backward else fail)
    subject = trained(lambda module, x: module(x))
    subject.step(states())
    before = {name: one.clone() for name, one in subject.state().tensors.items()}
    with pytest.raises(ConfigError, match=r"training\.compile: network 'policy' \(Sequential\) cannot be compiled: .*"):
        subject.step(states())
    assert subject.gradient_steps == 1
    assert all(torch.equal(one, before[name]) for name, one in subject.state().tensors.items())


def test_a_loss_that_calls_no_module_is_refused():
    subject = trained(lambda module, x: nn.functional.linear(x, module[0].weight))
    with pytest.raises(ConfigError, match=r"training\.compile: the loss of network 'policy' calls no module"):
        subject.step(states())


def test_bad_values_are_told_as_without_it():
    subject = trained(lambda module, x: module(x))
    subject.step(states())
    with pytest.raises(InvalidDataError, match="gradient step 1 was not applied"):
        subject.step(Batches({"state": np.full((3, 2), np.nan, np.float32)}))


def test_without_a_compiler_it_is_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"training\.compile on the CPU needs a C\+\+ compiler.*install g\+\+"):
        learner(training=COMPILED)
    learner()


def learns_compiled(group, where):
    compilation._compile_graph = lookup_backend("eager")
    training = TrainingConfig(batch=12, learning_rate=1e-2, gradient_clip=0.5, ema_decay=0.9, compile=True)
    subject, source = Learner(Line(), HGDagger(), training, 0, group), Dealt(group.rank, group.world)
    losses = [subject.step(source)["loss"] for _ in range(RANK_STEPS)]
    return {"losses": losses, "names": sorted(subject.state().tensors)}


@pytest.mark.slow
def test_two_ranks_compile_what_they_share(tmp_path):
    found = start(learns_compiled, 2, tmp_path)
    one, _, losses = alone(count=RANK_STEPS)
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    assert found["names"] == sorted(one.state().tensors)
