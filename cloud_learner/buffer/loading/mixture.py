"""Several kinds of robots in one run: a dataset for each spec, each batch from one of them, by shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.windows import Batch
from cloud_learner.buffer.sampling.shares import apportion
from wire.errors import ConfigError, InvalidDataError


class DatasetMixture:
    """Batches of several datasets in turn, as a `ReplayDataset` gives those of one. It closes none of them."""

    def __init__(self, datasets: Mapping[str, ReplayDataset], shares: Mapping[str, float]) -> None:
        """`shares` of the batches, by the same names; whoever has no data leaves its share to the others.

        Raises `ConfigError` for no dataset, other names, and shares that are not positive.
        """
        positive = all(0 < share < math.inf for share in shares.values())
        if not datasets or datasets.keys() != shares.keys() or not positive:
            raise ConfigError(f"mixture: shares {dict(shares)} must be positive, one for each of {sorted(datasets)}.")
        self.datasets = dict(datasets)
        self._shares = dict(shares)
        self._credit: np.ndarray = np.zeros(len(self.datasets))

    def refresh(self, limit: int | None = None) -> int:
        """`ReplayDataset.refresh` of each, up to `limit` segments of each; how many were looked at."""
        return sum(dataset.refresh(limit) for dataset in self.datasets.values())

    @property
    def shares(self) -> dict[str, float]:
        """Of the batches from now on, by name; 0 for who has no data. They sum to 1 unless that is nobody."""
        there = {name: self._shares[name] * self._takes_part(name) for name in self.datasets}
        return {name: share / (sum(there.values()) or 1.0) for name, share in there.items()}

    def _takes_part(self, name: str) -> bool:
        return self.datasets[name].eligible_steps > 0

    def next(self) -> tuple[str, Batch]:
        """The name of the dataset whose turn it is, and its next batch. Over any number of batches each gets its share
        to within one, counted while the same ones have data. Raises what `ReplayDataset.next` raises.
        """
        shares = np.array(list(self.shares.values()))
        if not shares.any():
            why = [f"{name}: {dataset.sampler.why_nothing()}" for name, dataset in self.datasets.items()]
            raise InvalidDataError(f"there is no step to learn from yet. {' '.join(why)}")
        draws, credit = apportion(1, shares, np.where(shares > 0, self._credit, 0.0))
        name = list(self.datasets)[int(draws.argmax())]
        batch = self.datasets[name].next()
        self._credit = credit
        return name, batch

    def state(self) -> dict[str, Any]:
        """JSON-able: what `restore` needs to go on with the batch after the last one."""
        states = {name: dataset.state() for name, dataset in self.datasets.items()}
        return {"credit": dict(zip(self.datasets, self._credit.tolist(), strict=True)), "datasets": states}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """As `ReplayDataset.restore`, of each; False if any goes on with other batches. A dataset that was not there
        yet begins anew.

        Raises `InvalidDataError` for a state that also has others.
        """
        states, credit = state.get("datasets", {}), state.get("credit", {})
        if not states or not states.keys() <= self.datasets.keys() or credit.keys() != states.keys():
            raise InvalidDataError(f"mixture: the state is of {sorted(states)}, these are {sorted(self.datasets)}.")
        self._credit = np.array([credit.get(name, 0.0) for name in self.datasets])
        same = [self.datasets[name].restore(one) for name, one in states.items()]
        return all(same)
