"""The flow policy: `Policy` for a robot and `TrainablePolicy` for a learner around one `FlowNetwork`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from policies.common.runtime import Runtime, acting, compiled, refresh
from policies.common.text import tokenize
from policies.common.weights import Header, load_published, pack_module, read_header, unpack
from policies.flow.batches import read_batch
from policies.flow.compatibility import NETWORK, read_config, require_fit, require_same
from policies.flow.config import FlowConfig
from policies.flow.networks import sampling
from policies.flow.networks.network import FlowNetwork
from policies.flow.networks.vlm import LORA_TARGETS, InstructionTokenizer
from policies.interface.chunks import chunk, require_prefix, require_version, require_width
from policies.interface.policy import Batch, NormalizationData, check_observation
from policies.interface.trainable import FinetuneConfig, apply_finetuning, initial_seed
from wire.errors import PolicyError
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, ResidualPolicy, RobotSpec

_PLAIN, _ALL = Runtime(), FinetuneConfig()


class FlowPolicy:
    """Flow-matching action chunks from images, an instruction and the state.

    Not for several threads: whoever serves it calls `load` between two inferences.
    """

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
        """`seed` is for the first weights and the noise of `act`. When `training` freezes anything, the first weights
        are the same for every seed, as a base that does not travel must be the same on every machine: `seed` is then
        for the adapters and the noise alone.

        `vlm`: the directory of the backbone on this machine, for a network that has one; `random_vlm` leaves its
        weights aside and takes random ones, the same everywhere, to measure or to test. Raises `ConfigError` if
        `config`, `runtime`, `training` or the directory cannot be used.
        """
        require_fit(spec, config)
        runtime.require()
        self.spec = spec
        self.config = config
        self.horizon = config.horizon
        self.version = 0
        self.runtime = runtime
        self.device = torch.device(runtime.device)
        names = {camera.name for camera in config.cameras}
        self._seen = msgspec.structs.replace(spec, cameras=tuple(c for c in spec.cameras if c.name in names))
        self._felt = msgspec.structs.replace(spec, cameras=())
        self._noise = torch.Generator().manual_seed(seed)
        low, high = spec.action_low(), spec.action_high()
        self._middle = torch.from_numpy((high + low) / 2).to(self.device)
        self._half = torch.from_numpy((high - low) / 2).to(self.device)
        directory = None if vlm is None else Path(vlm)
        # building a policy must not move the random stream of whoever builds it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(initial_seed(training, seed))
            self.module = FlowNetwork(config, directory, random_vlm)
        targets = LORA_TARGETS if config.vlm else ("fast.*",)
        apply_finetuning(self.module, training, targets, seed)
        self.module.to(self.device)
        self._words = (
            None if config.vlm is None or directory is None else InstructionTokenizer(directory, config.vlm.words)
        )
        # what is compiled holds on to its network, so that must not be the one that `load` replaces
        self._acting = acting(self.module, runtime)
        if runtime.compile and self._acting is self.module:
            self._acting = copy.deepcopy(self.module).requires_grad_(False).eval()
        self._draw = compiled(sampling.sample, runtime)
        self._look = compiled(_look, runtime)

    @property
    def ticks_ahead(self) -> tuple[int, ...]:
        """What `loss` wants to be told of the future."""
        return self.config.ahead

    @property
    def max_offset(self) -> int:
        """How much later than the image a batch's states and actions may be, in ticks."""
        return self.config.max_offset

    @property
    def history(self) -> int:
        """It looks at one moment."""
        return 0

    @property
    def think_reads_state(self) -> bool:
        """Whether a latent holds the state of its moment, for `act` to compare the newest one with."""
        return self.config.ego_motion

    @property
    def pretrained(self) -> bool:
        """Fresh ones begin with a random fast path, whatever the slow one knows."""
        return False

    @property
    def trained(self) -> PolicyCapabilities:
        """What weights of this network are trained for: `load` takes no others."""
        return self.config.trained

    @property
    def corrector(self) -> ResidualPolicy | None:
        """A copy of the network that corrects single actions on the robot, None without `config.residual`."""
        if not self.config.residual:
            return None
        return self.module.residual.export(self.module.normalizer, self.version)

    # --- Policy ------------------------------------------------------------------------------------------------

    def think(self, observation: Observation) -> Latent:
        """The latent of the newest frames and the instruction, float32[z]; its time is that of the oldest of them.

        With `ego_motion` it also holds the state.

        Raises `InvalidDataError` if what it reads does not fit the spec. Cameras it does not use may be missing.
        """
        return self.think_batch([observation])[0]

    @torch.inference_mode()
    def think_batch(self, observations: Sequence[Observation]) -> list[Latent]:
        """`think` of each, in one pass."""
        for observation in observations:
            check_observation(self._seen, observation)
        cameras = self.config.cameras
        images = [
            torch.stack([self._tensor(observation.images[camera.name].image) for observation in observations])
            for camera in cameras
        ]
        tokens = self._tokens([observation.task for observation in observations])
        state = torch.stack([self._tensor(observation.state) for observation in observations])
        with self.runtime.autocast():
            latents = self._look(self._network, images, tokens, state).float().cpu().numpy()
        return [
            Latent(
                latent,
                min((observation.images[camera.name].time_ns for camera in cameras), default=observation.time_ns),
                self.version,
            )
            for observation, latent in zip(observations, latents, strict=True)
        ]

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        """float32[H, da] within the spec's limits; reads the state and the latent, never an image.

        The latent's age is `observation.time_ns - latent.observed_ns`; a network without `max_offset` does not mind it.
        The chunk begins with what `prefix` has committed.

        Raises `PolicyError` for a latent of another version or shape, a prefix that does not fit or that the network
        was not trained for, and when the network gives NaN.
        """
        return self.act_batch([observation], [latent], [tick], [prefix])[0]

    @torch.inference_mode()
    def act_batch(
        self,
        observations: Sequence[Observation],
        latents: Sequence[Latent],
        ticks: Sequence[int],
        prefixes: Sequence[Prefix | None] | None = None,
    ) -> list[ActionChunk]:
        """`act` of each, in one pass and with the same noise as one after the other."""
        if prefixes is None:
            prefixes = [None] * len(observations)
        for observation, latent, prefix in zip(observations, latents, prefixes, strict=True):
            self._require(observation, latent, prefix)
        flat = self.horizon * self.spec.action_dim
        noise = torch.cat([torch.randn(1, flat, generator=self._noise) for _ in observations]).to(self.device)
        guided = [prefix is not None and prefix.guided for prefix in prefixes]
        if len(set(guided)) == 1:
            sampled = self._sample(observations, latents, prefixes, noise, guided[0])
        else:
            sampled = torch.empty_like(noise)
            for kind in (False, True):
                rows = [row for row, other in enumerate(guided) if other is kind]
                sampled[rows] = self._sample(
                    [observations[row] for row in rows],
                    [latents[row] for row in rows],
                    [prefixes[row] for row in rows],
                    noise[rows],
                    kind,
                )
        chosen = (sampled.view(len(guided), self.horizon, -1) * self._half + self._middle).cpu().numpy()
        return [
            chunk(actions, self.spec, self.version, observation, latent, tick, prefix)
            for actions, observation, latent, tick, prefix in zip(
                chosen, observations, latents, ticks, prefixes, strict=True
            )
        ]

    def _require(self, observation: Observation, latent: Latent, prefix: Prefix | None) -> None:
        """Raise what `act` says it raises for what it is given."""
        require_version(latent, self.version)
        require_width(latent, self.module.latent_width)
        check_observation(self._felt, observation)
        if prefix is None:
            return
        require_prefix(self.horizon, self.spec, prefix)
        if prefix.committed and not prefix.guided and not self.config.prefix:
            raise PolicyError(
                f"version {self.version} was not trained with committed prefixes; ask with `guided` or without a "
                "prefix, or train a network with `prefix`."
            )

    def _sample(
        self,
        observations: Sequence[Observation],
        latents: Sequence[Latent],
        prefixes: Sequence[Prefix | None],
        noise: torch.Tensor,
        guided: bool,
    ) -> torch.Tensor:
        """float32[b, H * da] in [-1, 1]"""
        seen = torch.stack([self._tensor(latent.data) for latent in latents])
        state = torch.stack([self._tensor(observation.state) for observation in observations])
        felt, age = self.module.normalizer(state), None
        if self.config.max_offset:
            ns = [o.time_ns - latent.observed_ns for o, latent in zip(observations, latents, strict=True)]
            age = torch.tensor([[max(0.0, one / self.spec.period_ns)] for one in ns], device=self.device)
        known = weights = None
        if guided or any(prefix is not None and prefix.committed for prefix in prefixes) or self._always_known:
            decided = torch.zeros(len(prefixes), self.horizon, self.spec.action_dim, device=self.device)
            weights = torch.zeros(len(prefixes), self.horizon)
            for row, prefix in enumerate(prefixes):
                if prefix is None:
                    continue
                count = len(prefix.actions)
                decided[row, :count] = ((self._tensor(prefix.actions) - self._middle) / self._half).clamp(-1, 1)
                if guided:
                    weights[row] = sampling.soft_mask(self.horizon, count, prefix.committed)
                else:
                    weights[row, : prefix.committed] = 1
            known, weights = decided.flatten(1), weights.to(self.device)
        with self.runtime.autocast():
            if guided and known is not None and weights is not None:
                pull = weights.repeat_interleave(self.spec.action_dim, 1)
                return sampling.sample_towards(self._network, seen, felt, noise, known, pull, age)
            return self._draw(self._network, seen, felt, noise, age, known, weights)

    def load(self, weights: bytes, version: int) -> None:
        """Take all weights of `version` at once: they are read into a fresh network, which then replaces the old one.

        A frozen base is the same in both. Raises `SpecMismatchError` for another robot's weights and `WeightsError` for
        anything else that does not fit; the old weights stay.
        """
        what = f"weights of version {version}"
        header, tensors = unpack(weights, what)
        header.spec.require(self.spec, what)
        require_same(self.config, self.trained, header, what)
        module = self._fresh()
        load_published(module, header, tensors, what)
        if self._acting is self.module:
            self._acting = module
        else:
            refresh(self._acting, module)
        self.module, self.version = module, version

    # --- TrainablePolicy ---------------------------------------------------------------------------------------

    def set_normalization(self, examples: NormalizationData) -> None:
        """Take the statistics of the states; once, before training begins."""
        self.module.normalizer.fit(examples.states)
        refresh(self._acting, self.module)

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
        sample = read_batch(batch, self.config, self.spec, self._tensor)
        return self.module.loss(
            sample.images,
            self._tokens(sample.instructions),
            sample.state,
            (sample.actions - self._middle) / self._half,
            sample.mask,
            sample.ahead,
            sample.age,
            sample.later,
            sample.advantage,
            sample.seen_state,
        )

    @property
    def image_losses(self) -> np.ndarray | None:
        """float32[b]: what each image's steps had in the last `loss`, None before it."""
        losses = self.module.image_losses
        return None if losses is None else losses.cpu().numpy()

    def save(self, module: nn.Module | None = None) -> bytes:
        """Weights of `module` (default: this policy's own) as a safetensors file that `load` accepts.

        What is frozen is not in it: `load` needs a policy that has the same base.
        """
        header = Header(
            network=NETWORK,
            config=msgspec.to_builtins(self.config),
            spec=self.spec,
            spec_hash=self.spec.hash,
            **msgspec.structs.asdict(self.trained),
        )
        return pack_module(self.module if module is None else module, header)

    @classmethod
    def from_weights(
        cls, weights: bytes, spec: RobotSpec, version: int, seed: int = 0, runtime: Runtime = _PLAIN, **made: Any
    ) -> FlowPolicy:
        """A policy with the network that `weights` describes; `made` as for the constructor. Raises as `load` does."""
        what = f"weights of version {version}"
        header = read_header(weights, what)
        header.spec.require(spec, what)
        policy = cls(spec, read_config(header, what), seed, runtime, **made)
        policy.load(weights, version)
        return policy

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _network(self) -> FlowNetwork:
        """What acts."""
        return self._acting  # type: ignore[return-value]

    @property
    def _always_known(self) -> bool:
        """Whether sampling gets a prefix even if there is none, so that it is compiled once."""
        return self.runtime.compile and self.config.prefix

    def _fresh(self) -> FlowNetwork:
        """A network of its own for what is trained; what is frozen is shared, as it may be billions of numbers."""
        shared = {id(parameter): parameter for parameter in self.module.parameters() if not parameter.requires_grad}
        return copy.deepcopy(self.module, shared)

    def _tensor(self, array: Any) -> torch.Tensor:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            array = array.copy()  # torch warns about memory it must not write, such as a received message
        return torch.as_tensor(array, device=self.device)

    def _tokens(self, instructions: Sequence[str]) -> torch.Tensor:
        if self._words is not None:
            rows = [self._words(text) for text in instructions]
        else:
            rows = [tokenize(text, self.config.vocabulary, self.config.words) for text in instructions]
        return torch.from_numpy(np.stack(rows)).to(self.device)


def _look(
    network: FlowNetwork, images: Sequence[torch.Tensor], tokens: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The latent, float[b, z]."""
    return network.look(images, tokens, state)
