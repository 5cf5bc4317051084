"""A real training run, and how far its versions and worse ones are from their parents and from what people did."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.publishing.action_check import ActionCheck
from cloud_learner.training.status import TrainerPhase, VersionRefusal
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.launch import learning
from policies.interface.policy import LearnedPolicy

_ROBOTS, _EVERY, _A_ROUND = 2, 200, 2.0
"""robots that practise meanwhile; gradient steps between two versions, and for each control period of theirs"""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPolicy:
    """What a run came to."""

    recipe: Recipe
    policy: LearnedPolicy
    module: nn.Module
    """of the last version"""
    versions: list[bytes]
    """weights files, the first as it was after the demonstrations"""
    check: ActionCheck
    """on what was recorded, with what people did there"""


@contextmanager
def train(place: Path, versions: int, seed: int = 0) -> Iterator[TrainedPolicy]:
    """Recipe `state`: demonstrations, then `versions` while robots practise and the scripted operator corrects."""
    recipe = get_recipe("state", seed)
    fleet = InProcessFleet(place, recipe, _ROBOTS, seed)
    trainer, learner = fleet.trainer, fleet.trainer.learner
    while trainer.phase != TrainerPhase.online:
        trainer.step()
    files = [learner.weights()]
    for _ in range(versions):
        fleet.turn(round(_EVERY / _A_ROUND), _A_ROUND)
        files.append(learner.weights())
    ledger, store = fleet.data.buffer.open_reader()
    policy = recipe.make_policy(recipe.spec, seed)
    config = learning.dataset_config(recipe, policy, seed)
    with ReplayDataset(ledger, store, recipe.spec, config) as dataset:
        dataset.refresh()
        check = learning.make_action_check(recipe, learner, dataset, store, seed)
        assert check is not None
        check.choose()
        assert check.ready
        yield TrainedPolicy(recipe, policy, learner.snapshot(), files, check)
    store.close()
    ledger.close()
    fleet.close()


def changed(module: nn.Module, change: Callable[[torch.Tensor, torch.Generator], torch.Tensor], seed: int) -> nn.Module:
    """A copy of `module` whose parameters are what `change` makes of them."""
    other, dice = copy.deepcopy(module), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.data = change(parameter.data, dice)
    return other


def shuffled(values: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Random weights: the tensor's own values in another order."""
    return values.flatten()[torch.randperm(values.numel(), generator=dice)].view_as(values)


def nearly(values: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Another version that acts alike."""
    return values * (1 + 1e-3 * torch.randn(values.shape, generator=dice))


def scores(trained: TrainedPolicy, random: int) -> list[dict[str, Any]]:
    """A row for each kind of version: how far it is, and what the check says."""
    files, save, module = trained.versions, trained.policy.save, trained.module
    fresh = [trained.recipe.make_policy(trained.recipe.spec, 100 + seed).save() for seed in range(random)]
    right = {
        f"trained {_EVERY} steps on": list(zip(files[1:], files, strict=False)),
        "trained on, against the first version": [(file, files[0]) for file in files[1:]],
        "first version after the demonstrations, against an untrained one": [(files[0], one) for one in fresh],
    }
    mixed = [save(changed(module, shuffled, seed)) for seed in range(random)]
    wrong = {
        "untrained": [(one, files[-1]) for one in fresh],
        "values of each tensor shuffled": [(one, files[-1]) for one in mixed],
        "10 times as large": [(save(changed(module, lambda values, _: 10 * values, 0)), files[-1])],
        "all zero": [(save(changed(module, lambda values, _: 0 * values, 0)), files[-1])],
    }
    kinds = [(name, "pass", pairs) for name, pairs in right.items()]
    kinds += [(name, "be refused", pairs) for name, pairs in wrong.items()]
    return [_row(trained.check, *kind) for kind in kinds]


def _row(check: ActionCheck, name: str, is_to: str, pairs: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    changes, distances, faults = [], [], []
    for file, parent in pairs:
        known = hashlib.sha256(parent).hexdigest()
        before, after = check.act(parent, known), check.act(file)
        assert not isinstance(before, VersionRefusal)
        assert not isinstance(after, VersionRefusal)
        change, refusal = check.compare(after, known)
        changes.append(change)
        distances.append(check.distance(after) or 0.0)
        faults.append(refusal.fault.value if refusal is not None else "")
    most = check.config.max_change
    return {
        "version": name,
        "is to": is_to,
        "count": len(pairs),
        "change from its parent: median; most": f"{np.median(changes):.3f}; {max(changes):.3f}",
        "of these above max_change": sum(change > most for change in changes),
        "from what people did: median; most": f"{np.median(distances):.3f}; {max(distances):.3f}",
        "refused": sum(map(bool, faults)),
        "for": ", ".join(sorted(set(faults) - {""})),
    }
