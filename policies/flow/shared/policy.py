"""The flow policy for robots of several shapes: each object is the view of one robot, all have the same network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from torch import nn

from policies.common.batches import StepBatch, read_steps, to_tensor
from policies.common.embodiments import EmbodimentTable
from policies.common.loading import load_whole
from policies.common.normalizer import Normalizer
from policies.common.runtime import Runtime
from policies.common.weights import pack_module, refresh, require_network, unpack
from policies.flow.config import FlowConfig
from policies.flow.networks.fast import Conditioning
from policies.flow.networks.network import FlowNetwork
from policies.flow.policy import FlowPolicy
from policies.flow.shared.columns import RobotColumns
from policies.flow.shared.config import SharedConfig
from policies.flow.shared.network import SharedFlowNetwork
from policies.interface.policy import Batch, NormalizationData
from policies.interface.trainable import FinetuneConfig
from wire.errors import HalfLoadedError, InvalidDataError, PolicyError, WeightsError
from wire.types import Latent, Observation, RobotSpec

_PLAIN, _ALL = Runtime(), FinetuneConfig()


class SharedFlowPolicy(FlowPolicy):
    """Acts for the robot `spec`; learns from batches of every robot that has joined, each of one of them alone, which
    its `spec_hash` names. As `Joinable`."""

    kind = "shared"
    config: SharedConfig
    module: SharedFlowNetwork

    def __init__(
        self,
        spec: RobotSpec,
        config: SharedConfig,
        seed: int = 0,
        runtime: Runtime = _PLAIN,
        training: FinetuneConfig = _ALL,
    ) -> None:
        """See `NetworkPolicy`. `spec` has joined, in the first row."""
        super().__init__(spec, config, seed, runtime, training)
        self._columns: dict[str, RobotColumns] = {}
        """by spec hash, of those that were asked for"""
        self._take_table(config.empty_table().join(spec))

    # --- Joinable -------------------------------------------------------------------------------------------------

    @property
    def embodiments(self) -> EmbodimentTable:
        """The robots that have joined."""
        return self.module.embodiments

    def clear_embodiments(self) -> None:
        """As if no robot had joined: for a trainer that has seen none. Nothing acts until its robot joins."""
        self._take_table(self.config.empty_table())

    def restore_embodiments(self, table: EmbodimentTable, networks: Iterable[nn.Module] = ()) -> None:
        """Take the table that belongs to tensors which are restored by themselves. Raises `WeightsError`."""
        self._require_table(table, "the checkpoint")
        self._take_table(table, networks)

    def add_embodiment(self, spec: RobotSpec, networks: Iterable[nn.Module] = (), *, ready: bool = True) -> None:
        """Give `spec` a row, unless it has one; it begins as the robot does that has the most in common with it.

        `networks`: further ones of this kind that are to have it, such as an average. Not `ready`: no robot acts by it
        before `mark_ready`. Raises `ConfigError` without room.
        """
        table = self.embodiments.join(spec, ready=ready)
        if table == self.embodiments:
            return
        for network in (self.module, *networks):
            cast(SharedFlowNetwork, network).join(table)
        self._take_table(table, networks)
        refresh(self._acting, self.module)

    def mark_ready(self, spec_hash: str, networks: Iterable[nn.Module] = ()) -> None:
        """From now on what is saved says that robots of this spec may act by it."""
        self._take_table(self.embodiments.with_ready(spec_hash), networks)

    # --- Policy, TrainablePolicy ----------------------------------------------------------------------------------

    def load(self, weights: bytes, version: int) -> None:
        """As `NetworkPolicy.load`, of weights in which this robot is one of several. Raises `SpecMismatchError` while
        it is not among those that may act by them."""
        what = f"version {version}"
        header, tensors = unpack(weights, what)
        require_network(header, self._header, what)
        table = header.embodiments
        if not isinstance(table, EmbodimentTable):
            raise WeightsError(f"{what}: a shared network's weights without the table of its robots; export them anew.")
        self._require_table(table, what)
        table.require_row(self.spec, what)
        try:
            load_whole(self.module, self._acting, header, tensors, what)
        except HalfLoadedError:
            self.version = 0
            raise
        self._take_table(table)
        self.version = version

    def save(self, module: nn.Module | None = None) -> bytes:
        """As `NetworkPolicy.save`; which robots it is for goes with `module`."""
        network = self.module if module is None else cast(SharedFlowNetwork, module)
        rows = network.embodiments.rows
        spec = rows[0].spec if rows else self.spec
        header = msgspec.structs.replace(self._header, spec=spec, spec_hash="", embodiments=network.embodiments)
        return pack_module(network, header)

    def set_normalization(self, examples: NormalizationData) -> None:
        """Take the statistics of the states of `examples.spec`, this policy's own where that is None, into its row.

        Raises `PolicyError` for a robot that has not joined.
        """
        own = self._own if examples.spec is None else self._columns_of(examples.spec.hash)
        found = Normalizer(len(own.state))
        found.fit(examples.states)
        with torch.no_grad():
            for table, values in ((self.module.mean, found.mean), (self.module.std, found.std)):
                table[own.row, own.state] = values.to(self.device)
        refresh(self._acting, self.module)

    def velocity(
        self, given: Conditioning, actions: torch.Tensor, time: torch.Tensor, module: nn.Module | None = None
    ) -> torch.Tensor:
        """As `Flows`; of columns, 0 in those that are not the robot's."""
        assert given.embodiment is not None
        own = self._columns_of(self.embodiments.rows[int(given.embodiment)].spec.hash)
        there = own.action_dims.repeat(self.horizon)
        return super().velocity(given, actions * there, time, module) * there

    # --- inside ---------------------------------------------------------------------------------------------------

    def _make_network(self, config: FlowConfig, vlm: Path | None, random_vlm: bool) -> FlowNetwork:
        assert isinstance(config, SharedConfig)
        return SharedFlowNetwork(config)

    def _require_table(self, table: EmbodimentTable, what: str) -> None:
        wanted = self.config.empty_table()
        if msgspec.structs.replace(table, rows=()) != wanted:
            raise WeightsError(f"{what}: its table of robots has other sizes than its network; export it anew.")
        table.require(what)

    def _take_table(self, table: EmbodimentTable, networks: Iterable[nn.Module] = ()) -> None:
        for network in (self.module, self._acting, *networks):
            cast(SharedFlowNetwork, network).embodiments = table
        self._columns.clear()
        self._cameras = self._own.cameras if table.row(self.spec.hash) is not None else []

    @property
    def _own(self) -> RobotColumns:
        return self._columns_of(self._header.spec_hash)

    def _columns_of(self, spec_hash: str) -> RobotColumns:
        found = self._columns.get(spec_hash)
        if found is None:
            table = self.embodiments
            if (row := table.row(spec_hash)) is None:
                known = ", ".join(f"'{one.spec.embodiment}'" for one in table.rows)
                raise PolicyError(
                    f"robot spec {spec_hash} has not joined the shared network, which knows {known or 'none yet'}; let "
                    "it join first (`add_embodiment`), or load a version that knows it."
                )
            found = self._columns[spec_hash] = RobotColumns(table, row, self.config, self.device)
        return found

    def _pictures(self, observation: Observation) -> list[torch.Tensor]:
        own = self._own
        seen = {name: to_tensor(observation.images[name].image, self.device)[None] for name in own.cameras}
        return own.pictures(seen, 1)

    def _state(self, observation: Observation) -> torch.Tensor:
        return self._own.states(super()._state(observation), self.module)

    def _noise(self, draws: torch.Generator) -> torch.Tensor:
        return super()._noise(draws) * self._own.action_dims.repeat(self.horizon)

    def _given(self, observation: Observation, latent: Latent) -> Conditioning:
        return super()._given(observation, latent)._replace(embodiment=self._own.row)

    def _normalized(self, actions: torch.Tensor) -> torch.Tensor:
        return self._own.actions(actions)

    def _own_actions(self, actions: torch.Tensor) -> torch.Tensor:
        return self._own.own_actions(actions)

    def _read_batch(self, batch: Batch) -> StepBatch:
        own = self._columns_of(self._spec_hash(batch))
        dims = {"state_dim": own.spec.state_dim, "action_dim": own.spec.action_dim}
        shapes = msgspec.structs.replace(self.config, **dims).batch_shapes(batch)
        # whose it is has been looked at, and hashing a spec takes a while
        plain = {name: values for name, values in batch.items() if name != "spec_hash"}
        read = read_steps(plain, own.spec, shapes, own.cameras, self.device)
        arrays = read.arrays
        for name in ("state", "seen_state", "ahead"):
            if name in arrays:
                arrays[name] = own.states(arrays[name], self.module)
        arrays["actions"] = own.actions(arrays["actions"])
        arrays |= {"embodiment": own.row, "state_dims": own.state_dims, "action_dims": own.action_dims}
        pictures = own.pictures(read.images, len(read.instructions))
        return read._replace(images={slot.name: image for slot, image in zip(own.slots, pictures, strict=True)})

    def _spec_hash(self, batch: Batch) -> str:
        given = batch.get("spec_hash", self._header.spec_hash)
        hashes = {given} if isinstance(given, str) else {str(one) for one in np.asarray(given).flat}
        if len(hashes) > 1:
            raise InvalidDataError(f"training batch: of robots {sorted(hashes)}; a shared network takes one at a time.")
        return hashes.pop()
