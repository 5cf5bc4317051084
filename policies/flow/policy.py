"""The flow policy: `Policy` for a robot and `TrainablePolicy` for a learner around one `FlowNetwork`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from policies.base import Batch, Examples, check_observation
from policies.flow import sampling
from policies.flow.config import FlowConfig
from policies.flow.network import FlowNetwork
from policies.text import tokenize
from policies.weights import Header, load_into, pack, read_header, unpack
from wire.errors import ConfigError, InvalidData, PolicyError, WeightsError
from wire.types import ActionChunk, Corrector, Latent, Observation, Prefix, RobotSpec, Trained

NETWORK = "flow"
"""`Header.network` of this policy's files"""


class FlowPolicy:
    """Flow-matching action chunks from images, an instruction and the state.

    Not for several threads: whoever serves it calls `load` between two inferences.
    """

    def __init__(self, spec: RobotSpec, config: FlowConfig, seed: int = 0, device: str = "cpu") -> None:
        """`seed` is for the first weights and the noise of `act`. Raises `ConfigError` if `config` cannot fit."""
        _require_fit(spec, config)
        self.spec = spec
        self.config = config
        self.horizon = config.horizon
        self.version = 0
        self.device = torch.device(device)
        names = {eye.name for eye in config.eyes}
        self._seen = msgspec.structs.replace(spec, cameras=tuple(c for c in spec.cameras if c.name in names))
        self._felt = msgspec.structs.replace(spec, cameras=())
        self._noise = torch.Generator().manual_seed(seed)
        low, high = spec.action_low(), spec.action_high()
        self._low, self._high = low, high
        self._middle = torch.from_numpy((high + low) / 2).to(self.device)
        self._half = torch.from_numpy((high - low) / 2).to(self.device)
        self.module: FlowNetwork = self._fresh(seed)

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
    def pretrained(self) -> bool:
        """Fresh ones begin with random weights."""
        return False

    @property
    def trained(self) -> Trained:
        """What weights of this network are trained for: `load` takes no others."""
        return self.config.trained

    @property
    def corrector(self) -> Corrector | None:
        """A copy of the network that corrects single actions on the robot, None without `config.residual`."""
        if not self.config.residual:
            return None
        return self.module.residual.export(self.module.normalizer, self.version)

    # --- Policy ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def think(self, observation: Observation) -> Latent:
        """The latent of the newest frames and the instruction, float32[z]; its time is that of the oldest of them.

        Raises `InvalidData` if what it reads does not fit the spec. A camera it has no eye for may be missing.
        """
        check_observation(self._seen, observation)
        frames = [observation.images[eye.name] for eye in self.config.eyes]
        images = [self._tensor(frame.image)[None] for frame in frames]
        tokens = self._tokens([observation.task])
        latent = self.module.slow(images, tokens)[0].cpu().numpy()
        observed_ns = min((frame.time_ns for frame in frames), default=observation.time_ns)
        return Latent(latent, observed_ns, self.version)

    @torch.inference_mode()
    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        """float32[H, da] within the spec's limits; reads the state and the latent, never an image.

        The latent's age is `observation.time_ns - latent.observed_ns`; a network without `max_offset` does not mind it.
        The chunk begins with what `prefix` has committed.

        Raises `PolicyError` for a latent of another version or shape, a prefix that does not fit or that the network
        was not trained for, and when the network gives NaN.
        """
        if latent.version != self.version:
            raise PolicyError(
                f"the latent was made by version {latent.version}, this policy is version {self.version}; "
                "call think() again after loading weights."
            )
        if latent.data.shape != (self.module.slow.width,):
            raise PolicyError(
                f"a latent of shape {list(latent.data.shape)}; this policy's think() gives [{self.module.slow.width}]."
            )
        check_observation(self._felt, observation)
        actions = (self._sample(observation, latent, prefix).view(self.horizon, -1) * self._half + self._middle).cpu()
        chosen = actions.numpy()
        if prefix is not None:
            chosen[: prefix.committed] = prefix.actions[: prefix.committed]
        if not np.isfinite(chosen).all():
            raise PolicyError(f"version {self.version} gave actions that are not finite; roll back to another version.")
        return ActionChunk(
            actions=np.clip(chosen, self._low, self._high),
            first_tick=tick,
            step_ns=self.spec.period_ns,
            version=self.version,
            observed_ns=observation.time_ns,
            latent_observed_ns=latent.observed_ns,
        )

    def _sample(self, observation: Observation, latent: Latent, prefix: Prefix | None) -> torch.Tensor:
        """[1, H * da] in [-1, 1]"""
        noise = torch.randn(1, self.horizon * self.spec.action_dim, generator=self._noise).to(self.device)
        seen, felt = self._tensor(latent.data)[None], self._tensor(observation.state)[None]
        age = None
        if self.config.max_offset:
            ticks = (observation.time_ns - latent.observed_ns) / self.spec.period_ns
            age = torch.full((1, 1), max(0.0, ticks), device=self.device)
        if prefix is None:
            return sampling.sample(self.module, seen, felt, noise, age)
        require_prefix(self, prefix)
        decided = ((self._tensor(prefix.actions) - self._middle) / self._half).clamp(-1, 1)
        if prefix.guided:
            weights = sampling.soft_mask(self.horizon, len(decided), prefix.committed).to(self.device)
            wanted = torch.zeros(self.horizon, self.spec.action_dim, device=self.device)
            wanted[: len(decided)] = decided
            weights = weights.repeat_interleave(self.spec.action_dim)
            return sampling.sample_towards(self.module, seen, felt, noise, wanted.view(1, -1), weights, age)
        if not prefix.committed:
            return sampling.sample(self.module, seen, felt, noise, age)
        if not self.config.prefix:
            raise PolicyError(
                f"version {self.version} was not trained with committed prefixes; ask with `guided` or without a "
                "prefix, or train a network with `prefix`."
            )
        return sampling.sample(self.module, seen, felt, noise, age, decided[: prefix.committed].reshape(1, -1))

    def load(self, weights: bytes, version: int) -> None:
        """Take all weights of `version` at once: they are read into a fresh network, which then replaces the old one.

        Raises `SpecMismatch` for another robot's weights and `WeightsError` for anything else that does not fit;
        the old weights stay.
        """
        what = f"weights of version {version}"
        header, tensors = unpack(weights, what)
        header.spec.require(self.spec, what)
        self._require_network(header, what)
        if header.trained != self.trained:
            raise WeightsError(
                f"{what}: its metadata says {header.trained}, its network configuration {self.trained}; "
                "the file was changed after it was saved. Export it again with `save()`."
            )
        module = self._fresh(0)
        load_into(module, tensors, what)
        self.module, self.version = module, version

    # --- TrainablePolicy ---------------------------------------------------------------------------------------

    def fit(self, examples: Examples) -> None:
        """Take the statistics of the states; once, before training begins."""
        self.module.normalizer.fit(examples.states)

    def loss(self, batch: Batch) -> torch.Tensor:
        """`FlowNetwork.loss` of a batch: a scalar. Noise and flow times come from torch's global generator.

        `images` {camera: uint8[b, h, w, 3]}, `instructions` b strings, and k steps behind each image: `state`
        [b, k, ds], `actions` [b, k, H, da], `mask` [b, k, H], `ahead` [b, k, W, ds] if the configuration asks for it.
        With `max_offset` also `frame_age` [b, k] or [b], in ticks. With `residual`, if they are there, `later_index`
        int[b, k] in 0..H-1 and `later_state` [b, k, ds], the state so many ticks after `state`.
        Without the k axis, one step behind each image.
        Raises `InvalidData` that names what does not fit.
        """
        h, ds = self.horizon, self.spec.state_dim
        shapes: dict[str, tuple[int, ...]] = {"state": (ds,), "actions": (h, self.spec.action_dim), "mask": (h,)}
        if self.config.ahead:
            shapes["ahead"] = (len(self.config.ahead), ds)
        if self.config.max_offset:
            shapes["frame_age"] = ()
        if self.config.residual and "later_state" in batch:
            shapes |= {"later_state": (ds,), "later_index": ()}
        if missing := [name for name in shapes if name not in batch]:
            raise InvalidData(f"training batch: it lacks {missing}; it has {sorted(batch)}.")
        flat = batch["state"].ndim == 2
        b, k = len(batch["state"]), 1 if flat else batch["state"].shape[1]
        tensors = {}
        for name, shape in shapes.items():
            tensor = self._tensor(batch[name])
            if flat:
                tensor = tensor[:, None]
            elif name == "frame_age" and tuple(tensor.shape) == (b,):
                tensor = tensor[:, None].expand(b, k)
            if tuple(tensor.shape) != (b, k, *shape):
                raise InvalidData(f"training batch: {name} has shape {list(tensor.shape)}, expected {[b, k, *shape]}.")
            tensors[name] = tensor
        for eye in self.config.eyes:
            image, expected = _image(batch, eye.name), (b, eye.height, eye.width, 3)
            if tuple(image.shape) != expected:
                raise InvalidData(
                    f"training batch: image of '{eye.name}' has shape {list(image.shape)}, expected {list(expected)}."
                )
        if len(batch["instructions"]) != b:
            raise InvalidData(f"training batch: {len(batch['instructions'])} instructions for {b} images.")
        kept = tensors["mask"].bool()
        if not kept.any():
            raise InvalidData("training batch: its mask keeps no action, so there is nothing to imitate.")
        age, later = tensors.get("frame_age"), None
        if "later_state" in tensors:
            index = tensors["later_index"].long()
            if not bool(((index >= 0) & (index < h)).all()):
                raise InvalidData(f"training batch: later_index must be in 0..{h - 1}.")
            later = tensors["later_state"], index
        return self.module.loss(
            [self._tensor(_image(batch, eye.name)) for eye in self.config.eyes],
            self._tokens(batch["instructions"]),
            tensors["state"],
            (tensors["actions"] - self._middle) / self._half,
            kept,
            tensors.get("ahead"),
            None if age is None else age.float()[..., None],
            later,
        )

    @property
    def image_losses(self) -> np.ndarray | None:
        """float32[b]: what each image's steps had in the last `loss`, None before it."""
        losses = self.module.image_losses
        return None if losses is None else losses.cpu().numpy()

    def save(self, module: nn.Module | None = None) -> bytes:
        """Weights of `module` (default: this policy's own) as a safetensors file that `load` accepts."""
        header = Header(
            network=NETWORK,
            config=msgspec.to_builtins(self.config),
            spec=self.spec,
            spec_hash=self.spec.hash,
            **msgspec.structs.asdict(self.trained),
        )
        return pack((self.module if module is None else module).state_dict(), header)

    @classmethod
    def from_weights(
        cls, weights: bytes, spec: RobotSpec, version: int, seed: int = 0, device: str = "cpu"
    ) -> FlowPolicy:
        """A policy with the network that `weights` describes. Raises as `load` does."""
        what = f"weights of version {version}"
        header = read_header(weights, what)
        header.spec.require(spec, what)
        policy = cls(spec, _config(header, what), seed, device)
        policy.load(weights, version)
        return policy

    # --- inside ------------------------------------------------------------------------------------------------

    def _fresh(self, seed: int) -> FlowNetwork:
        # building a policy must not move the random stream of whoever builds it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return FlowNetwork(self.config).to(self.device)

    def _tensor(self, array: Any) -> torch.Tensor:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            array = array.copy()  # torch warns about memory it must not write, such as a received message
        return torch.as_tensor(array, device=self.device)

    def _tokens(self, instructions: list[str]) -> torch.Tensor:
        rows = [tokenize(text, self.config.vocabulary, self.config.words) for text in instructions]
        return torch.from_numpy(np.stack(rows)).to(self.device)

    def _require_network(self, header: Header, what: str) -> None:
        config = _config(header, what)
        for field in FlowConfig.__struct_fields__:
            mine, theirs = getattr(self.config, field), getattr(config, field)
            if mine != theirs:
                raise WeightsError(
                    f"{what}: made by a network with {field} {theirs}, this policy has {mine}. "
                    "Train and run with the same network configuration."
                )


