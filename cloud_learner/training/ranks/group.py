"""The ranks of one training run: what they tell each other beside gradients.

The first rank decides and announces what comes next; the others do the same at the same time. `ALONE` is the group of a
process that trains by itself: there nothing is said, and nothing costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wire.errors import StorageError

_SILENT = timedelta(hours=12)
"""the first rank may wait for data or for people, and announces nothing meanwhile; who dies is noticed at once"""


class RankCommand(IntEnum):
    """What all ranks do next."""

    refresh = 0
    """look for new segments"""
    normalize = 1
    """take the first rank's normalisation data"""
    step = 2
    """one update"""
    drawn = 3
    """say which episodes were drawn"""
    snapshot = 4
    """gather the policy's average for the first rank"""
    save = 5
    """begin a checkpoint"""
    restore = 6
    """go back to the last good state"""
    stop = 7


class RankGroup:
    """A process by itself."""

    rank = 0
    world = 1
    background: dist.ProcessGroup | None = None
    """for what is beside the training, such as checkpoints; None alone"""

    def announce(self, command: RankCommand) -> None:
        """Of the first rank: tell the others what comes next."""

    def mean(self, value: float) -> float:
        """Of `value` over all ranks; the same on each."""
        return value

    def agree(self, ok: bool) -> bool:
        """Whether it is so on every rank."""
        return ok

    def together(self, action: Callable[[], object]) -> None:
        """Do something beside the training. Raises `StorageError` on every rank where it failed on one."""
        action()

    def union(self, numbers: Collection[int]) -> set[int]:
        """Of what all ranks give."""
        return set(numbers)

    def share(self, array: np.ndarray | None) -> np.ndarray:
        """The first rank's float32 array, on every rank; the others give None."""
        assert array is not None
        return array


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
        """Of the others: wait for what comes next."""
        command = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(command, 0, group=self._commands)
        return RankCommand(int(command))

    def mean(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self._commands)
        return float(total) / self.world

    def agree(self, ok: bool) -> bool:
        return self._agree(ok, self._commands)

    def together(self, action: Callable[[], object]) -> None:
        error: StorageError | None = None
        try:
            action()
        except StorageError as failure:
            error = failure
        if not self._agree(error is None, self.background):
            raise error or StorageError("another rank could not do its part; its log says why.")

    def union(self, numbers: Collection[int]) -> set[int]:
        counts = torch.zeros(self.world, dtype=torch.int64)
        counts[self.rank] = len(numbers)
        dist.all_reduce(counts, group=self._commands)
        mine = torch.zeros(int(counts.max()), dtype=torch.int64)
        mine[: len(numbers)] = torch.tensor(sorted(numbers), dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine, group=self._commands)
        return {int(n) for one, count in zip(found, counts.tolist(), strict=True) for n in one[:count]}

    def share(self, array: np.ndarray | None) -> np.ndarray:
        # at most eight sides, counted first
        sides = torch.zeros(9, dtype=torch.int64)
        if array is not None:
            sides[: array.ndim + 1] = torch.tensor([array.ndim, *array.shape])
        dist.broadcast(sides, 0, group=self._commands)
        shape = tuple(sides[1 : 1 + int(sides[0])].tolist())
        data = torch.empty(shape) if array is None else torch.from_numpy(np.ascontiguousarray(array, np.float32))
        if data.numel():
            dist.broadcast(data, 0, group=self._commands)
        return data.numpy()

    def _agree(self, ok: bool, group: dist.ProcessGroup | None) -> bool:
        said = torch.tensor([int(ok)])
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group)
        return bool(said)
