"""The ranks of one training run: what they tell each other beside gradients.

The first rank decides and announces what comes next; the others do the same at the same time. `ALONE` is the group of a
process that trains by itself: there nothing is said, and nothing costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cloud_learner.training.ranks.shared_random import SharedRandom
from policies.common.batches import part_of_batch
from wire.errors import StorageError

_ERROR_BYTES = 1000
_SILENT = timedelta(hours=12)
"""the first rank may wait for data or for people, and announces nothing meanwhile; who dies is noticed at once"""


class RankCommand(IntEnum):
    """What all ranks do next."""

    step = 0
    """one update"""
    snapshot = 1
    """gather the policy's average for the first rank"""
    save = 2
    """begin a checkpoint"""
    restore = 3
    """go back to the last good state"""
    stop = 4


class RankGroup:
    """A process by itself."""

    rank = 0
    world = 1
    background: dist.ProcessGroup | None = None
    """for what is beside the training, such as checkpoints; None alone"""

    def announce(self, command: RankCommand) -> None:
        """Of the first rank: tell the others what comes next."""

    def receive(self) -> RankCommand:
        """Of the others: wait for what comes next."""
        raise RuntimeError("a process by itself has nobody to follow.")

    def mean(self, value: float) -> float:
        """Of `value` over all ranks; the same on each."""
        return value

    def together(self, action: Callable[[], object]) -> None:
        """Do something beside the training. Raises `StorageError` on every rank where it failed on one."""
        action()

    def first(self, number: int) -> int:
        """What the first rank says, on every rank."""
        return number

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Of float64[n, ...] `values` those of all ranks, [n * world, ...] in their order; the same on each."""
        return values

    def share(self, batch: int) -> AbstractContextManager[object]:
        """Inside, losses are those of this rank's rows of a batch of so many: torch's random numbers are what one
        process draws for these rows, and what is divided by is what all ranks keep."""
        return nullcontext()


ALONE = RankGroup()


class ProcessRanks(RankGroup):
    """Ranks that talk through the default process group of torch.distributed, which has a CPU backend."""

    def __init__(self, device: str) -> None:
        """`device`: where networks are, `cpu` or `cuda`."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device, (self.world,))
        self._commands = dist.new_group(backend="gloo", timeout=_SILENT)
        self.background = dist.new_group(backend="gloo", timeout=_SILENT)

    def announce(self, command: RankCommand) -> None:
        if self.rank == 0:
            dist.broadcast(torch.tensor([int(command)]), 0, group=self._commands)

    def receive(self) -> RankCommand:
        command = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(command, 0, group=self._commands)
        return RankCommand(int(command))

    def mean(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self._commands)
        return float(total) / self.world

    def together(self, action: Callable[[], object]) -> None:
        error: StorageError | None = None
        try:
            action()
        except StorageError as failure:
            error = failure
        text = str(error).encode()[:_ERROR_BYTES] if error is not None else b""
        mine = torch.tensor(list(text.ljust(_ERROR_BYTES)), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self.background)
        texts = [bytes(one.tolist()).decode(errors="replace").strip() for one in every]
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise error or StorageError(failed[0])

    def first(self, number: int) -> int:
        said = torch.tensor([number])
        dist.broadcast(said, 0, group=self._commands)
        return int(said)

    def gather(self, values: np.ndarray) -> np.ndarray:
        mine = torch.from_numpy(np.ascontiguousarray(values))
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._commands)
        return torch.cat(every).numpy()

    @contextmanager
    def share(self, batch: int) -> Iterator[None]:
        with SharedRandom(self.rank, self.world, batch // self.world), part_of_batch(self._mean_count):
            yield

    def _mean_count(self, count: torch.Tensor) -> torch.Tensor:
        total = count.detach().to("cpu", torch.float64)
        dist.all_reduce(total, group=self._commands)
        return (total / self.world).to(count.device, torch.float32)
