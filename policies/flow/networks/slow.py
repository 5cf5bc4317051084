"""The slow path that learns from nothing: convolutions and words to a latent.

Each word of an instruction is hashed into a small vocabulary, so no word list has to travel: by CRC-32, which is the
same on every machine and in every process (Python's own `hash` is not).

Shapes: b images, z latent, L words, cells of the last features, t tokens.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from policies.flow.config import CameraEncoderConfig, FlowConfig, SlowPathConfig
from policies.flow.networks.attention_pooler import AttentionPooler, Layer
from policies.flow.networks.fast import fourier_features, frequencies

PADDING = 0
"""the id of no word"""
_WORD = re.compile(r"\w+")
_COORDINATE_FREQUENCIES = 4
"""sines and cosines of each cell's x and of its y"""
_FUTURE_STATE_WIDTH = 128


class Features(nn.Module):
    """Image -> features of its cells, looking for what the words name.

    Words scale and shift the features: FiLM, Perez et al. 2018, arXiv 1709.07871, equation 2.
    """

    coordinates: torch.Tensor
    """float32[2, cells]: x and y of each cell of the last features, in [-1, 1]"""

    def __init__(self, camera: CameraEncoderConfig, config: SlowPathConfig) -> None:
        super().__init__()
        convolutions: list[nn.Module] = []
        channels, height, width = 3, camera.height, camera.width
        for layer in config.stem:
            padding = layer.kernel // 2 if layer.kernel % 2 else (layer.kernel - layer.stride) // 2
            if convolutions:
                convolutions.append(nn.ReLU())
            convolutions.append(nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride, padding))
            channels = layer.channels
            height = (height + 2 * padding - layer.kernel) // layer.stride + 1
            width = (width + 2 * padding - layer.kernel) // layer.stride + 1
        self.channels = channels
        self.stem = nn.Sequential(*convolutions)
        self.film = nn.Linear(config.word_width, 2 * channels)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        across, down = torch.meshgrid(torch.linspace(-1, 1, width), torch.linspace(-1, 1, height), indexing="xy")
        self.register_buffer("coordinates", torch.stack([across.flatten(), down.flatten()]), persistent=False)

    def features(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """uint8[b, h, w, 3], float[b, word_width] -> float[b, channels, down, across]"""
        # bfloat16 from the start where training uses it: converting the images is a tenth of the step otherwise
        device = images.device.type
        half = torch.is_autocast_enabled(device)
        kind = torch.get_autocast_dtype(device) if half else next(self.stem.parameters()).dtype
        features = self.stem(images.permute(0, 3, 1, 2).to(kind) * (1 / 127.5) - 1)
        scale, shift = self.film(words)[:, :, None, None].chunk(2, 1)
        return F.relu(features * (1 + scale) + shift)


class Encoder(Features):
    """Image -> feature points. Spatial soft-max: Finn et al. 2016, arXiv 1509.06113, section IV."""

    def __init__(self, camera: CameraEncoderConfig, config: SlowPathConfig) -> None:
        super().__init__(camera, config)
        self.points = nn.Conv2d(self.channels, config.points, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """uint8[b, h, w, 3], float[b, word_width] -> float[b, 2 * points] in [-1, 1]"""
        heat = self.points(self.features(images, words)).float()
        # the features lie channel by channel, so this is a view and the soft-max runs along whole rows of points
        mass = heat.permute(0, 2, 3, 1).flatten(1, 2).softmax(1)
        return (self.coordinates.float() @ mass).flatten(1).to(words.dtype)


class Cells(Features):
    """Image -> one token per cell, which knows where it is."""

    def __init__(self, camera: CameraEncoderConfig, config: SlowPathConfig, inner: int) -> None:
        super().__init__(camera, config)
        self.token = nn.Linear(self.channels + 2 + 4 * _COORDINATE_FREQUENCIES, inner)
        # [2, cells, 2 * frequencies]
        turns = fourier_features(self.coordinates[..., None], frequencies(_COORDINATE_FREQUENCIES))
        self.register_buffer("where", torch.cat([self.coordinates.t(), turns[0], turns[1]], 1), persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    where: torch.Tensor
    """[cells, 2 + 4 * _COORDINATE_FREQUENCIES]"""

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """uint8[b, h, w, 3], float[b, word_width] -> float[b, cells, inner]"""
        found = self.features(images, words).permute(0, 2, 3, 1).flatten(1, 2)
        where = self.where.to(found.dtype).expand(len(found), -1, -1)
        return self.token(torch.cat([found, where], 2))


class ConvSlowPath(nn.Module):
    """Images and words -> latent: every camera's feature points, then the mean of the word vectors."""

    def __init__(self, config: SlowPathConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.word_width, padding_idx=PADDING)
        self.encoders = nn.ModuleList(Encoder(camera, config) for camera in config.cameras)
        self.width = 2 * config.points * len(config.cameras) + config.word_width

    def forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """one uint8[b, h, w, 3] per camera, int64[b, L] -> float[b, z]"""
        words = mean_word(self.words(tokens), tokens)
        seen = [encoder(image, words) for encoder, image in zip(self.encoders, images, strict=True)]
        return torch.cat([*seen, words], 1)


class TokenSlowPath(nn.Module):
    """Images and words -> latent tokens: every camera's cells and every word, pooled by learned queries."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        assert config.pooler is not None
        inner = config.pooler.inner
        self.words = nn.Embedding(config.vocabulary, config.word_width, padding_idx=PADDING)
        self.encoders = nn.ModuleList(Cells(camera, config, inner) for camera in config.cameras)
        self.word = nn.Linear(config.word_width, inner)
        # whose token it is: of the mean word, of a word, of a camera
        self.sources = nn.Parameter(0.02 * torch.randn(2 + len(config.cameras), inner))
        self.layers = nn.ModuleList(Layer(inner, config.pooler.heads) for _ in range(config.pooler.layers))
        self.pooler = AttentionPooler(config.pooler)
        self.width = self.pooler.width

    def forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """one uint8[b, h, w, 3] per camera, int64[b, L] -> float[b, z]"""
        vectors = self.words(tokens)
        mean = mean_word(vectors, tokens)
        parts = [self.word(mean)[:, None], self.word(vectors)]
        parts += [encoder(image, mean) for encoder, image in zip(self.encoders, images, strict=True)]
        x = torch.cat([part + source for part, source in zip(parts, self.sources, strict=True)], 1)
        # there is always a token to look at: the mean word, even of no words
        real = x.new_ones(x.shape[:2], dtype=torch.bool)
        real[:, 1 : 1 + tokens.shape[1]] = tokens != PADDING
        for layer in self.layers:
            x = layer(x, real)
        return self.pooler(x, real)


class FutureStateHead(nn.Sequential):
    """Latent and state -> how far the state moves until so many ticks later, in its standard deviations.

    While it learns that, the slow path learns what to look for. k steps behind each image, ds state, W ticks.
    """

    def __init__(self, latent_width: int, state_dim: int, ticks: int) -> None:
        """`ticks`: W"""
        inputs, width, outputs = latent_width + state_dim, _FUTURE_STATE_WIDTH, ticks * state_dim
        super().__init__(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))

    def errors(self, latent: torch.Tensor, state: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """float32[b, k, W, ds], squared: of [b, z], normalised [b, k, ds] and what it was, [b, k, W, ds]"""
        seen = torch.cat([latent[:, None].expand(-1, state.shape[1], -1), state], -1)
        return (self(seen).float().unflatten(-1, moved.shape[-2:]) - moved).square()


def mean_word(vectors: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[b, L, word_width], int64[b, L] -> [b, word_width], of the real words; the others are 0 in `vectors`."""
    return vectors.sum(1) / (tokens != PADDING).sum(1, keepdim=True).clamp_min(1)


@functools.lru_cache(maxsize=4096)
def _ids(instruction: str, vocabulary: int, length: int) -> tuple[int, ...]:
    ids = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in _WORD.findall(instruction.lower())][:length]
    return (*ids, *[PADDING] * (length - len(ids)))


def tokenize(instruction: str, vocabulary: int, length: int) -> np.ndarray:
    """int64[length]: the ids of the first `length` words of `instruction`, then `PADDING`.

    Case, punctuation and spacing do not matter; `vocabulary` counts the padding id.
    """
    return np.array(_ids(instruction, vocabulary, length), np.int64)
