"""What policies around our own networks share, the token policy too: cameras, words, latents, weights."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from policies.common.batches import StepBatch, read_steps, to_tensor
from policies.common.loading import load_whole
from policies.common.noise import draw_seed
from policies.common.runtime import Runtime, acting, compiled
from policies.common.weights import Header, pack_module, refresh, unpack_own
from policies.flow.config import SlowPathConfig
from policies.flow.networks.slow import tokenize
from policies.interface.policy import (
    Batch,
    NormalizationData,
    check_observation,
    chunk,
    oldest_frame_ns,
    require_prefix,
    require_version,
)
from policies.interface.trainable import FinetuneConfig, apply_finetuning, initial_seed
from wire.errors import HalfLoadedError, PolicyError
from wire.messages.recording import FlowTrace
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, RobotSpec


class NetworkPolicy(ABC):
    """A policy whose network has a slow path that `encode`s, a `normalizer` and a `latent_width`.

    Not for several threads: whoever serves it calls `load` between two inferences.
    """

    kind: str
    """`Header.network` of this policy's files"""
    config: SlowPathConfig
    module: Any
    history = 0
    pretrained = False

    def __init__(
        self,
        spec: RobotSpec,
        config: SlowPathConfig,
        make: Callable[[], Any],
        lora_targets: tuple[str, ...],
        seed: int,
        runtime: Runtime,
        training: FinetuneConfig,
    ) -> None:
        """`make` builds the network that `config` describes.

        `seed` is for the first weights and for the randomness of `act`. When `training` freezes anything, the first
        weights are the same for every seed, as a base that does not travel must be the same on every machine: `seed` is
        then for the adapters and for `act` alone. Raises `ConfigError` for what cannot be used.
        """
        config.require_robot(spec)
        runtime.require()
        self.spec = spec
        self.config = config
        self.horizon = config.horizon
        self.max_offset = config.max_offset
        self.version = 0
        self.runtime = runtime
        self.device = torch.device(runtime.device)
        low, high = spec.action_low(), spec.action_high()
        self._middle, self._half = (to_tensor(x / 2, self.device) for x in (high + low, high - low))
        self._cameras = [camera.name for camera in config.cameras]
        self._seeds = torch.Generator().manual_seed(seed)
        self._header = Header(self.kind, msgspec.json.decode(msgspec.json.encode(config)), spec, spec.hash)
        # building a policy must not move the random stream of whoever builds it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(initial_seed(training, seed))
            self.module = make()
        apply_finetuning(self.module, training, lora_targets, seed)
        self.module.to(self.device)
        self._encode = compiled(type(self.module).encode, runtime)
        # what is compiled holds on to its network, so that must not be the one that training changes
        self._acting: Any = acting(self.module, runtime)
        if runtime.compile and self._acting is self.module:
            self._acting = copy.deepcopy(self.module).requires_grad_(False).eval()

    @property
    def trained(self) -> PolicyCapabilities:
        """What weights of this network are trained for: `load` takes no others."""
        return self.config.trained

    # --- Policy ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def think(self, observation: Observation) -> Latent:
        """The latent of the newest frames and the instruction, float32[z]; its time is that of the oldest of them.

        Raises `InvalidDataError` if what it reads does not fit the spec. Cameras it does not use may be missing.
        """
        check_observation(self.spec, observation, self._cameras)
        images = self._pictures(observation)
        words = self._instruction_ids([observation.task])
        with self.runtime.autocast():
            latent = self._encode(self._acting, images, words, self._state(observation))[0].float().cpu().numpy()
        return Latent(latent, oldest_frame_ns(observation, self._cameras), self.version)

    @torch.inference_mode()
    def act(
        self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None, seed: int = 0
    ) -> ActionChunk:
        """float32[H, da] within the spec's limits; reads the state and the latent, never an image.

        The latent's age is `observation.time_ns - latent.observed_ns`; a network without `max_offset` does not mind it.
        The chunk begins with what `prefix` has committed. It names the seed of its noise, and is made again, to the
        last bit, with that `seed`; 0 draws one.

        Raises `PolicyError` for a latent of another version or shape, a prefix that does not fit or that the network
        was not trained for, and when the network gives NaN.
        """
        require_version(latent, self.version)
        width = self.module.latent_width
        if latent.data.shape != (width,):
            raise PolicyError(f"a latent of shape {list(latent.data.shape)}; this policy's think() gives [{width}].")
        check_observation(self.spec, observation, ())
        if prefix is not None:
            require_prefix(self.horizon, self.spec, prefix)
            self._require_usable_prefix(prefix)
        seed = seed or self._draw_seed()
        outlook = self._outlook(observation, latent)
        explored = self._explore(observation, latent, prefix, seed)
        actions, trace, log_prob = explored or (self._actions(observation, latent, prefix, seed), None, math.nan)
        how = outlook, trace, log_prob
        return chunk(actions, self.spec, self.version, observation, latent, tick, prefix, seed, *how)

    def load(self, weights: bytes, version: int) -> None:
        """Take all weights of `version` at once, into the network that is there; a frozen base stays.

        Raises `SpecMismatchError` for another robot's weights and `WeightsError` for anything else that does not fit;
        the old weights stay. `HalfLoadedError` when they do not: then no version is loaded.
        """
        what = f"weights of version {version}"
        header, tensors = unpack_own(weights, self._header, what)
        self._require_tensors(tensors, what)
        try:
            load_whole(self.module, self._acting, header, tensors, what)
        except HalfLoadedError:
            self.version = 0
            raise
        self.version = version

    # --- TrainablePolicy ---------------------------------------------------------------------------------------

    def set_normalization(self, examples: NormalizationData) -> None:
        """Take the statistics of the states; once, before training begins."""
        self.module.normalizer.fit(examples.states)
        refresh(self._acting, self.module)

    @property
    def image_losses(self) -> np.ndarray | None:
        """float32[b]: what each image's steps had in the last `loss`, None before it."""
        losses: torch.Tensor | None = self.module.image_losses
        return None if losses is None else losses.cpu().numpy()

    def save(self, module: nn.Module | None = None) -> bytes:
        """Weights of `module` (default: this policy's own) as a safetensors file that `load` accepts.

        What is frozen is not in it: `load` needs a policy that has the same base.
        """
        return pack_module(self.module if module is None else module, self._header)

    # --- inside ------------------------------------------------------------------------------------------------

    def _require_tensors(self, tensors: dict[str, torch.Tensor], what: str) -> None:  # noqa: B027 - only some need it
        """Raise `WeightsError` for tensors that fit the network and cannot be used all the same."""

    @abstractmethod
    def _require_usable_prefix(self, prefix: Prefix) -> None:
        """Raise `PolicyError` for a prefix that this policy cannot begin a chunk with."""

    @abstractmethod
    def _actions(self, observation: Observation, latent: Latent, prefix: Prefix | None, seed: int) -> np.ndarray:
        """float32[H, da] in the robot's units, from the noise of `seed`"""

    def _explore(
        self, observation: Observation, latent: Latent, prefix: Prefix | None, seed: int
    ) -> tuple[np.ndarray, FlowTrace, float] | None:
        """The same, how they came about, and how probable that was; None for a chunk whose probability nobody asks."""
        return None

    def _outlook(self, observation: Observation, latent: Latent) -> float:
        """`ActionChunk.outlook`"""
        return math.nan

    def _draw_seed(self) -> int:
        """For the noise of a chunk; 0 for a policy that needs none."""
        return draw_seed(self._seeds)

    def _pictures(self, observation: Observation) -> list[torch.Tensor]:
        """uint8[1, h, w, 3] of each camera that the network looks through"""
        return [to_tensor(observation.images[camera].image, self.device)[None] for camera in self._cameras]

    def _state(self, observation: Observation) -> torch.Tensor:
        """float32[1, ds], as the network's `normalizer` takes it"""
        return to_tensor(observation.state, self.device)[None]

    def _normalized(self, actions: torch.Tensor) -> torch.Tensor:
        """[..., da] in the robot's units -> as the network knows them, from -1 to 1"""
        return (actions - self._middle) / self._half

    def _own_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return actions * self._half + self._middle

    def _latent(self, latent: Latent) -> torch.Tensor:
        """float32[1, z]"""
        return to_tensor(latent.data, self.device)[None]

    def _age(self, observation: Observation, latent: Latent) -> torch.Tensor | None:
        """float32[1, 1], ticks since what the latent saw; None for a network that does not mind it."""
        if not self.max_offset:
            return None
        ticks = (observation.time_ns - latent.observed_ns) / self.spec.period_ns
        return torch.tensor([[max(0.0, ticks)]], device=self.device)

    def _read_batch(self, batch: Batch) -> StepBatch:
        """What the network reads of a training batch; errors: see `read_steps`."""
        return read_steps(batch, self.spec, self.config.batch_shapes(batch), self._cameras, self.device)

    def _instruction_ids(self, instructions: Sequence[str]) -> torch.Tensor:
        """int64[b, L]"""
        rows = [tokenize(text, self.config.vocabulary, self.config.words) for text in instructions]
        return torch.from_numpy(np.stack(rows)).to(self.device)
