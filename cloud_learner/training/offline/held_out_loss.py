"""How well weights do on episodes that nothing is trained on."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from cloud_learner.buffer.loading.dataset import ReplayDataset
from policies.interface.policy import Batch, LearnedPolicy
from wire.errors import InvalidDataError

BATCHES = 16


class HeldOutLoss:
    """The policy's own imitation loss, whatever algorithm and settings made the weights."""

    def __init__(self, policy: LearnedPolicy, batches: Sequence[Batch], seed: int) -> None:
        """`policy`: one of its own, whose weights change. `seed`: of what a loss draws, so that the same weights have
        the same loss."""
        self._policy, self._batches, self._seed = policy, batches, seed

    def of(self, weights: bytes) -> float:
        """The mean over the batches, NaN where one is. Raises as `Policy.load` does."""
        self._policy.load(weights, 1)
        device = next(self._policy.module.parameters()).device
        devices, total = [device] if device.type == "cuda" else [], 0.0
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._seed)
            for batch in self._batches:
                total += float(self._policy.loss(batch))
        return total / len(self._batches)


def draw_held_out(dataset: ReplayDataset) -> list[Batch]:
    """`BATCHES` of a dataset whose config is `held_out`: the same ones for the same seed and buffer.

    Raises `InvalidDataError` where none of its episodes is held out.
    """
    while dataset.refresh():
        pass
    if not dataset.eligible_steps:
        raise InvalidDataError(
            f"none of the episodes with something to imitate is among the {dataset.config.validation:.0%} that are "
            "held out: hold out more with --set validation=SHARE, or record more."
        )
    # a batch holds until the next one
    return [copy.deepcopy(dataset.next()) for _ in range(BATCHES)]
