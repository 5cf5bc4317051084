"""Statistics that follow the data: the policies that have them keep every promise, and normalise by what was known."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from policies.conformance.check import check_policy, example_batch
from policies.interface.registry import PolicyChoice, make_policy
from policies.tokens.config import TokensConfig
from policies.tokens.policy import TokenPolicy
from wire.errors import WeightsError

WITH_VLM = importlib.util.find_spec("transformers") is not None
STATISTICS = {"normalizer.mean", "normalizer.std", "normalizer.count", "normalizer.mean64", "normalizer.spread"}


def failed(make):
    return [f"{check.name}: {check.detail}" for check in check_policy(make) if not check.passed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place", "options"),
    [
        ("flow", "small", {"prefix": True, "max_offset": 2, "residual": True}),
        ("flow", "pixels", {"prefix": True, "max_offset": 2, "residual": True}),
        ("tokens", "fast", {"max_offset": 2, "width": 32}),
        ("tokens", "residual_vq", {"width": 32}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_policies_conform(seeing, kind, place, options):
    choice = PolicyChoice(kind, place, {"online_statistics": True, "horizon": 6, **options})
    assert make_policy(choice, seeing, 3).module.normalizer.online
    assert failed(lambda: make_policy(choice, seeing, 3)) == []


@pytest.mark.slow
@pytest.mark.skipif(not WITH_VLM, reason="the backbone needs transformers")
def test_one_with_a_backbone_and_adapters_conforms(seeing, tmp_path):
    from tests.policies.flow.vlm_directory import build

    config = {
        "vlm": str(build(tmp_path / "vlm")),
        "vlm_train": True,
        "online_statistics": True,
        "horizon": 6,
        "training": {"lora": {"rank": 2}},
    }
    choice = PolicyChoice("flow", "small", config)
    policy = make_policy(choice, seeing, 3)
    assert any("lora" in name for name, _ in policy.module.named_parameters())
    assert failed(lambda: make_policy(choice, seeing, 3)) == []


def flow(spec, online):
    return make_policy(PolicyChoice("flow", "pixels", {"online_statistics": online}), spec, 0)


def tokens(spec, online):
    return TokenPolicy(spec, TokensConfig(state_dim=2, action_dim=2, width=32, online_statistics=online), 0)


@pytest.mark.parametrize("kind", [flow, tokens])
def test_a_batch_is_normalised_by_what_was_known_before_it(seeing, kind):
    batch = example_batch(seeing, 16, ticks_ahead=kind(seeing, False).ticks_ahead)
    batch["state"] = batch["state"] + np.float32(2)

    def losses(policy):
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            found.append(policy.loss(batch).item())
        return found

    first, second = losses(kind(seeing, True))
    still, again = losses(kind(seeing, False))
    assert first == still == again
    assert second != first


@pytest.mark.parametrize("kind", [flow, tokens])
def test_only_training_moves_statistics_and_they_travel(seeing, kind):
    policy, other = kind(seeing, True), kind(seeing, True)
    batch = example_batch(seeing, 16, ticks_ahead=policy.ticks_ahead)
    with torch.no_grad():
        policy.loss(batch)
    policy.module.eval()
    policy.loss(batch)
    assert policy.module.normalizer.count == 0
    policy.module.train()
    policy.loss(batch).backward()
    assert policy.module.normalizer.mean.numpy() == pytest.approx(batch["state"].mean((0, 1)), rel=1e-5)
    other.load(policy.save(), 1)
    ours, theirs = policy.module.state_dict(), other.module.state_dict()
    assert {name for name in ours if name.startswith("normalizer")} == STATISTICS
    assert all(torch.equal(ours[name], theirs[name]) for name in STATISTICS)


def test_weights_whose_statistics_do_not_follow_are_refused(seeing):
    with pytest.raises(WeightsError, match="online_statistics"):
        tokens(seeing, True).load(tokens(seeing, False).save(), 1)
    with pytest.raises(WeightsError, match="online_statistics"):
        flow(seeing, True).load(flow(seeing, False).save(), 1)