def require_prefix(policy: FlowPolicy, prefix: Prefix) -> None:
    """Raise `PolicyError` that says what is wrong if `prefix` cannot begin a chunk of `policy`."""
    h, da = policy.horizon, policy.spec.action_dim
    shape = np.shape(prefix.actions)
    if len(shape) != 2 or shape[0] > h or shape[1] != da:
        raise PolicyError(f"a prefix of shape {list(shape)}; this policy's chunks are [{h}, {da}].")
    if not 0 <= prefix.committed <= shape[0]:
        raise PolicyError(f"a prefix of {shape[0]} actions with {prefix.committed} committed.")
    if not np.isfinite(prefix.actions).all():
        raise PolicyError("a prefix with actions that are not finite.")


def _image(batch: Batch, camera: str) -> Any:
    images = batch.get("images", {})
    if camera not in images:
        raise InvalidData(f"training batch: no images of camera '{camera}'; it has {sorted(images)}.")
    return images[camera]


def _config(header: Header, what: str) -> FlowConfig:
    if header.network != NETWORK:
        raise WeightsError(f"{what}: made by a '{header.network}' network, this policy is '{NETWORK}'.")
    try:
        return msgspec.convert(header.config, FlowConfig)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{what}: the network configuration cannot be read: {error}.") from error


def _require_fit(spec: RobotSpec, config: FlowConfig) -> None:
    for name, mine, theirs in (
        ("state_dim", config.state_dim, spec.state_dim),
        ("action_dim", config.action_dim, spec.action_dim),
    ):
        if mine != theirs:
            raise ConfigError(f"flow policy: {name} {mine}, but robot '{spec.embodiment}' has {theirs}.")
    cameras = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
    for eye in config.eyes:
        if cameras.get(eye.name) != (eye.height, eye.width):
            raise ConfigError(
                f"flow policy: camera '{eye.name}' at {eye.height}x{eye.width}, but robot '{spec.embodiment}' has "
                f"{cameras or 'no camera'}."
            )
    config.require()
