"""The network of the token policy: the flow policy's slow path, and a decoder that says a chunk token by token.

Shapes: b images, k steps behind each, n chunks (b * k in training), z latent, ds state, m tokens that are looked at,
L the most tokens of a chunk, w the decoder's width, V action tokens. Token V begins a chunk and ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from policies.common.batches import count_kept
from policies.common.normalizer import Normalizer
from policies.flow.networks.attention_pooler import FeedForward
from policies.flow.networks.fast import AGE_FEATURES, AgeFeatures
from policies.flow.networks.slow import ConvSlowPath
from policies.tokens.config import TokensConfig
from wire.errors import InvalidDataError

_FIRST_DEVIATION = 0.3
"""of embeddings: about as large as what the state adds to them"""
_LENGTH_BYTES = 8


class Attention(nn.Module):
    """Several heads; what is asked and what is looked at may be different tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        # one layer for both: a bias on keys alone changes nothing and would get no gradient
        self.key_value = nn.Linear(width, 2 * width)
        self.mix = nn.Linear(width, width)

    def keys_values(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of [n, m, w], each [n, heads, m, w / heads]."""
        keys, values = self.key_value(tokens).chunk(2, -1)
        return self._split(keys), self._split(values)

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """[n, t, w] asks [n, heads, m, w / heads]; `mask`: False where it may not look."""
        found = F.scaled_dot_product_attention(self._split(self.query(x)), keys, values, mask, is_causal=causal)
        return self.mix(found.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class DecoderBlock(nn.Module):
    """Attention to the tokens so far, then to latent and state, then a feed-forward part, each behind a norm
    (Vaswani et al. 2017, arXiv 1706.03762, section 3.1, with the norms in front)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.own, self.cross = Attention(width, heads), Attention(width, heads)
        self.feed = FeedForward(width)

    def forward(self, x: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[n, t, w], all tokens at once; `memory` is `cross.keys_values`."""
        quiet = self.before(x)
        return self._rest(x + self.own(quiet, *self.own.keys_values(quiet), None, True), memory)

    def step(
        self,
        x: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        here: torch.Tensor,
        past: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, 1, w], one more token: its place in the cache is `here`, bool[L]; it looks at `past`, bool[L]."""
        quiet = self.before(x)
        key, value = self.own.keys_values(quiet)
        where = here[:, None]
        keys, values = torch.where(where, key, keys), torch.where(where, value, values)
        return self._rest(x + self.own(quiet, keys, values, past[None], False), memory), keys, values

    def _rest(self, x: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.feed(x + self.cross(self.between(x), *memory, None, False))


class DecoderContext(NamedTuple):
    """What tokens depend on besides those before them."""

    felt: torch.Tensor
    """[n, 1, w]: the state, which is also added to every token: beside the latent alone it is easily lost"""
    seen: list[tuple[torch.Tensor, torch.Tensor]]
    """keys and values of latent, state and age, for each block"""


class Decoder(nn.Module):
    """Latent and state -> tokens, one after the other."""

    def __init__(self, config: TokensConfig, latent_width: int) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.longest = config.longest
        self.words = nn.Embedding(config.action_vocabulary + 1, width)
        self.positions = nn.Parameter(_FIRST_DEVIATION * torch.randn(self.longest, width))
        nn.init.normal_(self.words.weight, std=_FIRST_DEVIATION)
        self.latent = nn.Linear(latent_width, config.latent_tokens * width)
        self.state = nn.Linear(config.state_dim, width)
        if config.max_offset:
            self.embed_age = AgeFeatures(config.max_offset)
            self.age = nn.Linear(AGE_FEATURES, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        # not the vectors that are read: with those a fresh network repeats its first token, and so ends at once
        self.head = nn.Linear(width, config.action_vocabulary + 1)

    def context(self, latent: torch.Tensor, state: torch.Tensor, age: torch.Tensor | None) -> DecoderContext:
        """[n, z], normalised [n, ds], [n, 1] ticks -> what the blocks look at."""
        felt = self.state(state)[:, None]
        seen = [self.latent(latent).unflatten(-1, (-1, self.config.width)), felt]
        if self.config.max_offset:
            ticks = state.new_zeros(len(state), 1) if age is None else age
            seen.append(self.age(self.embed_age(ticks))[:, None])
        tokens = torch.cat(seen, 1)
        return DecoderContext(felt, [block.cross.keys_values(tokens) for block in self._blocks])

    def forward(self, told: torch.Tensor, memory: DecoderContext) -> torch.Tensor:
        """int64[n, t] tokens, the first that which begins -> [n, t, V + 1] logits of the ones that follow each."""
        x = self.words(told) + self.positions[: told.shape[1]] + memory.felt
        for block, seen in zip(self._blocks, memory.seen, strict=True):
            x = block(x, seen)
        return self._logits(x)

    def cache(self, memory: DecoderContext) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Room for the keys and values of L tokens, per block."""
        keys = memory.seen[0][0]
        empty = keys.new_zeros(keys.shape[0], keys.shape[1], self.longest, keys.shape[3])
        return [(empty, empty) for _ in self.blocks]

    def step(
        self,
        token: torch.Tensor,
        at: torch.Tensor,
        memory: DecoderContext,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """int64[n] the token at place `at`, int64[] -> [n, V + 1] logits of the one that follows, and a new cache.

        All shapes are the same at every place, so that it is compiled once.
        """
        every = torch.arange(self.longest, device=token.device)
        here, past = every == at, every <= at
        x = (self.words(token) + self.positions[at])[:, None] + memory.felt
        following = []
        for block, seen, (keys, values) in zip(self._blocks, memory.seen, cache, strict=True):
            x, keys, values = block.step(x, seen, keys, values, here, past)
            following.append((keys, values))
        return self._logits(x)[:, 0], following

    @property
    def _blocks(self) -> list[DecoderBlock]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class TokenNetwork(nn.Module):
    """Both paths, the state's statistics, and the tokeniser's bytes."""

    packed: torch.Tensor
    """uint8[8 + most]: how many bytes, then these, then zeros. A buffer, so that the tokeniser is wherever the weights
    are: in files, in checkpoints, in the average. Its shape follows from the configuration alone"""
    image_losses: torch.Tensor | None = None
    """float32[b]: the loss behind each image of the last `loss`"""

    def __init__(self, config: TokensConfig) -> None:
        super().__init__()
        self.normalizer = Normalizer(config.state_dim, config.online_statistics)
        self.slow = ConvSlowPath(config)
        self.latent_width = self.slow.width
        """z"""
        self.decoder = Decoder(config, self.latent_width)
        self.register_buffer("packed", torch.zeros(_LENGTH_BYTES + config.tokenizer_bytes, dtype=torch.uint8))

    def pack(self, tokenizer: bytes) -> None:
        """Keep what `ActionTokenizer.to_bytes` gave, on whatever device the network lies."""
        room = len(self.packed) - _LENGTH_BYTES
        assert len(tokenizer) <= room, f"{len(tokenizer)} bytes of tokeniser, and the configuration allows {room}"
        data = len(tokenizer).to_bytes(_LENGTH_BYTES, "little") + tokenizer.ljust(room, b"\0")
        self.packed.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def encode(self, images: Sequence[torch.Tensor], words: torch.Tensor, seen_state: torch.Tensor) -> torch.Tensor:
        """The latent, float[b, z], of images and words alone."""
        return self.slow(images, words)

    def loss(
        self,
        images: Sequence[torch.Tensor],
        instructions: torch.Tensor,
        state: torch.Tensor,
        chunks: list[list[int]],
        weights: torch.Tensor,
        age: torch.Tensor | None,
        fixed: bool,
        *,
        by_sample: bool = False,
    ) -> torch.Tensor:
        """Cross-entropy of each token behind those before it (pi0-FAST, arXiv 2501.09747, section V.A):

            - sum_i w_i sum_t log p(t_i,t | t_i,<t, latent, state) / sum_i w_i n_i

        images: uint8[b, h, w, 3] per camera; instructions: int64[b, words]; state: [b, k, ds]; chunks: b * k lists of
        tokens; weights: [b, k]; age: [b, k, 1] ticks. With `fixed` every chunk has as many tokens, so none ends.
        `by_sample`: [b, k] - w_i sum_t log p instead.
        Online statistics take the states in afterwards, as those of `FlowNetwork.loss` do.
        """
        b, k = state.shape[:2]
        told, wanted = _aligned(chunks, self.decoder, fixed, state.device)
        latent = self.slow(images, instructions).repeat_interleave(k, 0)
        felt = self.normalizer(state).flatten(0, 1)
        memory = self.decoder.context(latent, felt, None if age is None else age.flatten(0, 1))
        logits = self.decoder(told, memory).float()
        errors = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="none")
        errors = errors.view_as(wanted).sum(1).view(b, k) * weights
        counts = (wanted >= 0).sum(1).view(b, k) * weights
        self.image_losses = (errors.detach().sum(1) / counts.sum(1).clamp_min(1e-6)).float()
        if self.normalizer.online and self.training and torch.is_grad_enabled():
            self.normalizer.update(state)
        if by_sample:
            return errors
        return errors.sum() / count_kept(counts.sum()).clamp_min(1e-6)


def unpack(packed: torch.Tensor) -> bytes:
    """What `TokenNetwork.pack` was given. Raises `InvalidDataError` if no such bytes are there."""
    data = packed.cpu().numpy().tobytes()
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not 0 < length <= len(data) - _LENGTH_BYTES:
        raise InvalidDataError(f"action tokeniser: {length} bytes in a place for {len(data) - _LENGTH_BYTES}.")
    return data[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _aligned(
    chunks: list[list[int]], decoder: Decoder, fixed: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[n, t] what is read and what should follow it, -1 where nothing does. Longer ones lose their end."""
    edge = decoder.words.num_embeddings - 1
    rows = [tokens[: decoder.longest] for tokens in chunks]
    # whoever stops for want of room has not ended
    wanted = [row if fixed or len(row) == decoder.longest else [*row, edge] for row in rows]
    most = max(1, *(len(row) for row in wanted))
    told = torch.tensor([([edge, *row] + [edge] * most)[:most] for row in rows])
    follow = torch.tensor([row + [-1] * (most - len(row)) for row in wanted])
    return told.to(device), follow.to(device)
