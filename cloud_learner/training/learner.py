"""One update after another: what an algorithm asks for, with clipped AdamW, running averages and the run's precision.

A learner is deterministic: the same policy, settings, seed and batches give the same bytes, also when it was saved and
restored in between. It knows nothing of files, buffers or the network.

What is frozen is in memory once, shared by the weights and their average, and never in a checkpoint: only its hash is
(`policies.common.weights`). What a policy's `loss` needs of the module, such as training mode for dropout, it sets
itself; its random numbers are torch's, which follow from the seed and the number of the update.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import nn

from cloud_learner.algorithms.augmentation import shift_images
from cloud_learner.algorithms.interface import POLICY, Algorithm, AlgorithmConfig, Metrics, TrainedNetwork
from cloud_learner.training.config import LossPrecision, TrainingConfig
from cloud_learner.training.optimized_network import OptimizedNetwork, is_optional
from cloud_learner.training.ranks.group import ALONE, RankCommand, RankGroup
from cloud_learner.training.ranks.sharded_network import make_network
from policies.common.embodiments import EmbodimentTable
from policies.common.weights import base_sha256
from policies.interface.capabilities import Joinable
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError, NotFiniteError, PolicyError, suggest

_EMBODIMENTS = "embodiments"
_RESUME = (
    "Train with the recipe, algorithm, --policy and --policy-config (its `training` options included) that made it, or "
    "start a fresh --data directory."
)


@dataclass(frozen=True)
class LearnerState:
    """All that a learner needs to go on as if it had never stopped."""

    tensors: dict[str, torch.Tensor]
    """weights, averages and moments by name, on the CPU; of the weights those that training changes"""
    meta: dict[str, Any]
    """JSON: gradient steps, the seed and, if something is frozen, the hash of that"""


class BatchSource(Protocol):
    """Where batches come from, such as a `ReplayDataset`. It may have `batches_per_update`: so many make one update at
    least, as from an `EmbodimentMix`."""

    def next(self) -> Batch:
        """The next batch."""
        ...

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        """float[b]: how well each image of it is learned."""
        ...


class Learner:
    """Trains what the algorithm names, in place, and keeps the average of the policy that robots run."""

    def __init__(
        self,
        policy: TrainablePolicy,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        seed: int = 0,
        group: RankGroup = ALONE,
    ) -> None:
        """`group`: ranks that make the same updates at the same time; what they train is sharded over them.

        Raises `PolicyError` for a network in which nothing can be trained, and `ConfigError` for a policy and an
        algorithm that do not fit."""
        self.policy = policy
        self.training = training
        self.group = group
        self.named = f"algorithm '{algorithm.name}'"
        """for people"""
        algorithm.require_ranks(group.world)
        # its own networks begin alike under the same seed, on every rank
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.algorithm = algorithm.make(policy)
        if not isinstance(self.algorithm, Algorithm):
            raise ConfigError(f"{self.named}: make() gave {self.algorithm!r}, which is no Algorithm.")
        self.gradient_steps = 0
        """updates that were made"""
        self.random_lock = threading.Lock()
        """held while torch's global random numbers are a step's: whoever draws of them in another thread holds it"""
        for name, one in self.algorithm.networks.items():
            if not isinstance(one, TrainedNetwork):
                raise ConfigError(f"{self.named}: its network '{name}' is {type(one).__name__}, and no TrainedNetwork.")
            # where the policy was made; what an algorithm has beside it need not mind
            one.module.to(next(policy.module.parameters()).device)
        self.networks: dict[str, OptimizedNetwork] = {
            name: make_network(name, one, training, group) for name, one in self.algorithm.networks.items()
        }
        if POLICY not in self.networks:
            raise ConfigError(f"{self.named} trains {sorted(self.networks)}, and no '{POLICY}'.")
        self.device = self.networks[POLICY].device
        self.bfloat16 = training.precision == LossPrecision.bfloat16 and _has_bfloat16(self.device)
        self.seed = seed
        self._norms: dict[str, float] = {}

    def step(self, source: BatchSource) -> Metrics:
        """One update; what the algorithm says of it, and the norms of gradients.

        Raises `NotFiniteError` where a loss or a gradient is not finite: its network is then as it was before.
        `ConfigError` for a network that cannot be compiled though the training says so, and for an algorithm whose loss
        is no scalar or whose metrics are not what `Metrics` says: no further step can be made then.
        """
        metrics = self._checked(self.algorithm.update(_Step(self, source)))
        self.gradient_steps += 1
        for network in self.networks.values():
            network.update_average(self.gradient_steps)
        return self._norms | metrics

    def _checked(self, metrics: object) -> Metrics:
        """What an update gave, as it has to be."""
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"{self.named}: update() gave {metrics!r}, and no numbers by name.")
        for name, value in metrics.items():
            if not isinstance(name, str):
                raise ConfigError(f"{self.named}: update() gave {name!r} as a name; it must be a word.")
            if not isinstance(value, Real):
                raise ConfigError(
                    f"{self.named}: update() gave '{name}' as {type(value).__name__}, which is no number; of a tensor "
                    "give its .item()."
                )
        if "loss" not in metrics:
            raise ConfigError(f"{self.named}: update() gave {', '.join(metrics) or 'nothing'}, and no loss.")
        found = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(found["loss"]):
            raise ConfigError(f"{self.named}: update() gave a loss of {found['loss']}; it must be finite.")
        return found

    def note_norm(self, network: str, norm: float) -> None:
        """Of its newest gradient, before it was clipped."""
        self._norms["gradient_norm" if network == POLICY else f"gradient_norm_of_{network}"] = norm

    @property
    def average(self) -> nn.Module:
        """Of the policy: what robots run."""
        return self.networks[POLICY].average

    def weights(self) -> bytes:
        """The averaged weights as a file that `Policy.load` accepts."""
        return self.policy.save(self.networks[POLICY].whole_average())

    def snapshot(self) -> nn.Module:
        """A copy of the average, for `policy.save` in whatever thread; what is frozen is shared, not copied."""
        self.group.announce(RankCommand.snapshot)
        return self.networks[POLICY].copy_average()

    def state(self) -> LearnerState:
        """A copy of everything that changes; training may go on while it is written."""
        tensors = {name: one for network in self.networks.values() for name, one in network.state().items()}
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        meta: dict[str, Any] = {"gradient_steps": self.gradient_steps, "seed": self.seed}
        if base := base_sha256(self.policy.module):
            meta["base"] = base
        if isinstance(self.policy, Joinable):
            meta[_EMBODIMENTS] = msgspec.to_builtins(self.policy.embodiments)
        return LearnerState(copies, meta)

    def empty_shards(self, sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        """Tensors to read a checkpoint into that has `sizes`: of what is sharded this rank's shards."""
        empty: dict[str, torch.Tensor] = {}
        for network in self.networks.values():
            empty |= network.empty_like(sizes)
        return {n: empty[n] if n in empty else torch.empty(size, dtype=kind) for n, (size, kind) in sizes.items()}

    def restore(self, state: LearnerState) -> None:
        """Go on from `state`.

        Raises `PolicyError`, with nothing changed, if it was taken from another network or on top of another base.
        """
        own = {name: one for network in self.networks.values() for name, one in network.changing().items()}
        for name, mine in own.items():
            theirs = state.tensors.get(name)
            if theirs is None or theirs.shape != mine.shape:
                found = "is missing" if theirs is None else f"has shape {list(theirs.shape)}"
                raise PolicyError(
                    f"the checkpoint is of another network: '{name}' {found}, expected {list(mine.shape)}. {_RESUME}"
                )
        extra = [name for name in state.tensors if not is_optional(name) and name not in own]
        theirs_base, base = str(state.meta.get("base", "")), base_sha256(self.policy.module)
        if theirs_base != base:
            raise PolicyError(
                f"the checkpoint was trained on top of {_frozen(theirs_base)}, this policy has {_frozen(base)}: other "
                f"frozen weights, or adapters with another alpha / rank. {_RESUME}"
            )
        if extra:
            raise PolicyError(f"the checkpoint is of another network: it also has '{extra[0]}'. {_RESUME}")
        try:
            gradient_steps, seed = int(state.meta["gradient_steps"]), int(state.meta["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(f"the checkpoint cannot be restored: {error} is missing or not valid.") from error
        self._restore_embodiments(state)
        for network in self.networks.values():
            network.restore(state.tensors)
        self.gradient_steps, self.seed = gradient_steps, seed

    def _restore_embodiments(self, state: LearnerState) -> None:
        if not isinstance(self.policy, Joinable):
            return
        try:
            table = msgspec.convert(state.meta.get(_EMBODIMENTS), EmbodimentTable)
        except (msgspec.ValidationError, ConfigError) as error:
            raise PolicyError(
                f"the checkpoint cannot be restored: its robots cannot be read: {error}. {_RESUME}"
            ) from error
        self.policy.restore_embodiments(table, [self.average])


class _Step:
    """One update, as the algorithm sees it."""

    def __init__(self, learner: Learner, source: BatchSource) -> None:
        self._learner, self._source = learner, source
        self.rng = np.random.default_rng((learner.seed, learner.gradient_steps))
        self._seed = int(self.rng.integers(2**63))
        self._random_state: list[torch.Tensor] = []
        """of torch's generators, where the last draw left them"""
        self._drawing = False

    def draw(self) -> Batch:
        batch, pixels, group = self._source.next(), self._learner.training.shift_px, self._learner.group
        return shift_images(batch, pixels, self.rng, group.rank, group.world) if pixels else batch

    def minimize(self, network: str, loss: Callable[[Batch], torch.Tensor]) -> float:
        count = max(self._learner.training.accumulate, getattr(self._source, "batches_per_update", 1))
        return self._descend(network, (partial(loss, self.draw()) for _ in range(count)), count)

    def descend(self, network: str, loss: Callable[[], torch.Tensor], rate: float = 1.0) -> float:
        return self._descend(network, iter([loss]), 1, rate)

    def average(self, network: str) -> nn.Module:
        return self._network(network).average

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        group = self._learner.group
        if group.world > 1:
            # ranks plan alike, and so go by the losses of all
            mine = np.stack([np.asarray(batch["task"]), np.asarray(batch["online"]), losses], 1)
            every = group.gather(mine.astype(np.float64))
            batch, losses = {"task": every[:, 0].astype(np.int64), "online": every[:, 1] > 0}, every[:, 2]
        self._source.note_losses(batch, losses)

    @contextmanager
    def random(self) -> Iterator[None]:
        if self._drawing:
            raise ConfigError(
                f"{self._learner.named}: step.random(), minimize() and descend() do not go inside a loss, nor inside "
                "step.random(): a loss has the update's random numbers already."
            )
        device = self._learner.device
        devices = [device] if device.type == "cuda" else []
        with self._learner.random_lock, torch.random.fork_rng(devices=devices):
            if self._random_state:
                torch.set_rng_state(self._random_state[0])
                for state in self._random_state[1:]:
                    torch.cuda.set_rng_state(state, device)
            else:
                torch.manual_seed(self._seed)
            self._drawing = True
            try:
                with self._shared():
                    yield
            finally:
                self._drawing = False
            self._random_state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]

    def _network(self, name: str) -> OptimizedNetwork:
        """Raises `ConfigError` for one that the algorithm does not train."""
        if (network := self._learner.networks.get(name)) is None:
            known = self._learner.networks
            named = ", ".join(f"'{one}'" for one in known)
            raise ConfigError(f"{self._learner.named} trains no network '{name}', only {named}.{suggest(name, known)}")
        return network

    def _shared(self) -> AbstractContextManager[object]:
        return self._learner.group.share(self._learner.training.batch)

    def _descend(self, name: str, losses: Iterator[Callable[[], torch.Tensor]], count: int, rate: float = 1.0) -> float:
        """One optimiser's step down the mean of `count` losses; that mean."""
        learner, total = self._learner, 0.0
        network = self._network(name)
        network.begin()
        for loss in losses:
            with self.random(), torch.autocast(learner.device.type, torch.bfloat16, enabled=learner.bfloat16):
                value = self._scalar(name, network.compute(network.compiled(loss))) / count
            total += learner.group.mean(value.item())
            if not math.isfinite(total):
                network.begin()
                raise NotFiniteError(self._not_applied(name, f"the loss is {total}"))
            # a checkpointed part of a network draws again what it drew
            with self._shared():
                network.backward(value)
        norm = network.clipped_norm()
        if not math.isfinite(norm):
            network.begin()
            raise NotFiniteError(self._not_applied(name, f"the gradient's norm is {norm} at a loss of {total}"))
        network.step(learner.gradient_steps, rate)
        learner.note_norm(name, norm)
        return total

    def _scalar(self, name: str, loss: object) -> torch.Tensor:
        """`loss`, as it has to be. Raises `ConfigError`."""
        if not isinstance(loss, torch.Tensor):
            wrong = f"is a {type(loss).__name__}; it must be a tensor that is a scalar."
        elif loss.numel() != 1:
            wrong = f"is a tensor of shape {list(loss.shape)}; it must be a scalar: take its mean."
        elif not loss.requires_grad:
            wrong = "depends on no weights that are trained: compute it by the network, with gradients."
        else:
            return loss
        raise ConfigError(f"{self._learner.named}: its loss for '{name}' {wrong}")

    def _not_applied(self, name: str, reason: str) -> str:
        what = "" if name == POLICY else f" of '{name}'"
        return (
            f"gradient step {self._learner.gradient_steps}{what} was not applied: {reason}. Look for bad values in the "
            "newest data, or train with a smaller learning rate."
        )


def _has_bfloat16(device: torch.device) -> bool:
    """Without its instructions bfloat16 is emulated, at a seventh of float32's speed.

    The processor must have them and oneDNN must use them: ONEDNN_MAX_CPU_ISA may forbid it to.
    """
    if device.type != "cpu":
        return True
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return there and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _frozen(base: str) -> str:
    return f"a frozen base of sha256 {base[:12]}" if base else "nothing frozen"
