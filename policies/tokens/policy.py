"""The token policy: says a chunk as action tokens, one after the other, behind the flow policy's slow path."""

from __future__ import annotations

import numpy as np
import torch

from policies.common.batches import hold_masked, to_tensor
from policies.common.noise import seeded
from policies.common.runtime import Runtime, compiled
from policies.common.weights import refresh
from policies.flow.network_policy import NetworkPolicy
from policies.interface.policy import Batch, NormalizationData
from policies.interface.trainable import FinetuneConfig
from policies.tokens.config import FastConfig, TokensConfig
from policies.tokens.fast import FastTokenizer
from policies.tokens.network import Decoder, TokenNetwork, unpack
from policies.tokens.read_tokenizer import read_tokenizer
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import ActionTokenizer
from wire.errors import InvalidDataError, PolicyError, WeightsError
from wire.types import Latent, Observation, Prefix, ResidualPolicy, RobotSpec

LEAST_SPAN = 0.02
"""of a dimension's limits: what moved less counts as having moved so far, see `Scaling.fit`"""

_PLAIN, _ALL = Runtime(), FinetuneConfig()


class TokenPolicy(NetworkPolicy):
    """Action chunks as tokens from images, an instruction and the state.

    Before `set_normalization` its tokeniser says every rounded coefficient by itself, with the spec's limits as range.
    It takes no committed prefix: a chunk's first token is about all its actions at once.
    """

    kind = "tokens"
    config: TokensConfig
    module: TokenNetwork
    corrector: ResidualPolicy | None = None
    ticks_ahead: tuple[int, ...] = ()

    def __init__(
        self,
        spec: RobotSpec,
        config: TokensConfig,
        seed: int = 0,
        runtime: Runtime = _PLAIN,
        training: FinetuneConfig = _ALL,
    ) -> None:
        """See `NetworkPolicy`."""

        def make() -> TokenNetwork:
            network = TokenNetwork(config)
            first = FastConfig(vocabulary=config.action_vocabulary)
            limits = spec.action_low(), spec.action_high()
            network.pack(FastTokenizer.unfitted(*limits, config.horizon, first).to_bytes())
            return network

        super().__init__(spec, config, make, ("decoder.*",), seed, runtime, training)
        self._read: tuple[torch.Tensor, int, ActionTokenizer] | None = None
        self._step = compiled(Decoder.step, runtime)

    @property
    def tokenizer(self) -> ActionTokenizer:
        """That of the present weights, read again when its bytes were written (`set_normalization`, `load`, a
        checkpoint).
        """
        packed = self.module.packed
        if self._read is None or self._read[0] is not packed or self._read[1] != packed._version:
            self._read = packed, packed._version, self._require_tokenizer(unpack(packed))
        return self._read[2]

    def _require_usable_prefix(self, prefix: Prefix) -> None:
        if prefix.committed or prefix.guided:
            raise PolicyError(
                f"version {self.version} says whole chunks as tokens and cannot begin one with what is committed; ask "
                "without a prefix, or use the flow policy."
            )

    def _draw_seed(self) -> int:
        return super()._draw_seed() if self.config.temperature else 0

    def _actions(self, observation: Observation, latent: Latent, prefix: Prefix | None, seed: int) -> np.ndarray:
        noise = None
        if self.config.temperature:
            shape = 1, self.config.longest, self.config.action_vocabulary + 1
            # the Gumbel-max trick: the largest of logits + temperature * noise is a draw from their softmax
            noise = -(-torch.rand(shape, generator=seeded(seed)).clamp_min(1e-12).log()).log().to(self.device)
            noise *= self.config.temperature
        state, age = self._state(observation), self._age(observation, latent)
        with self.runtime.autocast():
            return self.tokenizer.decode(self._sample_tokens(self._latent(latent), state, age, noise))

    def _sample_tokens(
        self, latent: torch.Tensor, state: torch.Tensor, age: torch.Tensor | None, noise: torch.Tensor | None
    ) -> list[int]:
        """Tokens of a chunk, the likeliest or a draw each time, until it ends or there is no more room."""
        decoder, tokenizer = self._acting.decoder, self.tokenizer
        edge = self.config.action_vocabulary
        memory = decoder.context(latent, self._acting.normalizer(state), age)
        cache = decoder.cache(memory)
        token = torch.full((1,), edge, device=self.device)
        every = torch.arange(edge + 1, device=self.device)
        said: list[int] = []
        for position in range(min(self.config.longest, tokenizer.length or self.config.longest)):
            logits, cache = self._step(decoder, token, torch.tensor(position, device=self.device), memory, cache)
            first, last = tokenizer.allowed(position)
            able = (every >= first) & (every < last)
            if tokenizer.length is None:
                able |= every == edge
            scores = logits.float() if noise is None else logits.float() + noise[:, position]
            token = scores.masked_fill(~able, -torch.inf).argmax(-1)
            if int(token) == edge:
                break
            said.append(int(token))
        return said

    def _require_tensors(self, tensors: dict[str, torch.Tensor], what: str) -> None:
        if "packed" in tensors:
            try:
                self._require_tokenizer(unpack(tensors["packed"]))
            except InvalidDataError as error:
                raise WeightsError(f"{what}: {error} Fetch or export the weights again.") from error

    def set_normalization(self, examples: NormalizationData) -> None:
        """Take the statistics of the states and learn the tokeniser of the chunks; once, before training begins.

        Without a whole chunk the tokeniser stays as it is: every chunk can be said with it, only in more tokens.
        """
        super().set_normalization(examples)
        if len(examples.chunks):
            span = LEAST_SPAN * (self.spec.action_high() - self.spec.action_low())
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
        return self._loss(batch, by_sample=False)

    def log_probability(self, batch: Batch) -> torch.Tensor:
        """As `Scores`: of the chunk's tokens, times the share of its actions that were kept."""
        return -self._loss(batch, by_sample=True)

    def _loss(self, batch: Batch, *, by_sample: bool) -> torch.Tensor:
        read = self._read_batch(batch)
        arrays, mask = read.arrays, read.arrays["mask"]
        chunks = hold_masked(arrays["actions"], mask).flatten(0, 1).cpu().numpy()
        share = mask.cpu().numpy().mean(-1)
        counts = share.reshape(-1) > 0
        tokens: list[list[int]] = [[] for _ in range(len(chunks))]
        for row, one in zip(np.flatnonzero(counts), self.tokenizer.encode_batch(chunks[counts]), strict=True):
            tokens[row] = one
        return self.module.loss(
            list(read.images.values()),
            self._instruction_ids(read.instructions),
            arrays["state"],
            tokens,
            to_tensor(share.astype(np.float32), self.device),
            arrays.get("frame_age"),
            self.tokenizer.length is not None,
            by_sample=by_sample,
        )

    def _require_tokenizer(self, data: bytes) -> ActionTokenizer:
        """Raises `InvalidDataError` for a tokeniser of other chunks, or with more tokens than there is room for."""
        made = read_tokenizer(data)
        shape = made.horizon, len(made.scaling.low)
        if shape != (self.horizon, self.spec.action_dim) or made.vocabulary > self.config.action_vocabulary:
            raise InvalidDataError(
                f"action tokeniser: of chunks {list(shape)} with {made.vocabulary} tokens; this policy's are "
                f"[{self.horizon}, {self.spec.action_dim}] with {self.config.action_vocabulary} at most."
            )
        return made
