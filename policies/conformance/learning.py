"""Checks of what a policy does in a trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from policies.conformance.data import (
    Make,
    flattened,
    looked_at,
    randomize_zero_init,
    refused,
    seeded,
    with_random_zero_init,
)
from policies.interface.policy import Batch, LearnedPolicy
from wire.errors import InvalidDataError
from wire.types import Observation

SAME = 1e-4
"""relative difference of two losses that are sums of the same numbers in another order"""
_TRIES = 4
"""losses in which each trained tensor must have had a part: some are drawn into one only now and then"""


def gradient(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    flags = [parameter.requires_grad for parameter in policy.module.parameters()]
    without: list[str] = []
    for number in range(_TRIES):
        loss = _loss(policy, batch, number)
        if loss.ndim != 0 or not np.isfinite(loss.item()):
            yield f"the loss is {loss}, not one finite number"
        loss.backward()
        without = [name for name, p in policy.module.named_parameters() if p.requires_grad and not _has_gradient(p)]
        if not without:
            break
        randomize_zero_init(policy)
    if [parameter.requires_grad for parameter in policy.module.parameters()] != flags:
        yield "loss() freezes or thaws parameters"
    yield f"no gradient reaches {without[:8]}, {len(without)} in all" if without else ""


def bfloat16(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    import torch

    policy = make()
    device = next(policy.module.parameters()).device.type
    exact = float(_loss(policy, batch).detach())
    with torch.autocast(device, torch.bfloat16):
        loss = _loss(policy, batch)
    loss.backward()
    if not math.isfinite(loss.item()):
        yield f"the loss is {loss.item()} under bfloat16 autocast, {exact:.4g} in float32"
    bad = [n for n, p in policy.module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
    yield f"gradients under bfloat16 autocast are not finite: {bad[:5]}" if bad else ""


def masked(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    keep = policy.horizon // 2
    if not keep:
        return
    mask = np.array(batch["mask"])
    mask[..., keep:] = 0
    other = np.array(batch["actions"])
    other[..., keep:, :] = (policy.spec.action_low() + policy.spec.action_high()) - other[..., keep:, :]
    first = _value(policy, {**batch, "mask": mask})
    second = _value(policy, {**batch, "mask": mask, "actions": other})
    if not _same(first, second):
        yield f"the loss is {first:.6g} or {second:.6g} as actions are that the mask says were not imitated"


def apart(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    make = with_random_zero_init(make)
    b = len(batch["state"])
    half = np.arange(b) < b // 2
    before, after = _varied(batch, half), _varied(batch, ~half)
    both = _varied(batch, np.ones(b, bool))
    policy = make()
    losses = [_value(policy, one) for one in (batch, before, after, both)]
    # what changing some samples does to a mean over samples is the same whatever the others are
    alone, beside = losses[1] - losses[0], losses[3] - losses[2]
    if abs(alone - beside) <= 1e-3 * max(abs(alone), abs(beside)) + 3e-6 * max(map(abs, losses)):
        return
    yield (
        f"states and images of some samples move the loss by {alone:.4g} or {beside:.4g}, as those of the others are: "
        "samples of a batch must not see each other's"
    )


def flat_or_grouped(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    grouped, flat = (_value(policy, one) for one in flattened(batch))
    if not _same(grouped, flat):
        yield f"the loss of a batch with one step behind each image is {grouped:.6g}, without that axis {flat:.6g}"


def refusals(make: Make, observation: Observation, batch: Batch) -> Iterator[str]:
    policy = make()
    wider = {name: np.concatenate([batch[name], batch[name][..., :1]], -1) for name in ("state", "actions")}
    cases: list[tuple[str, Batch]] = [
        (f"{name} of {wider[name].shape[-1]} dimensions", {**batch, name: wider[name]}) for name in wider
    ]
    cases.append(("no actions", {name: values for name, values in batch.items() if name != "actions"}))
    longer = np.concatenate([batch["actions"], batch["actions"][..., -1:, :]], -2)
    mask = np.concatenate([batch["mask"], batch["mask"][..., -1:]], -1)
    cases.append((f"{policy.horizon + 1} actions in a chunk", {**batch, "actions": longer, "mask": mask}))
    cases.append(("nothing to imitate (its mask keeps none)", {**batch, "mask": np.zeros_like(batch["mask"])}))
    for camera in looked_at(make, observation):
        rest = {name: images for name, images in batch["images"].items() if name != camera}
        cases.append((f"no images of camera '{camera}'", {**batch, "images": rest}))
    for what, bad in cases:
        yield refused(f"loss() of a batch with {what}", partial(_loss, policy, bad), InvalidDataError)


def _loss(policy: LearnedPolicy, batch: Batch, seed: int = 0) -> Any:
    """Of a seeded draw: noise, flow times and dropout come from the global streams in most policies."""
    with seeded(seed):
        return policy.loss(batch)


def _value(policy: LearnedPolicy, batch: Batch) -> float:
    """The loss as a number, of the same weights and statistics each time: those that follow the data move with it."""
    import torch

    before = {name: buffer.clone() for name, buffer in policy.module.named_buffers()}
    value = float(_loss(policy, batch).detach())
    with torch.no_grad():
        for name, buffer in policy.module.named_buffers():
            if name in before:
                buffer.copy_(before[name])
    return value


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _has_gradient(parameter: Any) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _varied(batch: Batch, chosen: np.ndarray) -> Batch:
    """Other images and states, past ones too, in the samples that bool[b] `chosen` says. Their actions stay."""
    varied = dict(batch)
    for name in ("state", "past_state", "later_state"):
        if name in batch:
            values = np.array(batch[name])
            values[chosen] = -0.5 * values[chosen]
            varied[name] = values
    for name in ("images", "past_images"):
        if name in batch:
            varied[name] = {camera: _negative(images, chosen) for camera, images in batch[name].items()}
    return varied


def _negative(images: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    images = np.array(images)
    images[chosen] = 255 - images[chosen]
    return images
