"""Batches of several shapes of robots in one run: a dataset for each, in turn, as a `ReplayDataset` gives those of one.

A batch is of one robot, and its `spec_hash` says which; nothing is padded here. A robot takes part from when it has its
demonstrations, whenever that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import msgspec
import numpy as np

from cloud_learner.buffer.loading.config import DatasetConfig, DatasetStats
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.mixture import DatasetMixture
from cloud_learner.training.demonstrations import DemonstrationCount
from policies.interface.policy import Batch, NormalizationData
from wire.errors import InvalidDataError
from wire.messages.gateway import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)

_GREATEST = ("newest_row", "echo")
"""figures that are not summed"""


@dataclass(frozen=True, slots=True, eq=False)
class MixMember:
    """One shape."""

    spec: RobotSpec
    dataset: ReplayDataset
    share: float
    """of the batches, beside the others'"""
    demonstrations: DemonstrationCount | None = None
    """that it takes part with; None: with whatever it has"""


class EmbodimentMix:
    """Of members by name. Not for several threads at once, except `submit`."""

    def __init__(
        self, members: Mapping[str, MixMember], learn_batches: int = 0, on_learned: Callable[[str], None] | None = None
    ) -> None:
        """`on_learned` is told the spec's hash when a member is about to have its batch number `learn_batches`, and
        once more by the next one after `restore` or `go_back`.

        Raises `ConfigError` for no member and for shares that are not positive.
        """
        self._members = dict(members)
        datasets = {name: member.dataset for name, member in members.items()}
        self._turns = _Turns(datasets, {name: member.share for name, member in members.items()}, self)
        self._by_hash = {member.spec.hash: member.dataset for member in members.values()}
        self._learn_batches, self._on_learned = learn_batches, on_learned
        self.joined: list[str] = []
        """members that take part, in the order in which they joined"""
        self._batches: dict[str, int] = {}
        """that each was given"""
        self._learned: set[str] = set()
        """members of which `on_learned` was told"""

    @property
    def config(self) -> DatasetConfig:
        """With the tasks of all; what else robots of several shapes differ in is that of the first."""
        configs = [member.dataset.config for member in self._members.values()]
        tasks = {task: sentence for config in configs for task, sentence in config.tasks.items()}
        return msgspec.structs.replace(configs[0], tasks=tasks)

    @property
    def datasets(self) -> dict[str, ReplayDataset]:
        """By member."""
        return {name: member.dataset for name, member in self._members.items()}

    @property
    def batches_per_update(self) -> int:
        """So many make one update, that each robot has a part in it."""
        return max(1, len(self.joined))

    # --- what is there --------------------------------------------------------------------------------------------

    def pop_newcomer(self) -> NormalizationData | None:
        """What to normalise a robot by that has its demonstrations by now; it takes part from now on. None: nobody new.

        Raises `StorageError` when they cannot be read; ask again then.
        """
        for name, member in self._members.items():
            if name in self.joined or not member.dataset.eligible_steps:
                continue
            if member.demonstrations is not None and not member.demonstrations.complete:
                continue
            found = member.dataset.examples()
            self.joined.append(name)
            self._batches[name] = 0
            return NormalizationData(found.states, found.chunks, member.spec)
        return None

    def refresh(self, limit: int | None = None) -> int:
        """`ReplayDataset.refresh` of each; the most that one of them looked at."""
        return max([dataset.refresh(limit) for dataset in self.datasets.values()])

    def submit(self, row: int, segment: Segment) -> None:
        """As `ReplayDataset.submit`."""
        for dataset in self.datasets.values():
            dataset.submit(row, segment)

    def pop_wanted_pictures(self) -> tuple[str, ...]:
        """As `ReplayDataset.pop_wanted_pictures`."""
        return tuple(name for dataset in self.datasets.values() for name in dataset.pop_wanted_pictures())

    @property
    def newest_row(self) -> int:
        """Ledger row of the newest segment looked at."""
        return max(dataset.newest_row for dataset in self.datasets.values())

    @property
    def eligible_steps(self) -> int:
        """Steps of those that take part at which a window may begin."""
        return sum(self._members[name].dataset.eligible_steps for name in self.joined)

    @property
    def ahead_of_data(self) -> bool:
        """As `ReplayDataset.ahead_of_data`, of every one that takes part: who brings nothing holds nobody up."""
        return bool(self.joined) and all(self._members[name].dataset.ahead_of_data for name in self.joined)

    def count_from_now(self) -> None:
        """As `ReplayDataset.count_from_now`."""
        for dataset in self.datasets.values():
            dataset.count_from_now()

    # --- batches --------------------------------------------------------------------------------------------------

    def next(self) -> Batch:
        """The batch of the one whose turn it is. Raises what `ReplayDataset.next` raises."""
        name, batch = self._turns.next()
        self._batches[name] += 1
        spec_hash = self._members[name].spec.hash
        if self._on_learned is not None and name not in self._learned and self._batches[name] >= self._learn_batches:
            self._learned.add(name)
            self._on_learned(spec_hash)
        return {**batch, "spec_hash": spec_hash}

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        """As `ReplayDataset.note_losses`, to the one whose batch it is."""
        self._by_hash[batch["spec_hash"]].note_losses(batch, losses)

    def drawn_episodes(self) -> set[int]:
        """As `ReplayDataset.drawn_episodes`, of all."""
        return set().union(*(dataset.drawn_episodes() for dataset in self.datasets.values()))

    @property
    def stats(self) -> DatasetStats:
        """Of all together."""
        return reduce(_added, (dataset.stats for dataset in self.datasets.values()))

    @property
    def echo(self) -> float:
        """As `ReplayDataset.echo`, the greatest."""
        return max(dataset.echo for dataset in self.datasets.values())

    # --- going on after a stop ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able: what `restore` needs to go on with the batch after the one delivered last."""
        return {**self._turns.state(), "joined": list(self.joined), "batches": dict(self._batches)}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """As `ReplayDataset.restore`, of each; a member that was not there yet begins anew.

        Raises `InvalidDataError` for a state of others.
        """
        joined, batches = self._read_joined(state)
        same = self._turns.restore(state)
        self._set_joined(joined, batches)
        return same

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Those take part that did at `state`, with as many batches; all others join again. Batches go on.

        The network that batches are for knows nobody else. All join again where `state` cannot be read.
        """
        try:
            self._set_joined(*self._read_joined(state))
        except InvalidDataError as error:
            log.warning("all robots join again: %s", error)
            self._set_joined([], {})

    def _read_joined(self, state: Mapping[str, Any]) -> tuple[list[str], dict[str, int]]:
        try:
            joined, batches = msgspec.convert((state["joined"], state["batches"]), tuple[list[str], dict[str, int]])
        except (KeyError, msgspec.ValidationError) as error:
            raise InvalidDataError(f"mixture: the state cannot be read ({error}); begin anew without it.") from error
        if unknown := sorted(set(joined) - self._members.keys()):
            raise InvalidDataError(f"mixture: the state is also of {unknown}; there are {sorted(self._members)}.")
        return joined, batches

    def _set_joined(self, joined: list[str], batches: dict[str, int]) -> None:
        self.joined, self._batches = joined, batches
        self._learned.clear()

    def close(self) -> None:
        """As `ReplayDataset.close`, of each."""
        for dataset in self.datasets.values():
            dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Turns(DatasetMixture):
    """Whose turn it is, among those that have joined."""

    def __init__(self, datasets: Mapping[str, ReplayDataset], shares: Mapping[str, float], mix: EmbodimentMix) -> None:
        super().__init__(datasets, shares)
        self._mix = mix

    def _takes_part(self, name: str) -> bool:
        return name in self._mix.joined and super()._takes_part(name)


def _added(one: DatasetStats, other: DatasetStats) -> DatasetStats:
    sums = {}
    for name in DatasetStats.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        sums[name] = max(mine, theirs) if name in _GREATEST else mine + theirs
    return DatasetStats(**sums)
