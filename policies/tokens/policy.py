"""The token policy: says a chunk as action tokens, one after the other, behind the flow policy's slow path."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from policies.common.runtime import Runtime, acting, compiled, refresh
from policies.common.text import tokenize
from policies.common.weights import Header, load_published, pack_module
from policies.common.weights import unpack as unpack_file
from policies.flow.batches import read_batch
from policies.flow.compatibility import require_fit
from policies.interface.chunks import chunk, require_prefix, require_version, require_width
from policies.interface.policy import Batch, NormalizationData, check_observation
from policies.interface.trainable import FinetuneConfig, apply_finetuning, initial_seed
from policies.tokens.config import FastConfig, TokensConfig
from policies.tokens.fast import FastTokenizer
from policies.tokens.network import Decoder, TokenNetwork, unpack
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import ActionTokenizer, from_bytes
from wire.errors import InvalidDataError, PolicyError, WeightsError
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, ResidualPolicy, RobotSpec

NETWORK = "tokens"
"""`Header.network` of this policy's files"""
LEAST_SPAN = 0.02
"""of a dimension's limits: what moved less counts as having moved so far, see `Scaling.fit`"""

_PLAIN, _ALL = Runtime(), FinetuneConfig()


class TokenPolicy:
    """Action chunks as tokens from images, an instruction and the state.

    Before `fit` its tokeniser says every rounded coefficient by itself, with the spec's limits as range. It takes no
    committed prefix: a chunk's first token is about all its actions at once.

    Not for several threads: whoever serves it calls `load` between two inferences.
    """

    corrector: ResidualPolicy | None = None
    ticks_ahead: tuple[int, ...] = ()
    history = 0
    pretrained = False

    def __init__(
        self,
        spec: RobotSpec,
        config: TokensConfig,
        seed: int = 0,
        runtime: Runtime = _PLAIN,
        training: FinetuneConfig = _ALL,
    ) -> None:
        """`seed` is for the first weights and for drawing tokens. When `training` freezes anything, the first weights
        are the same for every seed, as a base that does not travel must be the same on every machine: `seed` is then
        for the adapters and for drawing tokens alone. Raises `ConfigError` for what cannot be used.
        """
        config.require()
        require_fit(spec, config.slow)
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
        self._low, self._high = spec.action_low(), spec.action_high()
        # building a policy must not move the random stream of whoever builds it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(initial_seed(training, seed))
            self.module = TokenNetwork(config)
        apply_finetuning(self.module, training, ("decoder.*",), seed)
        first = FastConfig(vocabulary=config.action_vocabulary)
        self.module.pack(FastTokenizer.unfitted(self._low, self._high, config.horizon, first).to_bytes())
        self.module.to(self.device)
        self._read: tuple[torch.Tensor, int, ActionTokenizer] | None = None
        # what is compiled holds on to its network; training must not change that one while it acts
        self._acting = acting(self.module, runtime)
        if runtime.compile and self._acting is self.module:
            self._acting = copy.deepcopy(self.module).requires_grad_(False).eval()
        self._step = compiled(_step, runtime)

    @property
    def tokenizer(self) -> ActionTokenizer:
        """That of the present weights, read again whenever its bytes were written: by `fit`, `load`, a checkpoint."""
        packed = self.module.packed
        if self._read is None or self._read[0] is not packed or self._read[1] != packed._version:
            self._read = packed, packed._version, self._require_tokenizer(unpack(packed))
        return self._read[2]

    @property
    def max_offset(self) -> int:
        """How much later than the image a batch's states and actions may be, in ticks."""
        return self.config.max_offset

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
        check_observation(self._seen, observation)
        frames = [observation.images[camera.name] for camera in self.config.cameras]
        images, words = [self._tensor(frame.image)[None] for frame in frames], self._words([observation.task])
        with self.runtime.autocast():
            latent = self._network.slow(images, words)[0].float().cpu().numpy()
        observed_ns = min((frame.time_ns for frame in frames), default=observation.time_ns)
        return Latent(latent, observed_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        """float32[H, da] within the spec's limits; reads the state and the latent, never an image.

        Raises `PolicyError` for a latent of another version or shape, and for a prefix that is to be kept or that does
        not fit.
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
        """`act` of each, in one pass."""
        for i, (observation, latent) in enumerate(zip(observations, latents, strict=True)):
            self._require(observation, latent, None if prefixes is None else prefixes[i])
        noise = None
        if self.config.temperature:
            shape = len(observations), self.config.longest, self.config.action_vocabulary + 1
            # the Gumbel-max trick: the largest of logits + temperature * noise is a draw from their softmax
            noise = -(-torch.rand(shape, generator=self._noise).clamp_min(1e-12).log()).log().to(self.device)
            noise *= self.config.temperature
        state = torch.stack([self._tensor(observation.state) for observation in observations])
        seen = torch.stack([self._tensor(latent.data) for latent in latents])
        ages = [[(o.time_ns - z.observed_ns) / self.spec.period_ns] for o, z in zip(observations, latents, strict=True)]
        with self.runtime.autocast():
            said = self._say(seen, state, torch.tensor(ages, device=self.device), noise)
        return [
            chunk(self.tokenizer.decode(tokens), self.spec, self.version, observation, latent, tick)
            for tokens, observation, latent, tick in zip(said, observations, latents, ticks, strict=True)
        ]

    def _require(self, observation: Observation, latent: Latent, prefix: Prefix | None) -> None:
        require_version(latent, self.version)
        require_width(latent, self.module.slow.width)
        check_observation(self._felt, observation)
        if prefix is None:
            return
        require_prefix(self.horizon, self.spec, prefix)
        if prefix.committed or prefix.guided:
            raise PolicyError(
                f"version {self.version} says whole chunks as tokens and cannot begin one with what is committed; ask "
                "without a prefix, or use the flow policy."
            )

    def _say(
        self, latent: torch.Tensor, state: torch.Tensor, age: torch.Tensor, noise: torch.Tensor | None
    ) -> list[list[int]]:
        """Tokens of each chunk, the likeliest or a draw each time, until it ends or there is no more room."""
        decoder, tokenizer = self._network.decoder, self.tokenizer
        edge = self.config.action_vocabulary
        memory = decoder.look(latent, self._network.normalizer(state), age)
        cache = decoder.cache(memory)
        token = torch.full((len(state),), edge, device=self.device)
        every = torch.arange(edge + 1, device=self.device)
        said: list[list[int]] = [[] for _ in range(len(state))]
        going = set(range(len(state)))
        for place in range(min(self.config.longest, tokenizer.length or self.config.longest)):
            logits, cache = self._step(decoder, token, torch.tensor(place, device=self.device), memory, cache)
            first, last = tokenizer.allowed(place)
            able = (every >= first) & (every < last)
            if tokenizer.length is None:
                able |= every == edge
            scores = logits.float() if noise is None else logits.float() + noise[:, place]
            token = scores.masked_fill(~able, -torch.inf).argmax(-1)
            for row, chosen in enumerate(token.tolist()):
                if row in going and chosen != edge:
                    said[row].append(chosen)
                else:
                    going.discard(row)
            if not going:
                break
        return said

    def load(self, weights: bytes, version: int) -> None:
        """Take all weights of `version` at once, the tokeniser with them.

        Raises `SpecMismatchError` for another robot's weights and `WeightsError` for anything else that does not fit;
        the old weights stay.
        """
        what = f"weights of version {version}"
        header, tensors = unpack_file(weights, what)
        header.spec.require(self.spec, what)
        self._require_same(header, what)
        if "packed" in tensors:
            try:
                self._require_tokenizer(unpack(tensors["packed"]))
            except InvalidDataError as error:
                raise WeightsError(f"{what}: {error} Fetch or export the weights again.") from error
        load_published(self.module, header, tensors, what)
        refresh(self._acting, self.module)
        self.version = version

    # --- TrainablePolicy ---------------------------------------------------------------------------------------

    def set_normalization(self, examples: NormalizationData) -> None:
        """Take the statistics of the states and learn the tokeniser of the chunks; once, before training begins.

        Without a whole chunk the tokeniser stays as it is: every chunk can be said with it, only in more tokens.
        """
        self.module.normalizer.fit(examples.states)
        if len(examples.chunks):
            span = LEAST_SPAN * (self._high - self._low)
            made: ActionTokenizer
            if self.config.tokenizer == "fast":
                made = FastTokenizer.fit(examples.chunks, self.config.fast, span)
            else:
                made = ResidualVQ.fit(examples.chunks, self.config.residual_vq, span)
            self._require_tokenizer(made.to_bytes())
            self.module.pack(made.to_bytes())
        refresh(self._acting, self.module)

    def loss(self, batch: Batch) -> torch.Tensor:
        """`TokenNetwork.loss` of a batch, a scalar; the batch as for `FlowPolicy.loss`.

        A chunk is tokens of all its actions. Where `mask` ends one early, nobody knows what would have followed: its
        last kept action stands in for the rest (in front of the first kept one, that one), because a constant costs the
        fewest tokens, and the chunk counts by the share of its actions that were kept. None kept: it does not count.
        Raises `InvalidDataError` that names what does not fit.
        """
        sample = read_batch(batch, self.config.slow, self.spec, self._tensor)
        mask = sample.mask.cpu().numpy()
        chunks = held(sample.actions.detach().cpu().numpy(), mask).reshape(-1, self.horizon, self.spec.action_dim)
        share = mask.mean(-1)
        counts = share.reshape(-1) > 0
        tokens: list[list[int]] = [[] for _ in range(len(chunks))]
        for row, one in zip(np.flatnonzero(counts), self.tokenizer.encode_batch(chunks[counts]), strict=True):
            tokens[row] = one
        return self.module.loss(
            sample.images,
            self._words(sample.instructions),
            sample.state,
            tokens,
            self._tensor(share.astype(np.float32)),
            sample.age,
            self.tokenizer.length is not None,
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
        return pack_module(self.module if module is None else module, header)

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _network(self) -> TokenNetwork:
        """What acts."""
        return self._acting  # type: ignore[return-value]

    def _tensor(self, array: Any) -> torch.Tensor:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            array = array.copy()  # torch warns about memory it must not write, such as a received message
        return torch.as_tensor(array, device=self.device)

    def _words(self, instructions: Sequence[str]) -> torch.Tensor:
        rows = [tokenize(text, self.config.vocabulary, self.config.words) for text in instructions]
        return torch.from_numpy(np.stack(rows)).to(self.device)

    def _require_tokenizer(self, data: bytes) -> ActionTokenizer:
        """Raises `InvalidDataError` for a tokeniser of other chunks, or with more tokens than there is room for."""
        made = from_bytes(data)
        shape = made.horizon, len(made.scaling.low)
        if shape != (self.horizon, self.spec.action_dim) or made.vocabulary > self.config.action_vocabulary:
            raise InvalidDataError(
                f"action tokeniser: of chunks {list(shape)} with {made.vocabulary} tokens; this policy's are "
                f"[{self.horizon}, {self.spec.action_dim}] with {self.config.action_vocabulary} at most."
            )
        return made

    def _require_same(self, header: Header, what: str) -> None:
        if header.network != NETWORK:
            raise WeightsError(f"{what}: made by a '{header.network}' network, this policy is '{NETWORK}'.")
        try:
            theirs = msgspec.convert(header.config, TokensConfig)
        except msgspec.ValidationError as error:
            raise WeightsError(f"{what}: the network configuration cannot be read: {error}.") from error
        for field in TokensConfig.__struct_fields__:
            if getattr(self.config, field) != getattr(theirs, field):
                raise WeightsError(
                    f"{what}: made by a network with {field} {getattr(theirs, field)}, this policy has "
                    f"{getattr(self.config, field)}. Train and run with the same network configuration."
                )
        if header.trained != self.trained:
            raise WeightsError(
                f"{what}: its metadata says {header.trained}, its network configuration {self.trained}; "
                "the file was changed after it was saved. Export it again with `save()`."
            )


def held(actions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[..., H, da] `actions` with the last one that bool[..., H] `mask` kept in place of each that it did not.

    In front of the first that is kept, that one; a chunk of which none is kept becomes 0.
    """
    index = np.where(mask, np.arange(mask.shape[-1]), -1)
    index = np.maximum.accumulate(index, -1)
    index = np.where(index < 0, mask.argmax(-1)[..., None], index)
    filled = np.take_along_axis(actions, index[..., None], -2)
    return np.where(np.asarray(mask.any(-1))[..., None, None], filled, 0)


def _step(decoder: Decoder, token: torch.Tensor, at: torch.Tensor, memory: Any, cache: Any) -> Any:
    return decoder.step(token, at, memory, cache)
