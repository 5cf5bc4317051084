"""What acts may be smaller and faster than what is trained; what is trained never notices."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from policies.common.int8 import Int8Linear, to_int8
from policies.common.runtime import Runtime, _own_graphs, acting, compiled
from policies.common.weights import refresh
from policies.interface.trainable import FinetuneConfig, apply_finetuning
from wire.errors import ConfigError

BFLOAT16 = Runtime(dtype="bfloat16")
INT8 = Runtime(int8=True)
BOTH = Runtime(dtype="bfloat16", int8=True)


class Net(nn.Module):
    """Everything a copy must treat differently: large and small layers, a norm, a statistic, two names for a layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(7, 96)
            self.layers = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 96, bias=False))
            self.norm = nn.BatchNorm1d(96)
            self.last = nn.Linear(96, 3)
        self.again = self.layers[1]
        self.register_buffer("mean", torch.full((7,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x - self.mean)
        return self.last(self.norm(hidden + self.layers(hidden)))


@pytest.fixture
def net() -> Net:
    module = Net()
    module(inputs(64))  # running statistics of their own
    return module.eval()


def inputs(rows: int = 9) -> torch.Tensor:
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(1))


def run(network: nn.Module, runtime: Runtime, x: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode(), runtime.autocast():
        return network(inputs() if x is None else x).float()


def test_a_plain_runtime_acts_with_the_trained_network_itself(net: Net) -> None:
    assert acting(net, Runtime()) is net
    assert acting(net, Runtime(compile=True)) is net


@pytest.mark.parametrize("runtime", [BFLOAT16, INT8, BOTH])
def test_a_copy_acts_nearly_alike_and_the_trained_network_is_not_touched(net: Net, runtime: Runtime) -> None:
    net.last.weight.grad = torch.ones_like(net.last.weight)
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    network = acting(net, runtime)
    assert net.training
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not network.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in network.parameters())
    exact = run(net.eval(), Runtime())
    error = (run(network, runtime) - exact).abs().max()
    assert 0 < error < 0.03 * exact.abs().max()


def test_matrices_are_rounded_but_norms_and_statistics_are_not(net: Net) -> None:
    copy = acting(net, BFLOAT16)
    types = {name: tensor.dtype for name, tensor in copy.state_dict().items() if tensor.is_floating_point()}
    assert types["first.weight"] == types["layers.1.weight"] == torch.bfloat16
    assert {kind for name, kind in types.items() if not name.endswith("weight")} == {torch.float32}
    assert types["norm.weight"] == types["layers.0.weight"] == torch.float32
    assert torch.equal(copy.mean, net.mean)


def test_large_layers_get_eight_bits_and_shared_ones_stay_shared(net: Net) -> None:
    copy = acting(net, INT8)
    kinds = {name: type(part) for name, part in copy.named_modules() if isinstance(part, nn.Linear | Int8Linear)}
    assert kinds == {"first": nn.Linear, "layers.1": Int8Linear, "layers.3": Int8Linear, "last": nn.Linear}
    assert copy.again is copy.layers[1]
    assert "8" not in {type(part).__name__[-1] for part in net.modules()}


@pytest.mark.parametrize("traced", [False, True])
def test_each_output_of_a_rounded_layer_has_its_own_scale(traced: bool) -> None:
    linear = nn.Linear(256, 64)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))
        linear.weight[5] *= 1000
        linear.weight[6] = 0
    small = Int8Linear(linear, traced)
    step = linear.weight.abs().amax(1, keepdim=True) / 127
    assert ((small.weight - linear.weight).abs() <= 0.5001 * step + 1e-9).all()
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        exact, rounded = linear(x), small(x)
        assert torch.equal(rounded, small(x))
    assert rounded.shape == (2, 3, 64)
    for output in (0, 5, 6):
        scale = exact[..., output].abs().max()
        assert (rounded - exact)[..., output].abs().max() <= 0.03 * scale + 1e-6


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_goes_through_a_rounded_layer(traced: bool, dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 80)
    small = Int8Linear(linear, traced)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    pull = torch.randn(5, 80, generator=torch.Generator().manual_seed(4)).to(dtype)
    (found,) = torch.autograd.grad(small(x), x, pull)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), pull.float() @ small.values(), rtol=0.01, atol=0.01)
    assert torch.equal(small(x).detach(), small(x.detach()))


