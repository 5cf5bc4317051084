"""The flow policy around one `FlowNetwork`: `Policy` for a robot and `TrainablePolicy` for a learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from policies.common.batches import StepBatch, hold_masked, to_tensor
from policies.common.noise import seeded
from policies.common.runtime import Runtime, compiled
from policies.flow.config import FlowConfig
from policies.flow.network_policy import NetworkPolicy
from policies.flow.networks import sampling
from policies.flow.networks.exploration import count_points, explore, log_density, random_step
from policies.flow.networks.fast import ADVANTAGES, Conditioning
from policies.flow.networks.network import FlowNetwork
from policies.flow.networks.vlm import LORA_TARGETS, instruction_tokenizer
from policies.interface.capabilities import GOOD
from policies.interface.policy import Batch
from policies.interface.trainable import FinetuneConfig
from wire.errors import InvalidDataError, PolicyError
from wire.messages.recording import FlowTrace
from wire.types import Latent, Observation, Prefix, ResidualPolicy, RobotSpec

_PLAIN, _ALL = Runtime(), FinetuneConfig()


class FlowPolicy(NetworkPolicy):
    """Flow-matching action chunks from images, an instruction and the state."""

    kind = "flow"
    config: FlowConfig
    module: FlowNetwork

    def __init__(
        self,
        spec: RobotSpec,
        config: FlowConfig,
        seed: int = 0,
        runtime: Runtime = _PLAIN,
        training: FinetuneConfig = _ALL,
        vlm: Path | str | None = None,
        random_vlm: bool = False,
    ) -> None:
        """See `NetworkPolicy`. `vlm`: the directory of the backbone on this machine, for a network that has one;
        `random_vlm` leaves its weights aside and takes random ones, the same everywhere, to measure or to test."""
        directory = None if vlm is None else Path(vlm)
        targets = LORA_TARGETS if config.vlm else ("fast.*",)
        super().__init__(
            spec, config, lambda: self._make_network(config, directory, random_vlm), targets, seed, runtime, training
        )
        self.ticks_ahead = config.ahead
        self._exploring = True
        self._tokenizer = None
        if config.vlm is not None and directory is not None:
            self._tokenizer = instruction_tokenizer(directory, config.vlm.words)
        self._sample = compiled(sampling.sample, runtime)

    @property
    def think_reads_state(self) -> bool:
        """Whether a latent holds the state of its moment, for `act` to compare the newest one with."""
        return self.config.ego_motion

    @property
    def corrector(self) -> ResidualPolicy | None:
        """A copy of the network that corrects single actions on the robot, None without `config.residual`."""
        if not self.config.residual:
            return None
        return self.module.residual.export(self.module.normalizer, self.version)

    def _make_network(self, config: FlowConfig, vlm: Path | None, random_vlm: bool) -> FlowNetwork:
        return FlowNetwork(config, vlm, random_vlm)

    def _require_usable_prefix(self, prefix: Prefix) -> None:
        if prefix.committed and not prefix.guided and not self.config.prefix:
            raise PolicyError(
                f"version {self.version} was not trained with committed prefixes; ask with `guided` or without a "
                "prefix, or train a network with `prefix`."
            )

    def _actions(self, observation: Observation, latent: Latent, prefix: Prefix | None, seed: int) -> np.ndarray:
        horizon, width = self.horizon, self.config.action_dim
        draws = seeded(seed)
        noise = self._noise(draws)
        given = self._given(observation, latent)
        guided = prefix is not None and prefix.guided
        decided = torch.zeros(1, horizon, width, device=self.device)
        weights = torch.zeros(1, horizon)
        if prefix is not None:
            known, count = to_tensor(prefix.actions, self.device), len(prefix.actions)
            decided[0, :count] = self._normalized(known).clamp(-1, 1)
            weights[0] = sampling.soft_mask(horizon, count if guided else prefix.committed, prefix.committed)
        wanted, weights = decided.flatten(1), weights.to(self.device)
        # compiled once: it gets a prefix even if there is none
        if self.config.prefix and (self.runtime.compile or (prefix is not None and prefix.committed)):
            given = given._replace(committed=weights)
        with self.runtime.autocast():
            if guided:
                pull = weights.repeat_interleave(width, 1)
                actions = sampling.sample_towards(self._acting.fast, self.config, given, noise, wanted, pull)
            else:
                actions = self._sample(self._acting.fast, self.config, given, noise, wanted)
            if self.config.editor:
                settled = weights.repeat_interleave(width, 1)
                actions = self._acting.editor(given, actions, settled, self._editor_noise(draws)).float()
        return self._own_actions(actions.view(horizon, width)).cpu().numpy()

    def _explore(
        self, observation: Observation, latent: Latent, prefix: Prefix | None, seed: int
    ) -> tuple[np.ndarray, FlowTrace, float] | None:
        # what is committed or leaned on is not the flow's own
        if (
            not self._exploring
            or not self.config.explore
            or (prefix is not None and (prefix.committed or prefix.guided))
        ):
            return None
        given, head, draws = self._given(observation, latent), self._acting.noise_head, seeded(seed)
        noise = self._noise(draws)
        with self.runtime.autocast():
            walk = explore(self._acting.fast, self.config, head, given, noise, draws)
            actions = walk.actions
            if self.config.editor:
                actions = self._acting.editor(given, actions, noise=self._editor_noise(draws)).float()
        age = max(0.0, (observation.time_ns - latent.observed_ns) / self.spec.period_ns)
        # whoever makes the chunk knows its tick
        trace = FlowTrace(0, walk.step, walk.points.cpu().numpy(), observation.state, age)
        own = self._own_actions(actions.view(self.horizon, -1)).cpu().numpy()
        return own, trace, walk.log_prob

    def _outlook(self, observation: Observation, latent: Latent) -> float:
        if not self.config.outlook:
            return super()._outlook(observation, latent)
        # where the members know nothing of it they do not agree
        return self._acting.outlook(self._given(observation, latent)).amin().sigmoid().item()

    def _noise(self, draws: torch.Generator) -> torch.Tensor:
        """float32[1, H * da]"""
        return torch.randn(1, self.horizon * self.config.action_dim, generator=draws).to(self.device)

    def _editor_noise(self, draws: torch.Generator) -> torch.Tensor | None:
        """float32[1, 2 * da]"""
        if not (self._exploring and self.config.editor_noise):
            return None
        return self.config.editor_noise * torch.randn(1, 2 * self.config.action_dim, generator=draws).to(self.device)

    def _given(self, observation: Observation, latent: Latent) -> Conditioning:
        """What a chunk is made from."""
        state = self.module.normalizer(self._state(observation))
        return Conditioning(self._latent(latent), state, self._age(observation, latent))

    def _read_batch(self, batch: Batch) -> StepBatch:
        read = super()._read_batch(batch)
        read.arrays["actions"] = self._normalized(read.arrays["actions"])
        return read

    def loss(self, batch: Batch) -> torch.Tensor:
        """`FlowNetwork.loss` of a batch: a scalar. Noise and flow times come from torch's global generator.

        `images` {camera: uint8[b, h, w, 3]}, `instructions` b strings, and k steps behind each image: `state`
        [b, k, ds], `actions` [b, k, H, da], `mask` [b, k, H], `ahead` [b, k, W, ds] if the configuration asks for it.
        With `max_offset` also `frame_age` [b, k] or [b], in ticks, and with `ego_motion` `seen_state` [b, ds], the
        state when the image was seen. With `residual`, if they are there, `later_index`
        int[b, k] in 0..H-1 and `later_state` [b, k, ds], the state so many ticks after `state`. With `advantage`, if
        it is there, `advantage` int[b, k] or [b]: 0 not known, 1 bad, 2 good.
        Without the k axis, one step behind each image. If `spec_hash` is there it must be that of this robot.
        Raises `InvalidDataError` that names what does not fit.
        """
        return self._loss(batch, by_sample=False)

    def sample_losses(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """As `Imitates`."""
        return self._loss(batch, by_sample=True, module=module)

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """As `Chunks`."""
        return self.horizon, self.config.action_dim

    def chunk_actions(self, batch: Batch) -> torch.Tensor:
        """As `Chunks`."""
        arrays = self._read_batch(batch).arrays
        return hold_masked(arrays["actions"], arrays["mask"]).flatten(2)

    def conditioning(self, batch: Batch, module: nn.Module | None = None) -> Conditioning:
        """As `Flows`."""
        network, read = self.module if module is None else cast(FlowNetwork, module), self._read_batch(batch)
        arrays, words = read.arrays, self._instruction_ids(read.instructions)
        state = arrays["state"]
        latent = network.encode(list(read.images.values()), words, arrays.get("seen_state", state[:, 0]))
        advantage = arrays["advantage"].long() if "advantage" in arrays else None
        row = arrays.get("embodiment")
        return Conditioning(latent, network.normalizer(state), arrays.get("frame_age"), None, advantage, row)

    def velocity(
        self, given: Conditioning, actions: torch.Tensor, time: torch.Tensor, module: nn.Module | None = None
    ) -> torch.Tensor:
        """As `Flows`."""
        network = self.module if module is None else cast(FlowNetwork, module)
        return network.velocity(given, actions, time)

    @property
    def edits(self) -> bool:
        """As `Edits`."""
        return self.config.editor is not None

    def edit(self, given: Conditioning, actions: torch.Tensor, module: nn.Module | None = None) -> torch.Tensor:
        """As `Edits`."""
        network = self.module if module is None else cast(FlowNetwork, module)
        return network.editor(given, actions)

    @property
    def explores(self) -> str:
        """As `Explores`."""
        return self.config.explore or ""

    @property
    def trace_points(self) -> int:
        """As `Explores`."""
        return count_points(self.config)

    def stop_exploring(self) -> None:
        """As `Explores`."""
        self._exploring = False

    def trace_log_probability(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """As `Explores`."""
        network, traces = self.module if module is None else cast(FlowNetwork, module), batch["traces"]
        # of a ratio of probabilities hardly anything is left in bfloat16
        with torch.autocast(self.device.type, enabled=False):
            return self._trace_log_probability(network, batch, traces)

    def _trace_log_probability(self, network: FlowNetwork, batch: Batch, traces: Batch) -> torch.Tensor:
        given = self.conditioning(batch | {"state": traces["state"], "frame_age": traces["age"]}, network)
        if self.config.advantage:
            good = torch.full((len(given.latent), 1), GOOD, device=self.device)
            given = given._replace(advantage=good)
        points = to_tensor(traces["points"], self.device)[:, None]
        first = to_tensor(traces["step"], self.device).float()[:, None, None]
        total = points.new_zeros(len(points))
        for step in range(points.shape[2] - 1):
            x, time = points[:, :, step], (first + step) / self.config.euler_steps
            v = network.velocity(given, x, time)
            mean, std = random_step(self.config, network.noise_head, given, x, v, time)
            total = total + log_density(points[:, :, step + 1], mean, std)[:, 0]
        return total

    @property
    def foretells(self) -> bool:
        """As `Foretells`."""
        return self.config.outlook is not None

    def foretell(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """As `Foretells`."""
        network = self.module if module is None else cast(FlowNetwork, module)
        with torch.no_grad():
            given = self.conditioning(batch, module)
        return network.outlook(given)

    @property
    def advised(self) -> bool:
        """As `Advised`."""
        return self.config.advantage

    @property
    def feature_width(self) -> int:
        """As `Encodes`."""
        return self.module.latent_width + self.config.state_dim

    def features(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """As `Encodes`: the latent and the normalised state."""
        given = self.conditioning(batch, module)
        steps = given.state.shape[1]
        return torch.cat([given.latent.float()[:, None].expand(-1, steps, -1), given.state], -1)

    def _loss(self, batch: Batch, *, by_sample: bool, module: nn.Module | None = None) -> torch.Tensor:
        network, read = self.module if module is None else cast(FlowNetwork, module), self._read_batch(batch)
        arrays, words = read.arrays, self._instruction_ids(read.instructions)
        for name, count in (("later_index", self.horizon), ("advantage", ADVANTAGES)):
            if name in arrays:
                arrays[name] = index = arrays[name].long()
                if not bool(((index >= 0) & (index < count)).all()):
                    raise InvalidDataError(f"training batch: {name} must be in 0..{count - 1}.")
        return network.loss(list(read.images.values()), words, arrays, by_sample=by_sample)

    def _instruction_ids(self, instructions: Sequence[str]) -> torch.Tensor:
        if self._tokenizer is None:
            return super()._instruction_ids(instructions)
        return torch.from_numpy(np.stack([self._tokenizer(text) for text in instructions])).to(self.device)
