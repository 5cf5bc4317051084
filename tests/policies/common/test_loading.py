"""Loaded weights are looked at: in the network that learns and in the one that acts, whatever that is made of."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from policies.common import loading
from policies.common.int8 import Int8Linear
from policies.common.runtime import Runtime
from policies.flow.policy import FlowPolicy
from policies.interface.trainable import FinetuneConfig, Lora
from wire.errors import HalfLoadedError, PolicyError, WeightsError
from wire.types import Frame, Latent, Observation, Prefix

KINDS = {
    "plain": (Runtime(), FinetuneConfig()),
    "bfloat16": (Runtime(dtype="bfloat16"), FinetuneConfig()),
    "int8": (Runtime(int8=True), FinetuneConfig()),
    "both": (Runtime(dtype="bfloat16", int8=True), FinetuneConfig()),
    "lora": (Runtime(), FinetuneConfig(lora=Lora(rank=2))),
    "lora in bfloat16": (Runtime(dtype="bfloat16"), FinetuneConfig(lora=Lora(rank=2))),
}
ALL = pytest.mark.parametrize("kind", KINDS)
APART = pytest.mark.parametrize("kind", [kind for kind, (runtime, _) in KINDS.items() if not runtime.plain])
Make = Callable[..., FlowPolicy]


@pytest.fixture
def make(seeing, seeing_net) -> Make:
    def made(kind: str, seed: int = 0) -> FlowPolicy:
        runtime, training = KINDS[kind]
        # wide enough for layers of 8 bits
        return FlowPolicy(seeing, msgspec.structs.replace(seeing_net, width=64), seed, runtime, training)

    return made


def trained(make: Make, kind: str) -> bytes:
    """Weights that differ in every tensor from those of a new policy."""
    policy = make(kind)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.25)
    return policy.save()


def see(policy: FlowPolicy) -> Observation:
    state = np.zeros(policy.spec.state_dim, np.float32)
    return Observation(1, state, {"front": Frame(1, np.full((16, 16, 3), 80, np.uint8))}, "reach")


@ALL
def test_what_was_loaded_whole_acts(make: Make, kind: str) -> None:
    policy = make(kind)
    policy.load(trained(make, kind), 3)
    if policy.runtime.int8:
        assert any(isinstance(part, Int8Linear) for part in policy._acting.modules())
    assert policy.act(see(policy), policy.think(see(policy)), 0).version == 3


@ALL
def test_a_tensor_that_differs_in_one_bit_is_found(make: Make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, published = make(kind), loading.load_published

    def flipped(module, header, tensors, what):
        published(module, header, tensors, what)
        first = next(one for one in module.parameters() if one.requires_grad)
        first.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(loading, "load_published", flipped)
    with pytest.raises(HalfLoadedError, match=r"version 3: '.*' is not what the file says"):
        policy.load(trained(make, kind), 3)
    assert policy.version == 0


@APART
def test_what_acts_is_looked_at_too(make: Make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(kind)
    monkeypatch.setattr(loading, "refresh", lambda network, module: None)
    with pytest.raises(HalfLoadedError, match="is not what the file says"):
        policy.load(trained(make, kind), 3)
    assert policy.version == 0


@ALL
def test_an_error_in_the_middle_leaves_no_version(make: Make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(kind)
    policy.load(trained(make, kind), 2)

    def breaks(module, header, tensors, what):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_published", breaks)
        with pytest.raises(HalfLoadedError, match=r"only a part of them was loaded.*out of memory"):
            policy.load(trained(make, kind), 3)
    assert policy.version == 0
    with pytest.raises(PolicyError):
        policy.act(see(policy), Latent(np.zeros(64, np.float32), 1, 2), 0, Prefix(np.zeros((0, 2), np.float32), 0))
    # what does not fit is refused before anything is touched
    policy.load(trained(make, kind), 4)
    with pytest.raises(WeightsError):
        policy.load(b"no weights", 5)
    assert policy.version == 4
