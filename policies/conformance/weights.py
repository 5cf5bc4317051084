"""Checks of what a policy saves and what it takes as weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np

from policies.conformance.data import Make, chunk_of, example_observation, refused, with_random_zero_init
from policies.interface.policy import Batch, NormalizationData
from wire.errors import InvalidDataError, PolicyError, SpecMismatchError, WeightsError
from wire.types import Observation


def versions(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    latent = policy.think(observation)
    policy.load(policy.save(), policy.version + 1)
    yield refused("act() on a latent of an earlier version", lambda: policy.act(observation, latent, 0), PolicyError)


def round_trip(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    make = with_random_zero_init(make)
    policy, other = make(), make()
    saved = policy.save()
    other.load(saved, 5)
    if other.version != 5:
        yield f"version is {other.version} after loading version 5"
    if other.save() != saved:
        yield "weights change when they are loaded and saved again"
    if not np.array_equal(chunk_of(policy, observation).actions, chunk_of(other, observation).actions):
        yield "a policy acts differently after its own weights were loaded"


def takes_effect(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    import torch

    policy, other = make(), make()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                size = max(float(parameter.abs().mean()), 0.01)
                parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))
    weights = policy.save()
    before = chunk_of(make(), observation).actions
    other.load(weights, 1)
    after = chunk_of(other, observation).actions
    if np.array_equal(before, after):
        yield "it acts as before after other weights were loaded"
    again = make()
    again.load(weights, 1)
    if not np.array_equal(after, chunk_of(again, observation).actions):
        yield "two policies with the same weights loaded act differently"


def garbage(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    good = policy.save()
    version = policy.version
    for name, bad in (
        ("nothing", b""),
        ("noise", bytes(range(256)) * 8),
        ("a torn file", good[: len(good) // 2]),
        ("a pickle", b"\x80\x04N."),
        ("a torch archive", b"PK\x03\x04" + good),
    ):
        yield refused(f"load() of {name}", partial(policy.load, bad, version + 1), WeightsError)
        if policy.version != version or policy.save() != good:
            yield f"load() of {name} changed the policy"


def others(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    from policies.common.weights import pack, unpack

    policy = make()
    good, version = policy.save(), policy.version
    try:
        header, tensors = unpack(good, "what save() gives")
    except WeightsError as error:
        yield f"weights that do not say of which robot and network they are: {error}; see policies.common.weights.pack"
    spec = msgspec.structs.replace(header.spec, embodiment=header.spec.embodiment + " of somebody else")
    robot = msgspec.structs.replace(header, spec=spec, spec_hash=spec.hash)
    network = msgspec.structs.replace(header, network="of another kind")
    name, tensor = max(tensors.items(), key=lambda item: item[1].numel())
    less = {other: kept for other, kept in tensors.items() if other != name}
    cases = [("another robot", pack(tensors, robot)), ("another kind of network", pack(tensors, network))]
    cases.append((f"a network without '{name}'", pack(less, header)))
    cases.append((f"a network with one more than '{name}'", pack({**tensors, name + ".more": tensor.clone()}, header)))
    shorter = tensor.flatten()[:-1].clone()
    cases.append((f"a network whose '{name}' is smaller", pack({**less, name: shorter}, header)))
    if tensor.is_floating_point():
        cases.append((f"a training that diverged ('{name}' is NaN)", pack({**less, name: tensor * np.nan}, header)))
    for what, bad in cases:
        load = partial(policy.load, bad, version + 1)
        yield refused(f"load() of weights of {what}", load, SpecMismatchError, WeightsError)
        if policy.version != version or policy.save() != good:
            yield f"load() of weights of {what} changed the policy"


def published(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    import safetensors.torch

    policy = make()
    saved = policy.save()
    frozen = {name for name, parameter in policy.module.named_parameters() if not parameter.requires_grad}
    sent = sorted(frozen & safetensors.torch.load(saved).keys())
    if sent:
        yield f"what is frozen is in the weights: {sent[:5]}, {len(sent)} in all; see `policies.common.weights`"
    # as a trainer saves the average of the weights
    average = copy.deepcopy(policy.module).requires_grad_(False).eval()
    if policy.save(average) != saved:
        yield "save(module) of a copy of its own module gives other weights than save()"


def statistics(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    make = with_random_zero_init(make)
    policy, other, spec = make(), make(), make().spec
    if getattr(policy, "pretrained", False):
        return
    states = np.stack([0.5 * example_observation(spec, seed).state + 0.25 for seed in range(64)])
    chunks = np.random.default_rng(0).uniform(
        spec.action_low(), spec.action_high(), (64, policy.horizon, spec.action_dim)
    )
    policy.set_normalization(NormalizationData(states, chunks.astype(np.float32)))
    other.load(policy.save(), policy.version)
    mine, theirs = chunk_of(policy, observation).actions, chunk_of(other, observation).actions
    if not np.array_equal(mine, theirs):
        yield "what set_normalization() took does not travel with the weights: loaded elsewhere, they act differently"
    wider = NormalizationData(np.hstack([states, states]), chunks.astype(np.float32))
    yield refused(
        "set_normalization() of another robot's states", lambda: policy.set_normalization(wider), InvalidDataError
    )