def test_code_that_reads_a_rounded_layers_weight_gets_its_type_at_once_and_its_values_when_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = nn.Linear(64, 80)
    small = Int8Linear(linear)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        product = torch.addmm(small.values()[0, 0].expand(1), x, small.weight.t())
        assert torch.allclose(product, x @ small.values().t() + small.values()[0, 0], atol=1e-5)
        assert (small.weight.detach() - linear.weight).abs().max() < 0.01
    monkeypatch.setattr(Int8Linear, "values", None)
    assert small.weight.dtype == torch.float32
    assert small.weight.shape == linear.weight.shape
    assert small.weight.device == linear.weight.device


def test_a_network_without_large_layers_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        acting(nn.Sequential(nn.Linear(4, 4)), INT8)
    assert "no Linear layer large enough" in caplog.text


def test_weights_of_a_subclass_are_left_to_their_owner() -> None:
    attention = nn.MultiheadAttention(128, 4)
    assert to_int8(attention, attention) == 0


@pytest.mark.parametrize("runtime", [BFLOAT16, INT8, BOTH])
def test_a_refreshed_copy_is_a_fresh_copy(net: Net, runtime: Runtime) -> None:
    network = acting(net, runtime)
    old = run(network, runtime)
    held = {name: tensor.data_ptr() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        for tensor in (*net.parameters(), net.mean, net.norm.running_mean):
            tensor.mul_(1.5)
    assert torch.equal(run(network, runtime), old)
    refresh(network, net)
    assert torch.equal(run(network, runtime), run(acting(net, runtime), runtime))
    assert not torch.equal(run(network, runtime), old)
    assert held == {name: tensor.data_ptr() for name, tensor in network.state_dict().items()}
    refresh(net, net)


def test_a_copy_draws_no_random_numbers(net: Net) -> None:
    before = torch.get_rng_state()
    refresh(acting(net, BOTH), net)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_compiled_functions_give_what_they_gave(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def step(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return network(x) / 2

    runtime = Runtime(compile=True, int8=True)
    network, fast = acting(net, runtime), compiled(step, runtime)
    with torch.inference_mode():
        exact = step(net, inputs())
        first = fast(network, inputs())
        # new weights are used without compiling again
        with torch.no_grad():
            net.last.weight.mul_(-1)
        refresh(network, net)
        mirrored = network.last.bias - first
        assert (fast(network, inputs()) - mirrored).abs().max() < 1e-5
    assert (first - exact).abs().max() < 0.03 * exact.abs().max()


def test_without_compile_a_function_stays_itself() -> None:
    assert compiled(run, Runtime()) is run


def test_what_cannot_be_compiled_runs_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(function: object, **options: object) -> object:
        def fail(*arguments: object) -> None:
            raise TorchDynamoException("no such kernel")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    double = compiled(lambda x: x * 2, Runtime(compile=True))
    with caplog.at_level(logging.WARNING):
        assert [double(torch.ones(1)).item() for _ in range(2)] == [2.0, 2.0]
    assert caplog.text.count("no such kernel") == 1


def test_a_mistake_inside_a_compiled_function_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(ZeroDivisionError):
        compiled(lambda: 1 // 0, Runtime(compile=True))()


@pytest.mark.slow
def test_any_thread_may_replay_graphs() -> None:
    from torch._inductor import cudagraph_trees

    def found() -> object:
        _own_graphs()
        _own_graphs()
        return cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")

    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(found).result()
    assert theirs == {}
    assert found() is not theirs


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "cuda:x"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=device.split(":")[0]):
        Runtime(device=device).require()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"g\+\+"):
        Runtime(compile=True).require()
    Runtime(int8=True).require()


@pytest.mark.parametrize("config", [{"dtype": "float16"}, {"devise": "cpu"}, {"int8": 1}])
def test_a_wrong_field_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(config, Runtime)


def test_a_configuration_is_read_without_torch() -> None:
    code = "import sys, policies.common.runtime as r; r.Runtime(int8=True).plain; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("runtime", [Runtime(dtype="bfloat16"), Runtime(int8=True)])
def test_what_is_frozen_is_converted_once(runtime: Runtime) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    apply_finetuning(module, FinetuneConfig(freeze=("0.*",)))
    network, x = acting(module, runtime), torch.randn(3, 64)
    with torch.no_grad(), runtime.autocast():
        before = [layer(x).clone() for layer in network]
        for parameter in module.parameters():
            parameter.mul_(2)
        refresh(network, module)
        after = [layer(x) for layer in network]
    assert torch.equal(before[0], after[0]), "the frozen layer was not looked at again"
    torch.testing.assert_close(after[1], 2 * before[1], rtol=0.02, atol=0.02)
