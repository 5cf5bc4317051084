"""The flow policy: `Policy` for a robot and `TrainablePolicy` for a learner around one `FlowNetwork`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from policies.common.batches import to_tensor
from policies.common.noise import seeded
from policies.common.runtime import Runtime, compiled
from policies.flow.config import FlowConfig
from policies.flow.network_policy import NetworkPolicy
from policies.flow.networks import sampling
from policies.flow.networks.fast import ADVANTAGES, Conditioning
from policies.flow.networks.network import FlowNetwork
from policies.flow.networks.vlm import LORA_TARGETS, instruction_tokenizer
from policies.interface.policy import Batch
from policies.interface.trainable import FinetuneConfig
from wire.errors import InvalidDataError, PolicyError
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
            spec, config, lambda: FlowNetwork(config, directory, random_vlm), targets, seed, runtime, training
        )
        self.ticks_ahead = config.ahead
        low, high = spec.action_low(), spec.action_high()
        self._middle, self._half = (to_tensor(x / 2, self.device) for x in (high + low, high - low))
        self._tokenizer = None
        if config.vlm is not None and directory is not None:
            self._tokenizer = instruction_tokenizer(directory, config.vlm.words)
        self._draw = compiled(sampling.sample, runtime)

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

    def _require_able(self, prefix: Prefix) -> None:
        if prefix.committed and not prefix.guided and not self.config.prefix:
            raise PolicyError(
                f"version {self.version} was not trained with committed prefixes; ask with `guided` or without a "
                "prefix, or train a network with `prefix`."
            )

    def _actions(
        self,
        observations: Sequence[Observation],
        latents: Sequence[Latent],
        prefixes: Sequence[Prefix | None],
        seeds: Sequence[int],
    ) -> np.ndarray:
        """float32[b, H, da]"""
        flat = self.horizon * self.spec.action_dim
        noise = torch.cat([torch.randn(1, flat, generator=seeded(seed)) for seed in seeds]).to(self.device)
        guided = [prefix is not None and prefix.guided for prefix in prefixes]
        sampled = torch.empty_like(noise)
        for kind in sorted(set(guided)):
            rows = [row for row, other in enumerate(guided) if other is kind]
            sampled[rows] = self._sample(
                [observations[row] for row in rows],
                [latents[row] for row in rows],
                [prefixes[row] for row in rows],
                noise[rows],
                kind,
            )
        return (sampled.view(len(guided), self.horizon, -1) * self._half + self._middle).cpu().numpy()

    def _sample(
        self,
        observations: Sequence[Observation],
        latents: Sequence[Latent],
        prefixes: Sequence[Prefix | None],
        noise: torch.Tensor,
        guided: bool,
    ) -> torch.Tensor:
        """float32[b, H * da] in [-1, 1]"""
        state = self.module.normalizer(self._states(observations))
        given = Conditioning(self._latents(latents), state, self._ages(observations, latents))
        known = weights = None
        # compiled once: it gets a prefix even if there is none
        always = self.runtime.compile and self.config.prefix
        if guided or always or any(prefix is not None and prefix.committed for prefix in prefixes):
            decided = torch.zeros(len(prefixes), self.horizon, self.spec.action_dim, device=self.device)
            weights = torch.zeros(len(prefixes), self.horizon)
            for row, prefix in enumerate(prefixes):
                if prefix is None:
                    continue
                actions = to_tensor(prefix.actions, self.device)
                count = len(actions)
                decided[row, :count] = ((actions - self._middle) / self._half).clamp(-1, 1)
                if guided:
                    weights[row] = sampling.soft_mask(self.horizon, count, prefix.committed)
                else:
                    weights[row, : prefix.committed] = 1
            known, weights = decided.flatten(1), weights.to(self.device)
        with self.runtime.autocast():
            if guided and known is not None and weights is not None:
                pull = weights.repeat_interleave(self.spec.action_dim, 1)
                return sampling.sample_towards(self._acting.fast, self.config, given, noise, known, pull)
            return self._draw(self._acting.fast, self.config, given._replace(committed=weights), noise, known)

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
        read = self._read_batch(batch, {"seen_state": (self.spec.state_dim,)} if self.config.ego_motion else {})
        arrays = read.arrays
        arrays["actions"] = (arrays["actions"] - self._middle) / self._half
        for name, count in (("later_index", self.horizon), ("advantage", ADVANTAGES)):
            if name in arrays:
                arrays[name] = index = arrays[name].long()
                if not bool(((index >= 0) & (index < count)).all()):
                    raise InvalidDataError(f"training batch: {name} must be in 0..{count - 1}.")
        return self.module.loss(list(read.images.values()), self._words(read.instructions), arrays)

    def _words(self, instructions: Sequence[str]) -> torch.Tensor:
        if self._tokenizer is None:
            return super()._words(instructions)
        return torch.from_numpy(np.stack([self._tokenizer(text) for text in instructions])).to(self.device)
